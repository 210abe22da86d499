"""The collector process: OTLP traces and logs over HTTP and gRPC and feedback in, durable events out.

Flow of a request: credential, limits, decode, redaction, group commit, answer. Invariants: 2xx only after the durable
append; a bad span is refused alone (partial success, dead letter); the tenant is the credential's; every queue and
body is bounded; nothing of a body is written to the process's own log.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from signal import SIGINT, SIGTERM

import click
from aiohttp import web

from spanloop.collectors.auth import Authenticator, Identity
from spanloop.collectors.bodies import JSON, PROTOBUF, Encodings, encodings, http_status, read_body, reply
from spanloop.collectors.connections import ConnectionGuard
from spanloop.collectors.feedback import parse_feedback
from spanloop.collectors.limits import expand
from spanloop.collectors.reception import SIGNALS, Reception, Signal, labels_of
from spanloop.collectors.redaction import workspace_key
from spanloop.collectors.routes import HTTP_ROUTES, Route, paths
from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.log.open import open_log
from spanloop.pipeline.otlp.decode_json import parse_json
from spanloop.pipeline.ports import Clock, Log, new_record
from spanloop.pipeline.process import hide_refused_bytes
from spanloop.schemas.errors import ConfigError, SpanloopError
from spanloop.schemas.settings import Settings, load_settings

__all__ = ["TRACE_ROUTES", "Receiver", "main"]

_log = logging.getLogger("spanloop.collector")

TRACE_ROUTES = paths("traces")
"""Where spans may be sent over HTTP."""
SWITCH_S = 0.0005
"""How long a thread keeps the interpreter when another wants it. The commit thread wants it back after each statement: at Python's
default of 5 ms it would wait for the decoder each time."""
GC_AFTER = 20_000
"""Objects made before Python looks for cycles: a request makes tens of thousands, none of them in a cycle."""
GRACE_S = 5.0
"""Calls under way may end for so long when the process stops."""

Handler = Callable[[web.Request, Identity], Awaitable[web.Response]]


class Receiver:
    """HTTP front of one log.

    Args:
        settings: limits, credentials, content rules.
        log: where accepted events go.
        key: key of the hash left where a text was dropped.
        clock: for feedback without a time and for keys that expire.
    """

    def __init__(self, settings: Settings, log: Log, key: bytes, clock: Clock | None = None) -> None:
        self._limits = settings.collector
        self._clock = clock or SystemClock()
        self.authenticator = Authenticator(settings, self._clock)
        self.reception = Reception(settings, log, key, self._clock)
        self.metrics = self.reception.metrics
        self.committer = self.reception.committer
        self.guard = ConnectionGuard(self._limits.read_timeout_s)

    def app(self) -> web.Application:
        """The application; its start-up and clean-up own the commit thread."""
        app = web.Application(client_max_size=0, middlewares=[self.guard.middleware()])
        handlers: dict[str, Handler] = {
            "feedback": self._feedback,
            "metrics": self._metrics,
            "health": self._health,
            **{name: partial(self._export, signal) for name, signal in SIGNALS.items()},
        }
        for route in HTTP_ROUTES:
            app.router.add_route(route.method, route.path, self._handle(route, handlers[route.handler]))
        app.on_startup.append(self._start)
        app.on_cleanup.append(self._stop)
        return app

    async def _start(self, _: web.Application) -> None:
        self.reception.start()

    async def _stop(self, _: web.Application) -> None:
        await self.reception.close()

    def _handle(self, route: Route, handler: Handler) -> Callable[[web.Request], Awaitable[web.Response]]:
        """Credential before body, and every error as a status with a message."""

        async def handle(request: web.Request) -> web.Response:
            headers = request.headers
            try:
                identity = Identity("", "", "")
                if route.action is not None:
                    identity = self.authenticator.check(
                        headers.get("Authorization"), route.action, api_key=headers.get("x-api-key")
                    )
                response = await handler(request, identity)
            except SpanloopError as exc:
                response = reply(_reply_type(request), http_status(exc), exc.message)
            except ConnectionError:
                raise
            except Exception:
                _log.exception("request failed")
                response = reply(
                    _reply_type(request), 500, "internal error; the collector's log has the trace"
                )
            if response.status >= 400 and not request.content.at_eof():
                response.force_close()  # what is left of the body is not kept
            self.metrics.add(
                "spanloop_requests_total", route=route.action or route.handler, status=str(response.status)
            )
            return response

        return handle

    async def _export(self, signal: Signal, request: web.Request, identity: Identity) -> web.Response:
        coding = encodings(request)
        self.committer.check_room()
        body = await self._body(request, coding, identity)
        taken = await self.reception.take(signal, body, coding, identity, labels_of(request.headers))
        return reply(coding.content_type, 200, taken.message, taken.rejected, signal.rejected_field)

    async def _body(self, request: web.Request, coding: Encodings, identity: Identity) -> bytes:
        return await read_body(
            request, self._limits, self.reception.budget, identity.tenant, compressed=bool(coding.codings)
        )

    # ------------------------------------------------------------ feedback

    async def _feedback(self, request: web.Request, identity: Identity) -> web.Response:
        coding = encodings(request, (JSON,))
        body = await self._body(request, coding, identity)
        for name in coding.codings:
            body = expand(body, name, self._limits.max_expanded_bytes)
        parsed = parse_feedback(
            parse_json(body)[0],
            tenant=identity.tenant,
            scorer=identity.name,
            now_ns=self._clock.now_ns(),
            redactor=self.reception.redactor,
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
            if event.target_kind == "trace" and not self.reception.seen(identity.tenant, event.target_id)
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

    async def _health(self, _: web.Request, __: Identity) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _metrics(self, _: web.Request, __: Identity) -> web.Response:
        gauges = {
            "spanloop_queue_requests": float(self.committer.depth),
            "spanloop_bodies_arriving_bytes": float(self.reception.budget.used),
            "spanloop_reserved_attributes_removed": float(self.reception.redactor.reserved_removed),
            "spanloop_connections_closed": float(self.guard.closed),
        }
        return web.Response(text=self.metrics.text(gauges), content_type="text/plain", charset="utf-8")


def _reply_type(request: web.Request) -> str:
    return PROTOBUF if "protobuf" in request.content_type else JSON


# ---------------------------------------------------------------- process


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Run until ``stop``; prints the ready line, flushes at the end. Raises ConfigError when a port is taken."""
    settings.workspace.mkdir(parents=True, exist_ok=True)
    sys.setswitchinterval(SWITCH_S)
    gc.freeze()
    gc.set_threshold(GC_AFTER)
    log = open_log(settings)
    try:
        await _serve(settings, log, stop)
    finally:
        log.close()


async def _serve(settings: Settings, log: Log, stop: asyncio.Event) -> None:
    receiver = Receiver(settings, log, workspace_key(settings))
    runner = web.AppRunner(receiver.app(), auto_decompress=False, access_log=None, shutdown_timeout=10.0)
    await runner.setup()
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(runner.cleanup)
        host, port = settings.collector.host, settings.collector.port
        try:
            await web.TCPSite(runner, host, port).start()
        except OSError as exc:
            raise _port_error(host, port, exc) from exc
        watch = asyncio.create_task(receiver.guard.watch(runner))
        stack.callback(watch.cancel)
        name = f"[{host}]" if ":" in host else host
        ready = {"ready": "collector", "url": f"http://{name}:{runner.addresses[0][1]}"}
        if settings.collector.grpc is not None:
            from spanloop.collectors.grpc_front import GrpcFront

            front = GrpcFront(receiver.reception, receiver.authenticator)
            bound = await front.start(host, settings.collector.grpc)
            stack.push_async_callback(front.stop, GRACE_S)
            ready["grpc"] = f"{name}:{bound}"
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()
        await stop.wait()


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
    """Receive OTLP traces, logs and feedback into the workspace's log."""
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    hide_refused_bytes()
    try:
        asyncio.run(_run(load_settings(config)))
    except SpanloopError as exc:
        sys.stderr.write(f"error: {exc.message}\n")
        sys.exit(exc.exit_code)


if __name__ == "__main__":
    main()
