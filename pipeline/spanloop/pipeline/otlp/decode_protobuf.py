"""OTLP protobuf ExportTraceServiceRequest -> spans. One parse by upb, then one walk; when upb refuses the request, it
is taken apart at its length marks and each span is parsed on its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

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

__all__ = ["decode_protobuf"]

_STATUS = {0: "unset", 1: "ok", 2: "error"}
_REFUSED = "the protobuf parser refuses this span: a value nested too deep, or a text that is not UTF-8"


def decode_protobuf(body: bytes, max_nesting: int = MAX_NESTING) -> DecodedBatch:
    """Spans of one OTLP protobuf request. Raises SchemaError when ``body`` is not such a request at all."""
    batch = DecodedBatch([], [])
    try:
        request = ExportTraceServiceRequest.FromString(body)
    except DecodeError:
        _take_apart(memoryview(body), batch, max_nesting)
        return batch
    for group in request.resource_spans:
        resource = _resource(group.resource.attributes, max_nesting)
        for scope_spans in group.scope_spans:
            scope = scope_spans.scope
            _decode_spans(scope_spans.spans, Origin(resource, scope.name, scope.version), batch, max_nesting)
    return batch


def _decode_spans(raw_spans: Iterable[Any], origin: Origin, batch: DecodedBatch, depth: int) -> None:
    for raw in raw_spans:
        try:
            batch.spans.append(_span(raw, origin, depth))
        except BadSpanError as exc:
            batch.rejected.append(Rejected(str(exc), raw.SerializeToString(), exc.kind))


def _span(raw: Any, origin: Origin, depth: int) -> Span:
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
    kind = raw.kind
    return Span(
        trace_id=trace_id,
        span_id=span_id,
        name=raw.name,
        start_ns=start,
        end_ns=end,
        parent_span_id=hex_id(parent, 8, "parent span id") if any(parent) else None,
        kind=kind if 0 <= kind <= 5 else 0,
        status=_STATUS.get(status.code, "unset"),
        status_message=status.message,
        attributes=attributes,
        events=span_events,
        links=span_links,
        scope=origin.scope,
        scope_version=origin.version,
        resource=origin.resource,
        dropped_attributes=raw.dropped_attributes_count,
    )


def _events(raw: Any, depth: int, flags: list[str]) -> tuple[SpanEvent, ...]:
    found = []
    for event in raw:
        check_times(event.time_unix_nano, 0)
        found.append(SpanEvent(event.name, event.time_unix_nano, _attributes(event.attributes, depth, flags)))
    return tuple(found)


def _links(raw: Any, depth: int, flags: list[str]) -> tuple[SpanLink, ...]:
    found = []
    for link in raw:
        attributes = _attributes(link.attributes, depth, flags)
        try:
            trace_id, span_id = hex_id(link.trace_id, 16, "trace id"), hex_id(link.span_id, 8, "span id")
        except BadSpanError:
            flags.append("invalid_link:links")
            continue
        found.append(SpanLink(trace_id, span_id, attributes))
    return tuple(found)


def _attributes(raw: Any, depth: int, flags: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for pair in raw:
        value = pair.value
        text = value.string_value
        found[pair.key] = text or _value(
            value, depth, flags, pair.key
        )  # a text that is not empty: the usual case
    return found


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


def _resource(raw: Any, depth: int) -> dict[str, Any]:
    flags: list[str] = []
    try:
        attributes = _attributes(raw, depth, flags)
    except BadSpanError:
        return with_flags({}, ["invalid_resource:resource"])
    return with_flags(attributes, flags) if flags else attributes


# ---------------------------------------------------------------- a request that upb refuses


def _take_apart(data: memoryview, batch: DecodedBatch, depth: int) -> None:
    try:
        groups = [part for number, part in fields(data) if number == 1]
    except WireError as exc:
        raise SchemaError(f"the body is not an OTLP protobuf request: {exc}") from exc
    for group in groups:
        try:
            parts = list(fields(group))
            resource = _lone_resource([p for n, p in parts if n == 1], depth)
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
    name = version = ""
    for number, part in parts:
        if number == 1:
            try:
                scope = InstrumentationScope.FromString(bytes(part))
                name, version = scope.name, scope.version
            except DecodeError:
                pass  # its spans are worth more than its name
    for number, part in parts:
        if number != 2:
            continue
        try:
            span = ProtoSpan.FromString(bytes(part))
        except DecodeError:
            batch.rejected.append(Rejected(_REFUSED, bytes(part), "protobuf"))
            continue
        _decode_spans((span,), Origin(resource, name, version), batch, depth)


def _lone_resource(parts: list[memoryview], depth: int) -> dict[str, Any]:
    found = Resource()
    try:
        for part in parts:
            found.MergeFromString(bytes(part))
    except DecodeError:
        return with_flags({}, ["invalid_resource:resource"])
    return _resource(found.attributes, depth)
