"""Codex CLI: log events only, no spans. Source: DIALECTS 6.

Everything of a run names one ``conversation.id``; a run begins with a prompt. A model call is two records without a
common id: the attempt (``api_request``) and, when the stream has ended, the answer with its tokens. Values are texts.
"""

from __future__ import annotations

from typing import Any

from spanloop.pipeline.dialects.coding_agents import begun_ns, failed, label, user_decided
from spanloop.pipeline.dialects.fields import argument_hashes, base_fields, integer, text
from spanloop.pipeline.dialects.operation import (
    AgentFacts,
    CallFacts,
    Member,
    Operation,
    ToolFacts,
    text_hash,
)
from spanloop.pipeline.otlp.log_ids import told_trace_id
from spanloop.schemas.spans import LOG, Span

__all__ = ["NAME", "matches", "read"]

NAME = "codex"

_PREFIX = "codex."
_EVENTS = {
    "user_prompt": ("note", "prompt"),
    "api_request": ("note", "attempt"),
    "websocket_request": ("note", "attempt"),
    "sse_event": ("model_call", "call"),
    "tool_decision": ("note", "decision"),
    "tool_result": ("tool_call", "tool"),
}
_ENDS = frozenset({"response.completed", "completed", "response.failed", "failed"})
"""Stream events that end a model call; others only say that it goes on, unless they tell an error without a kind."""


def matches(span: Span) -> bool:
    """A log record of one of its events."""
    return span.kind == LOG and span.name.startswith(_PREFIX)


def read(span: Span) -> Operation:
    """A log event as an operation."""
    attributes = span.attributes
    fields = base_fields(span)
    kind, event = _EVENTS.get(span.name.removeprefix(_PREFIX), ("note", "other"))
    if event == "call" and not _ends_call(attributes):
        kind, event = "note", "other"
    if event == "decision" and user_decided(attributes):
        kind = "human"
    conversation = label(attributes, "conversation.id")
    told = told_trace_id(attributes) if conversation else ""
    fields |= {
        "kind": kind,
        "event": event,
        "conversation": conversation,
        "member": Member(conversation, NAME, turns=True) if conversation else None,
    }
    if told not in ("", span.trace_id):
        fields["links"] = tuple(sorted({*fields.get("links", ()), (told, "")}))
    if _went_wrong(span):
        fields["status"] = "error"
    if event == "prompt":
        prompt = attributes.get("prompt")
        fields["run"] = AgentFacts(task_hash="" if prompt == "[REDACTED]" else text_hash(prompt))
    elif event == "call":
        fields["call"] = CallFacts(
            model=label(attributes, "model", "slug"),
            input_tokens=integer(attributes.get("input_token_count")),
            output_tokens=integer(attributes.get("output_token_count")),
        )
    elif event == "attempt":
        fields["call"] = CallFacts(model=label(attributes, "model", "slug"))
    elif event in ("tool", "decision"):
        fields["tool"] = ToolFacts(
            tool=label(attributes, "tool_name") or "tool",
            call_id=label(attributes, "call_id"),
            argument_hashes=argument_hashes(attributes.get("arguments")),
        )
    if event in ("attempt", "tool"):
        fields["start_ns"] = begun_ns(span)
    return Operation(**fields)


def _ends_call(attributes: dict[str, Any]) -> bool:
    kind = label(attributes, "event.kind")
    return kind in _ENDS or "output_token_count" in attributes or (not kind and "error.message" in attributes)


def _went_wrong(span: Span) -> bool:
    attributes: dict[str, Any] = span.attributes
    code = integer(attributes.get("http.response.status_code"))
    told = attributes.get("error.message")
    return (
        failed(span)
        or (code is not None and code >= 400)
        or (told is not None and told != "" and "success" not in attributes)
        or text(attributes.get("event.kind")) in ("response.failed", "failed")
    )
