"""Spans a second that the collector makes durable in its default configuration, against a handler that only parses.

Both run as processes and get the same protobuf requests (300 spans of about 1 KB each, gzip off) over four
connections; the ratio between them is the figure that travels. Run: .venv/bin/python benchmarks/receiver.py
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
from _harness import percentile, write
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SPANS, CONNECTIONS, SECONDS = 300, 4, 8.0

BARE = """
import asyncio, json, sys
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
async def traces(request):
    ExportTraceServiceRequest.FromString(await request.read())
    return web.Response(body=b"", content_type="application/x-protobuf")
async def main():
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/traces", traces)
    runner = web.AppRunner(app); await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0); await site.start()
    print(json.dumps({"ready": "bare", "url": "http://127.0.0.1:%d" % site._server.sockets[0].getsockname()[1]}), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


def request_body(rng: random.Random) -> bytes:
    """One export request: 15 traces of 20 agent spans, about 1 KB a span."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    resource.resource.attributes.add(key="service.name").value.string_value = "bench"
    scope = resource.scope_spans.add()
    scope.scope.name = "pydantic-ai"
    for number in range(SPANS):
        if number % 20 == 0:
            trace, root = rng.randbytes(16), rng.randbytes(8)
        span = scope.spans.add(
            trace_id=trace,
            span_id=root if number % 20 == 0 else rng.randbytes(8),
            name="chat fake-model",
            kind=3,
        )
        if number % 20:
            span.parent_span_id = root
        span.start_time_unix_nano = 1_790_000_000_000_000_000 + number
        span.end_time_unix_nano = span.start_time_unix_nano + 10**7
        for key, value in (
            ("gen_ai.operation.name", "chat"), ("gen_ai.agent.name", "orchestrator"), ("gen_ai.request.model", "fake-model"),
            ("gen_ai.response.id", rng.randbytes(12).hex()), ("gen_ai.provider.name", "openai"),
            ("gen_ai.conversation.id", rng.randbytes(16).hex()), ("server.address", "127.0.0.1"),
            ("gen_ai.input.messages", json.dumps([{"role": "user", "parts": [{"type": "text", "content": "x" * 400}]}])),
        ):  # fmt: skip
            span.attributes.add(key=key).value.string_value = value
        for key, value in (
            ("gen_ai.usage.input_tokens", 20),
            ("gen_ai.usage.output_tokens", 11),
            ("server.port", 8787),
        ):
            span.attributes.add(key=key).value.int_value = value
    return request.SerializeToString()


async def load(url: str, bodies: list[bytes]) -> dict:
    """Post ``bodies`` round robin over CONNECTIONS connections for SECONDS; every answer must be 200."""
    latencies: list[float] = []
    counter = iter(range(10**9))
    deadline = time.perf_counter() + SECONDS

    async def worker(session: aiohttp.ClientSession) -> None:
        while time.perf_counter() < deadline:
            body = bodies[next(counter) % len(bodies)]
            started = time.perf_counter()
            async with session.post(
                url + "/v1/traces", data=body, headers={"Content-Type": "application/x-protobuf"}
            ) as answer:
                await answer.read()
                assert answer.status == 200, answer.status
            latencies.append((time.perf_counter() - started) * 1e3)

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=CONNECTIONS)) as session:
        begin = time.perf_counter()
        await asyncio.gather(*(worker(session) for _ in range(CONNECTIONS)))
        elapsed = time.perf_counter() - begin
    return {
        "spans_per_s": round(len(latencies) * SPANS / elapsed),
        "p50_ms": round(percentile(latencies, 0.5), 1),
        "p99_ms": round(percentile(latencies, 0.99), 1),
        "requests": len(latencies),
    }


def measure(command: list[str], environment: dict[str, str], bodies: list[bytes]) -> dict:
    """Start a server, wait for its ready line, load it, add its CPU seconds and peak memory."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, **environment}, text=True
    ) as process:
        try:
            url = json.loads(process.stdout.readline())["url"]
            figures = asyncio.run(load(url, bodies))
            stat = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
            cpu = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
            status = Path(f"/proc/{process.pid}/status").read_text()
            figures["cpu_s_per_1000_spans"] = round(cpu / (figures["requests"] * SPANS) * 1000, 4)
            figures["peak_rss_mib"] = round(int(status.split("VmHWM:")[1].split()[0]) / 1024, 1)
            return figures
        finally:
            process.terminate()
            process.wait(20)


def main() -> None:
    rng = random.Random(0)
    bodies = [request_body(rng) for _ in range(400)]
    with tempfile.TemporaryDirectory() as folder:
        collector = measure(
            [sys.executable, "-m", "spanloop.collectors.receiver"],
            {"SPANLOOP_WORKSPACE": folder, "SPANLOOP_COLLECTOR__PORT": "0"},
            bodies,
        )
    bare = measure([sys.executable, "-c", BARE], {}, bodies)
    write(
        "receiver",
        ".venv/bin/python benchmarks/receiver.py",
        {
            "bytes_per_span": round(len(bodies[0]) / SPANS),
            "collector_durable": collector,
            "bare_handler_parse_only": bare,
            "ratio": round(collector["spans_per_s"] / bare["spans_per_s"], 3),
        },
    )


if __name__ == "__main__":
    main()
