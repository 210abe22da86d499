"""Spans to columns. They are the bulk: their JSON parts become text columns as they are on the log, without being decoded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from spanloop.pipeline.columns.cells import Columns, count, int64, plain_text, times
from spanloop.pipeline.ports import LogRecord
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import SpansReceived, decode, encode

__all__ = ["span_columns"]


class _Attributes(msgspec.Struct, gc=False):
    """The GenAI attributes that become columns; of any type, since clients send what they like."""

    operation: Any = msgspec.field(default=None, name="gen_ai.operation.name")
    agent: Any = msgspec.field(default=None, name="gen_ai.agent.name")
    tool: Any = msgspec.field(default=None, name="gen_ai.tool.name")
    model: Any = msgspec.field(default=None, name="gen_ai.response.model")
    request_model: Any = msgspec.field(default=None, name="gen_ai.request.model")
    response_id: Any = msgspec.field(default=None, name="gen_ai.response.id")
    input_tokens: Any = msgspec.field(default=None, name="gen_ai.usage.input_tokens")
    output_tokens: Any = msgspec.field(default=None, name="gen_ai.usage.output_tokens")
    policy_version: Any = msgspec.field(default=None, name="spanloop.policy.version")


class _Resource(msgspec.Struct, gc=False):
    service: Any = msgspec.field(default=None, name="service.name")


class _RawSpan(msgspec.Struct, gc=False):
    """A span with its JSON parts left as they are on the log."""

    trace_id: str
    span_id: str
    name: str
    start_ns: int
    end_ns: int
    parent_span_id: str | None = None
    kind: int = 0
    status: str = "unset"
    status_message: str = ""
    attributes: msgspec.Raw = msgspec.Raw(b"{}")
    events: msgspec.Raw = msgspec.Raw(b"[]")
    links: msgspec.Raw = msgspec.Raw(b"[]")
    resource: msgspec.Raw = msgspec.Raw(b"{}")
    scope: str = ""


class _RawSpans(msgspec.Struct, gc=False):
    type: str = ""
    tenant: str = "default"
    source: str = "otlp"
    spans: tuple[_RawSpan, ...] = ()
    schema_version: int = 1


_raw_spans = msgspec.json.Decoder(_RawSpans)
_attributes = msgspec.json.Decoder(_Attributes)
_resource = msgspec.json.Decoder(_Resource)
_UNREADABLE = (SchemaError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _read(record: LogRecord) -> _RawSpans:
    batch = _raw_spans.decode(record.value)
    if batch.type != "spans_received" or batch.schema_version != SpansReceived.VERSION:
        batch = _raw_spans.decode(encode(decode(record.value)))
    return batch


def span_columns(records: Sequence[LogRecord]) -> tuple[dict[str, Columns], int]:
    """Columns of the table ``spans``, and the number of records that could not be read."""
    heads: list[LogRecord] = []
    batches: list[_RawSpans] = []
    positions: list[int] = []
    spans: list[_RawSpan] = []
    known: list[_Attributes] = []
    services: dict[bytes, str | None] = {}
    bad = 0
    for record in records:
        try:
            batch = _read(record)
            own = [_attributes.decode(span.attributes) for span in batch.spans]
            resources = {bytes(span.resource) for span in batch.spans}
            services.update(
                {raw: plain_text(_resource.decode(raw).service) for raw in resources - services.keys()}
            )
        except _UNREADABLE:
            bad += 1
            continue
        size = len(own)
        heads += [record] * size
        batches += [batch] * size
        positions += range(size)
        spans += batch.spans
        known += own
    resources_of = [bytes(s.resource) for s in spans]
    return {
        "spans": {
            "tenant": [b.tenant for b in batches],
            "trace_id": [s.trace_id for s in spans],
            "span_id": [s.span_id for s in spans],
            "parent_span_id": [s.parent_span_id for s in spans],
            "name": [s.name for s in spans],
            "kind": int64([s.kind for s in spans]),
            "status": [s.status for s in spans],
            "status_message": [s.status_message for s in spans],
            "started": times([s.start_ns for s in spans]),
            "ended": times([s.end_ns for s in spans]),
            "duration_ms": [(s.end_ns - s.start_ns) / 1e6 for s in spans],
            "start_ns": int64([s.start_ns for s in spans]),
            "end_ns": int64([s.end_ns for s in spans]),
            "operation": [plain_text(a.operation) for a in known],
            "agent": [plain_text(a.agent) for a in known],
            "tool": [plain_text(a.tool) for a in known],
            "model": [plain_text(a.model if a.model is not None else a.request_model) for a in known],
            "response_id": [plain_text(a.response_id) for a in known],
            "input_tokens": [count(a.input_tokens) for a in known],
            "output_tokens": [count(a.output_tokens) for a in known],
            "policy_version": [plain_text(a.policy_version) for a in known],
            "scope": [s.scope for s in spans],
            "service": [services[raw] for raw in resources_of],
            "attributes": [bytes(s.attributes) for s in spans],
            "events": [bytes(s.events) for s in spans],
            "links": [bytes(s.links) for s in spans],
            "resource": resources_of,
            "source": [b.source for b in batches],
            "received": times([r.appended_ns for r in heads]),
            "position": positions,
            "repeat": [False] * len(spans),
            "partition": [r.partition for r in heads],
            "offset": [r.offset for r in heads],
        }
    }, bad
