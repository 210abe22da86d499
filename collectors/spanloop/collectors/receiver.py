"""The collector process: OTLP/HTTP traces, logs and feedback in, durable events out.

Flow of a request: credential, limits, decode, redaction, group commit, answer. Invariants: 2xx only after the durable
append; a bad span is refused alone (partial success, dead letter); the tenant is the credential's; every queue and
body is bounded; nothing of a body is written to the process's own log.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import sys
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import NamedTuple

import click
from aiohttp import web

from spanloop.collectors.auth import Authenticator, AuthError, Identity
from spanloop.collectors.batches import Intake, Prepared
from spanloop.collectors.bodies import (
    JSON,
    PROTOBUF,
    BodyTimeoutError,
    Encodings,
    UnsupportedError,
    encodings,
    read_body,
    reply,
)
from spanloop.collectors.commit import GroupCommitter, QueueFullError
from spanloop.collectors.evaluations import scores_of
from spanloop.collectors.feedback import parse_feedback
from spanloop.collectors.limits import BodyTooLargeError, ByteBudget, expand
from spanloop.collectors.metrics import Metrics
from spanloop.collectors.redaction import Redactor, workspace_key
from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.log.open import open_log
from spanloop.pipeline.otlp.decode_json import decode_json, parse_json
from spanloop.pipeline.otlp.decode_logs_json import decode_logs_json
from spanloop.pipeline.otlp.decode_logs_protobuf import decode_logs_protobuf
from spanloop.pipeline.otlp.decode_protobuf import decode_protobuf
from spanloop.pipeline.otlp.decoded import DecodedBatch
from spanloop.pipeline.ports import Clock, Log, NewRecord, new_record
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError, SchemaError, SpanloopError, TransientError
from spanloop.schemas.settings import Settings, load_settings

__all__ = ["Receiver", "main"]

_log = logging.getLogger("spanloop.collector")

_INLINE_BYTES = 64 * 1024
"""A plain body up to this size is decoded in the event loop; others would keep it for too long."""
_SEEN_TRACES = 100_000
TRACE_ROUTES = ("/v1/traces", "/api/public/otel/v1/traces")
"""The second is where Langfuse's clients send."""


class Signal(NamedTuple):
    """An OTLP signal: what one item of it is called, its decoders, the count of refused ones in the answer."""

    items: str
    decode_json: Callable[[bytes, int], DecodedBatch]
    decode_protobuf: Callable[[bytes, int], DecodedBatch]
    rejected: str


TRACES = Signal("spans", decode_json, decode_protobuf, "rejectedSpans")
LOGS = Signal("log records", decode_logs_json, decode_logs_protobuf, "rejectedLogRecords")

Handler = Callable[[web.Request, Identity], Awaitable[web.Response]]


class Receiver:
    """HTTP front of one log.

    Args:
        settings: limits, credentials, content rules.
        log: where accepted events go.
        key: key of the hash left where a text was dropped.
        clock: for feedback without a time.
    """

    def __init__(self, settings: Settings, log: Log, key: bytes, clock: Clock | None = None) -> None:
        self._limits = settings.collector
        self._clock = clock or SystemClock()
        self._auth = Authenticator(settings)
        self._redactor = Redactor(settings.content, key)
        self._intake = Intake(
            self._redactor, self._limits.max_attribute_bytes, keep_content=settings.content.training
        )
        self.metrics = Metrics()
        self.committer = GroupCommitter(
            log,
            group_s=self._limits.group_commit_ms / 1e3,
            queue_max=self._limits.queue_max,
            observe=self.metrics.commit,
        )
        self._budget = ByteBudget(4 * self._limits.max_expanded_bytes)
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="spanloop-decode")
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()

    def app(self) -> web.Application:
        """The application; its start-up and clean-up own the commit thread."""
        app = web.Application(client_max_size=0)
        for route in TRACE_ROUTES:
            app.router.add_post(route, self._route("spans", partial(self._export, TRACES)))
        app.router.add_post("/v1/logs", self._route("spans", partial(self._export, LOGS)))
        app.router.add_post("/v1/feedback", self._route("feedback", self._feedback))
        app.router.add_get("/metrics", self._route("metrics", self._metrics))
        app.router.add_get("/healthz", self._health)
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._stop)
        return app

    async def _start(self, _: web.Application) -> None:
        self.committer.start()

    async def _stop(self, _: web.Application) -> None:
        await self.committer.close()
        self._decoder.shutdown()

    def _route(self, action: str, handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Credential before body, and every error as a status with a message."""

        async def handle(request: web.Request) -> web.Response:
            try:
                identity = self._auth.check(request.headers.get("Authorization"), action)
                response = await handler(request, identity)
            except SpanloopError as exc:
                response = reply(_reply_type(request), _status(exc), exc.message)
            except ConnectionError:
                raise
            except Exception:
                _log.exception("request failed")
                response = reply(
                    _reply_type(request), 500, "internal error; the collector's log has the trace"
                )
            if response.status >= 400 and not request.content.at_eof():
                response.force_close()  # what is left of the body is not read
            self.metrics.add("spanloop_requests_total", route=action, status=str(response.status))
            return response

        return handle

    # ------------------------------------------------------------ spans

    async def _export(self, signal: Signal, request: web.Request, identity: Identity) -> web.Response:
        coding = encodings(request)
        body = await read_body(request, self._limits, self._budget, compressed=bool(coding.codings))
        self.metrics.add("spanloop_received_bytes_total", len(body))
        if coding.codings or len(body) > _INLINE_BYTES:
            loop = asyncio.get_running_loop()
            batch, prepared = await loop.run_in_executor(
                self._decoder, self._decode, signal, body, coding, identity
            )
        else:
            batch, prepared = self._decode(signal, body, coding, identity)
        appended = await self.committer.append(prepared.records)
        self._count(batch, prepared, sum(a.duplicate for a in appended), identity)
        rejected = len(batch.rejected)
        if not rejected:
            return reply(coding.content_type, 200)
        reasons = list(dict.fromkeys(r.reason for r in batch.rejected))
        more = f"; and {len(reasons) - 5} more reasons" if len(reasons) > 5 else ""
        message = f"{rejected} {signal.items} were refused: " + "; ".join(r[:300] for r in reasons[:5]) + more
        return reply(coding.content_type, 200, message, rejected, signal.rejected)

    def _decode(
        self, signal: Signal, body: bytes, coding: Encodings, identity: Identity
    ) -> tuple[DecodedBatch, Prepared]:
        for name in coding.codings:
            body = expand(body, name, self._limits.max_expanded_bytes)
        decode = signal.decode_protobuf if coding.content_type == PROTOBUF else signal.decode_json
        batch = decode(body, self._limits.max_nesting)
        count = len(batch.spans) + len(batch.rejected) + batch.ignored
        if count > self._limits.max_spans_per_request:
            raise BodyTooLargeError(
                f"{count} {signal.items} in one request, at most {self._limits.max_spans_per_request} "
                "(collector.max_spans_per_request): send smaller batches"
            )
        scores: list[NewRecord] = []
        if signal is LOGS:
            found = scores_of(batch.spans, identity, self._clock.now_ns(), self._redactor)
            batch.rejected += found.rejected
            scores = [new_record(event) for event in found.events]
        prepared = self._intake.prepare(batch, tenant=identity.tenant, source="otlp")
        prepared.records += scores
        return batch, prepared

    def _count(self, batch: DecodedBatch, prepared: Prepared, duplicates: int, identity: Identity) -> None:
        self.metrics.add("spanloop_spans_accepted_total", prepared.num_spans)
        self.metrics.add("spanloop_events_duplicate_total", duplicates)
        if batch.ignored:
            self.metrics.add("spanloop_log_records_ignored_total", batch.ignored)
        if scores := sum(record.topic == topics.FEEDBACK for record in prepared.records):
            self.metrics.add("spanloop_feedback_accepted_total", scores)
        for rejected in batch.rejected:
            self.metrics.add("spanloop_spans_rejected_total", kind=rejected.kind)
        for trace_id in prepared.trace_ids:
            self._seen[identity.tenant, trace_id] = None
            self._seen.move_to_end((identity.tenant, trace_id))
        while len(self._seen) > _SEEN_TRACES:
            self._seen.popitem(last=False)

    # ------------------------------------------------------------ feedback

    async def _feedback(self, request: web.Request, identity: Identity) -> web.Response:
        coding = encodings(request, (JSON,))
        body = await read_body(request, self._limits, self._budget, compressed=bool(coding.codings))
        for name in coding.codings:
            body = expand(body, name, self._limits.max_expanded_bytes)
        parsed = parse_feedback(
            parse_json(body)[0],
            tenant=identity.tenant,
            scorer=identity.name,
            now_ns=self._clock.now_ns(),
            redactor=self._redactor,
        )
        appended = await self.committer.append([new_record(event) for event in parsed.events])
        duplicates = sum(a.duplicate for a in appended)
        self.metrics.add("spanloop_feedback_accepted_total", len(appended) - duplicates)
        self.metrics.add("spanloop_feedback_rejected_total", len(parsed.rejected))
        notes = [
            {
                "index": index,
                "note": "no spans of this trace since the collector started; it counts when they come",
            }
            for index, event in zip(parsed.indexes, parsed.events, strict=True)
            if event.target_kind == "trace" and (identity.tenant, event.target_id) not in self._seen
        ]
        answer: dict[str, object] = {
            "accepted": len(appended) - duplicates,
            "duplicates": duplicates,
            "rejected": parsed.rejected,
        }
        if notes:
            answer["notes"] = notes
        return web.json_response(answer, status=400 if parsed.rejected and not parsed.events else 200)

    # ------------------------------------------------------------ state of the process

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _metrics(self, _: web.Request, __: Identity) -> web.Response:
        gauges = {
            "spanloop_queue_requests": float(self.committer.depth),
            "spanloop_bodies_arriving_bytes": float(self._budget.used),
            "spanloop_reserved_attributes_removed": float(self._redactor.reserved_removed),
        }
        return web.Response(text=self.metrics.text(gauges), content_type="text/plain", charset="utf-8")


def _status(exc: SpanloopError) -> int:
    if isinstance(exc, AuthError):
        return exc.status
    for kind, status in (
        (BodyTooLargeError, 413), (UnsupportedError, 415), (SchemaError, 400), (BodyTimeoutError, 408),
        (QueueFullError, 429), (TransientError, 503),
    ):  # fmt: skip
        if isinstance(exc, kind):
            return status
    return 503


def _reply_type(request: web.Request) -> str:
    return PROTOBUF if "protobuf" in request.content_type else JSON


# ---------------------------------------------------------------- process


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Run until ``stop``; prints the ready line, flushes at the end. Raises ConfigError when the port is taken."""
    settings.workspace.mkdir(parents=True, exist_ok=True)
    log = open_log(settings)
    try:
        receiver = Receiver(settings, log, workspace_key(settings))
        runner = web.AppRunner(receiver.app(), auto_decompress=False, access_log=None, shutdown_timeout=10.0)
        await runner.setup()
        try:
            host, port = settings.collector.host, settings.collector.port
            site = web.TCPSite(runner, host, port)
            try:
                await site.start()
            except OSError as exc:
                raise _port_error(host, port, exc) from exc
            bound = runner.addresses[0][1]
            name = f"[{host}]" if ":" in host else host
            sys.stdout.write(json.dumps({"ready": "collector", "url": f"http://{name}:{bound}"}) + "\n")
            sys.stdout.flush()
            await stop.wait()
        finally:
            await runner.cleanup()
    finally:
        log.close()


def _port_error(host: str, port: int, exc: OSError) -> ConfigError:
    what = (
        "is taken by another process"
        if exc.errno == errno.EADDRINUSE
        else f"cannot be opened: {exc.strerror}"
    )
    return ConfigError(
        f"port {port} on {host} {what}: stop that process, or choose another with collector.port in the TOML or "
        "SPANLOOP_COLLECTOR__PORT"
    )


async def _run(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal in (SIGTERM, SIGINT):
        loop.add_signal_handler(signal, stop.set)
    await serve(settings, stop)


@click.command()
@click.option("--config", type=click.Path(path_type=Path, dir_okay=False), help="TOML file of settings.")
def main(config: Path | None) -> None:
    """Receive OTLP traces and feedback over HTTP into the workspace's log."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        asyncio.run(_run(load_settings(config)))
    except SpanloopError as exc:
        sys.stderr.write(f"error: {exc.message}\n")
        sys.exit(exc.exit_code)


if __name__ == "__main__":
    main()
