"""A gateway in the test's process, before any upstream, and what it recorded."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from serving_support import save_version, settings_of, until

from spanloop.collectors.gateway import Gateway
from spanloop.collectors.gateway_finished import Events
from spanloop.collectors.gateway_recorder import Recorder
from spanloop.collectors.redaction import Redactor
from spanloop.learner.serving.embedded import EmbeddedServer
from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.events import RoutingChanged, decode

URL = "/v1/chat/completions"


@asynccontextmanager
async def gateway(tmp_path, *, upstream=None, training=True, routing=True, spools=(), **sections):
    """A running gateway before ``upstream`` (an application; none: the embedded server with two versions)."""
    if upstream is None:
        for version in (1, 2):
            save_version(tmp_path, version)
        upstream = EmbeddedServer(settings_of(tmp_path)).application()
    async with TestServer(upstream) as server:
        sections["gateway"] = {"upstream": str(server.make_url("/v1")), **sections.get("gateway", {})}
        settings = settings_of(tmp_path, content={"training": training}, **sections)
        log = MemoryLog(SystemClock())
        if routing:
            log.append([new_record(RoutingChanged(sequence=1, champion=1))])
        redactor = Redactor(settings.content, b"k" * 32)
        events = Events(settings, redact=lambda span: redactor.span(span, trusted=True))
        recorder = Recorder(log, events, queue_max=settings.gateway.queue_max, spools=spools)
        made = Gateway(settings, log, recorder=recorder)
        async with TestClient(TestServer(made.application())) as client:
            yield SimpleNamespace(
                client=client, log=log, gateway=made, server=server, url=str(client.make_url("/"))
            )


def spans(log):
    """Every span on the log."""
    return [span for r in log.read(["spans"], {}, 10_000) for span in decode(r.value).spans]


async def recorded(log, count):
    """The spans on the log, once there are so many."""
    await until(lambda: len(spans(log)) >= count)
    found = spans(log)
    assert len(found) == count
    return found


def upstream_of(handler, path=URL):
    """An upstream of one route."""
    app = web.Application()
    app.router.add_post(path, handler)
    return app
