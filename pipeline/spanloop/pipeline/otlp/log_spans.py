"""Log records in the form of spans (``kind`` LOG, docs/adr/0009): what both decoders of log requests share.

A record is rewritten as the span that it becomes and decoded by the decoder of spans, so that both signals have the
same limits, repairs and refusals. Its body becomes the attribute ``log.body``, its severity ``log.severity``; it
begins and ends at its time; its name is the event's name; its parent is the span in which it was logged.

Invariants: a record is decoded, refused or (when it says nothing of agents) counted on its own; JSON and protobuf of one record give the same span.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from spanloop.pipeline.otlp.decoded import DecodedBatch, Rejected
from spanloop.pipeline.otlp.log_ids import identified
from spanloop.schemas.spans import LOG, Span

__all__ = ["BODY", "PLACE", "SEVERITY", "take_records"]

T = TypeVar("T")

BODY = "log.body"
SEVERITY = "log.severity"
"""OTLP severity number, 1 to 24; from 17 on it is an error."""
PLACE = "0000000000000001"
"""Span id of a record until it has its own."""
_ERROR = 17
_AGENT_EVENTS = ("gen_ai.", "claude_code.", "codex.")
_AGENT_SCOPES = ("claude_code", "codex")
_EVENT_NAME = re.compile(r"[a-z][\w-]*(\.[\w-]+)+\Z", re.ASCII)


def take_records(
    records: Sequence[T],
    read: Callable[[Sequence[T]], DecodedBatch],
    raw: Callable[[T], bytes],
    batch: DecodedBatch,
) -> None:
    """Add the records of one scope to ``batch``; where one is refused, each is read alone, so that it is known which.

    Args:
        records: as they came.
        read: decodes records as spans.
        raw: the bytes of a record, for its dead letter.
        batch: is added to.
    """
    if not records:
        return
    found = read(records)
    if not found.rejected:
        _add(found.spans, records, raw, batch)
        return
    for record in records:
        alone = read([record])
        _add(alone.spans, [record] * len(alone.spans), raw, batch)
        batch.rejected.extend(
            Rejected(item.reason.replace("a span is", "a log record is"), raw(record), item.kind)
            for item in alone.rejected
        )


def _add(spans: Iterable[Span], records: Sequence[T], raw: Callable[[T], bytes], batch: DecodedBatch) -> None:
    for span, record in zip(spans, records, strict=True):
        if span.start_ns <= 0:
            reason = "a log record has neither timeUnixNano nor observedTimeUnixNano"
            batch.rejected.append(Rejected(reason, raw(record), "time"))
        else:
            finished = _finished(span)
            if _concerns_agents(finished):
                batch.spans.append(finished)
            else:
                batch.ignored += 1


def _finished(span: Span) -> Span:
    """A decoded record with its kind, name, status and ids."""
    attributes = span.attributes
    severity = attributes.get(SEVERITY)
    wrong = isinstance(severity, int) and severity >= _ERROR
    return identified(
        msgspec.structs.replace(
            span,
            name=span.name or _name(attributes),
            kind=LOG,
            status="error" if wrong or attributes.get("error.type") else "unset",
        )
    )


def _concerns_agents(record: Span) -> bool:
    """Whether the record is of agents' work; applications log much else."""
    return (
        record.name.startswith(_AGENT_EVENTS)
        or any(name in record.scope for name in _AGENT_SCOPES)
        or any(key.startswith("gen_ai.") for key in record.attributes)
    )


def _name(attributes: dict[str, Any]) -> str:
    """The event's name where the record has no field for it: of an attribute and a body that repeats it with more
    in front, the longer."""
    told, body = attributes.get("event.name"), attributes.get(BODY)
    name = told if isinstance(told, str) else ""
    if isinstance(body, str) and len(body) <= 128 and _EVENT_NAME.match(body) and body.endswith(name):
        return body
    return name or "log"
