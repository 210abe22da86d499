"""``human_intervention`` where the spans or log records say outright that a person took part (kind ``human``)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanloop.pipeline.assembly.human import HUMAN

if TYPE_CHECKING:
    from spanloop.pipeline.assembly.infer import Inference

__all__ = ["add_told_interventions"]


def add_told_interventions(work: Inference) -> None:
    """One event for each person's decision: from the person to the agent that waited for it, when it was made."""
    for i in work.tree.census.kind("human"):
        op = work.tree.ops[i]
        if op.kind != "human":
            continue
        tool = op.tool.tool if op.tool is not None else ""
        work.add("human_intervention", max(op.end_ns, op.start_ns), "user_decision", 1.0, (op.span_id,), agent=-1,
                 name=HUMAN, to=work.agent_of(i), tool=tool, operation=i)  # fmt: skip
