"""People in the loop, whom no span shows: a run that ended to have tool calls approved, or in a node that was interrupted, and the
run that goes on.

The two are one orchestration by their conversation and the ids of those calls, or of the node's execution; neither alone would join
them. What happened between them is one ``human_intervention``, seen when the second run begins. Source: DIALECTS 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from spanloop.pipeline.assembly.tree import Tree
from spanloop.pipeline.dialects.operation import Operation

if TYPE_CHECKING:
    from spanloop.pipeline.assembly.infer import Inference

__all__ = ["HUMAN", "add_human", "interruptions", "pause_ends", "pauses"]

HUMAN = "human"
"""Actor of a human intervention."""


def pause_ends(operation: Operation) -> Iterator[tuple[str, int]]:
    """(key, side) of a pause's two ends: 0 the run that put a call off, or the node that was interrupted; 1 the run that was resumed
    with it, or the node that went on, which may be interrupted again."""
    run, node = operation.run, operation.node
    if not operation.conversation:
        return
    if node is not None and node.instance:
        key = f"n/{operation.conversation}/{node.instance}"
        yield key, 1
        if node.paused:
            yield key, 0
    if run is None:
        return
    for side, ids in ((0, run.pending), (1, run.resumed)):
        for call_id in ids:
            yield f"p/{operation.conversation}/{call_id}", side


def pauses(tree: Tree) -> list[tuple[int, int]]:
    """(run that paused, run that went on), each resumption once, with the last run before it that put its calls off."""
    waiting: dict[str, int] = {}
    found = []
    for i in tree.census.pausing:
        op = tree.ops[i]
        if op.run is None or not (op.run.pending or op.run.resumed):
            continue
        ends = list(pause_ends(op))
        before = max((waiting.get(key, -1) for key, side in ends if side == 1), default=-1)
        if before >= 0:
            found.append((before, i))
        for key, side in ends:
            if side == 0:
                waiting[key] = i
    return found


def interruptions(tree: Tree) -> list[tuple[int, int]]:
    """(node that was interrupted, the same node as it goes on), one for each run of an engine that goes on: a person answers all of
    its interrupts at once."""
    nodes = tree.census.nodes
    if not any((node := tree.ops[i].node) is not None and node.paused for i in nodes):
        return []
    waiting: dict[tuple[str, str], int] = {}
    paused: set[tuple[str, str]] = set()
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for i in nodes:
        op = tree.ops[i]
        node = op.node
        if node is None or not node.instance:
            continue
        key = (op.conversation, node.instance)
        before = waiting.get(key, -1)
        if before >= 0 and _is_later(tree.ops[before], op):
            around = (op.conversation, node.instance.rpartition("|")[0])
            if around not in paused:  # else the engine that this one is a part of was interrupted with it
                found.setdefault((op.trace_id, op.parent_id), (before, i))
            del waiting[key]
        if node.paused and key not in waiting:
            waiting[key] = i
            paused.add(key)
    return list(found.values())


def _is_later(before: Operation, after: Operation) -> bool:
    """Whether ``after`` is another execution and no part of ``before``: spans within a node repeat its instance."""
    return before.trace_id != after.trace_id or 0 < before.end_ns <= after.start_ns


def add_human(work: Inference) -> None:
    """A ``human_intervention`` for each resumption of a run that asked a person."""
    tree = work.tree
    for paused, resumed in interruptions(tree):
        before, after = tree.ops[paused], tree.ops[resumed]
        agent = tree.turn_of.get(resumed, work.agent_of(resumed))
        work.add("human_intervention", after.start_ns, "interrupt_answered", 0.9, (before.span_id, after.span_id),
                 agent=-1, name=HUMAN, to=agent if agent in work.agent_ids else -1, operation=resumed)  # fmt: skip
    for paused, resumed in pauses(tree):
        before, after = tree.ops[paused], tree.ops[resumed]
        if before.run is not None and before.run.asks_human:
            work.add("human_intervention", after.start_ns, "approval_answered", 0.9, (before.span_id, after.span_id),
                     agent=-1, name=HUMAN, to=resumed if resumed in work.agent_ids else -1)  # fmt: skip
