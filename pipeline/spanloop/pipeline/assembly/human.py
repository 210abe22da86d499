"""People in the loop, whom no span shows: a run that ended to have tool calls approved, and the run that goes on.

The two are one orchestration by their conversation and the ids of those calls; neither alone would join them. What
happened between them is one ``human_intervention``, seen when the second run begins. Source: DIALECTS 3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from spanloop.pipeline.assembly.tree import Tree
from spanloop.pipeline.dialects.operation import Operation

if TYPE_CHECKING:
    from spanloop.pipeline.assembly.infer import Inference

__all__ = ["HUMAN", "add_human", "pause_ends", "pauses"]

HUMAN = "human"
"""Actor of a human intervention."""


def pause_ends(operation: Operation) -> Iterator[tuple[str, int]]:
    """(key, side) of a pause's two ends: 0 the run that put a call off, 1 the run that was resumed with it."""
    run = operation.run
    if run is None or not operation.conversation:
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


def add_human(work: Inference) -> None:
    """A ``human_intervention`` for each resumption of a run that asked a person."""
    tree = work.tree
    for paused, resumed in pauses(tree):
        before, after = tree.ops[paused], tree.ops[resumed]
        if before.run is not None and before.run.asks_human:
            work.add("human_intervention", after.start_ns, "approval_answered", 0.9, (before.span_id, after.span_id),
                     agent=-1, name=HUMAN, to=resumed if resumed in work.agent_ids else -1)  # fmt: skip
