"""Spans of our own SDK: what a program says outright of its acts, read without inference.

Runs, tools, model calls and guardrails are GenAI spans with claims beside; spawn, delegate, message, aggregate, stop and decision
have spans of their own. A menu whose probabilities are no distribution, or say that its choice could not be made, keeps its options
and loses them (flag ``bad_propensities``); a choice that is not on its menu is kept and flagged (``choice_not_on_menu``).
"""

from __future__ import annotations

import math
from typing import Any

from spanloop.pipeline.dialects import genai
from spanloop.pipeline.dialects.fields import text
from spanloop.pipeline.dialects.operation import Handover, Operation, Said
from spanloop.schemas import sdk_attributes as names
from spanloop.schemas.orchestration import Decision
from spanloop.schemas.spans import Span

__all__ = ["NAME", "decision_told", "matches", "read"]

NAME = "spanloop_sdk"

_KIND = {"spawn": "handover", "delegate": "handover", "message": "message", "receive": "message",
         "aggregate": "act", "stop": "act", "decision": "act"}  # fmt: skip
_MODES = ("return_to_caller", "pass_control")


def matches(span: Span) -> bool:
    """The SDK's scope and an act that it knows; the act alone where a pipeline lost the scope."""
    return span.scope in (names.SCOPE, "") and span.attributes.get(names.ACT) in names.ACTS


def read(span: Span) -> Operation:
    """A GenAI operation with what the program says of it."""
    attributes = span.attributes
    act = attributes[names.ACT]
    fields = genai.read_fields(span)
    fields["kind"] = kind = _KIND.get(act, fields["kind"])
    if kind == "handover":
        mode = attributes.get("gen_ai.transfer.mode")
        fields["handover"] = Handover(
            target=_label(attributes.get(names.TARGET)),
            mode=mode if mode in _MODES else "return_to_caller",
            rule="said",
        )
    elif kind == "message":
        fields["handover"] = Handover(target=_label(attributes.get(names.TARGET)), rule="said")
    decision, doubts = decision_told(attributes)
    if attributes.get(names.TRUNCATED) is True:
        doubts = (*doubts, "truncated_attributes")
    fields["flags"] = tuple(dict.fromkeys((*fields["flags"], *doubts)))
    fields["said"] = Said(
        act=act,
        target_id=_label(attributes.get(names.TARGET_ID)),
        sources=_labels(attributes.get(names.SOURCES), names.SOURCES_MAX),
        decided_by=_label(attributes.get(names.DECIDED_BY)),
        call=_label(attributes.get(names.CALL)),
        decision=decision,
        harness=text(attributes.get(names.HARNESS)) if act == "agent" else "",
    )
    return Operation(**fields)


def decision_told(attributes: dict[str, Any]) -> tuple[Decision | None, tuple[str, ...]]:
    """The decision that a span tells, and flags of what is wrong with it."""
    kind = attributes.get(names.DECISION)
    if not isinstance(kind, str) or not names.is_kind(kind):
        return None, ()
    options = _labels(attributes.get(names.OPTIONS), names.OPTIONS_MAX)
    chosen = _label(attributes.get(names.CHOSEN))
    by_policy = attributes.get(names.BY_POLICY)
    doubts: list[str] = []
    given = attributes.get(names.PROPENSITIES)
    propensities: tuple[float, ...] = ()
    if given is not None:
        propensities = _floats(given)
        if not propensities or names.menu_problem(options, propensities, chosen):
            propensities = ()
            doubts.append("bad_propensities")
    if options and chosen not in options:
        doubts.append("choice_not_on_menu")
    decision = Decision(
        kind=kind,
        chosen=chosen,
        options=tuple(dict.fromkeys(options)),
        propensities=propensities,
        by_policy=by_policy if isinstance(by_policy, bool) else None,
        state=_state(attributes),
    )
    return decision, tuple(doubts)


def _state(attributes: dict[str, Any]) -> tuple[tuple[str, float], ...]:
    """Named numbers; none where the two lists do not fit."""
    named = _labels(attributes.get(names.STATE_NAMES), names.STATE_MAX)
    values = _floats(attributes.get(names.STATE_VALUES))
    if len(named) != len(values):
        return ()
    return tuple(sorted({n: v for n, v in zip(named, values, strict=True) if n and math.isfinite(v)}.items()))


def _label(value: Any) -> str:
    """A name; where the receiver dropped it as a text, the keyed hash that stands for it."""
    if isinstance(value, dict) and isinstance(value.get("$hmac"), str):
        return "hmac:" + value["$hmac"]
    return value if isinstance(value, str) else ""


def _labels(value: Any, most: int) -> tuple[str, ...]:
    return tuple(_label(item) for item in value[:most]) if isinstance(value, list | tuple) else ()


def _floats(value: Any) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) > names.OPTIONS_MAX:
        return ()
    if not all(isinstance(item, int | float) and not isinstance(item, bool) for item in value):
        return ()
    return tuple(float(item) for item in value)
