"""Logs that state events and no spans (``formats/who_and_when``, ``formats/survey``): each event is a span whose attributes say
which it is, below one span for the log itself. Also chat logs of one agent (``formats/tau_bench``): GenAI, and the task key that
makes several tries of one task a group.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spanloop.pipeline.dialects import genai
from spanloop.pipeline.dialects.fields import base_fields, text, texts
from spanloop.pipeline.dialects.operation import GatewayFacts, Logged, Operation, text_hash
from spanloop.schemas.orchestration import EDGE_TYPES, EVENT_TYPES
from spanloop.schemas.spans import Span

__all__ = ["CHAT_SCOPE", "NAME", "SCOPE", "matches", "read"]

NAME = "event_log"
SCOPE = "spanloop.import.events"
CHAT_SCOPE = "spanloop.import.chat"


def matches(span: Span) -> bool:
    """The scope that the readers of such files write."""
    return span.scope in (SCOPE, CHAT_SCOPE)


def read(span: Span) -> Operation:
    """An event of a log, or a span of a chat."""
    if span.scope == CHAT_SCOPE:
        return _chat(span)
    attributes = span.attributes
    get = attributes.get
    kind = text(get("event_log.type"))
    flags = () if kind in ("", *EVENT_TYPES) else ("unknown_event_type",)
    triggered = get("event_log.triggered")
    fields = base_fields(span)
    fields["flags"] = (*fields["flags"], *flags)
    fields["kind"] = "logged"
    fields["logged"] = Logged(
        type=kind if not flags else "",
        agent=_label(get("event_log.agent")),
        to=_label(get("event_log.to")),
        tool=_label(get("event_log.tool")),
        status=text(get("event_log.status")),
        mode=text(get("event_log.mode")),
        triggered=triggered if isinstance(triggered, bool) else None,
        key=_label(get("event_log.key")),
        edges=_edges(attributes),
    )
    return Operation(**fields)


def _label(value: Any) -> str:
    """A name, or what stands for one that was dropped."""
    return text(value) or text_hash(value)


def _edges(attributes: dict[str, Any]) -> tuple[tuple[str, str, str], ...]:
    ends = [attributes.get(f"event_log.edges.{part}") for part in ("src", "dst")]
    kinds = texts(attributes.get("event_log.edges.type"))
    if not all(isinstance(end, list) for end in ends):
        return ()
    sources, targets = ([_label(item) for item in end or ()] for end in ends)
    return tuple(
        edge
        for edge in zip(sources, targets, kinds, strict=False)
        if edge[0] and edge[1] and edge[2] in EDGE_TYPES
    )


def _chat(span: Span) -> Operation:
    operation = genai.read(span)
    if operation.call is None:
        return operation
    facts = GatewayFacts(
        harness=text_hash(span.attributes.get("event_log.harness")),
        task_key=text(span.attributes.get("spanloop.task.key")),
    )
    return msgspec.structs.replace(operation, call=msgspec.structs.replace(operation.call, gateway=facts))
