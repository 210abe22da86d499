"""Shared cases on collecting, feedback and security, from the request to what the pipeline makes of it: each is sent as
OTLP/JSON and, where protobuf can say it, over gRPC, and its ``checks`` are read from the case file."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import math
import resource
import time
from typing import Any

import grpc
import pytest
from otlp_requests import as_protobuf, case, case_request, span
from receiver_harness import NOW, Running, receiver

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.runtimes.embedded import EmbeddedRuntime
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.state.memory import MemoryState
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.settings import Settings

PB = "application/x-protobuf"
EVERY = ("spans", "feedback", "orchestrations", "rewards", "credits", "samples", "dead_letters")


class World:
    """A receiver and the pipeline behind it on one log, under one clock."""

    def __init__(self, running: Running, **pipeline: Any) -> None:
        self.running = running
        self.clock: ManualClock = running.log._clock  # type: ignore[attr-defined]
        running.receiver._clock = self.clock
        settings = Settings(pipeline=pipeline)  # type: ignore[arg-type]
        self.runtime = EmbeddedRuntime(
            build_stages(settings.pipeline), running.log, MemoryState(running.log), self.clock
        )
        self.runtime.restore()

    def settle(self, seconds: float = 400.0) -> None:
        """Let the pipeline read on, and time pass until everything is closed."""
        for wait in (0.0, seconds, 0.0):
            self.clock.advance(seconds=wait)
            while self.runtime.step():
                pass

    def live(self) -> dict[tuple[str, str], Any]:
        """The last revision of each orchestration by tenant and id."""
        last = {(e.tenant, e.orchestration_id): e for e in self.running.events("orchestrations")}
        return {key: e for key, e in last.items() if e.content is not None}

    def tokens(self) -> tuple[int, int]:
        usage = [e.content.tokens for e in self.live().values()]
        return sum(t.input for t in usage), sum(t.output for t in usage)

    def rewards(self) -> dict[tuple[str, str], Any]:
        return {(e.tenant, e.orchestration_id): e for e in self.running.events("rewards")}

    def check(self, checks: dict[str, Any]) -> None:
        """What the case says of traces, spans and tokens."""
        stored = [s for e in self.running.events("spans") for s in e.spans]
        assert len({(e.tenant, e.trace_id) for e in self.running.events("spans")}) == checks["traces"]
        assert len(self.live()) == checks["traces"]
        if "spans" in checks:
            assert len(stored) == checks["spans"]
        if "output_tokens" in checks:
            assert self.tokens() == (checks["input_tokens"], checks["output_tokens"])

    async def feedback(self, items: list[dict[str, Any]], **headers: str) -> tuple[int, Any]:
        body = [
            {
                "trace_id": i["traceId"],
                "feedback_id": i["feedbackId"],
                "name": i["name"],
                "value": i["value"],
            }
            | ({"span_id": i["spanId"]} if "spanId" in i else {})
            for i in items
        ]
        return await self.running.post_json(json.dumps(body).encode(), "/v1/feedback", **headers)


def _log() -> MemoryLog:
    clock = ManualClock(NOW)
    log = MemoryLog(clock)
    log._clock = clock
    return log


@pytest.mark.parametrize("training", [False, True], ids=["default", "content kept"])
@pytest.mark.parametrize("number", [13, 14, 15, 17, 22])
async def test_the_checks_of_a_case(number: int, training: bool) -> None:
    found, spans = case(number)
    checks = found["checks"]
    async with receiver(_log(), content={"training": training}) as running:
        world = World(running)
        status, answer = await running.post_json(case_request(spans))
        assert status == 200
        rejected = int(answer.get("partialSuccess", {}).get("rejectedSpans", 0))
        assert (rejected, len(running.events("dead_letters"))) == (checks.get("rejected", 0),) * 2
        for body in found.get("raw_messages", []) if number == 22 else []:
            assert await running.post_json(body.encode()) == (200, {})
        world.settle()
        world.check({"spans": checks.get("accepted"), **checks} if "accepted" in checks else checks)
        records = running.log.read(list(EVERY), {}, 10_000)
        assert max(len(r.value) for r in records) <= checks.get("max_record_bytes", 2**20)
        for record in records:
            json.loads(record.value, parse_constant=_never)
            record.value.decode("utf-8", "strict")
        if training and "contains" in checks:
            assert checks["contains"].encode() in b"".join(r.value for r in records)
        if "roots" in checks:
            parents = [s.parent_span_id for e in running.events("spans") for s in e.spans]
            assert parents.count(None) == checks["roots"]


def _never(text: str) -> None:
    raise AssertionError(f"{text} is no JSON")


async def test_case_17_feedback() -> None:
    found, spans = case(17)
    async with receiver(_log()) as running:
        world = World(running)
        await running.post_json(case_request(spans))
        status, answer = await world.feedback(found["feedback"])
        assert (status, answer["accepted"], len(answer["rejected"])) == (200, 1, len(found["feedback"]) - 1)
        for raw in found["raw_messages"]:
            body = raw.replace("traceId", "trace_id").replace("feedbackId", "feedback_id").encode()
            assert (await running.post_json(body, "/v1/feedback"))[0] == 400
        world.settle()
        (rewards,) = world.rewards().values()
        assert rewards.team == found["checks"]["accepted_feedback_value"] * 1e6
        assert all(math.isfinite(r.value) for r in rewards.rewards if r.value is not None)


async def test_case_18_integers() -> None:
    found, spans = case(18)
    checks = found["checks"]
    async with receiver(_log(), content={"training": True}) as running:
        world = World(running)
        assert await running.post_json(case_request(spans)) == (200, {})
        world.settle()
        assert world.tokens()[0] in (checks["input_tokens"], checks["input_tokens"] + checks["exact_int"])
        stored = {s.span_id: s for e in running.events("spans") for s in e.spans}
        assert len(stored) == checks["spans"]
        for span_id, start in checks["exact_start_ns"].items():
            assert stored[span_id].start_ns == start
        assert str(checks["exact_int"]).encode() in b"".join(
            r.value for r in running.log.read(["spans"], {}, 99)
        )


async def test_case_19_ids_in_three_spellings() -> None:
    found, spans = case(19)
    async with receiver(_log()) as running:
        world = World(running)
        assert await running.post_json(case_request(spans)) == (200, {})
        world.settle()
        world.check(found["checks"]["compat"])
        assert {e.trace_id for e in running.events("spans")} == {found["checks"]["compat"]["trace_id"]}


async def test_case_33_a_rating_nine_days_later() -> None:
    found, spans = case(33)
    checks = found["checks"]
    async with receiver(_log()) as running:
        world = World(running, retention_s=30 * 86_400)
        began = world.clock.now_ns()
        for step in found["delivery"]:
            world.clock.set(max(world.clock.now_ns(), began + int(step["at_s"] * 1e9)))
            chosen = [spans[n] for n in step.get("spans", [])]
            if chosen:
                assert await running.post_json(case_request(chosen)) == (200, {})
            for n in step.get("feedback", []):
                status, _ = await world.feedback([found["feedback"][n]])
                assert status == 200
            world.settle()
        told = [e.team for e in running.events("rewards") if e.team is not None]
        assert len(told) == checks["revisions"]
        assert told[-1] == checks["final_outcome"]
        assert len(running.events("feedback")) <= len(found["feedback"])
        assert len(world.live()) == checks["traces"]


async def test_case_34_feedback_before_its_trace_and_for_none() -> None:
    found, spans = case(34)
    checks = found["checks"]
    async with receiver(_log()) as running:
        world = World(running)
        status, answer = await world.feedback(found["feedback"])
        assert (status, len(answer["rejected"])) == (200, checks["rejected_feedback"])
        assert len(answer["notes"]) == 2, "of the two traces nobody has seen yet"
        world.settle(5)
        assert await running.post_json(case_request(spans)) == (200, {})
        world.settle()
        assert len(world.live()) == checks["traces"]
        (rewards,) = [r for r in world.rewards().values() if r.team is not None]
        assert rewards.team == checks["outcome"] * 1e6
        known = {e.trace_id for e in running.events("spans")}
        pending = [
            f for f in running.events("feedback") if f.target_kind == "trace" and f.target_id not in known
        ]
        assert len(pending) == checks["pending_feedback"]
        assert (await running.post_json(b'{"trace_id":"zz","value":1}', "/v1/feedback"))[0] == 400


# ---------------------------------------------------------------- security


@pytest.mark.parametrize("how", ["http", "grpc"])
async def test_case_42_bombs(how: str) -> None:
    found, _ = case(42)
    checks, size = found["checks"], found["operations"][0]["bytes"]
    bomb = gzip.compress(b"\x0a" + bytes(size))
    good = as_protobuf([span(1)])
    latencies: list[float] = []
    async with receiver() as running:

        async def attack() -> Any:
            if how == "grpc":
                return (await running.call(bomb, timeout_s=150)).code
            return (await running.post(bomb, Content_Type=PB, Content_Encoding="gzip"))[0]

        async def others() -> None:
            for _ in range(100):
                began = time.perf_counter()
                assert (await running.post(good, Content_Type=PB))[0] == 200
                latencies.append(time.perf_counter() - began)
                await asyncio.sleep(0.01)

        await attack()  # what it needs once is not growth
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        answers, _ = await asyncio.gather(asyncio.gather(*(attack() for _ in range(100))), others())
        grown_mib = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        if how == "http":
            assert set(answers) == {413}
        else:
            codes = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
            assert set(answers) <= codes
        assert grown_mib < checks["max_rss_growth_mib"]
        assert sorted(latencies)[98] < 1.0, "p99 of the others"
        assert (await running.post(good, Content_Type=PB))[0] == 200, "process_alive"


async def test_case_42_the_other_bodies() -> None:
    found, _ = case(42)
    plain, depth = found["operations"][2]["bytes"], found["operations"][3]["depth"]
    bomb = gzip.compress(gzip.compress(bytes(found["operations"][1]["bytes"])))

    async def chunks() -> Any:
        for _ in range(22):
            yield bytes(2**20)

    async with receiver(collector={"read_timeout_s": 0.5}) as running:
        assert (await running.post(bomb, Content_Type=PB, Content_Encoding="gzip, gzip"))[0] == 413
        assert (await running.post(bytes(plain), Content_Type=PB))[0] == 413
        async with running.client.post(
            f"{running.url}/v1/traces", data=chunks(), headers={"Content-Type": PB}
        ) as answer:
            assert answer.status == 413
        assert (await running.post(b"\x0a\x00", Content_Type=PB, Content_Encoding="gzip"))[0] == 400
        assert (await running.post(b"\x0a\x00", Content_Type=PB, Content_Encoding="zstd"))[0] == 415
        assert (await running.post_json(b"[" * depth))[0] == 400

        async def slowly() -> Any:
            for _ in range(10):
                yield b"\x0a"
                await asyncio.sleep(0.2)

        async with running.client.post(
            f"{running.url}/v1/traces", data=slowly(), headers={"Content-Type": PB}
        ) as answer:
            assert answer.status == 408


@pytest.mark.parametrize("how", ["http", "grpc"])
async def test_case_43_two_tenants(how: str) -> None:
    found, spans = case(43)
    checks = found["checks"]
    keys = [{"key": f"{r}-key-of-{t}", "tenant": t, "role": r} for t in "AB" for r in ("agent", "scorer")]
    async with receiver(_log(), credentials=keys) as running:
        world = World(running)
        for raw in spans:
            bearer = f"Bearer agent-key-of-{raw['auth_tenant']}"
            if how == "http":
                status = (await running.post_json(case_request([raw]), Authorization=bearer))[0]
                assert status == 200
            else:
                assert (await running.call(_protobuf([raw]), authorization=bearer)).code is grpc.StatusCode.OK
        for item in found["feedback"]:
            status, _ = await world.feedback(
                [item], Authorization=f"Bearer scorer-key-of-{item['auth_tenant']}"
            )
            assert status == 200
        world.settle()
        assert len(world.live()) == checks["traces"]
        outcome = {tenant: r.team for (tenant, _), r in world.rewards().items() if r.team is not None}
        assert ("A" in outcome, "B" in outcome) == (
            bool(checks["feedback_on_A"]),
            bool(checks["feedback_on_B"]),
        )
        agents = {t: [a.name for a in e.content.agents] for (t, _), e in world.live().items()}
        assert agents == {"A": ["orchestrator"], "B": ["evil"]}
        for event in running.events("spans"):
            for one in event.spans:
                assert one.attributes.get("tenant") != "A", "a tenant is never read from an attribute"


async def test_case_44_an_agents_own_reward_counts_for_nothing() -> None:
    found, spans = case(44)
    checks = found["checks"]
    keys = [{"key": f"{r}-key-of-team-a", "tenant": "A", "role": r} for r in ("agent", "scorer")]
    async with receiver(_log(), credentials=keys, content={"training": True}) as running:
        world = World(running)
        sent = await running.post_json(case_request(spans), Authorization="Bearer agent-key-of-team-a")
        assert sent == (200, {})
        world.settle()
        assert all(r.team is None for r in world.rewards().values()), "no outcome before a scorer spoke"
        refused = 0
        for item in found["feedback"]:
            bearer = f"Bearer {item['auth_role']}-key-of-team-a"
            status, _ = await world.feedback([item], Authorization=bearer)
            assert status == (200 if item["auth_role"] == "scorer" else 403)
            refused += status == 403
        assert refused == checks["rejected_feedback"]
        world.settle()
        (rewards,) = world.rewards().values()
        assert rewards.team == checks["outcome"]


@pytest.mark.parametrize("how", ["http", "grpc"])
async def test_case_45_nothing_clear_at_rest(how: str) -> None:
    found, spans = case(45)
    checks = found["checks"]
    async with receiver(_log()) as running:
        world = World(running)
        if how == "http":
            assert await running.post_json(case_request(spans)) == (200, {})
            await running.post_json(case_request([{**spans[0], "spanId": "zz"}]))
        else:
            assert (await running.call(_protobuf(spans))).code is grpc.StatusCode.OK
        trace = spans[0]["traceId"]
        await running.post_json(json.dumps({"trace_id": trace, "value": 1}).encode(), "/v1/feedback")
        world.settle()
        written = b"".join(r.value for r in running.log.read(list(EVERY), {}, 10_000)).decode()
        hits = [s for s in found["forbidden_strings"] if s in written]
        assert len(hits) == checks["clear_text_hits"]
        assert "u-1" not in written
        assert [r.team for r in world.rewards().values()] == [1_000_000]


def _protobuf(spans: list[dict[str, Any]]) -> bytes:
    """Spans of a case as protobuf."""
    from google.protobuf import json_format
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    data = json.loads(case_request(spans))
    for group in data["resourceSpans"]:
        for one in group["scopeSpans"][0]["spans"]:
            for part in (one, *one.get("links", [])):
                for key in ("traceId", "spanId", "parentSpanId"):
                    if part.get(key):
                        part[key] = base64.b64encode(bytes.fromhex(part[key])).decode()
    return json_format.ParseDict(data, ExportTraceServiceRequest()).SerializeToString()


def test_the_cases_are_all_here() -> None:
    numbers = [13, 14, 15, 17, 18, 19, 22, 33, 34, 42, 43, 44, 45]
    for number in numbers:
        found, _ = case(number)
        assert found["id"] == number
        assert canonical_json(found["checks"])
