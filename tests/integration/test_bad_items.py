"""One bad item among 500 good spans costs itself at most, over HTTP protobuf, HTTP JSON and gRPC; what is refused is
counted in partial success and is a dead letter with its bytes."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from otlp_requests import as_json, as_protobuf, nested, span
from receiver_harness import Running, receiver

GOOD = 500
BAD_ID = f"{9_999:016x}"


class Bad(NamedTuple):
    """An item, and what is expected of it: the kind of its refusal, or how it is stored."""

    over: dict[str, Any]
    refused: str | None = None
    stored: Callable[[dict[str, Any]], bool] = lambda _: True
    json_refused: str | None = ""
    """Where JSON differs from protobuf: there a value of 60 levels is within our own limit."""


ITEMS = {
    "empty trace id": Bad({"trace_id": ""}, "id"),
    "zero trace id": Bad({"trace_id": "0" * 32}, "id"),
    "empty span id": Bad({"span_id": ""}, "id"),
    "zero span id": Bad({"span_id": "0" * 16}, "id"),
    "short span id": Bad({"span_id": "abcd"}, "id"),
    "empty AnyValue": Bad({"attributes": {"model": None}}, stored=lambda a: a["model"] is None),
    "time 2^64-1": Bad({"end": 2**64 - 1}, "time"),
    "bytes attribute": Bad({"attributes": {"model": b"\x00\xff"}}, stored=lambda a: a["model"] == {"$bytes": "AP8="}),
    "60 levels": Bad({"attributes": {"deep": nested(60)}}, "protobuf", json_refused=None),
    "200 levels": Bad({"attributes": {"deep": nested(200)}}, None),
    "60 levels of maps": Bad({"attributes": {"deep": [{"k": nested(60)}]}}, "protobuf", json_refused=None),
    "deep value in an event": Bad({"events": [("e", 1, {"deep": nested(60)})]}, "protobuf", json_refused=None),
}  # fmt: skip
ITEMS["200 levels"] = ITEMS["200 levels"]._replace(refused="protobuf", json_refused="nesting")


async def _send(running: Running, how: str, spans: list[dict[str, Any]]) -> tuple[int, str]:
    """(rejected, message) of an accepted request."""
    if how == "json":
        status, answer = await running.post_json(as_json(spans))
        found = answer.get("partialSuccess", {})
        assert status == 200
        return int(found.get("rejectedSpans", 0)), found.get("errorMessage", "")
    body = as_protobuf(spans)
    if how == "grpc":
        called = await running.call(body)
        assert called.code is grpc.StatusCode.OK
        raw = called.body
    else:
        status, raw, _ = await running.post(body, Content_Type="application/x-protobuf")
        assert status == 200
    partial = ExportTraceServiceResponse.FromString(raw).partial_success
    return partial.rejected_spans, partial.error_message


def _request(bad: Bad) -> list[dict[str, Any]]:
    spans = [span(n) for n in range(1, GOOD + 1)]
    spans.insert(GOOD // 2, span(9_999, **bad.over))
    return spans


@pytest.mark.parametrize("how", ["protobuf", "json", "grpc"])
@pytest.mark.parametrize("name", ITEMS)
async def test_one_bad_item_costs_itself(name: str, how: str) -> None:
    bad = ITEMS[name]
    refused = bad.json_refused if how == "json" and bad.json_refused != "" else bad.refused
    async with receiver(content={"training": True}) as running:
        rejected, message = await _send(running, how, _request(bad))
        stored = {s.span_id: s for e in running.events("spans") for s in e.spans}
        letters = running.events("dead_letters")
        assert {f"{n:016x}" for n in range(1, GOOD + 1)} <= stored.keys(), "no good neighbour is lost"
        if refused is None:
            assert (rejected, letters) == (0, [])
            assert bad.stored(stored[BAD_ID].attributes)
            return
        assert (rejected, len(stored), len(letters)) == (1, GOOD, 1)
        assert message.startswith("1 spans were refused: ")
        (letter,) = letters
        assert letter.reason == f"bad span: {refused}"
        data = base64.b64decode(letter.data)
        assert letter.size >= len(data) > 20
        if how == "json":
            assert json.loads(data)["name"] == "chat m"
        else:
            assert b"chat m" in data


@pytest.mark.parametrize("levels", [200, 400, 20_000])
async def test_json_deeper_than_its_parser_follows(levels: int) -> None:
    body = as_json([span(n) for n in range(1, GOOD + 1)] + [span(9_999, attributes={"deep": "XXXX"})])
    deep = b'{"arrayValue":{"values":[' * levels + b"]}}" * levels
    async with receiver() as running:
        status, answer = await running.post_json(body.replace(b'{"stringValue": "XXXX"}', deep))
        assert (status, answer["partialSuccess"]["rejectedSpans"]) == (200, "1")
        assert "nested too deep" in answer["partialSuccess"]["errorMessage"]
        assert sum(len(e.spans) for e in running.events("spans")) == GOOD
        assert [x.reason for x in running.events("dead_letters")] == ["bad span: nesting"]


@pytest.mark.parametrize("how", ["protobuf", "json", "grpc"])
async def test_a_duplicate_id_is_kept_beside_its_namesake(how: str) -> None:
    spans = [span(n) for n in range(1, GOOD + 1)]
    spans.insert(250, span(7, name="other", attributes={"x": 1}))
    async with receiver() as running:
        assert await _send(running, how, spans) == (0, "")
        stored = [s for e in running.events("spans") for s in e.spans]
        assert len(stored) == GOOD + 1
        assert sorted(s.name for s in stored if s.span_id == f"{7:016x}") == ["chat m", "other"]
        assert await _send(running, how, spans) == (0, "")
        assert len(running.events("spans")) == 1, "the request again is the same event"


@pytest.mark.parametrize("how", ["protobuf", "grpc"])
async def test_a_text_that_is_not_utf8_costs_its_span(how: str) -> None:
    spans = [span(n) for n in range(1, GOOD + 1)] + [span(9_999, name="XXXX")]
    body = as_protobuf(spans).replace(b"XXXX", b"\xff\xfe\xfd\xfc")
    async with receiver() as running:
        if how == "grpc":
            raw = (await running.call(body)).body
        else:
            raw = (await running.post(body, Content_Type="application/x-protobuf"))[1]
        assert ExportTraceServiceResponse.FromString(raw).partial_success.rejected_spans == 1
        assert sum(len(e.spans) for e in running.events("spans")) == GOOD


@pytest.mark.parametrize("how", ["protobuf", "json", "grpc"])
async def test_more_attributes_than_are_kept(how: str) -> None:
    many = {f"a{n:05}": n for n in range(5_000)} | {"gen_ai.usage.input_tokens": 7}
    async with receiver(collector={"max_attributes": 100}) as running:
        assert await _send(running, how, [span(1), span(2, attributes=many)]) == (0, "")
        stored = {s.span_id: s for e in running.events("spans") for s in e.spans}
        kept = stored[f"{2:016x}"]
        assert len(kept.attributes) == 100
        assert kept.attributes["gen_ai.usage.input_tokens"] == 7
        assert kept.attributes["spanloop.truncated"] == ["attributes"]
        assert kept.dropped_attributes == 5_001 - 99
        assert stored[f"{1:016x}"].dropped_attributes == 0


@pytest.mark.parametrize("how", ["protobuf", "json", "grpc"])
async def test_one_bad_item_in_every_tenth_place(how: str) -> None:
    kinds = [bad for name, bad in ITEMS.items() if bad.refused and not bad.json_refused]
    spans = [span(n, **(kinds[n % len(kinds)].over if n % 10 == 0 else {})) for n in range(1, GOOD + 1)]
    expected = sum(
        1
        for n in range(10, GOOD + 1, 10)
        if not (how == "json" and kinds[n % len(kinds)].json_refused is None)
    )
    async with receiver() as running:
        rejected, message = await _send(running, how, spans)
        assert rejected == expected
        assert sum(len(e.spans) for e in running.events("spans")) == GOOD - expected
        assert len(message) < 2_000
        text = running.receiver.metrics.text({})
        counted = [
            int(float(line.split()[-1]))
            for line in text.splitlines()
            if line.startswith("spanloop_spans_rejected_total{")
        ]
        assert sum(counted) == expected
