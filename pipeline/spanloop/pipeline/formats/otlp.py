"""OTLP requests of spans or log records in JSON: what a collector's file exporter or any OTLP/HTTP client writes."""

from __future__ import annotations

from typing import Any

from spanloop.pipeline.formats.values import Read
from spanloop.pipeline.otlp.decode_json import decode_request
from spanloop.pipeline.otlp.decode_logs_json import decode_log_request, is_log_request
from spanloop.pipeline.otlp.decoded import MAX_NESTING, DecodedBatch
from spanloop.schemas.errors import SchemaError

__all__ = ["NAME", "as_read", "matches", "read"]

NAME = "otlp"
_SPANS = frozenset({"resourceSpans", "resource_spans", "resourceLogs", "resource_logs"})
_OTHERS = {"resourceMetrics": "metrics", "resource_metrics": "metrics", "resourceProfiles": "profiles"}


def matches(value: dict[str, Any]) -> bool:
    """A request of one of OTLP's signals, or an empty one."""
    return not value or not value.keys().isdisjoint(_SPANS | _OTHERS.keys())


def read(value: dict[str, Any], max_nesting: int = MAX_NESTING, exact: bool = True) -> Read:
    """Spans or log records of a request. Raises SchemaError when it is none."""
    other = next((_OTHERS[key] for key in value if key in _OTHERS), "")
    if other and value.keys().isdisjoint(_SPANS):
        raise SchemaError(f"it holds OTLP {other}, which are not read; expected spans or logs")
    decode = decode_log_request if is_log_request(value) else decode_request
    return as_read(decode(value, max_nesting, exact))


def as_read(batch: DecodedBatch) -> Read:
    """A decoded batch as what a record held."""
    return Read(batch.spans, batch.rejected, ignored=batch.ignored)
