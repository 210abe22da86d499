"""Verdicts of guardrails and filters, and whether a run failed though its span says that it went well.

Some instrumentations do not record a guardrail's verdict. It was tripped when what encloses it within the run ended in
an error, with words that name the guardrail or none, and no model call followed. Source: DIALECTS 2.7 and 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanloop.pipeline.dialects.operation import Operation

if TYPE_CHECKING:
    from spanloop.pipeline.assembly.infer import Inference

__all__ = ["add_safety", "failed"]


def add_safety(work: Inference) -> None:
    """Events of guardrails and of content filters."""
    for i in work.tree.census.kind("guardrail"):
        op = work.tree.ops[i]
        if op.kind == "guardrail":
            triggered, confidence = _verdict(work, i)
            work.add("safety_event", op.start_ns, "guardrail_span", confidence, (op.span_id,), agent=work.agent_of(i),
                     name=op.agent, triggered=triggered, operation=i)  # fmt: skip
    filtered = {i for i in work.tree.census.calls if _filtered(work.tree.ops[i])}
    for call, group in enumerate(work.calls.groups) if filtered else ():
        if not filtered.isdisjoint(group):
            work.add("safety_event", work.calls.end(call), "content_filter", 0.9, work.calls.span_ids(call),
                     agent=work.calls.agent[call], triggered=True, call=call)  # fmt: skip


def _filtered(op: Operation) -> bool:
    return op.call is not None and "content_filter" in op.call.finish_reasons


def _verdict(work: Inference, i: int) -> tuple[bool, float]:
    """(whether guardrail ``i`` was tripped, how sure that is)."""
    tree = work.tree
    op = tree.ops[i]
    if op.triggered is not None:
        return op.triggered, 1.0
    if op.status == "error":
        return True, 0.6
    around = tree.parent[i]
    if around < 0 or tree.ops[around].status != "error":
        return False, 0.6
    blamed = tree.ops[around].guardrail
    if blamed:
        return blamed == op.name, 0.9
    agent = work.agent_of(i)
    follows = agent >= 0 and work.calls.after(agent, max(op.end_ns, op.start_ns)) >= 0
    return not follows, 0.8


def failed(work: Inference, run: int) -> bool:
    """Whether an entry run, or one that it passed control on to, ended in an error."""
    seen: set[int] = set()
    while run >= 0 and run not in seen:
        seen.add(run)
        if work.tree.ops[run].status == "error" or _ended_badly(work, run):
            return True
        passed = [d.target for d in work.found.by_source.get(run, ()) if d.mode == "pass_control"]
        run = passed[-1] if passed else -1
    return False


def _ended_badly(work: Inference, run: int) -> bool:
    """Whether the last of the run's own turns, where it has such, is an error."""
    last = -1
    for i in work.turns.get(run, ()):
        if last < 0 or work.tree.ops[i].end_ns >= work.tree.ops[last].end_ns:
            last = i
    return last >= 0 and work.tree.ops[last].status == "error"
