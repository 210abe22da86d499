"""The ends of runs that somebody had start: to whom their results go."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spanloop.pipeline.assembly.delegations import Delegation
from spanloop.pipeline.assembly.said import SAID

if TYPE_CHECKING:
    from spanloop.pipeline.assembly.infer import Inference

__all__ = ["USER", "add_returns"]

USER = "user"


def _receiver(work: Inference, d: Delegation, known: dict[int, tuple[int, str]]) -> tuple[int, str]:
    """Who gets the result of ``d``: where control was passed on, whoever waits for the source.

    Args:
        work: with the delegations.
        d: one of them.
        known: those who wait for runs that were looked at before; added to.
    """
    passed: dict[int, None] = {}
    waits: tuple[int, str] | None = None
    while waits is None and d.mode == "pass_control" and d.source not in passed:
        passed[d.source] = None
        into = work.found.into.get(d.source)
        waits = known.get(d.source) if into is not None else (-1, USER)
        d = into or d
    if waits is None:
        waits = (-1, d.source_name(work.tree) or USER) if d.source < 0 else (d.source, "")
    known.update(dict.fromkeys(passed, waits))
    return waits


def add_returns(work: Inference) -> None:
    """``return`` and ``despawn`` of each run that somebody had start and that ended."""
    tree = work.tree
    passed_on = {
        d.source
        for d in work.found.all
        if d.mode == "pass_control"
        and d.source >= 0
        and tree.turns_of(d.source)[-1].start_ns <= d.begins(tree)
    }
    known: dict[int, tuple[int, str]] = {}
    for target, d in work.found.into.items():
        op = tree.ops[target]
        if op.end_ns <= 0:
            continue
        status = "error" if op.status == "error" else "ok"
        told_start = d.rule == SAID and not d.delegates
        if target not in passed_on and d.mode != "message" and not told_start:
            to, to_name = _receiver(work, d, known)
            work.add("return", op.end_ns, d.rule, d.confidence, (op.span_id,), agent=target, to=to,
                     to_name=to_name, status=status, operation=d.tool)  # fmt: skip
        work.add("despawn", op.end_ns, "end_of_run", d.confidence, (op.span_id,), agent=target)
