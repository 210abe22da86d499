"""OTLP protobuf ExportTraceServiceRequest -> spans. One parse by upb down to the spans (``shallow``), then one walk in
which each attribute is parsed on its own; when upb refuses the request all the same, it is taken apart at its length
marks and each span is parsed alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope, KeyValue

from spanloop.pipeline.otlp import shallow
from spanloop.pipeline.otlp.decoded import (
    MAX_NESTING,
    BadSpanError,
    DecodedBatch,
    Origin,
    Rejected,
    bytes_value,
    check_times,
    float_value,
    hex_id,
    with_flags,
)
from spanloop.pipeline.otlp.wire import WireError, fields
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.spans import Span, SpanEvent, SpanLink

__all__ = [
    "STATUS",
    "decode_protobuf",
    "parsed",
    "read_pair",
    "read_resource",
    "read_scope",
    "read_span",
    "refusal",
]

STATUS = {0: "unset", 1: "ok", 2: "error"}
_UNCHANGING = frozenset({str, int, float, bool})
_SHORT = 256
_KNOWN_MAX = 8_192
"""Attributes up to the first many bytes are remembered with what they mean, up to so many: at most 4 MiB."""
_known: dict[bytes, tuple[str, Any]] = {}
_REFUSED = "the protobuf parser refuses this span: a value nested too deep, or a text that is not UTF-8"


def decode_protobuf(body: bytes, max_nesting: int = MAX_NESTING) -> DecodedBatch:
    """Spans of one OTLP protobuf request. Raises SchemaError when ``body`` is not such a request at all."""
    batch = DecodedBatch([], [])
    request = parsed(body)
    if request is None:
        _take_apart(memoryview(body), batch, max_nesting)
        return batch
    for group in request.resource_spans:
        resource = read_resource(group.resource, max_nesting)
        for scopes in group.scope_spans:
            _decode_spans(scopes.spans, Origin(resource, *read_scope(scopes.scope)), batch, max_nesting)
    return batch


def parsed(body: bytes) -> Any | None:
    """A request as far as ``shallow`` goes; None: it has to be taken apart."""
    try:
        return shallow.Request.FromString(body)
    except DecodeError:
        return None


def _decode_spans(raw_spans: Iterable[Any], origin: Origin, batch: DecodedBatch, depth: int) -> None:
    for raw in raw_spans:
        try:
            batch.spans.append(read_span(raw, origin, depth))
        except (BadSpanError, DecodeError, UnicodeDecodeError) as exc:
            batch.rejected.append(refusal(raw, exc))


def refusal(raw: Any, problem: Exception) -> Rejected:
    """A span that ``read_span`` refused."""
    if isinstance(problem, BadSpanError):
        return Rejected(str(problem), raw.SerializeToString(), problem.kind)
    return Rejected(_REFUSED, raw.SerializeToString(), "protobuf")


def read_span(raw: Any, origin: Origin, depth: int) -> Span:
    """One span as ``shallow`` has it. Raises BadSpanError, DecodeError or UnicodeDecodeError."""
    trace_id = hex_id(raw.trace_id, 16, "trace id")
    span_id = hex_id(raw.span_id, 8, "span id")
    parent = raw.parent_span_id
    start, end = raw.start_time_unix_nano, raw.end_time_unix_nano
    check_times(start, end)
    flags: list[str] = []
    attributes = _attributes(raw.attributes, depth, flags)
    events = raw.events
    links = raw.links
    span_events = _events(events, depth, flags) if events else ()
    span_links = _links(links, depth, flags) if links else ()
    if flags:
        with_flags(attributes, flags)
    status = raw.status
    message = status.message
    kind = raw.kind
    return Span(  # by position: names cost as much as the rest of it
        trace_id,
        span_id,
        raw.name.decode(),
        start,
        end,
        hex_id(parent, 8, "parent span id") if parent.strip(b"\0") else None,
        kind if 0 <= kind <= 5 else 0,
        STATUS.get(status.code, "unset"),
        message.decode() if message else "",
        attributes,
        span_events,
        span_links,
        origin.scope,
        origin.version,
        origin.resource,
        raw.dropped_attributes_count,
    )


def _events(raw: Any, depth: int, flags: list[str]) -> tuple[SpanEvent, ...]:
    found = []
    for part in raw:
        event = shallow.Event.FromString(part)
        time_ns = event.time_unix_nano
        check_times(time_ns, 0)
        found.append(SpanEvent(event.name.decode(), time_ns, _attributes(event.attributes, depth, flags)))
    return tuple(found)


def _links(raw: Any, depth: int, flags: list[str]) -> tuple[SpanLink, ...]:
    found = []
    for part in raw:
        link = shallow.Link.FromString(part)
        attributes = _attributes(link.attributes, depth, flags)
        try:
            trace_id, span_id = hex_id(link.trace_id, 16, "trace id"), hex_id(link.span_id, 8, "span id")
        except BadSpanError:
            flags.append("invalid_link:links")
            continue
        found.append(SpanLink(trace_id, span_id, attributes))
    return tuple(found)


def _attributes(raw: Iterable[bytes], depth: int, flags: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    known, short = _known.get, _SHORT
    for part in raw:
        pair = known(part) if len(part) <= short else None
        if pair is None:
            pair = _pair(part, depth, flags)
        found[pair[0]] = pair[1]
    return found


def _pair(part: bytes, depth: int, flags: list[str]) -> tuple[str, Any]:
    """``read_pair``. Short ones come again and again: what cannot change is remembered."""
    found = read_pair(part, depth, flags)
    if len(part) <= _SHORT and not flags and type(found[1]) in _UNCHANGING:
        if len(_known) >= _KNOWN_MAX:
            _known.clear()
        _known[part] = found
    return found


def read_pair(part: bytes, depth: int, flags: list[str]) -> tuple[str, Any]:
    """Key and value of one attribute; repairs are added to ``flags``."""
    pair = KeyValue.FromString(part)
    key, value = pair.key, pair.value
    text = value.string_value
    return key, text or _value(value, depth, flags, key)  # a text that is not empty: the usual case


def _value(value: Any, depth: int, flags: list[str], key: str) -> Any:
    if depth <= 0:
        raise BadSpanError(f"the value of attribute {key[:80]!r} is nested too deep", "nesting")
    match value.WhichOneof("value"):
        case "string_value":
            return value.string_value
        case "int_value":
            return value.int_value
        case "bool_value":
            return value.bool_value
        case "double_value":
            return float_value(value.double_value, flags, key)
        case "array_value":
            return [_value(item, depth - 1, flags, key) for item in value.array_value.values]
        case "kvlist_value":
            return {p.key: _value(p.value, depth - 1, flags, key) for p in value.kvlist_value.values}
        case "bytes_value":
            return bytes_value(value.bytes_value)
    return None


def read_resource(parts: Iterable[bytes], depth: int) -> dict[str, Any]:
    """Attributes of a resource. One that cannot be read costs itself, never its spans."""
    flags: list[str] = []
    attributes: dict[str, Any] = {}
    try:
        for part in parts:
            raw = [bytes(inner) for number, inner in fields(memoryview(part)) if number == 1]
            attributes |= _attributes(raw, depth, flags)
    except (BadSpanError, DecodeError, WireError):
        return with_flags({}, ["invalid_resource:resource"])
    return with_flags(attributes, flags) if flags else attributes


def read_scope(parts: Iterable[bytes]) -> tuple[str, str]:
    """Name and version; none where they cannot be read, since its spans are worth more than its name."""
    found = InstrumentationScope()
    try:
        for part in parts:
            found.MergeFromString(part)
    except DecodeError:
        return "", ""
    return found.name, found.version


# ---------------------------------------------------------------- a request that upb refuses


def _take_apart(data: memoryview, batch: DecodedBatch, depth: int) -> None:
    try:
        groups = [part for number, part in fields(data) if number == 1]
    except WireError as exc:
        raise SchemaError(f"the body is not an OTLP protobuf request: {exc}") from exc
    for group in groups:
        try:
            parts = list(fields(group))
            resource = read_resource([bytes(p) for n, p in parts if n == 1], depth)
            for scope_spans in (p for n, p in parts if n == 2):
                _take_scope_apart(scope_spans, resource, batch, depth)
        except WireError as exc:
            batch.rejected.append(
                Rejected(f"a ResourceSpans message is malformed: {exc}", bytes(group), "protobuf")
            )
    if not batch.spans and all("message is malformed" in r.reason for r in batch.rejected):
        reasons = "; ".join(r.reason for r in batch.rejected[:3]) or "no ResourceSpans in it"
        raise SchemaError(f"the body is not an OTLP protobuf request: {reasons}")


def _take_scope_apart(data: memoryview, resource: dict[str, Any], batch: DecodedBatch, depth: int) -> None:
    try:
        parts = list(fields(data))
    except WireError as exc:
        batch.rejected.append(Rejected(f"a ScopeSpans message is malformed: {exc}", bytes(data), "protobuf"))
        return
    name, version = read_scope([bytes(p) for n, p in parts if n == 1])
    for number, part in parts:
        if number != 2:
            continue
        try:
            span = shallow.Span.FromString(bytes(part))
        except DecodeError:
            batch.rejected.append(Rejected(_REFUSED, bytes(part), "protobuf"))
            continue
        _decode_spans((span,), Origin(resource, name, version), batch, depth)
