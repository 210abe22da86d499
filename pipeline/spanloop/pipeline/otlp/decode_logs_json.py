"""OTLP/JSON ExportLogsServiceRequest -> log records in the form of spans."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from spanloop.pipeline.otlp.decode_json import decode_request, parse_json
from spanloop.pipeline.otlp.decoded import MAX_NESTING, DecodedBatch
from spanloop.pipeline.otlp.log_ids import UNSET_TRACE
from spanloop.pipeline.otlp.log_spans import BODY, PLACE, SEVERITY, take_records
from spanloop.schemas.errors import SchemaError

__all__ = ["decode_log_request", "decode_logs_json", "is_log_request"]

_LEVELS = ("TRACE", "DEBUG", "INFO", "WARN", "ERROR", "FATAL")
_SEVERITIES = {
    f"SEVERITY_NUMBER_{level}{step or ''}": 4 * rank + (step or 1)
    for rank, level in enumerate(_LEVELS)
    for step in (0, 2, 3, 4)
}

_NUMBERS = frozenset(map(str, _SEVERITIES.values()))


def decode_logs_json(body: bytes, max_nesting: int = MAX_NESTING) -> DecodedBatch:
    """Records of one OTLP/JSON request. Raises SchemaError when ``body`` is not such a request at all."""
    data, exact = parse_json(body)
    return decode_log_request(data, max_nesting, exact)


def is_log_request(data: Any) -> bool:
    """Whether parsed JSON is a request of log records.

    >>> is_log_request({"resourceLogs": []}), is_log_request({"resourceSpans": []})
    (True, False)
    """
    return isinstance(data, dict) and ("resourceLogs" in data or "resource_logs" in data)


def decode_log_request(data: Any, max_nesting: int = MAX_NESTING, exact: bool = True) -> DecodedBatch:
    """Records of a parsed request; ``exact`` False: repair texts first."""
    if not isinstance(data, dict):
        raise SchemaError("expected an OTLP log request (a JSON object)")
    if data and not is_log_request(data):
        raise SchemaError(f"expected resourceLogs in an OTLP log request, found {sorted(map(str, data))[:5]}")
    batch = DecodedBatch([], [])
    for resource, scope, records in _scopes(data):

        def read(some: Sequence[Any], resource: Any = resource, scope: Any = scope) -> DecodedBatch:
            spans = [_as_span(record) for record in some]
            group = {"resource": resource, "scopeSpans": [{"scope": scope, "spans": spans}]}
            return decode_request({"resourceSpans": [group]}, max_nesting, exact)

        take_records(records, read, _raw, batch)
    return batch


def _scopes(data: dict[str, Any]) -> Iterator[tuple[Any, Any, list[Any]]]:
    for group in _objects(data, "resourceLogs", "resource_logs"):
        for scope in _objects(group, "scopeLogs", "scope_logs"):
            records = _either(scope, "logRecords", "log_records")
            if records is not None and not isinstance(records, list):
                raise SchemaError("logRecords is no list")
            yield group.get("resource"), scope.get("scope"), records or []


def _objects(data: dict[str, Any], camel: str, snake: str) -> list[dict[str, Any]]:
    found = _either(data, camel, snake)
    if found is None:
        return []
    if not isinstance(found, list) or not all(isinstance(item, dict) for item in found):
        raise SchemaError(f"{camel} is no list of objects")
    return found


def _as_span(record: Any) -> Any:
    """The record as a span; what is no object stays as it is and is refused."""
    if not isinstance(record, dict):
        return record
    attributes = record.get("attributes") or []
    if isinstance(attributes, list):
        attributes = list(attributes)
        if record.get("body") is not None:
            attributes.append({"key": BODY, "value": record["body"]})
        severity = _either(record, "severityNumber", "severity_number")
        if isinstance(severity, str):
            severity = int(severity) if severity in _NUMBERS else _SEVERITIES.get(severity)
        if isinstance(severity, int) and severity > 0:
            attributes.append({"key": SEVERITY, "value": {"intValue": severity}})
    trace_id = _either(record, "traceId", "trace_id")
    unset = trace_id is None or (isinstance(trace_id, str) and not trace_id.strip("0"))
    time = _either(record, "timeUnixNano", "time_unix_nano")
    if not time or time == "0":
        time = _either(record, "observedTimeUnixNano", "observed_time_unix_nano")
    return {
        "traceId": UNSET_TRACE if unset else trace_id,
        "spanId": PLACE,
        "parentSpanId": _either(record, "spanId", "span_id"),
        "name": _either(record, "eventName", "event_name"),
        "startTimeUnixNano": time,
        "endTimeUnixNano": time,
        "attributes": attributes,
        "droppedAttributesCount": _either(record, "droppedAttributesCount", "dropped_attributes_count"),
    }


def _either(data: dict[str, Any], camel: str, snake: str) -> Any:
    value = data.get(camel)
    return data.get(snake) if value is None else value


def _raw(record: Any) -> bytes:
    return json.dumps(record, ensure_ascii=True, default=str).encode("ascii")
