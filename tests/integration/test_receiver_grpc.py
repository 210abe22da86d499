"""OTLP/gRPC: statuses, compression under our own limits, credentials before the message, durability before OK."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
import signal
import subprocess
import sys
import threading
import time
import zlib
from pathlib import Path
from typing import Any

import grpc
import pytest
from log_requests import logs_protobuf, record
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from otlp_requests import as_protobuf, span
from receiver_harness import EXPORT, EXPORT_LOGS, NOW, process, read_all, receiver

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.schemas.errors import TransientError

CODE = grpc.StatusCode
KEYS = [
    {"key": f"{role}-key-of-team-a", "tenant": "A", "role": role}
    for role in ("agent", "scorer", "reader", "admin")
]
RETRY_INFO = b"type.googleapis.com/google.rpc.RetryInfo"


@pytest.mark.parametrize("compression", [None, grpc.Compression.Gzip, grpc.Compression.Deflate])
async def test_spans_and_logs_in_every_compression(compression: Any) -> None:
    async with receiver() as running:
        answer = await running.call(as_protobuf([span(1), span(2)]), compression=compression)
        assert (answer.code, answer.body) == (CODE.OK, b"")
        answer = await running.call(logs_protobuf([record()]), EXPORT_LOGS, compression)
        assert (answer.code, answer.body) == (CODE.OK, b"")
        assert sorted(s.span_id for e in running.events("spans") for s in e.spans)[:2] == [
            f"{n:016x}" for n in (1, 2)
        ]
        assert len(running.events("spans")) == 2
        assert 'spanloop_requests_total{route="spans",status="grpc_0"} 2' in running.receiver.metrics.text({})


async def test_the_same_request_over_http_and_grpc_is_one_event() -> None:
    body = as_protobuf([span(1)])
    async with receiver() as running:
        assert (await running.post(body, Content_Type="application/x-protobuf"))[0] == 200
        assert (await running.call(body)).code is CODE.OK
        assert len(running.events("spans")) == 1


async def test_partial_success_in_both_signals() -> None:
    async with receiver() as running:
        answer = await running.call(as_protobuf([span(1), span(2, trace_id="0" * 32)]))
        found = ExportTraceServiceResponse.FromString(answer.body).partial_success
        assert (found.rejected_spans, "all zero" in found.error_message) == (1, True)
        answer = await running.call(logs_protobuf([record(), record(time=0, observed=0)]), EXPORT_LOGS)
        assert ExportLogsServiceResponse.FromString(answer.body).partial_success.rejected_log_records == 1
        assert len(running.events("dead_letters")) == 2


@pytest.mark.parametrize(
    ("body", "code", "compression"),
    [
        (b"\xff\xff", CODE.INVALID_ARGUMENT, None),
        (bytes(20_001), CODE.RESOURCE_EXHAUSTED, None),
        (b"\x0a" + bytes(10**6), CODE.INVALID_ARGUMENT, grpc.Compression.Gzip),
        (b"\x0a" + bytes(10**6), CODE.INVALID_ARGUMENT, grpc.Compression.Deflate),
        (b"", CODE.OK, None),
    ],
    ids=["garbage", "too large", "gzip bomb", "deflate bomb", "empty"],
)
async def test_statuses(body: bytes, code: Any, compression: Any) -> None:
    async with receiver(collector={"max_body_bytes": 10_000, "max_expanded_bytes": 20_000}) as running:
        answer = await running.call(body, compression=compression)
        assert answer.code is code
        assert RETRY_INFO not in answer.status, "sending it again does not help"
        assert (await running.call(as_protobuf([span(1)]))).code is CODE.OK, "the process lives on"


async def test_compressed_message_over_its_own_limit() -> None:
    import random

    noise = as_protobuf([span(1, attributes={"x": random.Random(0).randbytes(12_000).hex()})])
    async with receiver(collector={"max_body_bytes": 10_000, "max_expanded_bytes": 40_000}) as running:
        answer = await running.call(noise, compression=grpc.Compression.Gzip)
        assert (answer.code, "max_body_bytes" in answer.details) == (CODE.INVALID_ARGUMENT, True)


async def test_truncated_compression_is_told() -> None:
    async with receiver() as running:
        for pack in (gzip.compress, zlib.compress):
            answer = await running.call(pack(as_protobuf([span(1)]))[:-9])
            assert (answer.code, "ends too soon" in answer.details) == (CODE.INVALID_ARGUMENT, True)


async def test_roles() -> None:
    async with receiver(credentials=KEYS) as running:
        body = as_protobuf([span(1)])
        for path in (EXPORT, EXPORT_LOGS):
            assert (await running.call(body, path)).code is CODE.UNAUTHENTICATED
            assert (await running.call(body, path, authorization="Bearer nope")).code is CODE.UNAUTHENTICATED
            refused = await running.call(body, path, authorization="Bearer reader-key-of-team-a")
            assert (refused.code, "agent" in refused.details) == (CODE.PERMISSION_DENIED, True)
        assert running.events("spans") == []
        for role in ("agent", "scorer", "admin"):
            answer = await running.call(body, authorization=f"Bearer {role}-key-of-team-a")
            assert answer.code is CODE.OK
        assert [e.tenant for e in running.events("spans")] == ["A"]


async def test_the_credential_is_checked_before_a_message_comes() -> None:
    async with receiver(credentials=KEYS) as running:
        assert (await running.call(b"")).code is CODE.UNAUTHENTICATED  # opens the channel
        call = running.channels[None].stream_unary(EXPORT)(timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call  # no message was ever written
        assert refused.value.code() is CODE.UNAUTHENTICATED


async def test_a_slow_message_is_timed_out() -> None:
    async with receiver(collector={"read_timeout_s": 0.3}) as running:
        assert (await running.call(as_protobuf([span(1)]))).code is CODE.OK
        call = running.channels[None].stream_unary(EXPORT)(timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await call
        assert late.value.code() is CODE.DEADLINE_EXCEEDED
        assert "read_timeout_s" in str(late.value.details())


async def test_streams_that_send_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """All places are held by one tenant's open streams: another tenant's message takes the oldest of them, and only a slow one."""
    monkeypatch.setattr("spanloop.collectors.grpc_front.SLOW_S", 0.3)
    keys = [*KEYS, {"key": "key-of-team-b", "tenant": "B", "role": "agent"}]
    async with receiver(credentials=keys) as running:
        own = {"authorization": "Bearer key-of-team-b"}
        assert (await running.call(as_protobuf([span(1)]), **own)).code is CODE.OK
        channel = running.channels[None]
        held = [channel.stream_unary(EXPORT)(metadata=(("x-api-key", KEYS[0]["key"]),)) for _ in range(16)]
        for _ in range(200):
            code = (await running.call(as_protobuf([span(2)]), **own)).code
            if code is not CODE.OK:
                break
        assert code is CODE.RESOURCE_EXHAUSTED
        await asyncio.sleep(0.4)
        for n in range(3, 8):
            assert (await running.call(as_protobuf([span(n)]), **own)).code is CODE.OK
        assert await held[0].code() is CODE.RESOURCE_EXHAUSTED
        for call in held:
            call.cancel()


async def test_unknown_method() -> None:
    async with receiver() as running:
        answer = await running.call(b"", "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export")
        assert answer.code is CODE.UNIMPLEMENTED


async def test_log_that_refuses_is_unavailable_with_retry_info() -> None:
    class Refusing(MemoryLog):
        full = True

        def append(self, records: Any) -> Any:
            if self.full:
                raise TransientError("cannot write spanloop.db: disk full")
            return super().append(records)

    log = Refusing(ManualClock(NOW))
    async with receiver(log) as running:
        answer = await running.call(as_protobuf([span(1)]))
        assert (answer.code, "disk full" in answer.details) == (CODE.UNAVAILABLE, True)
        assert RETRY_INFO in answer.status
        log.full = False
        assert (await running.call(as_protobuf([span(1)]))).code is CODE.OK


async def test_full_queue_is_resource_exhausted_with_retry_info_and_nothing_is_answered_before_the_append() -> (
    None
):
    gate = threading.Event()

    class Slow(MemoryLog):
        def append(self, records: Any) -> Any:
            assert gate.wait(20)
            return super().append(records)

    async with receiver(Slow(ManualClock(NOW)), collector={"queue_max": 1}) as running:
        first = asyncio.create_task(running.call(as_protobuf([span(1)])))
        deadline = time.monotonic() + 10
        while running.receiver.committer.depth or not running.receiver.committer.busy:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        second = asyncio.create_task(running.call(as_protobuf([span(2)])))
        while not running.receiver.committer.depth:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        refused = await running.call(as_protobuf([span(3)]))
        assert (refused.code, "queue_max" in refused.details) == (CODE.RESOURCE_EXHAUSTED, True)
        assert RETRY_INFO in refused.status
        assert not first.done()
        gate.set()
        assert [(await t).code for t in (first, second)] == [CODE.OK] * 2
        assert len(running.events("spans")) == 2


async def test_parallel_bombs_leave_others_alone() -> None:
    bomb = gzip.compress(b"\x0a" + bytes(256 * 2**20))
    async with receiver() as running:
        answers = await asyncio.gather(
            *(running.call(bomb, timeout_s=60) for _ in range(15)), running.call(as_protobuf([span(1)]))
        )
        assert {a.code for a in answers[:-1]} <= {CODE.INVALID_ARGUMENT, CODE.RESOURCE_EXHAUSTED}
        assert CODE.INVALID_ARGUMENT in {a.code for a in answers[:-1]}
        assert answers[-1].code in (CODE.OK, CODE.RESOURCE_EXHAUSTED)
        assert (await running.call(as_protobuf([span(1)]))).code is CODE.OK


PROGRAM = """
import sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from grpc import Compression
provider = TracerProvider()
exporter = OTLPSpanExporter(endpoint=sys.argv[1], insecure=True, compression=Compression.Gzip)
provider.add_span_processor(SimpleSpanProcessor(exporter))
with provider.get_tracer("t").start_as_current_span("chat m", attributes={"gen_ai.operation.name": "chat"}) as span:
    print(format(span.get_span_context().span_id, "016x"))
provider.shutdown()
"""


def _stored(workspace: Path) -> set[str]:
    log = SqliteLog(workspace / "spanloop.db")
    try:
        return {s.span_id for e in read_all(log, "spans") for s in e.spans}  # type: ignore[attr-defined]
    finally:
        log.close()


def test_otel_exporter_sends_here_and_sigterm_ends_it(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc")
    with process(tmp_path, SPANLOOP_COLLECTOR__GRPC_PORT="0") as (collector, ready):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, ready.grpc],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        collector.send_signal(signal.SIGTERM)
        assert collector.wait(15) == 0
    assert _stored(tmp_path) == {done.stdout.strip()}, done.stderr


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    acknowledged: set[str] = set()
    options = [("grpc.enable_http_proxy", 0)]
    with (
        process(tmp_path, SPANLOOP_COLLECTOR__GRPC_PORT="0") as (collector, ready),
        grpc.insecure_channel(ready.grpc, options=options) as channel,
    ):
        export = channel.unary_unary(EXPORT)
        threading.Timer(1.0, collector.kill).start()
        with contextlib.suppress(grpc.RpcError):
            for number in range(1, 100_000):
                export(as_protobuf([span(number)]), timeout=20)
                acknowledged.add(f"{number:016x}")
    assert 5 < len(acknowledged) < 99_999
    assert acknowledged <= _stored(tmp_path)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    with process(tmp_path, SPANLOOP_COLLECTOR__GRPC_PORT="0") as (_, ready):
        port = ready.grpc.rpartition(":")[2]
        config = tmp_path / "s.toml"
        config.write_text(f'workspace = "{tmp_path / "ws"}"\n[collector]\nport = 0\ngrpc_port = {port}\n')
        done = subprocess.run(
            [sys.executable, "-m", "spanloop.collectors.receiver", "--config", str(config)],
            capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert f"port {port}" in done.stderr
    assert "collector.grpc_port" in done.stderr
    assert "Traceback" not in done.stderr


def test_details_of_an_error_are_a_google_rpc_status() -> None:
    status_pb2 = pytest.importorskip("google.rpc.status_pb2")
    from google.rpc.error_details_pb2 import RetryInfo

    from spanloop.collectors.bodies import rpc_status

    found = status_pb2.Status.FromString(rpc_status(8, "later", retry_s=1))
    info = RetryInfo()
    assert found.details[0].Unpack(info)
    assert (found.code, found.message, info.retry_delay.seconds) == (8, "later", 1)
    assert json.loads(json.dumps(found.message)) == "later"
