"""OTLP decoders: what senders really send, and that a bad span never costs its neighbours."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from otlp_requests import TRACE, as_json, as_protobuf, case, case_request, corpora, nested, span

from spanloop.pipeline.otlp.decode_json import decode_json
from spanloop.pipeline.otlp.decode_protobuf import decode_protobuf
from spanloop.pipeline.otlp.decoded import FLAGS
from spanloop.pipeline.otlp.files import read_spans
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.errors import SchemaError

BOTH = pytest.mark.parametrize(
    ("write", "read"), [(as_json, decode_json), (as_protobuf, decode_protobuf)], ids=["json", "protobuf"]
)


@BOTH
def test_a_span_arrives_whole(write: Any, read: Any) -> None:
    attributes = {"s": "x", "empty": "", "i": -(2**63), "f": 3.0, "b": False, "n": None, "y": b"\0\xff",
                  "l": ["a", 1, [2.5]], "m": {"k": {"z": True}}, "el": [], "em": {}}  # fmt: skip
    other = "0af7651916cd43dd8448eb211c80319d"
    raw = span(
        2, parent_id="00000000000000aa", attributes=attributes, status=2, message="boom",
        events=[("e", 5, {"k": "v"})], links=[(other, "00000000000000bb", {"by": "x"})],
    )  # fmt: skip
    batch = read(write([raw], {"service.name": "svc", "pid": 7}))
    assert batch.rejected == []
    (found,) = batch.spans
    assert (found.trace_id, found.span_id, found.parent_span_id) == (TRACE, f"{2:016x}", "00000000000000aa")
    assert (found.kind, found.status, found.status_message, found.name) == (3, "error", "boom", "chat m")
    assert (found.scope, found.scope_version, found.resource) == (
        "lib",
        "1",
        {"service.name": "svc", "pid": 7},
    )
    assert found.attributes == attributes | {"y": {"$bytes": base64.b64encode(b"\0\xff").decode()}}
    assert [type(found.attributes[k]) for k in "ifb"] == [int, float, bool]
    assert (found.events[0].name, found.events[0].t_ns, found.events[0].attributes) == ("e", 5, {"k": "v"})
    assert (found.links[0].trace_id, found.links[0].attributes) == (other, {"by": "x"})


@BOTH
@pytest.mark.parametrize(
    ("over", "kind"),
    [
        ({"trace_id": "0" * 32}, "id"), ({"span_id": "0" * 16}, "id"), ({"trace_id": "ab" * 15}, "id"),
        ({"trace_id": ""}, "id"), ({"span_id": "ab" * 9}, "id"), ({"parent_id": "abcd"}, "id"),
        ({"end": 2**64 - 1}, "time"), ({"start": 2**63}, "time"), ({"attributes": {"deep": nested(70)}}, None),
        ({"attributes": {"deep": nested(200)}}, None),
    ],
)  # fmt: skip
def test_a_bad_span_is_refused_alone(write: Any, read: Any, over: dict[str, Any], kind: str | None) -> None:
    batch = read(write([span(1), span(2, **over), span(3)]))
    assert [s.span_id for s in batch.spans] == [f"{1:016x}", f"{3:016x}"]
    (rejected,) = batch.rejected
    assert rejected.data
    assert kind is None or rejected.kind == kind
    assert batch.spans[1].resource == {"service.name": "s"}
    assert batch.spans[1].scope == "lib"


def test_protobuf_value_that_upb_refuses_costs_one_span() -> None:
    body = as_protobuf([span(1), span(2, attributes={"deep": nested(60)}), span(3)])
    with pytest.raises(Exception, match="parsing"):
        ExportTraceServiceRequest.FromString(body)
    batch = decode_protobuf(body)
    assert (len(batch.spans), [r.kind for r in batch.rejected]) == (2, ["protobuf"])


def test_protobuf_text_that_is_not_utf8_costs_one_span() -> None:
    body = as_protobuf([span(1), span(2, name="XXXX"), span(3)]).replace(b"XXXX", b"\xff\xfe\xfd\xfc")
    batch = decode_protobuf(body)
    assert (len(batch.spans), len(batch.rejected)) == (2, 1)


@BOTH
def test_parent_of_zeros_is_no_parent_and_a_bad_link_is_flagged(write: Any, read: Any) -> None:
    (found,) = read(write([span(1, parent_id="0" * 16, links=[("0" * 32, "00000000000000bb", {})])])).spans
    assert found.parent_span_id is None
    assert (found.links, found.attributes[FLAGS]) == ((), ["invalid_link:links"])


@BOTH
def test_non_finite_numbers_become_text_and_are_flagged(write: Any, read: Any) -> None:
    values = {"a": float("nan"), "b": float("inf"), "c": float("-inf"), "d": 1e308}
    (found,) = read(write([span(1, attributes=values)])).spans
    assert found.attributes == {"a": "NaN", "b": "Infinity", "c": "-Infinity", "d": 1e308, FLAGS: [
        "invalid_number:a", "invalid_number:b", "invalid_number:c"]}  # fmt: skip
    canonical_json(found)


def _one(**fields: Any) -> bytes:
    base = {"traceId": TRACE, "spanId": "00000000000000aa", "name": "n"}
    return json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [base | fields]}]}]}).encode()


@pytest.mark.parametrize(
    ("fields", "attribute", "value"),
    [
        ({"kind": "SPAN_KIND_CLIENT"}, "kind", 3), ({"kind": 2}, "kind", 2), ({"kind": 77}, "kind", 0),
        ({"status": {"code": "STATUS_CODE_ERROR"}}, "status", "error"), ({"status": {}}, "status", "unset"),
        ({"startTimeUnixNano": 1790000001000000001}, "start_ns", 1790000001000000001),
        ({"start_time_unix_nano": "17"}, "start_ns", 17),
        ({"traceId": TRACE.upper()}, "trace_id", TRACE),
        ({"traceId": base64.b64encode(bytes.fromhex(TRACE)).decode()}, "trace_id", TRACE),
        ({"traceId": base64.b64encode(TRACE.encode()).decode()}, "trace_id", TRACE),
        ({"parentSpanId": "AAAAAAAAAAA="}, "parent_span_id", None),
        ({"attributes": [{"key": "i", "value": {"intValue": 7}}]}, "attributes", {"i": 7}),
        ({"attributes": [{"key": "i", "value": {"int_value": "9007199254740993"}}]}, "attributes",
         {"i": 9007199254740993}),
        ({"attributes": [{"key": "i", "value": {"intValue": "9223372036854775808"}}]}, "attributes",
         {"i": "9223372036854775808", FLAGS: ["out_of_range:i"]}),
        ({"attributes": [{"key": "f", "value": {"doubleValue": 3}}]}, "attributes", {"f": 3.0}),
        ({"attributes": [{"key": "x"}, {"key": "", "value": {"stringValue": "e"}}]}, "attributes",
         {"x": None, "": "e"}),
        ({"droppedAttributesCount": 4}, "dropped_attributes", 4),
    ],
)  # fmt: skip
def test_json_spellings(fields: dict[str, Any], attribute: str, value: Any) -> None:
    batch = decode_json(_one(**fields))
    assert batch.rejected == []
    assert getattr(batch.spans[0], attribute) == value


@pytest.mark.parametrize(
    "fields",
    [
        {"name": 7}, {"traceId": 7}, {"spanId": None}, {"startTimeUnixNano": "soon"}, {"startTimeUnixNano": -1},
        {"startTimeUnixNano": 1.5}, {"attributes": {"a": 1}}, {"attributes": [7]}, {"status": []},
        {"attributes": [{"key": "a", "value": "bare"}]}, {"attributes": [{"key": 1, "value": {}}]},
        {"attributes": [{"key": "a", "value": {"boolValue": "yes"}}]},
        {"attributes": [{"key": "a", "value": {"intValue": "1_0"}}]},
        {"attributes": [{"key": "a", "value": {"bytesValue": "?"}}]}, {"events": "x"}, {"links": [None]},
    ],
)  # fmt: skip
def test_json_bad_types_are_refused_alone(fields: dict[str, Any]) -> None:
    data = json.loads(_one(**fields))
    data["resourceSpans"][0]["scopeSpans"][0]["spans"].append(
        {"traceId": TRACE, "spanId": "00000000000000ab"}
    )
    batch = decode_json(json.dumps(data).encode())
    assert ([s.span_id for s in batch.spans], len(batch.rejected)) == (["00000000000000ab"], 1)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"7", b'{"x":1}', b'{"resourceSpans":7}', b'{"resourceSpans":[7]}', b"[" * 100_000, b"\xff\xfe"]
)  # fmt: skip
def test_what_is_no_json_request_is_refused_whole(body: bytes) -> None:
    with pytest.raises(SchemaError):
        decode_json(body)


@pytest.mark.parametrize("body", [b"{}", b"\x0a\xff\x01ab", b"\x0a\x05hello", b"<html>", b"\x0a"])
def test_what_is_no_protobuf_request_is_refused_whole(body: bytes) -> None:
    with pytest.raises(SchemaError):
        decode_protobuf(body)


def test_truncated_protobuf_is_refused_whole() -> None:
    body = as_protobuf([span(1), span(2)])
    for cut in range(1, len(body)):
        with pytest.raises(SchemaError):
            decode_protobuf(body[:cut])


def test_bad_utf8_in_json_is_repaired_and_flagged() -> None:
    body = as_json([span(1, attributes={"a": "XX"}), span(2)]).replace(b"XX", b"ok \xc3 end")
    batch = decode_json(body)
    assert batch.spans[0].attributes == {"a": "ok \ufffd end", FLAGS: ["invalid_unicode:a"]}
    assert FLAGS not in batch.spans[1].attributes


# ---------------------------------------------------------------- shared cases


def test_case_11_cycles_are_kept_for_assembly() -> None:
    _, spans = case(11)
    batch = decode_json(case_request(spans))
    assert (len(batch.spans), batch.rejected) == (6, [])
    assert batch.spans[0].parent_span_id == batch.spans[0].span_id


def test_case_13_zero_and_malformed_ids() -> None:
    found, spans = case(13)
    batch = decode_json(case_request(spans))
    checks = found["checks"]
    assert (len(batch.spans), len(batch.rejected)) == (checks["accepted"], checks["rejected"])
    assert {s.trace_id for s in batch.spans} == {"a000000000000000000000000000000e"}
    assert sum(s.parent_span_id is None for s in batch.spans) == checks["roots"]
    assert (
        sum(s.attributes.get("gen_ai.usage.input_tokens", 0) for s in batch.spans) == checks["input_tokens"]
    )


def test_case_15_lone_surrogates() -> None:
    found, spans = case(15)
    batch = decode_json(case_request(spans))
    assert (len(batch.spans), batch.rejected) == (3, [])
    texts = [s.attributes.get("gen_ai.output.messages") for s in batch.spans]
    assert found["checks"]["contains"] in texts
    assert "good \U0001f98a" in texts
    assert [FLAGS in s.attributes for s in batch.spans] == [False, True, False]
    assert batch.spans[1].attributes["k\ufffdey"] == "x"
    assert batch.spans[1].attributes["list"] == ["a", "\ufffd"]
    canonical_json(batch.spans)


def test_case_17_non_finite_numbers() -> None:
    _, spans = case(17)
    batch = decode_json(case_request(spans))
    assert (len(batch.spans), batch.rejected) == (8, [])
    costs = [s.attributes.get("gen_ai.usage.cost") for s in batch.spans]
    assert costs[1:] == ["NaN", "Infinity", "-Infinity", 1e308, 1e308, "0.25", None]
    assert sum(FLAGS in s.attributes for s in batch.spans) == 3


def test_case_18_integers_stay_exact() -> None:
    found, spans = case(18)
    batch = decode_json(case_request(spans))
    assert (len(batch.spans), batch.rejected) == (6, [])
    starts = {s.span_id: s.start_ns for s in batch.spans}
    assert starts | found["checks"]["exact_start_ns"] == starts
    values = [v for s in batch.spans for v in s.attributes.values()]
    assert found["checks"]["exact_int"] in values
    assert "9223372036854775808" in values


def test_case_19_hex_and_base64_ids_are_one_trace() -> None:
    found, spans = case(19)
    batch = decode_json(case_request(spans))
    assert (len(batch.spans), batch.rejected) == (3, [])
    assert {s.trace_id for s in batch.spans} == {found["checks"]["compat"]["trace_id"]}


def test_case_22_empty_and_null() -> None:
    found, spans = case(22)
    batch = decode_json(case_request(spans))
    assert (len(batch.spans), batch.rejected) == (5, [])
    for body in found["raw_messages"]:
        assert decode_json(body.encode()).spans == []


def test_json_and_protobuf_files_of_the_corpora_agree() -> None:
    files = sorted(corpora().glob("live-*/*/spans.otlp.jsonl"))
    assert files
    for path in files:
        by_json = list(read_spans(path))
        assert by_json == list(read_spans(path.with_name("spans.otlp.pb.len")))
        assert all(b.spans and not b.rejected for b in by_json)
