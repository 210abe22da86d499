"""OTLP protobuf ExportLogsServiceRequest -> log records in the form of spans. When upb refuses the request, it is
taken apart at its length marks and each record is parsed on its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span as ProtoSpan

from spanloop.pipeline.otlp.decode_protobuf import decode_protobuf
from spanloop.pipeline.otlp.decoded import MAX_NESTING, DecodedBatch, Rejected
from spanloop.pipeline.otlp.log_ids import UNSET_TRACE
from spanloop.pipeline.otlp.log_spans import BODY, PLACE, SEVERITY, take_records
from spanloop.pipeline.otlp.wire import WireError, fields
from spanloop.schemas.errors import SchemaError

__all__ = ["decode_logs_protobuf"]

_UNSET = bytes.fromhex(UNSET_TRACE)
_PLACE = bytes.fromhex(PLACE)
_REFUSED = "the protobuf parser refuses this log record: a value nested too deep, or a text that is not UTF-8"


class _Scope(NamedTuple):
    """Records of one scope."""

    resource: Resource
    scope: InstrumentationScope
    records: Sequence[LogRecord]


def decode_logs_protobuf(body: bytes, max_nesting: int = MAX_NESTING) -> DecodedBatch:
    """Records of one OTLP protobuf request. Raises SchemaError when ``body`` is not such a request at all."""
    batch = DecodedBatch([], [])
    for group in _scopes(body, batch):

        def read(some: Sequence[LogRecord], group: _Scope = group) -> DecodedBatch:
            request = ExportTraceServiceRequest()
            resource = request.resource_spans.add()
            resource.resource.CopyFrom(group.resource)
            scope = resource.scope_spans.add()
            scope.scope.CopyFrom(group.scope)
            scope.spans.extend(_as_span(record) for record in some)
            return decode_protobuf(request.SerializeToString(), max_nesting)

        take_records(group.records, read, lambda record: record.SerializeToString(), batch)
    return batch


def _scopes(body: bytes, batch: DecodedBatch) -> Iterator[_Scope]:
    try:
        request = ExportLogsServiceRequest.FromString(body)
    except DecodeError:
        yield from _taken_apart(memoryview(body), batch)
        return
    for group in request.resource_logs:
        for scope in group.scope_logs:
            yield _Scope(group.resource, scope.scope, scope.log_records)


def _as_span(record: LogRecord) -> ProtoSpan:
    time = record.time_unix_nano or record.observed_time_unix_nano
    span = ProtoSpan(
        trace_id=record.trace_id if any(record.trace_id) else _UNSET,
        span_id=_PLACE,
        parent_span_id=record.span_id if any(record.span_id) else b"",
        name=record.event_name,
        start_time_unix_nano=time,
        end_time_unix_nano=time,
        dropped_attributes_count=record.dropped_attributes_count,
    )
    span.attributes.extend(record.attributes)
    if record.HasField("body"):
        span.attributes.add(key=BODY).value.CopyFrom(record.body)
    if record.severity_number > 0:
        span.attributes.add(key=SEVERITY).value.int_value = record.severity_number
    return span


# ---------------------------------------------------------------- a request that upb refuses


def _taken_apart(data: memoryview, batch: DecodedBatch) -> Iterator[_Scope]:
    found: list[_Scope] = []
    before = len(batch.rejected)
    try:
        groups = [list(fields(part)) for number, part in fields(data) if number == 1]
    except WireError as exc:
        raise SchemaError(f"the body is not an OTLP protobuf log request: {exc}") from exc
    for group in groups:
        resource = Resource()
        _merge(resource, group)
        for scope in (part for number, part in group if number == 2):
            found += _scope_apart(scope, resource, batch)
    if not found and len(batch.rejected) == before:
        raise SchemaError("the body is not an OTLP protobuf log request: no record in it")
    yield from found


def _scope_apart(data: memoryview, resource: Resource, batch: DecodedBatch) -> list[_Scope]:
    try:
        parts = list(fields(data))
    except WireError as exc:
        reason = f"a ScopeLogs message is malformed: {exc}"
        batch.rejected.append(Rejected(reason, bytes(data), "protobuf"))
        return []
    scope = InstrumentationScope()
    _merge(scope, parts)
    records = []
    for part in (part for number, part in parts if number == 2):
        try:
            records.append(LogRecord.FromString(bytes(part)))
        except DecodeError:
            batch.rejected.append(Rejected(_REFUSED, bytes(part), "protobuf"))
    return [_Scope(resource, scope, records)]


def _merge(message: Resource | InstrumentationScope, parts: list[tuple[int, memoryview]]) -> None:
    """Read the first field into ``message``; records are worth more than where they came from."""
    for number, part in parts:
        if number == 1:
            try:
                message.MergeFromString(bytes(part))
            except DecodeError:
                message.Clear()
