"""Build OTLP requests for tests: one neutral description, written as OTLP/JSON and as protobuf; the shared cases."""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SHARED = Path(__file__).resolve().parents[2] / "shared"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def span(n: int = 1, **over: Any) -> dict[str, Any]:
    """A good span of TRACE in neutral form; attributes are plain Python values."""
    return {
        "trace_id": TRACE, "span_id": f"{n:016x}", "parent_id": "", "name": "chat m", "kind": 3,
        "start": 1_790_000_000_000_000_000 + n, "end": 1_790_000_001_000_000_000 + n,
        "attributes": {"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 7},
        "events": [], "links": [], "status": 0, "message": "", **over,
    }  # fmt: skip


def as_json(spans: list[dict[str, Any]], resource: dict[str, Any] | None = None) -> bytes:
    """The request as OTLP/JSON."""
    group = {
        "resource": {"attributes": _json_attributes(resource or {"service.name": "s"})},
        "scopeSpans": [{"scope": {"name": "lib", "version": "1"}, "spans": [_json_span(s) for s in spans]}],
    }
    return json.dumps({"resourceSpans": [group]}).encode()


def _json_span(s: dict[str, Any]) -> dict[str, Any]:
    return {
        "traceId": s["trace_id"], "spanId": s["span_id"], "parentSpanId": s["parent_id"], "name": s["name"],
        "kind": s["kind"], "startTimeUnixNano": str(s["start"]), "endTimeUnixNano": str(s["end"]),
        "attributes": _json_attributes(s["attributes"]),
        "events": [
            {"name": n, "timeUnixNano": str(t), "attributes": _json_attributes(a)} for n, t, a in s["events"]
        ],
        "links": [{"traceId": t, "spanId": i, "attributes": _json_attributes(a)} for t, i, a in s["links"]],
        "status": {"code": s["status"], "message": s["message"]},
    }  # fmt: skip


def _json_attributes(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": k, "value": _json_value(v)} for k, v in attributes.items()]


def _json_value(value: Any) -> dict[str, Any]:
    match value:
        case None:
            return {}
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            names = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
            return {"doubleValue": names.get(repr(value), value)}
        case str():
            return {"stringValue": value}
        case bytes():
            return {"bytesValue": base64.b64encode(value).decode()}
        case list():
            return {"arrayValue": {"values": [_json_value(v) for v in value]}}
    return {"kvlistValue": {"values": _json_attributes(value)}}


def as_protobuf(spans: list[dict[str, Any]], resource: dict[str, Any] | None = None) -> bytes:
    """The same request as protobuf."""
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    _proto_attributes(group.resource.attributes, resource or {"service.name": "s"})
    scope = group.scope_spans.add()
    scope.scope.name, scope.scope.version = "lib", "1"
    for s in spans:
        out = scope.spans.add(
            trace_id=bytes.fromhex(s["trace_id"]), span_id=bytes.fromhex(s["span_id"]),
            parent_span_id=bytes.fromhex(s["parent_id"]), name=s["name"], kind=s["kind"],
            start_time_unix_nano=s["start"], end_time_unix_nano=s["end"],
        )  # fmt: skip
        out.status.code, out.status.message = s["status"], s["message"]
        _proto_attributes(out.attributes, s["attributes"])
        for name, t, attributes in s["events"]:
            _proto_attributes(out.events.add(name=name, time_unix_nano=t).attributes, attributes)
        for trace_id, span_id, attributes in s["links"]:
            link = out.links.add(trace_id=bytes.fromhex(trace_id), span_id=bytes.fromhex(span_id))
            _proto_attributes(link.attributes, attributes)
    return request.SerializeToString()


def _proto_attributes(target: Any, attributes: dict[str, Any]) -> None:
    for key, value in attributes.items():
        pair = target.add(key=key)
        _proto_value(pair.value, value)


def _proto_value(target: Any, value: Any) -> None:
    match value:
        case None:
            target.SetInParent()
        case bool():
            target.bool_value = value
        case int():
            target.int_value = value
        case float():
            target.double_value = value
        case str():
            target.string_value = value
        case bytes():
            target.bytes_value = value
        case list():
            target.array_value.SetInParent()
            for item in value:
                _proto_value(target.array_value.values.add(), item)
        case dict():
            target.kvlist_value.SetInParent()
            _proto_attributes(target.kvlist_value.values, value)


def nested(depth: int) -> Any:
    """A text under ``depth`` lists."""
    value: Any = "deep"
    for _ in range(depth):
        value = [value]
    return value


def corpora() -> Path:
    """The folder of real spans; skips the test where it is not."""
    if not (SHARED / "corpora").is_dir():
        pytest.skip("the shared corpora are not beside this checkout")
    return SHARED / "corpora"


def case(number: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(case, its spans) of a shared case file; skips the test where there is none."""
    found = sorted((SHARED / "cases").glob(f"{number:02d}-*.json"))
    if not found:
        pytest.skip(f"shared case {number} is not beside this checkout")
    spec = importlib.util.spec_from_file_location("load_case", SHARED / "cases" / "load_case.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load(found[0])


def case_request(spans: list[dict[str, Any]]) -> bytes:
    """Spans of a case as one OTLP/JSON request: each brings its resource as a flat map."""
    groups = []
    for raw in spans:
        attributes = _json_attributes(raw.get("resource", {}))
        bare = {k: v for k, v in raw.items() if k not in ("resource", "auth_tenant")}
        groups.append({"resource": {"attributes": attributes}, "scopeSpans": [{"spans": [bare]}]})
    return json.dumps({"resourceSpans": groups}).encode()
