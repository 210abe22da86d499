"""Load on an OTLP/HTTP endpoint, and the bodies that are sent: real spans where the corpora are beside the checkout."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
from _harness import percentile
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

SPANS, CONNECTIONS = 300, 4
PROTOBUF = "application/x-protobuf"


def bodies(number: int, seed: int = 0) -> list[bytes]:
    """``number`` requests of SPANS spans, about 1.5 kB a span, 20 spans a trace, ids new in each."""
    rng = random.Random(seed)
    return [_body(rng) for _ in range(number)]


def _body(rng: random.Random) -> bytes:
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    for key, value in (
        ("service.name", "bench"),
        ("service.instance.id", "b-1"),
        ("telemetry.sdk.language", "python"),
    ):
        group.resource.attributes.add(key=key).value.string_value = value
    scope = group.scope_spans.add()
    scope.scope.name = "pydantic-ai"
    trace = root = b""
    for number in range(SPANS):
        if number % 20 == 0:
            trace, root = rng.randbytes(16), rng.randbytes(8)
        span = scope.spans.add(trace_id=trace, name="chat fake-model", kind=3)
        span.span_id = root if number % 20 == 0 else rng.randbytes(8)
        span.parent_span_id = b"" if number % 20 == 0 else root
        span.start_time_unix_nano = 1_790_000_000_000_000_000 + rng.randrange(10**9)
        span.end_time_unix_nano = span.start_time_unix_nano + 10**7
        asked = " ".join(rng.choices(_WORDS, k=90))
        said = " ".join(rng.choices(_WORDS, k=50))
        for key, value in (
            ("gen_ai.operation.name", "chat"), ("gen_ai.agent.name", "orchestrator"),
            ("gen_ai.request.model", "fake-model"), ("gen_ai.provider.name", "openai"),
            ("gen_ai.response.id", rng.randbytes(12).hex()), ("gen_ai.conversation.id", trace.hex()),
            ("server.address", "127.0.0.1"),
            ("gen_ai.input.messages", json.dumps([{"role": "user", "parts": [{"type": "text", "content": asked}]}])),
            ("gen_ai.output.messages", json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": said}]}])),
        ):  # fmt: skip
            span.attributes.add(key=key).value.string_value = value
        for key, count in (
            ("gen_ai.usage.input_tokens", rng.randrange(2_000)),
            ("gen_ai.usage.output_tokens", rng.randrange(500)),
            ("server.port", 8787),
        ):
            span.attributes.add(key=key).value.int_value = count
    return request.SerializeToString()


_WORDS = [
    "route",
    "the",
    "ticket",
    "to",
    "billing",
    "agent",
    "report",
    "confirm",
    "evidence",
    "account",
    "refund",
    "why",
]


async def load(url: str, requests: list[bytes], seconds: float, headers: dict[str, str]) -> dict[str, Any]:
    """Post ``requests``, each once, over CONNECTIONS connections for at most ``seconds``."""
    latencies: list[float] = []
    statuses: dict[int, int] = {}
    left = iter(requests)
    deadline = time.perf_counter() + seconds

    async def worker(session: aiohttp.ClientSession) -> None:
        for body in left:
            if time.perf_counter() > deadline:
                return
            began = time.perf_counter()
            async with session.post(url, data=body, headers={"Content-Type": PROTOBUF, **headers}) as answer:
                await answer.read()
                statuses[answer.status] = statuses.get(answer.status, 0) + 1
            latencies.append((time.perf_counter() - began) * 1e3)

    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=CONNECTIONS), timeout=timeout
    ) as session:
        began = time.perf_counter()
        await asyncio.gather(*(worker(session) for _ in range(CONNECTIONS)))
        elapsed = time.perf_counter() - began
    return {
        "spans_per_s": round(statuses.get(200, 0) * SPANS / elapsed),
        "p50_ms": round(percentile(latencies, 0.5), 1),
        "p99_ms": round(percentile(latencies, 0.99), 1),
        "spans": statuses.get(200, 0) * SPANS,
        "statuses": {str(k): v for k, v in sorted(statuses.items())},
        "seconds": round(elapsed, 2),
    }


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and its children, living and reaped."""
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(stat.parent.name) == pid or int(fields[1]) == pid:
            total += (
                sum(map(int, fields[11:15])) if int(stat.parent.name) == pid else sum(map(int, fields[11:13]))
            )
    return total / os.sysconf("SC_CLK_TCK")


def wait_for(url: str, process: subprocess.Popen[Any], seconds: float) -> None:
    """Until something answers at ``url``; raises RuntimeError when the process ends first or the time is over."""
    import urllib.error
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"it ended with {process.returncode}")
        try:
            opener.open(url, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.3)
    raise RuntimeError(f"nothing answered at {url} in {seconds:g} s")


def measure(
    process: subprocess.Popen[Any],
    url: str,
    requests: list[bytes],
    seconds: float,
    *,
    headers: dict[str, str] | None = None,
    durable: Callable[[], int] | None = None,
) -> dict[str, Any]:
    """Load a server; ``durable``: how many spans it can show afterwards."""
    before = cpu_s(process.pid)
    figures = asyncio.run(load(url, requests, seconds, headers or {}))
    figures["cpu_s_per_1000_spans"] = round(
        (cpu_s(process.pid) - before) / max(1, figures["spans"]) * 1000, 4
    )
    if durable is not None:
        began = time.perf_counter()
        shown = durable()
        while shown < figures["spans"] and time.perf_counter() - began < seconds:
            time.sleep(0.5)
            shown = durable()
        figures["visible_spans"] = shown
        figures["visible_spans_per_s"] = round(shown / (figures["seconds"] + time.perf_counter() - began))
    return figures
