"""Runs that a hand-over or a tool call may have had start, looked up by place or by text and not searched."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence

from spanloop.pipeline.assembly.clocks import SKEW_NS
from spanloop.pipeline.assembly.tree import Tree
from spanloop.pipeline.assembly.turns import TURN, place_of
from spanloop.pipeline.dialects.operation import Operation

__all__ = ["Peers", "Waiting"]

_Key = tuple[str, str]


class Peers:
    """Runs and turns that stand side by side, in order of start; looked up only where a hand-over does not say to whom."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._beside: dict[tuple[str, int], list[int]] | None = None
        self._other: dict[int, int] = {}
        """The next run or turn of another agent beside each."""

    def _index(self) -> dict[tuple[str, int], list[int]]:
        tree = self._tree
        found: dict[tuple[str, int], list[int]] = defaultdict(list)
        for j, op in enumerate(tree.ops):
            if op.kind in ("agent_run", TURN) and j not in tree.same_run:
                found[(op.trace_id, place_of(tree, j))].append(j)
        for runs in found.values():
            for one, two in zip(reversed(runs[:-1]), reversed(runs[1:]), strict=True):
                same = tree.turn_of.get(one, one) == tree.turn_of.get(two, two)
                self._other[one] = self._other.get(two, -1) if same else two
        return found

    def after(self, source: int, i: int) -> int:
        """The run or turn that begins first after hand-over ``i`` where the source's own turn began; -1 without one."""
        tree = self._tree
        turn = tree.parent[i]
        while turn >= 0 and tree.ops[turn].kind not in ("agent_run", TURN):
            turn = tree.parent[turn]
        turn = tree.same_run.get(turn, turn)
        if turn < 0 or source < 0:
            return -1
        if self._beside is None:
            self._beside = self._index()
        beside = self._beside.get((tree.ops[i].trace_id, place_of(tree, turn)), [])
        place = bisect_right(beside, i)
        if place == len(beside):
            return -1
        following = beside[place]
        own = tree.turn_of.get(following, following) == source
        return self._other.get(following, -1) if own else following


class Waiting:
    """Runs that wait for the tool call which had them start, by a key; added in order of start."""

    def __init__(self, tree: Tree) -> None:
        self._ops = tree.ops
        self._runs: dict[_Key, list[int]] = defaultdict(list)
        self._clocks: dict[_Key, set[str]] = defaultdict(set)
        """Processes of the runs; of unknown ones nothing."""
        self._odd: set[_Key] = set()
        """Keys of which a run does not end after its start."""

    def __bool__(self) -> bool:
        return bool(self._runs)

    def add(self, key: _Key, i: int) -> None:
        """Let run ``i`` wait."""
        op = self._ops[i]
        self._runs[key].append(i)
        if op.resource:
            self._clocks[key].add(op.resource)
        if op.end_ns < op.start_ns:
            self._odd.add(key)

    def take(self, key: _Key, i: int) -> None:
        """Let run ``i`` wait no longer."""
        runs = self._runs[key]
        del runs[bisect_left(runs, i)]

    def around(self, key: _Key, tool: Operation) -> Sequence[int]:
        """The runs of ``key`` that can lie within the time of ``tool`` (``clocks.within``), in order of start."""
        runs = self._runs.get(key)
        if not runs:
            return ()
        one_clock = not tool.resource or self._clocks[key] <= {tool.resource}
        skew = 0 if one_clock else SKEW_NS
        first = bisect_left(runs, tool.start_ns - skew, key=self._start)
        odd = key in self._odd
        last = len(runs) if odd else bisect_right(runs, tool.end_ns + skew, key=self._start)
        return runs[first:last]

    def _start(self, i: int) -> int:
        return self._ops[i].start_ns
