"""The receiver over HTTP: encodings, statuses, limits, credentials, durability before 200."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
import time
import zlib
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from otlp_requests import TRACE, as_json, as_protobuf, case, case_request, span
from receiver_harness import NOW, receiver

from spanloop.collectors.bodies import ArrivingBodies
from spanloop.collectors.receiver import TRACE_ROUTES
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.schemas.errors import TransientError

PB = "application/x-protobuf"
OTHER = "0af7651916cd43dd8448eb211c80319d"
KEYS = [
    {"key": "agent-key-of-a", "tenant": "A", "role": "agent"},
    {"key": "scorer-key-of-b", "tenant": "B", "role": "scorer"},
    {"key": "agent-key-of-b", "tenant": "B", "role": "agent"},
    {"key": "reader-key-of-a", "tenant": "A", "role": "reader"},
]


@pytest.mark.parametrize("route", TRACE_ROUTES)
async def test_protobuf_and_json_answer_in_kind(route: str) -> None:
    async with receiver() as running:
        status, body, headers = await running.post(as_protobuf([span(1)]), route, Content_Type=PB)
        assert (status, body, headers["Content-Type"]) == (200, b"", PB)
        assert await running.post_json(as_json([span(2)]), route) == (200, {})
        assert [e.spans[0].span_id for e in running.events("spans")] == [f"{n:016x}" for n in (1, 2)]


@pytest.mark.parametrize("pack", [gzip.compress, zlib.compress], ids=["gzip", "deflate"])
async def test_compressed(pack: Any) -> None:
    name = "gzip" if pack is gzip.compress else "deflate"
    async with receiver() as running:
        status, _, _ = await running.post(
            pack(as_protobuf([span(1)])), Content_Type=PB, Content_Encoding=name
        )
        assert status == 200
        twice = await running.post(
            pack(pack(as_protobuf([span(2)]))), Content_Type=PB, Content_Encoding=f"{name}, {name}"
        )
        assert twice[0] == 200
        assert len(running.events("spans")) == 2


async def test_one_event_a_trace_and_a_repeat_changes_nothing() -> None:
    body = as_protobuf([span(1), span(2, trace_id=OTHER), span(3)])
    async with receiver() as running:
        for _ in range(3):
            assert (await running.post(body, Content_Type=PB))[0] == 200
        assert [(e.trace_id, len(e.spans), e.source, e.tenant) for e in running.events("spans")] == [
            (TRACE, 2, "otlp", "default"), (OTHER, 1, "otlp", "default")]  # fmt: skip
        text = running.receiver.metrics.text({})
        assert "spanloop_events_duplicate_total 4" in text
        assert "spanloop_spans_accepted_total 9" in text


async def test_partial_success_and_dead_letters() -> None:
    spans = [span(1), span(2, trace_id="0" * 32, attributes={"note": "pat@example.invalid"}), span(3)]
    async with receiver() as running:
        status, body, _ = await running.post(as_protobuf(spans), Content_Type=PB)
        answer = ExportTraceServiceResponse.FromString(body)
        assert (status, answer.partial_success.rejected_spans) == (200, 1)
        assert "trace id is all zero" in answer.partial_success.error_message
        status, parsed = await running.post_json(as_json(spans))
        assert (status, parsed["partialSuccess"]["rejectedSpans"]) == (200, "1")
        (event,) = running.events("spans")
        assert len(event.spans) == 2
        letters = running.events("dead_letters")
        assert [(x.reason, x.data, x.details) for x in letters] == [("bad span: id", "", {})] * 2
        assert 'spanloop_spans_rejected_total{kind="id"} 2' in running.receiver.metrics.text({})


async def test_dead_letters_keep_bytes_where_content_is_kept() -> None:
    async with receiver(content={"training": True}) as running:
        await running.post(as_protobuf([span(1, trace_id="0" * 32)]), Content_Type=PB)
        (letter,) = running.events("dead_letters")
        assert letter.data
        assert "all zero" in letter.details["reason"]


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (b"\xff\xff", {"Content_Type": PB}, 400), (b"{", {"Content_Type": "application/json"}, 400),
        (b"[" * 15_000, {"Content_Type": "application/json"}, 400), (b"{}", {"Content_Type": "text/plain"}, 415),
        (b"{}", {"Content_Type": PB, "Content_Encoding": "br"}, 415),
        (b"{}", {"Content_Type": "application/json", "Content_Encoding": "gzip"}, 400),
        (gzip.compress(bytes(30_000)), {"Content_Type": PB, "Content_Encoding": "gzip"}, 413),
        (gzip.compress(gzip.compress(bytes(10**6))), {"Content_Type": PB, "Content_Encoding": "gzip, gzip"}, 413),
        (bytes(20_001), {"Content_Type": PB}, 413),
        (gzip.compress(bytes(range(256)) * 64, 0), {"Content_Type": PB, "Content_Encoding": "gzip"}, 413),
        (b"{}", {"Content_Type": "application/json; charset=utf-8"}, 200),
        (b'{"resourceSpans":[]}', {"Content_Type": "application/json"}, 200), (b"", {"Content_Type": PB}, 200),
    ],
    ids=lambda v: str(v)[:30] if not isinstance(v, dict) else "-".join(v.values()),
)  # fmt: skip
async def test_statuses(body: bytes, headers: dict[str, str], status: int) -> None:
    async with receiver(collector={"max_body_bytes": 10_000, "max_expanded_bytes": 20_000}) as running:
        found, raw, answered = await running.post(body, **headers)
        assert found == status
        if status != 200 and PB not in headers["Content_Type"]:
            assert json.loads(raw)["message"]
        if status != 200 and PB in headers["Content_Type"]:
            assert raw[0] == 0x08, "google.rpc.Status starts with its code"
            assert answered["Content-Type"] == PB
        assert (await running.post(as_protobuf([span(1)]), Content_Type=PB))[0] == 200, "the process lives on"


async def test_chunked_body_over_the_limit() -> None:
    async def chunks() -> Any:
        for _ in range(50):
            yield bytes(1000)

    async with (
        receiver(collector={"max_expanded_bytes": 20_000}) as running,
        running.client.post(
            f"{running.url}/v1/traces", data=chunks(), headers={"Content-Type": PB}
        ) as answer,
    ):
        assert answer.status == 413


async def test_too_many_spans() -> None:
    async with receiver(collector={"max_spans_per_request": 3}) as running:
        status, answer = await running.post_json(as_json([span(n) for n in range(1, 5)]))
        assert (status, running.events("spans")) == (413, [])
        assert "max_spans_per_request" in answer["message"]


async def test_slow_body_is_timed_out() -> None:
    async with receiver(collector={"read_timeout_s": 0.2}) as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: {PB}\r\nContent-Length: 100\r\n\r\nab"
        writer.write(head.encode())
        line = await asyncio.wait_for(reader.readline(), 5)
        assert b" 408 " in line
        writer.close()


async def _used(budget: ArrivingBodies, size: int) -> None:
    for _ in range(500):
        if budget.used == size:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{budget.used} bytes are arriving, not {size}")


async def test_slow_uploads_of_one_key_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """One tenant's bodies, begun and never ended, hold all room: another's body takes that of the oldest, once it is slow."""
    monkeypatch.setattr("spanloop.collectors.bodies.SLOW_S", 0.5)
    collector = {"max_body_bytes": 20_000, "max_expanded_bytes": 20_000, "read_timeout_s": 30}
    async with receiver(collector=collector, credentials=KEYS) as running:
        host, port = running.url.removeprefix("http://").split(":")
        budget = running.receiver.reception.budget
        head = f"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: {PB}\r\nx-api-key: agent-key-of-a\r\n"
        held = []
        for n in range(1, 5):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(f"{head}Content-Length: 20000\r\n\r\n".encode() + bytes(18_000))
            held.append((reader, writer))
            await _used(budget, 18_000 * n)
        own = {"Content_Type": PB, "x_api_key": "agent-key-of-b"}
        big = [as_protobuf([span(n, attributes={"note": "x" * 12_000})]) for n in (1, 2, 3)]
        status, body, headers = await running.post(big[0], **own)
        assert (status, headers["Retry-After"]) == (503, "1"), body
        await asyncio.sleep(0.6)
        for one in big:
            assert (await running.post(one, **own))[0] == 200
        line = await asyncio.wait_for(held[0][0].readline(), 5)
        assert b" 503 " in line
        assert budget.used == 3 * 18_000, "only as many give way as must"
        for _, writer in held:
            writer.close()
        await _used(budget, 0)


class _RefusingLog(MemoryLog):
    """A log whose disk is full until told otherwise."""

    full = True

    def append(self, records: Any) -> Any:
        if self.full:
            raise TransientError("cannot write spanloop.db: disk full")
        return super().append(records)


async def test_log_refuses_then_recovers() -> None:
    log = _RefusingLog(ManualClock(NOW))
    async with receiver(log) as running:
        status, raw, headers = await running.post(as_json([span(1)]), Content_Type="application/json")
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "disk full" in json.loads(raw)["message"]
        log.full = False
        assert (await running.post_json(as_json([span(1)])))[0] == 200
        assert len(running.events("spans")) == 1


class _SlowLog(MemoryLog):
    """A log whose append waits for a gate."""

    def __init__(self) -> None:
        super().__init__(ManualClock(NOW))
        self.gate = threading.Event()

    def append(self, records: Any) -> Any:
        assert self.gate.wait(20)
        return super().append(records)


async def test_no_answer_before_the_append_and_a_full_queue_refuses() -> None:
    log = _SlowLog()
    async with receiver(log, collector={"queue_max": 2}) as running:
        first = asyncio.create_task(running.post_json(as_json([span(1)])))
        deadline = time.monotonic() + 10
        while running.receiver.committer.depth or not running.receiver.committer.busy:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        waiting = [asyncio.create_task(running.post_json(as_json([span(n)]))) for n in (2, 3)]
        while running.receiver.committer.depth < 2:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        status, _, headers = await running.post(as_json([span(4)]), Content_Type="application/json")
        assert (status, headers["Retry-After"]) == (429, "1")
        assert not first.done()
        log.gate.set()
        assert [await t for t in (first, *waiting)] == [(200, {})] * 3
        assert len(running.events("spans")) == 3


async def test_one_poisoned_append_does_not_fail_its_group() -> None:
    class Log(MemoryLog):
        def append(self, records: Any) -> Any:
            if any(b"poison" in r.value for r in records):
                raise ValueError("poison")
            return super().append(records)

    async with receiver(Log(ManualClock(NOW)), collector={"group_commit_ms": 50}) as running:
        bodies = [as_json([span(1)]), as_json([span(2, name="poison")]), as_json([span(3)])]
        answers = await asyncio.gather(*(running.post_json(b) for b in bodies))
        assert [status for status, _ in answers] == [200, 500, 200]
        assert len(running.events("spans")) == 2


# ---------------------------------------------------------------- credentials and tenants


async def test_credentials_on_every_route() -> None:
    async with receiver(credentials=KEYS) as running:
        for path in (*TRACE_ROUTES, "/v1/feedback"):
            for header in ({}, {"Authorization": "Bearer nope"}, {"Authorization": "Basic agent-key-of-a"}):
                status, _raw, headers = await running.post(
                    b"{}", path, Content_Type="application/json", **header
                )
                assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
            reader = await running.post_json(b"{}", path, Authorization="Bearer reader-key-of-a")
            assert reader[0] == 403
        agent = await running.post_json(b"{}", "/v1/feedback", Authorization="Bearer agent-key-of-a")
        assert agent[0] == 403
        assert "scorer" in agent[1]["message"]
        async with running.client.get(f"{running.url}/metrics") as answer:
            assert answer.status == 401
        async with running.client.get(f"{running.url}/healthz") as answer:
            assert await answer.json() == {"status": "ok"}
        assert not running.events("spans")


async def test_credential_is_checked_before_the_body_is_read() -> None:
    async with receiver(credentials=KEYS) as running:
        host, port = running.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(
            f"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: {PB}\r\nContent-Length: 999\r\n\r\n".encode()
        )
        assert b" 401 " in await asyncio.wait_for(reader.readline(), 5)
        writer.close()


async def test_case_43_two_tenants_with_one_trace_id() -> None:
    found, spans = case(43)
    async with receiver(credentials=KEYS) as running:
        for raw in spans:
            key = f"Bearer agent-key-of-{raw['auth_tenant'].lower()}"
            assert (await running.post_json(case_request([raw]), Authorization=key))[0] == 200
        item = found["feedback"][0]
        body = {"trace_id": item["traceId"], "feedback_id": item["feedbackId"], "value": item["value"]}
        status, answer = await running.post_json(
            json.dumps(body).encode(), "/v1/feedback", Authorization="Bearer scorer-key-of-b"
        )
        assert (status, answer["accepted"]) == (200, 1)
        events = running.events("spans")
        assert sorted(e.tenant for e in events) == ["A", "B"]
        assert len({e.key for e in events}) == found["checks"]["traces"]
        assert [(e.tenant, e.value) for e in running.events("feedback")] == [("B", 1.0)]


# ---------------------------------------------------------------- feedback


async def test_feedback_array_keeps_the_good_items() -> None:
    items = [
        {"trace_id": TRACE, "value": 1},
        {"trace_id": "zz", "value": 1},
        {"response_id": "r", "value": 0.5},
    ]
    async with receiver() as running:
        status, answer = await running.post_json(json.dumps(items).encode(), "/v1/feedback")
        assert (status, answer["accepted"], answer["duplicates"]) == (200, 2, 0)
        assert [r["index"] for r in answer["rejected"]] == [1]
        assert [n["index"] for n in answer["notes"]] == [0], "no span of that trace has come yet"
        status, answer = await running.post_json(json.dumps(items).encode(), "/v1/feedback")
        assert (status, answer["accepted"], answer["duplicates"]) == (200, 0, 2)
        await running.post_json(as_json([span(1)]))
        status, answer = await running.post_json(json.dumps(items).encode(), "/v1/feedback")
        assert "notes" not in answer
        assert [e.value for e in running.events("feedback")] == [1.0, 0.5]


@pytest.mark.parametrize(
    "body",
    [b'{"trace_id":"zz","value":1}', b"nope", b'{"value":NaN}', b"7", b'[{"value":"1"}]', b'{"value":1e999}'],
)
async def test_bad_feedback_is_400(body: bytes) -> None:
    async with receiver() as running:
        assert (await running.post_json(body, "/v1/feedback"))[0] == 400
        assert (await running.post(body, "/v1/feedback", Content_Type=PB))[0] == 415
        assert running.events("feedback") == []


async def test_metrics_text() -> None:
    async with receiver() as running:
        await running.post_json(as_json([span(1)]))
        async with running.client.get(f"{running.url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        assert "spanloop_spans_accepted_total 1" in lines
        assert "spanloop_queue_requests 0" in lines
        assert "spanloop_commit_seconds_count 1" in lines
        assert 'spanloop_requests_total{route="spans",status="200"} 1' in lines


# ---------------------------------------------------------------- shared cases through the whole receiver


async def test_case_13_partial_success() -> None:
    found, spans = case(13)
    async with receiver() as running:
        status, answer = await running.post_json(case_request(spans))
        assert (status, answer["partialSuccess"]["rejectedSpans"]) == (200, str(found["checks"]["rejected"]))
        assert sum(len(e.spans) for e in running.events("spans")) == found["checks"]["accepted"]
        assert len(running.events("dead_letters")) == found["checks"]["rejected"]


@pytest.mark.parametrize("training", [False, True])
async def test_case_14_inline_image(training: bool) -> None:
    found, spans = case(14)
    async with receiver(content={"training": training}) as running:
        assert await running.post_json(case_request(spans)) == (200, {})
        records = running.log.read(["spans"], {}, 100)
        assert max(len(r.value) for r in records) <= found["checks"]["max_record_bytes"]
        kept = [s for e in running.events("spans") for s in e.spans]
        tokens = [
            sum(s.attributes.get(f"gen_ai.usage.{k}_tokens", 0) for s in kept) for k in ("input", "output")
        ]
        assert (len(kept), tokens) == (3, [found["checks"]["input_tokens"], found["checks"]["output_tokens"]])
        cut = [s for s in kept if "gen_ai.input.messages" in s.attributes]
        value = cut[0].attributes["gen_ai.input.messages"]
        if training:
            assert cut[0].attributes["spanloop.truncated"] == ["gen_ai.input.messages"]
            assert value.startswith("data:image/png;base64,AAAA")
        else:
            assert value["$redacted"] == 22 + 6_291_456


@pytest.mark.parametrize("number", [11, 15, 17, 18, 19, 22])
async def test_cases_that_must_be_accepted(number: int) -> None:
    found, spans = case(number)
    async with receiver() as running:
        assert await running.post_json(case_request(spans)) == (200, {})
        assert sum(len(e.spans) for e in running.events("spans")) == len(spans)
        for body in found.get("raw_messages", []) if number == 22 else []:
            assert await running.post_json(body.encode()) == (200, {})


async def test_case_42_parallel_bombs() -> None:
    found, _ = case(42)
    size = found["operations"][0]["bytes"]
    bomb = gzip.compress(bytes(size))
    depth = found["operations"][3]["depth"]
    async with receiver() as running:
        answers = await asyncio.gather(
            *(running.post(bomb, Content_Type=PB, Content_Encoding="gzip") for _ in range(20)),
            running.post(as_protobuf([span(1)]), Content_Type=PB),
        )
        assert [a[0] for a in answers] == [413] * 20 + [200]
        twice = gzip.compress(bomb)
        assert (await running.post(twice, Content_Type=PB, Content_Encoding="gzip, gzip"))[0] == 413
        assert (await running.post(bytes(found["operations"][2]["bytes"]), Content_Type=PB))[0] == 413
        assert (await running.post_json(b"[" * depth))[0] == 400


async def test_case_45_nothing_clear_is_written() -> None:
    found, spans = case(45)
    async with receiver() as running:
        assert await running.post_json(case_request(spans)) == (200, {})
        bad = [{**spans[0], "spanId": "zz"}]
        await running.post_json(case_request(bad))
        written = b"".join(r.value for r in running.log.read(["spans", "dead_letters"], {}, 100)).decode()
        assert [s for s in found["forbidden_strings"] if s in written] == []
