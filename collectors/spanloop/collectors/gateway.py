"""The gateway process: an OpenAI-compatible proxy that routes by policy version and records each call as a span.

Place: agents' chat requests come in here, go to serving (or another upstream) over HTTP, and reach the log as GenAI
spans. It follows the ``policies`` topic for routing. Invariants: a client never waits for the log; a request for the
policy alias is served by the version that ``routing`` chooses, other models pass through unchanged; what a client did
not ask for is not in its answer; only OpenAI's routes are exposed, none of serving's control routes.
Run: ``python -m spanloop.collectors.gateway [--config TOML]``.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from spanloop.collectors.auth import Authenticator, AuthError
from spanloop.collectors.gateway_call import Call, GatewayError, bad_request, read_call
from spanloop.collectors.gateway_follow import Follower
from spanloop.collectors.gateway_metrics import GatewayMetrics
from spanloop.collectors.gateway_record import CallRecord, Redact, call_event
from spanloop.collectors.gateway_recorder import Recorder
from spanloop.collectors.gateway_tokens import ask_for_tokens
from spanloop.collectors.gateway_upstream import Upstream
from spanloop.collectors.routing import Router
from spanloop.collectors.untyped import the_map
from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.ports import Clock, Log
from spanloop.schemas.canonical import digest
from spanloop.schemas.errors import TerminalError
from spanloop.schemas.ids import policy_name
from spanloop.schemas.settings import Settings

__all__ = ["Gateway", "main"]

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode

MAX_BODY_BYTES = 32 * 2**20
CLIENT_GONE = 499
_CALL: web.RequestKey[Call] = web.RequestKey("call", Call)
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """The application and what it holds.

    Args:
        settings: The deployment.
        log: Read for routing, appended with spans.
        clock: Times of the spans.
        redact: What stays of a span where content is off; None: no messages at all.
        key: Secret of the hashes that stand for prompts and conversations.
    """

    def __init__(
        self,
        settings: Settings,
        log: Log,
        *,
        clock: Clock | None = None,
        redact: Redact | None = None,
        key: bytes = b"",
    ) -> None:
        self.settings = settings
        self._key = key
        self._authenticator = Authenticator(settings)
        self._clock = clock or SystemClock()
        self.router = Router(settings.gateway.policy, time.monotonic)
        self.follower = Follower(log, self.router)
        self.recorder = Recorder(
            log,
            lambda record: call_event(
                record,
                content=settings.content.training,
                redact=redact,
                max_attribute_bytes=settings.collector.max_attribute_bytes,
            ),
            queue_max=settings.gateway.queue_max,
        )
        self.metrics = GatewayMetrics()
        self._version = re.compile(re.escape(settings.gateway.policy) + r"@v[0-9]{1,9}\Z")
        self._upstream: Upstream | None = None

    def application(self) -> web.Application:
        """The aiohttp application; start-up reads the routing there is, clean-up flushes the records."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._finish])
        for prefix in ("", "/sessions/{session}"):
            app.router.add_post(prefix + "/v1/chat/completions", self.chat)
            app.router.add_get(prefix + "/v1/models", self.models)
        app.router.add_get("/healthz", self.healthz)
        app.router.add_get("/metrics", self.metrics_text)
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        self._upstream = Upstream(self.settings)
        await asyncio.to_thread(self.follower.start)
        self.recorder.start()
        yield
        await self._upstream.close()
        await asyncio.to_thread(self.follower.close)
        await asyncio.to_thread(self.recorder.close)

    @property
    def upstream(self) -> Upstream:
        """The upstream of the running application."""
        if self._upstream is None:
            raise TerminalError("the gateway is not running")
        return self._upstream

    # ------------------------------------------------------------ routes

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions, also below /sessions/ID."""
        start_ns = self._clock.now_ns()
        tenant = self._tenant(request)
        call = read_call(request, tenant, await request.read(), start_ns=start_ns, key=self._key)
        request[_CALL] = call
        self._plan(call)
        return await self.upstream.relay(request, call)

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models: the policy alias and what the upstream has."""
        alias = self.settings.gateway.policy
        routing = self.router.routing(self._tenant(request))
        cards: list[Any] = []
        if routing is not None:
            champion = policy_name(alias, routing.champion)
            cards.append(
                {"id": alias, "object": "model", "created": 0, "owned_by": "spanloop", "root": champion}
            )
        cards += await self.upstream.models(request)
        return _json({"object": "list", "data": cards})

    async def healthz(self, _: web.Request) -> web.Response:
        """GET /healthz: 200 while the process serves; says whether there is a routing and what waits."""
        routing = self.router.routing(self.settings.tenant)
        champion = None if routing is None else policy_name(self.settings.gateway.policy, routing.champion)
        return _json(
            {
                "status": "ok",
                "champion": champion,
                "queue": self.recorder.depth,
                "lost": self.recorder.num_lost,
            }
        )

    async def metrics_text(self, _: web.Request) -> web.Response:
        """GET /metrics, Prometheus text."""
        recorder = self.recorder
        more = {
            "spanloop_gateway_queue": ("gauge", "Calls that wait for the log.", recorder.depth),
            "spanloop_gateway_recorded_total": ("counter", "Calls on the log.", recorder.num_recorded),
            "spanloop_gateway_lost_total": ("counter", "Calls never recorded.", recorder.num_lost),
            "spanloop_gateway_failed_appends_total": ("counter", "Appends the log refused.", recorder.num_failed_appends),
            "spanloop_gateway_failed_reads_total": ("counter", "Failed reads of routing.", self.follower.num_failed_reads),
            "spanloop_gateway_live_keys": ("gauge", "Conversations whose version is kept.", self.router.num_pins),
        }  # fmt: skip
        return web.Response(text=self.metrics.text(more), content_type="text/plain")

    # ------------------------------------------------------------ one call

    def _tenant(self, request: web.Request) -> str:
        try:
            return self._authenticator.check(request.headers.get("Authorization"), "spans").tenant
        except AuthError as exc:
            if exc.status == 403:
                message = "this key's role may not ask the gateway; it needs role agent, scorer or admin"
                raise GatewayError(403, message, kind="permission_error", code="forbidden") from exc
            raise GatewayError(401, exc.message, kind="authentication_error", code="invalid_api_key") from exc

    def _plan(self, call: Call) -> None:
        """Choose the version and write the upstream's request. Raises GatewayError (503, 400)."""
        alias, model = self.settings.gateway.policy, call.body["model"]
        exploration = 0.0
        if model == alias:
            choice = self.router.route(call.tenant, call.key)
            if choice is None:
                raise GatewayError(
                    503,
                    f"no version of {alias!r} serves yet: the learner has not registered a policy. Is it running "
                    "(`spanloop up` with learner.vocabulary set)? Try again in a moment. Other models go to gateway.upstream.",
                    kind="service_unavailable",
                    code="no_policy",
                    retry_s=1,
                )
            call.route, call.version = choice.route, policy_name(alias, choice.version)
            exploration = choice.exploration
        elif self._version.match(model):
            call.route, call.version = "pinned", model
        else:
            return
        if not isinstance(call.body.get("messages"), list):
            raise bad_request("`messages` must be a list")
        asking, call.asked = ask_for_tokens(call.body, call.version, tokens=self.settings.content.training)
        if exploration:
            asking["vllm_xargs"] = {**the_map(asking.get("vllm_xargs")), "exploration": exploration}
        call.data = _encode(asking)

    @web.middleware
    async def _finish(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        """Errors become OpenAI's error objects; every call that went out is recorded; every request is counted."""
        started = time.perf_counter()
        status = CLIENT_GONE
        try:
            reply = await _told(request, handler)
            status = reply.status
            return reply
        finally:
            call = request.get(_CALL)
            if call is not None and call.sent:
                self._record(call, status)
            self.metrics.observe(call.route if call else "none", status, time.perf_counter() - started)

    def _record(self, call: Call, status: int) -> None:
        address, port = self.upstream.address(call)
        if status == CLIENT_GONE and not call.error:
            call.error = "client_disconnected"
        elif status >= 400 and not call.error:
            call.error = "gateway_failed"
        self.recorder.put(
            CallRecord(
                tenant=call.tenant,
                call_id=call.call_id,
                request=call.body,
                response=call.response,
                route=call.route,
                policy_version=call.version,
                conversation=digest("conversation", self._key, call.key.value),
                conversation_source=call.key.source,
                harness=call.harness,
                start_ns=call.start_ns,
                end_ns=self._clock.now_ns(),
                status=status,
                error=call.error,
                parent=call.parent,
                task_key=call.task_key,
                server_address=address,
                server_port=port,
                streamed=bool(call.body.get("stream")),
            )
        )


async def _told(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """The handler's answer, or its failure as an answer."""
    call_error = ""
    try:
        return await handler(request)
    except GatewayError as exc:
        call_error, reply = exc.code, exc.response()
    except web.HTTPException as exc:
        message = f"{request.method} {request.path}: {exc.reason}"
        code = exc.reason.lower().replace(" ", "_")
        reply = GatewayError(exc.status, message, kind="invalid_request_error", code=code).response()
    except Exception:
        _log.exception("%s %s failed", request.method, request.path)
        message = "the gateway failed; its log has the traceback"
        call_error, reply = "gateway_failed", GatewayError(500, message, kind="internal_error", code="gateway_failed").response()  # fmt: skip
    call = request.get(_CALL)
    if call is not None and not call.error:
        call.error = call_error
    return reply


def _json(body: Any) -> web.Response:
    return web.Response(body=_encode(body), content_type="application/json")


def main() -> None:
    """Run the process until SIGTERM or SIGINT."""
    import argparse

    from spanloop.collectors.redaction import Redactor, workspace_key
    from spanloop.pipeline.log.open import open_log
    from spanloop.pipeline.process import serve
    from spanloop.schemas.settings import load_settings

    parser = argparse.ArgumentParser(prog="python -m spanloop.collectors.gateway", description=__doc__)
    parser.add_argument("--config", type=Path)
    settings = load_settings(parser.parse_args().config)
    settings.workspace.mkdir(parents=True, exist_ok=True)
    log = open_log(settings)
    key = workspace_key(settings)
    redactor = Redactor(settings.content, key)
    gateway = Gateway(settings, log, redact=lambda span: redactor.span(span, trusted=True), key=key)
    serve("gateway", gateway.application(), settings.gateway.host, settings.gateway.port)
    log.close()


if __name__ == "__main__":
    main()
