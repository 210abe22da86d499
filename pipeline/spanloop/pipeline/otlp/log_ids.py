"""Ids of log records, which have none: functions of what was logged, so that a retry is the same record.

A record without a trace context still belongs to something: to a prompt of a session, to a conversation, to a
response. Records that name the same one get the same trace id, whoever sent them and in whichever batch.

Invariants: the ids depend on the record alone; they are made after redaction, so that no unkeyed hash of a dropped
text is stored; trace ids made here start with fffffffe, so that a job keeps the id that its own traces give it.
Two equal records of one nanosecond are one record.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spanloop.schemas.canonical import canonical_json, digest
from spanloop.schemas.spans import LOG, Span

__all__ = ["UNSET_TRACE", "identified", "is_told", "told_trace_id"]

UNSET_TRACE = "f" * 32
"""Trace id of a record that came without one, until ``identified``."""
_CONVERSATIONS = ("conversation.id", "gen_ai.conversation.id", "session.id")
_PROMPTS = ("prompt.id", "prompt_id")
_PREFIX = "fffffffe"


def identified(record: Span) -> Span:
    """``record`` with its ids; a span is returned as it is. The attributes count, the resource does not: a
    collector on the way may add to it."""
    if record.kind != LOG:
        return record
    trace_id = "" if is_told(record.trace_id) else record.trace_id
    own = digest(
        "log_record",
        trace_id,
        record.parent_span_id or "",
        record.start_ns,
        record.name,
        record.scope,
        canonical_json(record.attributes),
    )
    trace_id = trace_id or told_trace_id(record.attributes) or _trace("record", own)
    return msgspec.structs.replace(record, trace_id=trace_id, span_id=own[:16])


def is_told(trace_id: str) -> bool:
    """Whether a record's trace id was made here and is not its sender's."""
    return trace_id == UNSET_TRACE or trace_id.startswith(_PREFIX)


def told_trace_id(attributes: dict[str, Any]) -> str:
    """Trace id of all records of the same prompt, else conversation, else response; empty when none is named.

    Dialects link spans of the same prompt to it, so that spans and log records of one turn are one orchestration.
    """
    conversation = _first(attributes, _CONVERSATIONS)
    if conversation:
        prompt = _first(attributes, _PROMPTS)
        return _trace("prompt", conversation, prompt) if prompt else _trace("conversation", conversation)
    response = _first(attributes, ("gen_ai.response.id",))
    return _trace("response", response) if response else ""


def _trace(*parts: str) -> str:
    return _PREFIX + digest("log_trace", *parts)[:24]


def _first(attributes: dict[str, Any], keys: tuple[str, ...]) -> str:
    for key in keys:
        value = attributes.get(key)
        if value:
            return value if isinstance(value, str) else canonical_json(value).decode()
    return ""
