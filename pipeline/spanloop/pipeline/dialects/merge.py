"""Two dialects on one span: the special one says what the span is, the other fills what it left open.

Instrumentations write over each other: OpenInference adds GenAI names to its spans and its own to those of ADK,
and a framework's tracer and an observer's share one span.
"""

from __future__ import annotations

from functools import cache

import msgspec

from spanloop.pipeline.dialects.operation import Operation

__all__ = ["filled"]

_FACTS = ("call", "tool", "run", "handover", "triggered", "node")
_TEXTS = ("agent", "run_id", "conversation", "guardrail")


def filled(first: Operation, second: Operation) -> Operation:
    """``first`` with its gaps filled from ``second``, another reading of the same span.

    A kind that ``first`` does not know is taken with its facts; otherwise facts are filled field by field only
    where both readings agree on the kind.

    >>> one = Operation("t", "s", "", "unknown", 1, 2, name="x")
    >>> two = Operation("t", "s", "", "workflow", 1, 2, name="flow", agent="a")
    >>> filled(one, two).kind, filled(two, one).agent
    ('workflow', 'a')
    """
    changes: dict[str, object] = {}
    if first.kind == "unknown" and second.kind != "unknown":
        changes["kind"], changes["name"] = second.kind, second.name
    if first.kind in (second.kind, "unknown"):
        for name in _FACTS:
            mine, other = getattr(first, name), getattr(second, name)
            if other is not None and other != mine:
                changes[name] = _facts(mine, other)
    for name in _TEXTS:
        if not getattr(first, name) and getattr(second, name):
            changes[name] = getattr(second, name)
    if second.status and not first.status:
        changes["status"] = second.status
    if second.flags and second.flags != first.flags:
        changes["flags"] = (*first.flags, *(f for f in second.flags if f not in first.flags))
    return msgspec.structs.replace(first, **changes) if changes else first


@cache
def _defaults(kind: type[msgspec.Struct]) -> tuple[tuple[str, object], ...]:
    return tuple((field.name, field.default) for field in msgspec.structs.fields(kind))


def _facts(mine: object, other: object) -> object:
    """``mine`` with the fields that stand at their defaults taken from ``other``."""
    if not isinstance(mine, msgspec.Struct) or type(mine) is not type(other):
        return other if mine is None else mine
    gaps = {
        name: value
        for name, default in _defaults(type(mine))
        if getattr(mine, name) == default and (value := getattr(other, name)) != default
    }
    return msgspec.structs.replace(mine, **gaps) if gaps else mine
