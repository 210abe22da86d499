"""The gateway process: an OpenAI-compatible proxy that routes by policy version and records each call as a span.

Place: agents' requests come in here, go to serving (or another upstream) over HTTP, and reach the log as GenAI spans, by way of a
spool on disk. It follows the ``policies`` topic for routing. Invariants: a client never waits for the log, and is answered while it
is away; a request for the policy alias is served by the version that ``routing`` chooses, other models pass through unchanged; what
a client did not ask for is not in its answer; only OpenAI's routes and /v1/decide are exposed, none of serving's control routes.
Run: ``python -m spanloop.collectors.gateway [--config TOML]``.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import time
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from aiohttp import web

from spanloop.collectors.auth import Authenticator, AuthError, Identity
from spanloop.collectors.gateway_answers import CALL, Handler, no_answer, told
from spanloop.collectors.gateway_call import Call, GatewayError, bad_request, read_call
from spanloop.collectors.gateway_chains import Chains, Given
from spanloop.collectors.gateway_decide import Decider
from spanloop.collectors.gateway_finished import Events
from spanloop.collectors.gateway_follow import Follower
from spanloop.collectors.gateway_health import health, recording
from spanloop.collectors.gateway_metrics import GatewayMetrics
from spanloop.collectors.gateway_recorder import Recorder
from spanloop.collectors.gateway_recording import Recording
from spanloop.collectors.gateway_routes import PASSED, PREFIXES, extra_route, is_control, path_below_session
from spanloop.collectors.gateway_shapes import DECIDE, SHAPES, Shape
from spanloop.collectors.gateway_targets import Target, Targets
from spanloop.collectors.gateway_upstream import Upstream
from spanloop.collectors.routing import Router
from spanloop.collectors.untyped import text, the_map
from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.ports import Clock, Log
from spanloop.schemas.errors import TerminalError
from spanloop.schemas.ids import policy_name
from spanloop.schemas.settings import Settings

__all__ = ["Gateway", "main"]

_log = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode
_model_of = msgspec.json.Decoder(dict[str, Any]).decode

MAX_BODY_BYTES = 32 * 2**20
CLIENT_GONE = 499


class Gateway:
    """The application and what it holds.

    Args:
        settings: The deployment.
        log: Read for routing.
        clock: Times of the spans.
        recorder: Takes the finished calls. None: one in this process, without a spool, that keeps no messages where content is off.
        kept: File of the last known routing.
    """

    def __init__(
        self,
        settings: Settings,
        log: Log,
        *,
        clock: Clock | None = None,
        recorder: Recording | None = None,
        kept: Path | None = None,
    ) -> None:
        self.settings = settings
        self._authenticator = Authenticator(settings)
        self._clock = clock or SystemClock()
        self.router = Router(settings.gateway.policy, time.monotonic)
        self.follower = Follower(log, self.router, kept=kept)
        self.recorder = recorder or Recorder(log, Events(settings), queue_max=settings.gateway.queue_max)
        self.metrics = GatewayMetrics()
        self.targets = Targets(settings)
        self.chains = Chains(private=len({c.tenant for c in settings.credentials}) > 1)
        self._version = re.compile(re.escape(settings.gateway.policy) + r"@v[0-9]{1,9}\Z")
        self._decider = Decider(settings, self.router)
        self._upstream: Upstream | None = None

    def application(self) -> web.Application:
        """The aiohttp application; start-up reads the routing there is, clean-up flushes the records. Raises ConfigError."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[self._finish])
        extra = [
            (method, extra_route(path))
            for path in self.settings.gateway.passthrough
            for method in ("GET", "POST")
        ]
        for prefix in PREFIXES:
            for shape in SHAPES.values():
                app.router.add_post(f"{prefix}/v1{shape.path}", partial(self.call, shape))
            app.router.add_post(f"{prefix}/v1{DECIDE.path}", self.decide)
            app.router.add_get(prefix + "/v1/models", self.models)
            for method, path in (*PASSED, *extra):
                app.router.add_route(method, prefix + path, self.passed)
        app.router.add_get("/healthz", self.healthz)
        app.router.add_get("/metrics", self.metrics_text)
        app.cleanup_ctx.append(self._running)
        return app

    async def _running(self, _: web.Application) -> AsyncIterator[None]:
        self._upstream = Upstream(self.settings, self.targets, self._answered)
        async with self.recorder.running():
            await asyncio.to_thread(self.follower.start)
            yield
            await self._upstream.close()
            await self._decider.close()
            await asyncio.to_thread(self.follower.close)

    @property
    def upstream(self) -> Upstream:
        """The upstream of the running application."""
        if self._upstream is None:
            raise TerminalError("the gateway is not running")
        return self._upstream

    # ------------------------------------------------------------ routes

    async def call(self, shape: Shape, request: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions, /v1/responses and /v1/completions, also below /sessions/ID."""
        start_ns = self._clock.now_ns()
        tenant = self._tenant(request)
        data = await request.read()
        call = read_call(request, shape, tenant, data, start_ns=start_ns, target=self.targets.own)
        request[CALL] = call
        self._go_on(call)
        self._plan(call)
        self.recorder.begin()
        return await self.upstream.relay(request, call)

    async def decide(self, request: web.Request) -> web.Response:
        """POST /v1/decide, also below /sessions/ID: an option of a menu, whatever becomes of serving."""
        start_ns = self._clock.now_ns()
        tenant = self._tenant(request)
        call = self._decider.read(request, tenant, await request.read(), start_ns)
        request[CALL] = call
        self.recorder.begin()
        return await self._decider.decide(call)

    async def passed(self, request: web.Request) -> web.StreamResponse:
        """Routes that go on unchanged and are not recorded."""
        tenant = self._tenant(request)
        path = path_below_session(request.rel_url.raw_path, below="session" in request.match_info)
        if is_control(path):
            raise web.HTTPNotFound
        data = await request.read()
        target, base = self.targets.own, ""
        if response_id := request.match_info.get("response_id"):
            target, base = self._holder(tenant, response_id)
        elif model := request.match_info.get("model") or _named_model(data):
            target = self.targets.of(model)
        return await self.upstream.forward(request, target, path.removeprefix("/v1"), data, base)

    async def models(self, request: web.Request) -> web.Response:
        """GET /v1/models: the policy alias and what the upstreams have."""
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
        """GET /healthz: 200 while the process serves; says whether there is a routing, what waits and what was lost."""
        routing = self.router.routing(self.settings.tenant)
        champion = None if routing is None else policy_name(self.settings.gateway.policy, routing.champion)
        return _json(health(self.recorder, champion, from_file=self.follower.from_file))

    async def metrics_text(self, request: web.Request) -> web.Response:
        """GET /metrics, Prometheus text, for any role: the receiver's rule."""
        self._identity(request, "metrics")
        more = {
            **recording(self.recorder),
            "spanloop_gateway_failed_reads_total": ("counter", "Failed reads of routing.", self.follower.num_failed_reads),
            "spanloop_gateway_live_keys": ("gauge", "Conversations whose version is kept.", self.router.num_pins),
        }  # fmt: skip
        return web.Response(text=self.metrics.text(more, self.recorder.lost), content_type="text/plain")

    # ------------------------------------------------------------ one call

    def _tenant(self, request: web.Request) -> str:
        return self._identity(request, "spans").tenant

    def _identity(self, request: web.Request, action: str) -> Identity:
        """Who the credential is of: in X-Spanloop-Key where Authorization is the upstream's. Raises GatewayError (401, 403)."""
        key = request.headers.get("X-Spanloop-Key")
        header = f"Bearer {key}" if key is not None else request.headers.get("Authorization")
        try:
            return self._authenticator.check(header, action)
        except AuthError as exc:
            if exc.status == 403:
                message = "this key's role may not ask the gateway; it needs role agent, scorer or admin"
                raise GatewayError(403, message, kind="permission_error", code="forbidden") from exc
            raise GatewayError(401, exc.message, kind="authentication_error", code="invalid_api_key") from exc

    def _go_on(self, call: Call) -> None:
        """A request that names an earlier answer belongs to its conversation and its server. Raises GatewayError (404)."""
        earlier = text(call.body.get("previous_response_id"))
        if not earlier:
            return
        if not self.chains.may_ask(call.tenant, earlier):
            raise no_answer(earlier)
        given = self.chains.get(call.tenant, earlier)
        if given is not None:
            call.upstream = given.url
            if call.key.source not in ("session", "trace"):
                call.key = given.key

    def _holder(self, tenant: str, response_id: str) -> tuple[Target, str]:
        """Who has an answer. Raises GatewayError (404) when it is another tenant's."""
        if not self.chains.may_ask(tenant, response_id):
            raise no_answer(response_id)
        given = self.chains.get(tenant, response_id)
        if given is None:
            return self.targets.own, ""
        every = (self.targets.own, *self.targets.others)
        return next(target for target in every if given.url in target.urls), given.url

    def _plan(self, call: Call) -> None:
        """Choose version and server, and write the upstream's request. Raises GatewayError (503, 400)."""
        alias, model = self.settings.gateway.policy, call.body["model"]
        tokens = self.settings.content.training
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
            call.exploration = choice.exploration
        elif self._version.match(model):
            call.route, call.version = "pinned", model
        else:
            call.target = self.targets.of(model)
            if not (tokens and call.target.tokens):
                return
        if call.shape.name == "chat" and not isinstance(call.body.get("messages"), list):
            raise bad_request("`messages` must be a list")
        asking, call.asked = call.shape.ask(call.body, call.version or model, tokens=tokens)
        call.wants_tokens = tokens
        if call.exploration:
            asking["vllm_xargs"] = {**the_map(asking.get("vllm_xargs")), "exploration": call.exploration}
        call.data = _encode(asking)

    @web.middleware
    async def _finish(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors become OpenAI's error objects; every call that went out is recorded; every request is counted."""
        started = time.perf_counter()
        status = CLIENT_GONE
        try:
            reply = await told(request, handler)
            status = reply.status
            return reply
        finally:
            call = request.get(CALL)
            if call is not None and call.sent:
                self._record(call, status)
            self.metrics.observe(call.route if call else "none", status, time.perf_counter() - started)

    def _answered(self, call: Call, response_id: str) -> None:
        self.chains.add(response_id, Given(call.tenant, call.key, call.version, call.upstream))

    def _record(self, call: Call, status: int) -> None:
        if status == CLIENT_GONE and not call.error:
            call.error = "client_disconnected"
        elif status >= 400 and not call.error:
            call.error = "gateway_failed"
        if call.response_id:
            self._answered(call, call.response_id)
        server = self.upstream.address(call)
        self.recorder.put(call.finished(status, end_ns=self._clock.now_ns(), server=server))


def _named_model(data: bytes) -> str:
    """The model that a JSON body names; empty for any other."""
    try:
        return text(_model_of(data).get("model")) if data[:1] == b"{" else ""
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""


def _json(body: Any) -> web.Response:
    return web.Response(body=_encode(body), content_type="application/json")


def main() -> None:
    """Run the process until SIGTERM or SIGINT."""
    import argparse

    from spanloop.collectors.gateway_log import LateLog
    from spanloop.collectors.gateway_sender import Sender
    from spanloop.collectors.gateway_spools import spool_folder
    from spanloop.collectors.workspace_key import workspace_key
    from spanloop.pipeline.log.open import open_log
    from spanloop.pipeline.process import serve
    from spanloop.schemas.settings import load_settings

    parser = argparse.ArgumentParser(prog="python -m spanloop.collectors.gateway", description=__doc__)
    parser.add_argument("--config", type=Path)
    settings = load_settings(parser.parse_args().config)
    settings.workspace.mkdir(parents=True, exist_ok=True)
    workspace_key(settings)  # what is wrong with it shows here, and not in the recorder
    log = LateLog(lambda: open_log(settings))
    kept = spool_folder(settings) / "routing.json"
    gateway = Gateway(settings, log, recorder=Sender(settings), kept=kept)
    application = gateway.application()
    application.on_startup.append(_settle)
    serve("gateway", application, settings.gateway.host, settings.gateway.port, cancel=True)
    log.close()


async def _settle(_: web.Application) -> None:
    """What there is at the start stays: the garbage collector need not look at it again, which takes it tens of milliseconds."""
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
