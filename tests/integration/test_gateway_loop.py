"""The gateway before the embedded server, with real clients: plain HTTP, openai's, and a pydantic-ai agent."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from typing import Literal

import aiohttp
import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from gateway_support import URL, gateway, recorded, spans, upstream_of
from serving_support import TOKENIZER, TOOLS, WORDS, chat, save_version, sse, until

from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.events import RoutingChanged, decode
from spanloop.schemas.ids import gateway_span_id, gateway_trace_id

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


async def test_a_call_is_served_and_recorded(tmp_path):
    async with gateway(tmp_path) as g:
        headers = {"traceparent": f"00-{TRACE}-{SPAN}-01", "X-Task-Key": "task-7"}
        async with g.client.post(URL, json=chat(seed=5, temperature=0.9), headers=headers) as answer:
            assert answer.status == 200
            body = await answer.json()
        assert body["model"] == "policy@v1"
        assert body["choices"][0]["logprobs"] is None
        assert "token_ids" not in body["choices"][0]
        assert "prompt_token_ids" not in body
        function = body["choices"][0]["message"]["tool_calls"][0]["function"]
        words = [function["name"], *json.loads(function["arguments"]).values()]
        (span,) = await recorded(g.log, 1)
    a = span.attributes
    assert (span.trace_id, span.parent_span_id, span.span_id) == (TRACE, SPAN, gateway_span_id(body["id"]))
    assert (a["gen_ai.response.id"], a["gen_ai.response.model"]) == (body["id"], "policy@v1")
    assert (a["spanloop.policy.version"], a["spanloop.policy.route"]) == ("policy@v1", "champion")
    assert a["spanloop.prompt_token_ids"] == [1, *TOKENIZER.encode(["red", "green"]), 3]
    assert TOKENIZER.decode(a["spanloop.response_token_ids"]) == words
    assert len(a["spanloop.response_logprobs"]) == len(words)
    assert {t for t, _ in a["spanloop.menus"][0]} == set(TOKENIZER.encode(["close", "look", "spawn"]))
    assert (a["gen_ai.request.seed"], a["gen_ai.request.temperature"]) == (5, 0.9)
    assert (a["spanloop.task.key"], a["spanloop.conversation.source"]) == ("task-7", "trace")
    assert 0 < span.start_ns <= span.end_ns


async def test_a_stream_is_the_same_call(tmp_path):
    async with gateway(tmp_path) as g:
        async with g.client.post(URL, json=chat(seed=5)) as answer:
            whole = await answer.json()
        async with g.client.post(URL, json=chat(seed=5, stream=True)) as answer:
            assert answer.content_type == "text/event-stream"
            text = await answer.text()
        chunks = sse(text)
        for hidden in ("token_ids", '"usage"', "token_id:"):
            assert hidden not in text
        calls = [d for c in chunks for d in c["choices"][0]["delta"].get("tool_calls", ())]
        function = whole["choices"][0]["message"]["tool_calls"][0]["function"]
        assert calls[0]["function"]["name"] == function["name"]
        assert "".join(c["function"]["arguments"] for c in calls) == function["arguments"]
        asked = chat(seed=5, stream=True, stream_options={"include_usage": True}, return_token_ids=True)
        async with g.client.post(URL, json=asked) as answer:
            chunks = sse(await answer.text())
        assert chunks[-1]["usage"] == whole["usage"]
        assert chunks[0]["prompt_token_ids"]
        first, second, third = await recorded(g.log, 3)
    same = {
        k: v for k, v in first.attributes.items() if k not in ("gen_ai.response.id", "gen_ai.output.messages")
    }
    for span in (second, third):
        assert span.attributes["gen_ai.request.stream"] is True
        assert {k: span.attributes[k] for k in same} == same


async def test_before_the_first_policy_it_says_so(tmp_path):
    async with gateway(tmp_path, routing=False) as g:
        async with g.client.post(URL, json=chat()) as answer:
            body = await answer.json()
            assert (answer.status, body["error"]["code"]) == (503, "no_policy")
            assert "the learner has not registered a policy" in body["error"]["message"]
            assert answer.headers["Retry-After"] == "1"
        g.log.append([new_record(RoutingChanged(sequence=1, champion=2))])
        await until(lambda: g.gateway.router.routing("default"))
        async with g.client.post(URL, json=chat()) as answer:
            assert (await answer.json())["model"] == "policy@v2"
        await recorded(g.log, 1)  # the refusal never went out


async def test_sessions_keep_their_version_and_shares_are_kept(tmp_path):
    async with gateway(tmp_path) as g:
        g.log.append([new_record(RoutingChanged(sequence=2, champion=1, learner=2, learning_share=0.5))])
        await until(lambda: g.gateway.router.routing("default").learner == 2)

        async def model(session, path=True):
            url = f"/sessions/{session}{URL}" if path else URL
            headers = {} if path else {"X-Session-Id": session}
            async with g.client.post(url, json=chat(), headers=headers) as answer:
                return (await answer.json())["model"]

        first = {f"s{i}": await model(f"s{i}") for i in range(40)}
        assert 8 <= list(first.values()).count("policy@v2") <= 32
        assert {s: await model(s, path=False) for s in first} == first
        g.log.append([new_record(RoutingChanged(sequence=3, champion=2))])
        await until(lambda: g.gateway.router.routing("default").sequence == 3)
        assert {s: await model(s) for s in first} == first
        assert await model("new") == "policy@v2"
        routes = {s.attributes["spanloop.policy.route"] for s in await recorded(g.log, 121)}
        assert routes == {"champion", "learning"}


async def test_a_named_version_is_pinned_and_other_models_pass_unchanged(tmp_path):
    seen = []

    async def other(request):
        seen.append((await request.read(), request.headers.get("Authorization")))
        return web.Response(
            body=b'{"id": "x1",  "choices": [], "logprobs": 1}', content_type="application/json"
        )

    async with gateway(tmp_path, upstream=upstream_of(other)) as g:
        data = b'{"model":  "gpt-5", "messages": [{"role": "user", "content": "SECRET"}]}'
        async with g.client.post(URL, data=data, headers={"Authorization": "Bearer upstream-key"}) as answer:
            assert await answer.read() == b'{"id": "x1",  "choices": [], "logprobs": 1}'
        assert seen == [(data, "Bearer upstream-key")]
        async with g.client.post(URL, json=chat("policy@v7")) as answer:
            assert answer.status == 200
        assert json.loads(seen[1][0])["model"] == "policy@v7"
        assert json.loads(seen[1][0])["return_token_ids"] is True
        passed, pinned = sorted(await recorded(g.log, 2), key=lambda s: s.attributes["spanloop.policy.route"])
    assert passed.attributes["spanloop.policy.route"] == "pass"
    assert "spanloop.policy.version" not in passed.attributes
    assert passed.trace_id == gateway_trace_id("x1")
    assert pinned.attributes["spanloop.policy.route"] == "pinned"
    assert pinned.attributes["spanloop.policy.version"] == "policy@v7"


async def test_an_upstreams_error_passes_through_and_is_recorded(tmp_path):
    async with gateway(tmp_path) as g:
        async with g.client.post(URL, json=chat(tools=[])) as answer:
            assert answer.status == 400
            assert "only generates tool calls" in (await answer.json())["error"]["message"]
        g.log.append([new_record(RoutingChanged(sequence=2, champion=9))])
        await until(lambda: g.gateway.router.routing("default").champion == 9)
        async with g.client.post(URL, json=chat(user="another")) as answer:
            assert answer.status == 404
        bad, missing = await recorded(g.log, 2)
    assert (bad.status, bad.attributes["error.type"]) == ("error", "upstream_400")
    assert missing.attributes["http.response.status_code"] == 404
    assert missing.attributes["spanloop.policy.version"] == "policy@v9"


async def test_an_upstream_that_is_away_slow_or_talks_nonsense(tmp_path):
    async def odd(request):
        body = await request.json()
        if "slow" in body["user"]:
            await asyncio.sleep(5)
        return web.Response(body=b"<html>", content_type="application/json")

    async with gateway(tmp_path, upstream=upstream_of(odd), gateway={"timeout_s": 0.3}) as g:
        for user, status, code in (("x", 502, "upstream_malformed"), ("slow", 504, "upstream_timeout")):
            async with g.client.post(URL, json=chat(user=user)) as answer:
                assert (answer.status, (await answer.json())["error"]["code"]) == (status, code)
        await g.server.close()
        async with g.client.post(URL, json=chat(user="x")) as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (502, "upstream_unreachable")
        async with g.client.get("/v1/models") as answer:
            assert [m["id"] for m in (await answer.json())["data"]] == ["policy"]
        errors = [s.attributes["error.type"] for s in await recorded(g.log, 3)]
    assert errors == ["upstream_malformed", "upstream_timeout", "upstream_unreachable"]


async def test_a_stream_that_breaks_off(tmp_path):
    async def broken(request):
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        chunk = {"id": "x1", "model": "policy@v1", "choices": [{"index": 0, "delta": {"content": "he"}}]}
        await reply.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        request.transport.abort()
        return reply

    async with gateway(tmp_path, upstream=upstream_of(broken)) as g:
        async with g.client.post(URL, json=chat(stream=True)) as answer:
            text = await answer.text()
        assert '"content": "he"' in text  # an event from which nothing is taken out stays byte for byte
        assert "upstream_cut_off" in text
        assert "[DONE]" not in text
        (span,) = await recorded(g.log, 1)
    assert span.attributes["error.type"] == "upstream_cut_off"
    assert span.attributes["gen_ai.response.id"] == "x1"


async def test_bad_requests_are_openais_errors(tmp_path):
    async with gateway(tmp_path) as g:
        for data in (
            b"{",
            b"[]",
            b'{"model": 3}',
            b'{"model": "policy", "messages": 3}',
            b"\xff",
            b"[" * 100_000,
        ):
            async with g.client.post(URL, data=data) as answer:
                assert answer.status == 400
                assert (await answer.json())["error"]["type"] == "invalid_request_error"
        for method, path, status in (
            ("GET", URL, 405),
            ("POST", "/v1/load_lora_adapter", 404),
            ("GET", "/", 404),
        ):
            async with g.client.request(method, path) as answer:
                assert answer.status == status
                assert "error" in await answer.json()
        assert spans(g.log) == []


@pytest.mark.parametrize(("upstream_key", "goes_on"), [("ours", "Bearer ours"), ("", None)])
async def test_credentials(tmp_path, upstream_key, goes_on):
    seen = []

    async def other(request):
        seen.append(request.headers.get("Authorization"))
        return web.json_response({"id": "x1", "choices": []})

    keys = [
        {"key": "agent-key-1", "tenant": "t1", "role": "agent"},
        {"key": "reader-key", "tenant": "t1", "role": "reader"},
    ]
    more = {"credentials": keys, "gateway": {"upstream_key": upstream_key}}
    async with gateway(tmp_path, upstream=upstream_of(other), **more) as g:
        g.log.append([new_record(RoutingChanged(tenant="t1", sequence=1, champion=4))])
        await until(lambda: g.gateway.router.routing("t1"))
        for key, status in ((None, 401), ("wrong", 401), ("reader-key", 403), ("agent-key-1", 200)):
            headers = {"Authorization": f"Bearer {key}"} if key else {}
            async with g.client.post(URL, json=chat(), headers=headers) as answer:
                assert answer.status == status
                if status != 200:
                    assert (await answer.json())["error"]["code"] in ("invalid_api_key", "forbidden")
        (span,) = await recorded(g.log, 1)
        (record,) = g.log.read(["spans"], {}, 10)
    assert seen == [goes_on]  # never the client's key of this gateway
    assert decode(record.value).tenant == "t1"
    assert span.attributes["spanloop.policy.version"] == "policy@v4"


async def test_with_content_off_nothing_of_it_reaches_the_log(tmp_path):
    async with gateway(tmp_path, training=False) as g:
        for stream in (False, True):
            request = chat(content="red green blue", stream=stream, user="person@example.com")
            async with g.client.post(URL, json=request) as answer:
                assert answer.status == 200
                await answer.read()
        found = await recorded(g.log, 2)
        data = b"".join(r.value for r in g.log.read(["spans"], {}, 10))
    for word in (
        b"token_ids",
        b"logprobs",
        b"menus",
        b"red",
        b"green",
        b"blue",
        b"person",
        b"short",
        b"full",
    ):
        assert word not in data.replace(b"$redacted", b"")
    for span in found:
        assert span.attributes["spanloop.policy.version"] == "policy@v1"
        assert span.attributes["gen_ai.usage.input_tokens"] == 5


async def test_metrics_and_health(tmp_path):
    async with gateway(tmp_path) as g:
        async with g.client.post(URL, json=chat()) as answer:
            await answer.read()
        await recorded(g.log, 1)
        async with g.client.get("/metrics") as answer:
            text = await answer.text()
        assert 'spanloop_gateway_requests_total{route="champion",status="200"} 1' in text
        assert "spanloop_gateway_lost_total 0" in text
        async with g.client.get("/healthz") as answer:
            assert await answer.json() == {"status": "ok", "champion": "policy@v1", "queue": 0, "lost": 0}


async def test_metrics_ask_for_a_key_where_there_are_keys(tmp_path):
    keys = [
        {"key": "watcher-key-0123456789", "role": "reader"},
        {"key": "agent-key-0123456789", "role": "agent"},
    ]
    async with gateway(tmp_path, credentials=keys) as g:

        async def asked(path: str, headers: dict[str, str]) -> int:
            async with g.client.get(path, headers=headers) as answer:
                assert ("spanloop_gateway" in await answer.text()) == (answer.status == 200)
                return answer.status

        assert await asked("/metrics", {}) == 401
        assert await asked("/metrics", {"Authorization": "Bearer wrong"}) == 401
        for given in keys:
            assert await asked("/metrics", {"Authorization": f"Bearer {given['key']}"}) == 200
        assert await asked("/metrics", {"X-Spanloop-Key": keys[0]["key"], "Authorization": "Bearer x"}) == 200
        async with g.client.get("/healthz") as answer:
            assert answer.status == 200


async def test_the_openai_client(tmp_path):
    async with (
        gateway(tmp_path) as g,
        openai.AsyncOpenAI(base_url=g.url + "v1", api_key="none", max_retries=0) as client,
    ):
        whole = await client.chat.completions.create(**chat(seed=3))
        (call,) = whole.choices[0].message.tool_calls
        assert call.function.name in ("close", "look", "spawn")
        name, arguments = "", ""
        async for chunk in await client.chat.completions.create(**chat(seed=3, stream=True)):
            for part in chunk.choices[0].delta.tool_calls or ():
                name += part.function.name or ""
                arguments += part.function.arguments or ""
        assert (name, arguments) == (call.function.name, call.function.arguments)
        assert [m.id async for m in client.models.list()] == ["policy", "policy@v1"]
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.chat.completions.create(**chat("policy@v77"))
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await client.chat.completions.create(**chat(temperature=-1))


async def test_a_pydantic_ai_agent(tmp_path):
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    calls = []

    def close() -> str:
        """End."""
        return "closed"

    def look() -> str:
        """Look closer."""
        calls.append("look")
        return "red green blue"

    def spawn(skill: Literal["a", "b", "c"], brief: Literal["short", "full"]) -> str:
        """Give the work to somebody."""
        return f"{skill} {brief}"

    outputs = [ToolOutput(close, name="close"), ToolOutput(spawn, name="spawn")]
    async with gateway(tmp_path) as g:
        provider = OpenAIProvider(base_url=g.url + "v1", api_key="none")
        agent = Agent(OpenAIChatModel("policy", provider=provider), tools=[look], output_type=outputs)
        for i in range(12):
            result = await agent.run(
                "red blue", model_settings={"temperature": 9.0, "extra_headers": {"X-Session-Id": f"run-{i}"}}
            )
            assert result.output == "closed" or set(result.output.split()) <= {*"abc", "short", "full"}
        await until(lambda: len(spans(g.log)) == 12 + len(calls))
        found = spans(g.log)
    assert len({s.attributes["spanloop.conversation"] for s in found}) == 12
    assert {s.attributes["spanloop.policy.version"] for s in found} == {"policy@v1"}
    assert len({s.attributes["spanloop.harness"] for s in found}) == 1
    after_look = [s for s in found if len(s.attributes["spanloop.prompt_token_ids"]) == 5]
    assert len(after_look) == len(calls) > 0  # the last message is then the tool's result


def start(module, config):
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--config", config], stdout=subprocess.PIPE, env=env, text=True
    )
    return process, json.loads(process.stdout.readline())


async def test_the_processes_say_ready_flush_on_sigterm_and_leave_zero(tmp_path):
    save_version(tmp_path, 1)
    config = tmp_path / "spanloop.toml"
    words = json.dumps(list(WORDS))
    config.write_text(
        f'workspace = "{tmp_path}"\n[content]\ntraining = true\n[serving]\nport = 0\n[gateway]\nport = 0\n[learner]\nvocabulary = {words}\n'
    )
    log = SqliteLog(tmp_path / "spanloop.db")
    log.append([new_record(RoutingChanged(sequence=1, champion=1))])
    serving, ready = await asyncio.to_thread(start, "spanloop.learner.serving.embedded", str(config))
    assert ready["ready"] == "serving"
    config.write_text(config.read_text().replace("[gateway]", f'[gateway]\nupstream = "{ready["url"]}/v1"'))
    proxy, ready = await asyncio.to_thread(start, "spanloop.collectors.gateway", str(config))
    assert ready["ready"] == "gateway"
    try:
        async with aiohttp.ClientSession() as session:
            for _ in range(5):
                async with session.post(ready["url"] + URL, json=chat(tools=TOOLS)) as answer:
                    assert answer.status == 200, await answer.text()
    finally:
        for process in (proxy, serving):
            process.send_signal(signal.SIGTERM)
    started = time.monotonic()
    assert [await asyncio.to_thread(p.wait, 20) for p in (proxy, serving)] == [0, 0]
    assert time.monotonic() - started < 15
    assert len(spans(log)) == 5  # the last ones were flushed
    log.close()
    for process in (proxy, serving):
        process.stdout.close()


async def test_a_port_that_is_taken_is_told(tmp_path):
    async with TestServer(web.Application()) as taken:
        env = {**os.environ, "SPANLOOP_GATEWAY__PORT": str(taken.port), "SPANLOOP_WORKSPACE": str(tmp_path)}
        process = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "spanloop.collectors.gateway"],
            env=env,
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert process.returncode == 4
    assert "in use by another process" in process.stderr
    assert "SPANLOOP_GATEWAY__PORT" in process.stderr
    assert process.stdout == ""
