"""Run the receiver for a test: in this process over any Log, or as the real process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import grpc
import grpc.aio
from aiohttp import web

from spanloop.collectors.grpc_front import GrpcFront
from spanloop.collectors.receiver import Receiver
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.ports import Log
from spanloop.schemas.events import Event, decode
from spanloop.schemas.settings import Settings

NOW = 1_790_000_000_000_000_000
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
EXPORT_LOGS = "/opentelemetry.proto.collector.logs.v1.LogsService/Export"


class GrpcAnswer(NamedTuple):
    """What a call came back with."""

    code: grpc.StatusCode
    body: bytes
    details: str
    status: bytes
    """grpc-status-details-bin: a google.rpc.Status."""


class Running:
    """A receiver that listens, its log and a client."""

    def __init__(self, url: str, log: Log, receiver: Receiver, client: aiohttp.ClientSession) -> None:
        self.url, self.log, self.receiver, self.client = url, log, receiver, client
        self.grpc: GrpcFront | None = None
        self.starting = asyncio.Lock()
        self.runner: web.AppRunner | None = None
        self.channels: dict[Any, grpc.aio.Channel] = {}

    async def call(
        self, body: bytes, path: str = EXPORT, compression: Any = None, timeout_s: float = 20, **metadata: str
    ) -> GrpcAnswer:
        """One gRPC call with raw bytes; metadata names with _ for -."""
        async with self.starting:
            if self.grpc is None:
                self.grpc = GrpcFront(self.receiver.reception, self.receiver.authenticator)
                self.port = await self.grpc.start("127.0.0.1", 0)
        if compression not in self.channels:
            self.channels[compression] = grpc.aio.insecure_channel(
                f"127.0.0.1:{self.port}", options=[("grpc.enable_http_proxy", 0)], compression=compression
            )
        named = tuple((k.replace("_", "-"), v) for k, v in metadata.items())
        call = self.channels[compression].unary_unary(path)(body, metadata=named, timeout=timeout_s)
        try:
            return GrpcAnswer(grpc.StatusCode.OK, await call, "", b"")
        except grpc.aio.AioRpcError as exc:
            status = dict(exc.trailing_metadata() or ()).get("grpc-status-details-bin", b"")
            return GrpcAnswer(exc.code(), b"", exc.details() or "", status)  # type: ignore[arg-type]

    async def close_grpc(self) -> None:
        """Stop the gRPC side and the clients' channels."""
        for channel in self.channels.values():
            await channel.close()
        if self.grpc is not None:
            await self.grpc.stop(2)

    async def post(self, body: bytes, path: str = "/v1/traces", **headers: str) -> tuple[int, bytes, Any]:
        """(status, body, headers) of a POST; header names with _ for -."""
        named = {k.replace("_", "-"): v for k, v in headers.items()}
        async with self.client.post(self.url + path, data=body, headers=named) as answer:
            return answer.status, await answer.read(), answer.headers

    async def post_json(self, body: bytes, path: str = "/v1/traces", **headers: str) -> tuple[int, Any]:
        """(status, parsed answer) of a JSON POST."""
        status, raw, _ = await self.post(body, path, **{"Content_Type": "application/json", **headers})
        return status, json.loads(raw)

    def events(self, topic: str) -> list[Any]:
        """All events of a topic."""
        return read_all(self.log, topic)


def read_all(log: Log, topic: str) -> list[Event]:
    """All events of a topic of a log."""
    return [decode(r.value) for r in log.read([topic], {}, 100_000)]


@contextlib.asynccontextmanager
async def receiver(log: Log | None = None, **sections: Any) -> AsyncIterator[Running]:
    """A receiver on a free port; ``sections`` are settings, e.g. collector={"queue_max": 1}."""
    values: dict[str, Any] = {"collector": {"port": 0, "group_commit_ms": 1} | sections.pop("collector", {})}
    settings = Settings(**values, **sections)
    log = log or MemoryLog(ManualClock(NOW))
    front = Receiver(settings, log, b"k" * 32, ManualClock(NOW))
    runner = web.AppRunner(front.app(), auto_decompress=False, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        async with aiohttp.ClientSession() as client:
            running = Running(url, log, front, client)
            running.runner = runner
            try:
                yield running
            finally:
                await running.close_grpc()
    finally:
        await runner.cleanup()


class Url(str):
    """Where a collector listens; ``grpc``: host:port of its gRPC side."""

    __slots__ = ("grpc",)
    grpc: str


@contextlib.contextmanager
def process(workspace: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Url]]:
    """The collector as a process on a free port: (process, url) once it is ready."""
    env = {**os.environ, "SPANLOOP_WORKSPACE": str(workspace), "SPANLOOP_COLLECTOR__PORT": "0", **environment}
    command = [sys.executable, "-m", "spanloop.collectors.receiver"]
    started = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert started.stdout is not None
        line = started.stdout.readline()
        if not line:
            assert started.stderr is not None
            raise AssertionError(f"the collector did not start: {started.stderr.read()}")
        ready = json.loads(line)
        assert ready["ready"] == "collector"
        url = Url(ready["url"])
        url.grpc = ready.get("grpc", "")
        yield started, url
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate()
