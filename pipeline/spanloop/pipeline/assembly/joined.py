"""Why traces are one orchestration, beyond links and response ids, and which calls came to nothing: counted as flags."""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from spanloop.pipeline.assembly.calls import Calls
from spanloop.pipeline.assembly.delegations import Delegations
from spanloop.pipeline.assembly.human import interruptions, pauses
from spanloop.pipeline.assembly.tree import Tree
from spanloop.pipeline.dialects.operation import Operation

__all__ = ["dead_calls", "joined_flags"]


def joined_flags(tree: Tree, calls: Calls, found: Delegations) -> dict[str, int]:
    """``joined_by_task``, ``joined_by_approval``, ``joined_by_interrupt``, ``joined_by_team`` and ``dead_calls`` with their counts, zeros left out."""
    ops = tree.ops
    flags = {
        "joined_by_task": sum(
            d.tool >= 0
            and d.rule == "task_is_tool_argument"
            and ops[d.tool].trace_id != ops[d.target].trace_id
            for d in found.all
        ),
        "joined_by_approval": sum(ops[i].trace_id != ops[j].trace_id for i, j in pauses(tree)),
        "joined_by_interrupt": sum(ops[i].trace_id != ops[j].trace_id for i, j in interruptions(tree)),
        "joined_by_team": _team_traces(tree),
        "dead_calls": len(dead_calls(tree, calls, found)),
    }
    return {name: count for name, count in flags.items() if count}


def _team_traces(tree: Tree) -> int:
    """Traces beyond the first of each team that messages without links name."""
    teams: dict[str, set[str]] = {}
    for i in tree.census.messages:
        op = tree.ops[i]
        if op.message is not None and not op.links:
            team = op.message.receiver.partition("/")[2]
            if team:
                teams.setdefault(team, set()).add(op.trace_id)
    return sum(len(traces) - 1 for traces in teams.values())


def dead_calls(tree: Tree, calls: Calls, found: Delegations) -> list[int]:
    """Calls that an agent made after it had passed control on, before it got it back: nobody used their answers."""
    first: dict[tuple[int, int], int] = {}
    for d in found.all:
        if d.mode != "pass_control" or d.tool < 0 or d.source < 0:
            continue
        handed = tree.ops[d.tool].end_ns
        turns = tree.turns_of(d.source)
        turn = bisect_right(turns, handed, key=_start) - 1
        if turn >= 0:
            turn = bisect_left(turns, turns[turn].start_ns, key=_start)
            first[(d.source, turn)] = min(handed, first.get((d.source, turn), handed))
    dead: set[int] = set()
    for (source, turn), handed in first.items():
        own = calls.of_agent.get(source, [])
        until = tree.turns_of(source)[turn].end_ns
        dead.update(
            own[bisect_left(own, handed, key=calls.start) : bisect_right(own, until, key=calls.start)]
        )
    return sorted(dead)


def _start(operation: Operation) -> int:
    return operation.start_ns
