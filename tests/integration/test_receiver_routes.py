"""Every route of the table, over HTTP and gRPC, with every kind of wrong key; connections that send nothing."""

from __future__ import annotations

import asyncio
import base64

import grpc
import pytest
from log_requests import logs_json, logs_protobuf, record
from otlp_requests import TRACE, as_json, as_protobuf, span
from receiver_harness import receiver

from spanloop.collectors.auth import MAY
from spanloop.collectors.connections import ConnectionGuard
from spanloop.collectors.routes import GRPC_ROUTES, HTTP_ROUTES, Route

ROLES = ("agent", "scorer", "reader", "admin")
KEYS = [{"key": f"{role}-key-of-team-a", "tenant": "A", "role": role} for role in ROLES] + [
    {"key": "old-admin-key", "tenant": "A", "role": "admin", "expires": "2026-01-01T00:00:00Z"}
]
BODIES = {
    "traces": as_json([span(1)]),
    "logs": logs_json([record()]),
    "feedback": b'{"trace_id": "%s", "value": 1}' % TRACE.encode(),
}
WRONG = {
    "no key": {},
    "unknown": {"Authorization": "Bearer nope"},
    "empty": {"Authorization": "Bearer "},
    "basic": {"Authorization": "Basic " + base64.b64encode(b"user:nope").decode()},
    "expired": {"Authorization": "Bearer old-admin-key"},
    "x-api-key": {"x-api-key": "nope"},
}


async def _status(running, route: Route, headers: dict[str, str]) -> int:
    data = BODIES.get(route.handler)
    named = headers | ({"Content-Type": "application/json"} if data else {})
    async with running.client.request(
        route.method, running.url + route.path, data=data, headers=named
    ) as answer:
        await answer.read()
        if answer.status == 401:
            assert answer.headers["WWW-Authenticate"] == "Bearer"
        return answer.status


@pytest.mark.parametrize("route", HTTP_ROUTES, ids=lambda r: f"{r.method} {r.path}")
async def test_each_http_route_wants_a_key_that_may(route: Route) -> None:
    async with receiver(credentials=KEYS) as running:
        for name, headers in WRONG.items():
            expected = 401 if route.action else 200
            assert await _status(running, route, headers) == expected, name
        for role in ROLES:
            expected = 200 if route.action is None or role in MAY[route.action] else 403
            given = {"Authorization": f"Bearer {role}-key-of-team-a"}
            assert await _status(running, route, given) == expected, role
        tenants = {e.tenant for topic in ("spans", "feedback") for e in running.events(topic)}
        assert tenants <= {"A"}


@pytest.mark.parametrize("route", GRPC_ROUTES, ids=lambda r: r.path)
async def test_each_grpc_route_wants_a_key_that_may(route) -> None:
    body = as_protobuf([span(1)]) if route.handler == "traces" else logs_protobuf([record()])
    async with receiver(credentials=KEYS) as running:
        for name, headers in WRONG.items():
            answer = await running.call(body, route.path, **{k.lower(): v for k, v in headers.items()})
            assert answer.code is grpc.StatusCode.UNAUTHENTICATED, name
        for role in ROLES:
            answer = await running.call(body, route.path, authorization=f"Bearer {role}-key-of-team-a")
            allowed = role in MAY[route.action]
            assert answer.code is (grpc.StatusCode.OK if allowed else grpc.StatusCode.PERMISSION_DENIED), role


async def test_the_application_has_no_route_beside_the_table() -> None:
    async with receiver() as running:
        app = running.receiver.app()
        served = {(r.method, r.resource.canonical) for r in app.router.routes() if r.resource is not None}
        listed = {(r.method, r.path) for r in HTTP_ROUTES}
        assert served - {("HEAD", path) for _, path in listed} == listed
        for path in ("/", "/v1/metrics", "/v1/traces/", "/api/public/ingestion"):
            assert (await running.post(b"{}", path, Content_Type="application/json"))[0] == 404


async def test_langfuse_and_langsmith_exporters_by_their_own_settings() -> None:
    keys = [{"key": "sk-lf-of-team-a", "tenant": "A", "role": "agent"}]
    pair = base64.b64encode(b"pk-lf-whatever:sk-lf-of-team-a").decode()
    async with receiver(credentials=keys) as running:
        body = as_protobuf([span(1)])
        for path, headers in (
            ("/api/public/otel/v1/traces", {"Authorization": f"Basic {pair}", "x_langfuse_ingestion_version": "4"}),
            ("/otel/v1/traces", {"x_api_key": "sk-lf-of-team-a", "Langsmith_Project": "p"}),
        ):  # fmt: skip
            status, _, _ = await running.post(body, path, Content_Type="application/x-protobuf", **headers)
            assert status == 200
        assert [e.tenant for e in running.events("spans")] == ["A"]


async def test_the_experiment_of_mlflows_header_is_kept_as_a_label_of_the_resource() -> None:
    async with receiver() as running:
        body = as_protobuf([span(1), span(2)])
        for number, header in enumerate(("17", "pat@example.invalid", "x" * 200, "a\tb")):
            await running.post(
                as_protobuf([span(10 + number)]),
                Content_Type="application/x-protobuf",
                x_mlflow_experiment_id=header,
            )
        await running.call(body, x_mlflow_experiment_id="18")
        found = {s.span_id: s.resource for e in running.events("spans") for s in e.spans}
        assert found[f"{10:016x}"] == {"service.name": "s", "mlflow.experiment_id": "17"}
        for number in (11, 12, 13):
            assert found[f"{number:016x}"] == {"service.name": "s"}
        assert [found[f"{n:016x}"]["mlflow.experiment_id"] for n in (1, 2)] == ["18", "18"]


# ---------------------------------------------------------------- connections


class _Transport:
    def __init__(self) -> None:
        self.aborted = False

    def abort(self) -> None:
        self.aborted = True


class _Connection:
    def __init__(self) -> None:
        self.transport = _Transport()


async def test_guard_by_the_clock() -> None:
    now = [0.0]
    guard = ConnectionGuard(10.0, idle_s=75.0, now_s=lambda: now[0])
    note = guard.middleware()
    silent, asking, resting = _Connection(), _Connection(), _Connection()
    gate = asyncio.Event()

    class Request:
        def __init__(self, protocol: object) -> None:
            self.protocol = protocol

    async def waits(_: object) -> None:
        await gate.wait()

    async def answers(_: object) -> None:
        return None

    every = [silent, asking, resting]
    guard.sweep(every)
    await note(Request(resting), answers)
    busy = asyncio.create_task(note(Request(asking), waits))
    await asyncio.sleep(0)
    for at, aborted in ((9.0, []), (11.0, [silent]), (74.0, [silent]), (76.0, [silent, resting])):
        now[0] = at
        guard.sweep(every)
        assert [c for c in every if c.transport.aborted] == aborted, at
    gate.set()
    await busy
    assert not asking.transport.aborted


async def test_a_connection_that_never_ends_its_head_is_closed_and_others_go_on() -> None:
    async with receiver(collector={"read_timeout_s": 0.3}) as running:
        host, port = running.url.removeprefix("http://").split(":")
        watch = asyncio.create_task(running.receiver.guard.watch(running.runner))
        slow = [await asyncio.open_connection(host, int(port)) for _ in range(20)]
        for _, writer in slow:
            writer.write(b"POST /v1/traces HTTP/1.1\r\nHost: x\r\n")
        for number in range(12):
            answer = await running.post(
                as_protobuf([span(number + 1)]), Content_Type="application/x-protobuf"
            )
            assert answer[0] == 200
            await asyncio.sleep(0.1)
        for reader, _ in slow:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await asyncio.wait_for(reader.readexactly(1), 1)
        assert running.receiver.guard.closed == 20
        watch.cancel()
