"""Agents that live on: their runs are turns of one agent, not agents of their own.

Evidence: one instance id (AutoGen names its participants); or one name and one place, below an engine, or below a
workflow whose agents hand control back to one that was there before. The agent stands at its first turn and lasts
to the end of its last one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from spanloop.pipeline.assembly.names import folded
from spanloop.pipeline.dialects.operation import Operation

if TYPE_CHECKING:
    from spanloop.pipeline.assembly.tree import Tree

__all__ = ["TURN", "merge_turns", "place_of"]

TURN = "turn"
"""Kind that a later run of an agent gets in the tree: it is no agent of its own."""
_STEPS = 8
"""Spans that say nothing between an agent and its place; more are looked at no further."""


def place_of(tree: Tree, i: int) -> int:
    """The operation that ``i`` stands below, spans that say nothing left out; -1: none."""
    above = tree.parent[i]
    for _ in range(_STEPS):
        if above < 0 or tree.ops[above].kind not in ("unknown", "message"):
            break
        above = tree.parent[above]
    return above


def merge_turns(tree: Tree) -> None:
    """Make later turns of an agent part of its first one; before agents are looked up in the tree."""
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    handed: dict[str, list[int]] | None = None
    candidates = range(len(tree.ops)) if tree.census.nodes else tree.census.kind("agent_run")
    for i in candidates:
        op = tree.ops[i]
        if op.kind != "agent_run":
            continue
        if op.instance:
            groups[("instance", op.instance)].append(i)
            continue
        place = place_of(tree, i)
        if place < 0 or not op.agent:
            continue
        above = tree.ops[place]
        if above.run is not None and above.run.engine:
            groups[("node", above.trace_id, above.span_id, folded(op.agent))].append(i)
        elif above.kind == "workflow":
            handed = _handed(tree) if handed is None else handed
            if folded(op.agent) in handed or "" in handed:
                groups[("flow", above.trace_id, above.span_id, folded(op.agent))].append(i)
    for key, runs in groups.items():
        if len(runs) > 1:
            _merge(tree, _one_after_another(tree, runs, handed or {}, key) if key[0] != "instance" else runs)


def _handed(tree: Tree) -> dict[str, list[int]]:
    """Starts of the hand-overs to each name in order, ns; under the empty name those that do not tell to whom."""
    found: dict[str, list[int]] = defaultdict(list)
    for i in tree.census.handovers:
        op = tree.ops[i]
        if op.handover is not None:
            found[folded(op.handover.target)].append(op.start_ns)
    return found


def _one_after_another(
    tree: Tree, runs: list[int], handed: dict[str, list[int]], key: tuple[str, ...]
) -> list[int]:
    """The runs of one name that do not overlap; in a workflow only those that something handed back to."""
    kept = runs[:1]
    for i in runs[1:]:
        last, op = tree.ops[kept[-1]], tree.ops[i]
        if not 0 < last.end_ns <= op.start_ns:
            continue
        if key[0] == "flow" and not any(
            _between(handed.get(name, ()), last.end_ns, op.start_ns) for name in (folded(op.agent), "")
        ):
            continue
        kept.append(i)
    return kept


def _between(times: Sequence[int], first: int, last: int) -> bool:
    """Whether one of ``times`` (sorted) is at least ``first`` and at most ``last``."""
    place = bisect_left(times, first)
    return place < len(times) and times[place] <= last


def _merge(tree: Tree, runs: list[int]) -> None:
    if len(runs) < 2:
        return
    first, *later = runs
    tree.turns[first] = [tree.ops[i] for i in runs]
    for i in later:
        tree.turn_of[i] = first
        tree.ops[i] = msgspec.structs.replace(tree.ops[i], kind=TURN)
    tree.ops[first] = _whole(tree.turns[first])


def _whole(turns: list[Operation]) -> Operation:
    """The first turn with the last one's end and status; unfinished while one of them is."""
    ends = [op.end_ns for op in turns]
    end = max(ends) if min(ends) > 0 else 0
    last = max(turns, key=lambda op: (op.end_ns, op.start_ns))
    return msgspec.structs.replace(turns[0], end_ns=end, status=last.status)
