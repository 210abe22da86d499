"""A gateway before a decision server, in the test's process."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer, unused_port
from serving_support import settings_of

from spanloop.collectors.gateway import Gateway
from spanloop.collectors.gateway_finished import Events
from spanloop.collectors.gateway_recorder import Recorder
from spanloop.collectors.redaction import Redactor
from spanloop.learner.decision_policy import DecisionConfig, DecisionNet
from spanloop.learner.serving.decisions import DecisionServer
from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.dialects import operation_of
from spanloop.pipeline.dialects.operation import GatewayFacts
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.events import RoutingChanged
from spanloop.schemas.orchestration import Decision
from spanloop.schemas.spans import Span

ASKED = {
    "kind": "O2",
    "menu": ["writer", {"name": "critic", "features": {"load": 3}}, "nobody"],
    "state": {"round": 1, "topic": "tax", "urgent": True},
    "default": "nobody",
}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


@asynccontextmanager
async def deciding(
    tmp_path, *, serving: web.Application | str = "up", routing=True, training=True, timeout_s=5.0, **sections
):
    """A gateway before a decision server ("up"), before nothing ("down") or before an application."""
    DecisionNet.initial(DecisionConfig(), 3).save(tmp_path / "policies" / "policy@v1", None, {})
    decisions = {"vocabulary": (), "decisions": True}
    settings = settings_of(tmp_path, learner=decisions, content={"training": training}, **sections)
    app = DecisionServer(settings).application() if serving == "up" else serving
    server = None if isinstance(app, str) else TestServer(app)
    if server is not None:
        await server.start_server()
    port = unused_port() if server is None else server.port
    settings = settings_of(
        tmp_path, learner=decisions, content={"training": training}, serving={"port": port},
        gateway={"decide_timeout_s": timeout_s, "upstream": "http://127.0.0.1:9/v1"}, **sections,
    )  # fmt: skip
    log = MemoryLog(SystemClock())
    if routing:
        log.append([new_record(RoutingChanged(sequence=1, champion=1, exploration=0.2))])
    redactor = Redactor(settings.content, b"k" * 32)
    events = Events(settings, redact=lambda span: redactor.span(span, trusted=True))
    recorder = Recorder(log, events, queue_max=settings.gateway.queue_max)
    made = Gateway(settings, log, recorder=recorder)
    try:
        async with TestClient(TestServer(made.application())) as client:
            url = str(client.make_url("/"))
            yield SimpleNamespace(client=client, log=log, gateway=made, url=url)
    finally:
        if server is not None:
            await server.close()


def told_by(span: Span) -> tuple[Decision, GatewayFacts, str]:
    """The decision that the gateway's span tells, what the gateway knows of the call, and the call that it names."""
    operation = operation_of(span, "gateway")
    said, call = operation.said, operation.call
    assert operation.kind == "model_call"
    assert said is not None
    assert said.act == "decision"
    assert said.decision is not None
    assert call is not None
    assert call.gateway is not None
    return said.decision, call.gateway, said.call
