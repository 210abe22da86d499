"""The desk's client: pydantic-ai and three addresses, nothing of spanloop; every ticket ends in one trace and one outcome."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

ROOT = Path(__file__).parents[2]
DESK = ROOT / "examples" / "dispatch_desk"
CLIENT = ("agents.py", "client.py", "game.py", "main.py")


@pytest.mark.parametrize("name", CLIENT)
def test_the_client_imports_nothing_of_spanloop(name: str) -> None:
    text = (DESK / name).read_text()
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    assert not [module for module in imported if module.split(".")[0] == "spanloop"]
    assert "spanloop" not in text
    own = [module for module in imported if module.startswith("dispatch_desk.")]
    assert all("optimum" not in module for module in own)


class World:
    """A gateway that takes the first option with a twist, a receiver of spans and one of feedback."""

    def __init__(self) -> None:
        self.requests: list[dict] = []
        self.sessions: list[str] = []
        self.spans: list = []
        self.feedback: list[dict] = []
        self.refusals = 1

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self.sessions.append(request.headers["X-Session-Id"])
        number = len(self.requests)
        function = body["tools"][-1 if number % 3 else 0]["function"]
        arguments = {name: schema["enum"][0] for name, schema in function["parameters"]["properties"].items()}
        call = {
            "id": f"t{number}",
            "type": "function",
            "function": {"name": function["name"], "arguments": json.dumps(arguments)},
        }
        return web.json_response({
            "id": f"r{number}", "object": "chat.completion", "created": 1, "model": "policy@v0",
            "choices": [{"index": 0, "finish_reason": "tool_calls",
                         "message": {"role": "assistant", "content": None, "tool_calls": [call]}}],
            "usage": {"prompt_tokens": 15, "completion_tokens": 1, "total_tokens": 16},
        })  # fmt: skip

    async def traces(self, request: web.Request) -> web.Response:
        message = ExportTraceServiceRequest.FromString(await request.read())
        self.spans += [s for r in message.resource_spans for scope in r.scope_spans for s in scope.spans]
        return web.Response()

    async def outcomes(self, request: web.Request) -> web.Response:
        if self.refusals:
            self.refusals -= 1
            return web.json_response({}, status=503)
        self.feedback += await request.json()
        return web.json_response({})

    def application(self) -> web.Application:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/traces", self.traces)
        app.router.add_post("/v1/feedback", self.outcomes)
        return app


async def work(world: World, *arguments: str) -> dict:
    runner = web.AppRunner(world.application())
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "examples"),
        "OPENAI_BASE_URL": f"{url}/v1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "FEEDBACK_URL": f"{url}/v1/feedback",
    }
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "dispatch_desk.main", *arguments, env=environment,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, err = await asyncio.wait_for(process.communicate(), 60)
    finally:
        await runner.cleanup()
    assert process.returncode == 0, err.decode()
    return json.loads(out)


@pytest.mark.parametrize("sdk", [False, True])
async def test_each_ticket_is_one_trace_one_session_and_one_outcome(sdk: bool) -> None:
    world = World()
    report = await work(
        world,
        "--tickets",
        "12",
        "--concurrency",
        "4",
        "--phone-from",
        "0",
        "--phone",
        "1",
        *(["--sdk"] if sdk else []),
    )
    assert (report["tickets"], report["failed"], report["outcomes_sent"]) == (12, 0, 12)
    traces = {span.trace_id.hex() for span in world.spans}
    assert len(traces) == 12
    assert {item["trace_id"] for item in world.feedback} == traces
    assert len({item["feedback_id"] for item in world.feedback}) == 12
    assert len(set(world.sessions)) == 12
    names = Counter(span.name for span in world.spans)
    assert names["invoke_agent desk"] == 12
    assert names["chat policy"] == len(world.requests)
    assert names["invoke_agent specialist"] == names["invoke_agent checker"] > 0
    roots = [span for span in world.spans if span.name == "invoke_agent desk"]
    assert all(span.status.code != 2 and span.end_time_unix_nano for span in roots)
    responses = [
        a.value.string_value for s in world.spans for a in s.attributes if a.key == "gen_ai.response.id"
    ]
    assert len(set(responses)) == len(world.requests)
    for body in world.requests:
        last = next(m for m in reversed(body["messages"]) if m["role"] in ("user", "tool"))
        assert len(last["content"].split()) == 13
        assert last["content"].split()[0] == "phone"
        assert body["tool_choice"] == "required"
        assert body["parallel_tool_calls"] is False


async def test_spans_carry_no_message_content() -> None:
    world = World()
    await work(world, "--tickets", "3", "--concurrency", "1")
    text = " ".join(a.value.string_value for span in world.spans for a in span.attributes)
    assert "no-report" not in text
    assert "repair" not in text
