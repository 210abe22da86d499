"""OTLP log requests for tests: one neutral description, written as OTLP/JSON and as protobuf."""

from __future__ import annotations

import json
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from otlp_requests import TRACE, _json_attributes, _json_value, _proto_attributes, _proto_value

from spanloop.pipeline.otlp.decode_logs_json import decode_logs_json
from spanloop.schemas.spans import Span

T0 = 1_790_000_000_000_000_000


def record(name: str = "gen_ai.evaluation.result", **over: Any) -> dict[str, Any]:
    """A good record in neutral form; attributes and body are plain Python values."""
    return {
        "trace_id": TRACE, "span_id": f"{7:016x}", "time": T0, "observed": T0 + 5, "name": name, "severity": 9,
        "attributes": {"gen_ai.evaluation.name": "correct", "gen_ai.evaluation.score.value": 0.5}, **over,
    }  # fmt: skip


def logs_json(records: list[dict[str, Any]], scope: str = "lib", **resource: Any) -> bytes:
    """The request as OTLP/JSON."""
    found = []
    for r in records:
        item = {
            "timeUnixNano": str(r["time"]), "observedTimeUnixNano": str(r["observed"]),
            "severityNumber": r["severity"], "eventName": r["name"], "traceId": r["trace_id"],
            "spanId": r["span_id"], "attributes": _json_attributes(r["attributes"]),
        }  # fmt: skip
        if "body" in r:
            item["body"] = _json_value(r["body"])
        found.append(item)
    group = {
        "resource": {"attributes": _json_attributes(resource or {"service.name": "s"})},
        "scopeLogs": [{"scope": {"name": scope, "version": "1"}, "logRecords": found}],
    }
    return json.dumps({"resourceLogs": [group]}).encode()


def logs_protobuf(records: list[dict[str, Any]], scope: str = "lib", **resource: Any) -> bytes:
    """The same request as protobuf."""
    request = ExportLogsServiceRequest()
    group = request.resource_logs.add()
    _proto_attributes(group.resource.attributes, resource or {"service.name": "s"})
    logs = group.scope_logs.add()
    logs.scope.name, logs.scope.version = scope, "1"
    for r in records:
        out = logs.log_records.add(
            time_unix_nano=r["time"], observed_time_unix_nano=r["observed"], severity_number=r["severity"],
            event_name=r["name"], trace_id=bytes.fromhex(r["trace_id"]), span_id=bytes.fromhex(r["span_id"]),
        )  # fmt: skip
        _proto_attributes(out.attributes, r["attributes"])
        if "body" in r:
            out.body.SetInParent()
            _proto_value(out.body, r["body"])
    return request.SerializeToString()


def log(name: str, t: float, *, trace: str = "", span: str = "", scope: str = "test", body: Any = None,
        **attributes: Any) -> Span:  # fmt: skip
    """A decoded log record; time in seconds, ``__`` in attribute names for a dot, no trace context unless given."""
    given = {key.replace("__", "."): value for key, value in attributes.items()}
    item = record(
        name, time=round(t * 10**9), attributes=given, trace_id=trace, span_id=span,
        **({} if body is None else {"body": body}),
    )  # fmt: skip
    (found,) = decode_logs_json(logs_json([item], scope)).spans
    return found
