"""Log records among the operations of one orchestration, folded in: what they repeat counts once, what no span tells
is made of them.

In this order: a record of a model call or tool call that a span tells as well becomes a note on that span; attempts
give their start to the answer that ends them; a conversation is divided into turns by the prompts in it; operations
that name a run of which there is no operation get one around them.

Invariants: a function of the set of operations, whatever their order; operations without records or members are
returned as they are; no operation is lost, and ids are digests of what is there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from spanloop.pipeline.assembly.members import with_runs
from spanloop.pipeline.dialects.operation import Member, Operation

__all__ = ["fold_log_events"]

_Key = tuple[str, str]
"""(trace id, span id)."""
_TWICE = frozenset({"model_call", "tool_call", "human"})
"""Kinds that both signals tell."""


def fold_log_events(operations: Iterable[Operation]) -> list[Operation]:
    """``operations`` with log records folded in and the runs added that only their members tell."""
    ops = list(operations)
    if not any(op.event or op.member for op in ops):
        return ops
    ops.sort(key=lambda op: (op.start_ns, op.trace_id, op.span_id, op.event))
    ops = _notes_on_spans(ops)
    ops = _answers_with_attempts(ops)
    ops = _in_turns(ops)
    return with_runs(ops)


def _replace(op: Operation, **changes: object) -> Operation:
    return msgspec.structs.replace(op, **changes)


# ---------------------------------------------------------------- the same thing on both signals


def _notes_on_spans(ops: list[Operation]) -> list[Operation]:
    """Records that repeat a span become notes on it; the span takes over that it failed. Two records that differ are
    two facts: equal ones are one record already."""
    spans: dict[tuple[str, str], list[Operation]] = defaultdict(list)
    for op in ops:
        if not op.event and op.kind in _TWICE:
            spans[_identity(op)].append(op)
    spans.pop(("", ""), None)
    failed: set[_Key] = set()
    found = []
    for op in ops:
        same = _same(spans.get(_identity(op), []), op) if op.event else None
        if same is None:
            found.append(op)
            continue
        if op.status == "error":
            failed.add((same.trace_id, same.span_id))
        found.append(_replace(op, kind="note", parent_id=same.span_id, parent_trace=same.trace_id))
    for op in ops:  # what runs inside a tool call and says that it failed
        if op.kind == "note" and not op.event and op.status == "error" and op.parent_id:
            failed.add((op.trace_id, op.parent_id))
    return [
        _replace(op, status="error")
        if (op.trace_id, op.span_id) in failed and op.kind in ("tool_call", "model_call")
        else op
        for op in found
    ]


def _identity(op: Operation) -> tuple[str, str]:
    """What a span and a record of the same thing share; two empty texts: nothing."""
    if op.kind == "model_call" and op.call is not None and op.call.response_id:
        return "response", op.call.response_id
    if op.kind in _TWICE and op.tool is not None and op.tool.call_id:
        return op.kind, op.tool.call_id
    return "", ""


def _same(known: list[Operation], record: Operation) -> Operation | None:
    """The one of ``known`` that ``record`` repeats: call ids may repeat, so the one around its end, else the first."""
    if not known:
        return None
    return next((op for op in known if op.start_ns <= record.end_ns <= op.end_ns), known[0])


# ---------------------------------------------------------------- answers and turns


def _answers_with_attempts(ops: list[Operation]) -> list[Operation]:
    """The answer to an attempt begins with it. A failed attempt is a failed call; one whose answer never came is a
    call of which nothing is known."""
    pending: dict[str, int] = {}
    found = list(ops)
    order = sorted(
        (i for i, op in enumerate(ops) if op.event in ("attempt", "call") and op.member is not None),
        key=lambda i: (ops[i].end_ns, ops[i].event == "call", ops[i].span_id),
    )
    for i in order:
        op = ops[i]
        key = op.member.key if op.member else ""
        if op.event == "attempt":
            if op.status == "error":
                found[i] = _replace(op, kind="model_call")
            else:
                if key in pending:
                    found[pending[key]] = _replace(ops[pending[key]], kind="model_call")
                pending[key] = i
        elif op.kind == "model_call" and key in pending and op.start_ns == op.end_ns:
            found[i] = _replace(op, start_ns=ops[pending.pop(key)].start_ns)
    for i in pending.values():
        found[i] = _replace(ops[i], kind="model_call")
    return found


def _in_turns(ops: list[Operation]) -> list[Operation]:
    """Members of a conversation become members of the turn in which they ended; a turn begins with its prompt."""
    prompts: dict[str, list[int]] = defaultdict(list)
    for op in ops:
        if op.event == "prompt" and op.member is not None and op.member.turns:
            prompts[op.member.key].append(op.start_ns)
    found = []
    for op in ops:
        member = op.member
        if member is not None and member.turns:
            turn = max(bisect_right(prompts[member.key], max(op.end_ns, op.start_ns)), 1)
            member = Member(f"{member.key}/{turn}", member.name, member.parent, starts=member.starts)
            op = _replace(op, member=member)  # noqa: PLW2901
        found.append(op)
    return found
