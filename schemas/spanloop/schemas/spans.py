"""One span as spanloop stores it: OTLP decoded once, after the allow-list, with ids in lower-case hex.

The same struct comes from OTLP protobuf, OTLP JSON, files and the gateway, so that everything behind
the collectors is blind to the wire format.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from spanloop.schemas.canonical import content_hash, digest

__all__ = ["LOG", "Redacted", "Span", "SpanEvent", "SpanLink", "redacted", "span_hash"]

LOG = 6
"""``Span.kind`` of an OTLP log record (docs/adr/0009); the decoders give no span a kind above 5."""

JsonValue = Any
"""str, int, finite float, bool, None, list or dict of the same. Bytes arrive as {"$bytes": base64},
non-finite floats as the strings "NaN", "Infinity", "-Infinity"."""

Redacted = dict[str, Any]
"""What stands where a text was dropped: {"$redacted": length in characters, "$hmac": keyed hash of the text}."""


def redacted(length: int, hmac: str) -> Redacted:
    """The stand-in for a dropped text; rules that compare texts compare the hash."""
    return {"$redacted": length, "$hmac": hmac}


class SpanEvent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A timed event inside a span (exception, deprecated message events)."""

    name: str
    t_ns: int = 0
    attributes: dict[str, JsonValue] = {}


class SpanLink(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A link to another span, possibly of another trace."""

    trace_id: str
    span_id: str
    attributes: dict[str, JsonValue] = {}


class Span(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One finished operation. ``start_ns``/``end_ns`` are raw: never corrected, end may precede start."""

    trace_id: str
    """32 lower-case hex digits, not all zero."""
    span_id: str
    """16 lower-case hex digits, not all zero."""
    name: str
    start_ns: int
    end_ns: int
    parent_span_id: str | None = None
    kind: int = 0
    """OTLP SpanKind: 0 unspecified, 1 internal, 2 server, 3 client, 4 producer, 5 consumer; LOG: a log record."""
    status: str = "unset"
    """unset, ok or error."""
    status_message: str = ""
    attributes: dict[str, JsonValue] = {}
    events: tuple[SpanEvent, ...] = ()
    links: tuple[SpanLink, ...] = ()
    scope: str = ""
    scope_version: str = ""
    resource: dict[str, JsonValue] = {}
    dropped_attributes: int = 0


def span_hash(span: Span) -> str:
    """Content hash of a span; equal for the same span sent twice, whatever its attribute order."""
    return content_hash(span)


def spans_event_id(tenant: str, trace_id: str, hashes: Iterable[str]) -> str:
    """Deterministic id of a batch of one trace, from the hashes of its spans: a retry of the same batch is the same event."""
    return digest("spans", tenant, trace_id, *hashes)
