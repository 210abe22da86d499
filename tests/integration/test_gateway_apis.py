"""The gateway's APIs before upstreams that answer as OpenAI's and vLLM's do: bytes, streams, tools, Responses, several servers."""

import asyncio
import json
from contextlib import asynccontextmanager

import openai
import pytest
import yarl
from aiohttp import web
from aiohttp.test_utils import TestServer
from gateway_support import URL, gateway, recorded, spans, upstream_of
from serving_support import chat, until

from spanloop.collectors.gateway_routes import extra_route
from spanloop.collectors.gateway_tokens import TOP_LOGPROBS
from spanloop.schemas.errors import ConfigError, SpanloopError

CONTROL = [
    "/pause", "/resume", "/is_paused", "/sleep", "/wake_up",
    "/is_sleeping", "/update_weights", "/start_weight_update", "/finish_weight_update", "/init_weight_transfer_engine",
    "/shutdown_weight_transfer_engine", "/update_weight_version", "/weight_info", "/weight_checker", "/load_lora_adapter",
    "/unload_lora_adapter", "/invocations", "/score", "/rerank", "/pooling",
    "/classify", "/tokenize", "/detokenize", "/tokenizer_info", "/collective_rpc",
    "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/server_info", "/abort_requests",
    "/scale_elastic_ep", "/start_profile", "/stop_profile", "/generative_scoring", "/inference/v1/generate",
    "/v2/embed", "/v2/rerank", "/cohere/v2/chat", "/ping", "/load",
    "/version", "/docs", "/openapi.json", "/fault_tolerance/apply", "/release_kv_cache_memory",
    "/kv_event_sources", "/get_world_size", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/score",
    "/v1/rerank", "/v1/systemone", "/v1/realtime", "/v1/messages", "/v1/chat/completions/batch",
    "/v1/chat/completions/render", "/v1/completions/render", "/v1/responses/render", "/v1/files", "/v1/fine_tuning/jobs",
    "/v1/../pause", "/v1/models/../../pause", "/v1/models/..%2f..%2fpause", "/v1//pause", "//pause",
    "/v1/chat/completions/../../../pause", "/sessions/s/pause", "/sessions/s/v1/load_lora_adapter", "/sessions/../pause", "/sessions/..%2f/v1/score",
    "/V1/chat/completions",
]  # fmt: skip


async def test_nothing_of_servings_control_surface_is_reachable(tmp_path):
    seen = []

    async def anything(request):
        seen.append(request.path)
        return web.Response()

    app = web.Application()
    app.router.add_route("*", "/{rest:.*}", anything)
    async with gateway(tmp_path, upstream=app, gateway={"passthrough": ["/v1/audio/*"]}) as g:
        for path in CONTROL:
            for method in ("GET", "POST", "PUT", "DELETE"):
                url = g.url.rstrip("/") + path
                async with g.client.session.request(method, yarl.URL(url, encoded=True)) as answer:
                    assert answer.status in (404, 405), (method, path, answer.status)
        assert seen == []
        async with g.client.post("/v1/audio/speech", data=b"x") as answer:
            assert answer.status == 200
        for path in ("/v1/audio/../pause", "/v1/audio/%2e%2e/pause"):
            async with g.client.session.post(yarl.URL(g.url.rstrip("/") + path, encoded=True)) as answer:
                assert answer.status == 404
        assert seen[-1] == "/v1/audio/speech"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/*",
        "/pause",
        "/v1/a/../pause",
        "/v1/x/sleep",
        "/v2/embed",
        "/v1/a?b",
        "/v1/Score",
    ],
)
def test_a_control_route_cannot_be_added(path):
    with pytest.raises(ConfigError, match="passthrough"):
        extra_route(path)


CHUNKS = [
    b': keep-alive\n\nevent: x\nid: 3\ndata: {"id": "c1",  "choices": [{"index": 0, "delta": {"content": "h\xc3\xa9"}}]}\n\n',
    b'data: {"id":"c1","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"call_1","function":{"name":"look","argu',
    b'ments":"{\\"a"}}]}}]}\r\n\r\ndata: {"id":"c1","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":'
    b'{"arguments":"\\": 1}"}},{"index":1,"id":"call_2","function":{"name":"spawn","arguments":"{}"}}]}}]}\n\n',
    b'data: {"id":"c1","choices":[{"index":0,"delta":{},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":2,"completion_tokens":3}}\n',
    b"\n\n\ndata: [DONE]\n\n",
]


def stream_of(pieces, headers=None):
    async def handler(request):
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream", **(headers or {})})
        await reply.prepare(request)
        for piece in pieces:
            await reply.write(piece)
            await asyncio.sleep(0)
        return reply

    return handler


async def test_a_stream_of_another_model_is_byte_for_byte_and_recorded(tmp_path):
    upstream = upstream_of(stream_of(CHUNKS, {"X-Ratelimit-Remaining": "7", "Set-Cookie": "a=b"}))
    async with gateway(tmp_path, upstream=upstream) as g:
        async with g.client.post(URL, json=chat("gpt-5", stream=True)) as answer:
            assert await answer.read() == b"".join(CHUNKS)
            assert answer.headers["X-Ratelimit-Remaining"] == "7"
            assert "Set-Cookie" not in answer.headers
        (span,) = await recorded(g.log, 1)
    (said,) = json.loads(span.attributes["gen_ai.output.messages"])
    calls = [part for part in said["parts"] if part["type"] == "tool_call"]
    assert [(c["id"], c["name"], c["arguments"]) for c in calls] == [
        ("call_1", "look", '{"a": 1}'),
        ("call_2", "spawn", "{}"),
    ]
    assert said["parts"][0]["content"] == "hé"
    assert span.attributes["spanloop.backend_gave_none"] is True
    assert span.attributes["gen_ai.usage.output_tokens"] == 3


async def test_a_stream_of_the_policy_is_what_the_server_says_to_one_who_does_not_ask(tmp_path):
    """The gateway's additions, taken out again, leave the server's own bytes."""

    async def vllm(request):
        body = await request.json()
        logprobs = (
            {"content": [{"token": "token_id:5", "logprob": -0.1, "top_logprobs": []}]}
            if body.get("logprobs")
            else None
        )
        chunk = {
            "id": "c1",
            "model": body["model"],
            "choices": [{"index": 0, "delta": {"content": "hé"}, "logprobs": logprobs}],
        }
        if body.get("return_token_ids"):
            chunk["prompt_token_ids"] = [1, 2]
            chunk["choices"][0]["token_ids"] = [5]
        events = [b"data: " + json.dumps(chunk, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"]
        if (body.get("stream_options") or {}).get("include_usage"):
            events.append(
                b'data: {"id":"c1","choices":[],"usage":{"prompt_tokens":2,"completion_tokens":1}}\n\n'
            )
        return await stream_of([*events, b"data: [DONE]\n\n"])(request)

    async with gateway(tmp_path, upstream=upstream_of(vllm)) as g:
        for more in (
            {},
            {"logprobs": True},
            {"return_token_ids": True},
            {"stream_options": {"include_usage": True}},
        ):
            request = chat(stream=True, **more)
            async with g.client.post(URL, json=request) as answer:
                through = await answer.read()
            async with g.client.session.post(
                g.server.make_url(URL), json={**request, "model": "policy@v1"}
            ) as answer:
                assert through == await answer.read()
        for span in await recorded(g.log, 4):
            assert span.attributes["spanloop.response_token_ids"] == [5]
            assert span.attributes["spanloop.response_logprobs"] == [-0.1]
            assert "spanloop.backend_gave_none" not in span.attributes


async def test_several_choices_and_parallel_calls(tmp_path):
    async def many(request):
        body = await request.json()
        choices = [
            {"index": i, "message": {"role": "assistant", "content": f"c{i}"}, "finish_reason": "stop"}
            for i in range(body["n"])
        ]
        await asyncio.sleep(0.05)
        return web.json_response({"id": "c-" + body["user"], "choices": choices})

    async with gateway(tmp_path, upstream=upstream_of(many)) as g:

        async def one(i):
            async with g.client.post(URL, json=chat("gpt-5", n=3, user=str(i))) as answer:
                return (await answer.json())["id"], len((await answer.json())["choices"])

        found = await asyncio.gather(*[one(i) for i in range(200)])
        assert found == [(f"c-{i}", 3) for i in range(200)]
        every = await recorded(g.log, 200)
    assert {s.attributes["gen_ai.response.id"] for s in every} == {f"c-{i}" for i in range(200)}
    assert len({(s.trace_id, s.span_id) for s in every}) == 200
    assert every[0].attributes["gen_ai.request.choice.count"] == 3
    assert every[0].attributes["gen_ai.response.finish_reasons"] == ["stop"] * 3


async def test_a_server_that_repeats_its_ids_does_not_make_two_calls_one(tmp_path):
    async def same(_):
        return web.json_response({"id": "x", "choices": []})

    async with gateway(tmp_path, upstream=upstream_of(same)) as g:
        for _ in range(3):
            async with g.client.post(URL, json=chat("gpt-5")) as answer:
                await answer.read()
        found = await recorded(g.log, 3)
    assert len({s.span_id for s in found}) == 3
    assert [s.attributes.get("spanloop.response_id.repeated") for s in found] == [None, True, True]


async def test_errors_go_back_unchanged(tmp_path):
    async def limited(request):
        status = int((await request.json())["user"])
        headers = {
            "Retry-After": "7",
            "retry-after-ms": "6500",
            "X-Should-Retry": "true",
            "Location": "http://elsewhere.test/",
        }
        return web.Response(status=status, body=b'{"error":  {"message": "slow down"}}', headers=headers)

    async with gateway(tmp_path, upstream=upstream_of(limited)) as g:
        for model in ("policy", "gpt-5"):
            for status in (429, 400, 500, 503, 307):
                async with g.client.post(
                    URL, json=chat(model, user=str(status)), allow_redirects=False
                ) as answer:
                    assert (answer.status, await answer.read()) == (
                        status,
                        b'{"error":  {"message": "slow down"}}',
                    )
                    assert answer.headers["Retry-After"] == "7"
                    assert answer.headers["retry-after-ms"] == "6500"
        found = await recorded(g.log, 10)
    assert {s.attributes["error.type"] for s in found} == {f"upstream_{s}" for s in (429, 400, 500, 503, 307)}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_ends_the_upstreams_work(tmp_path, stream):
    begun, ended = asyncio.Event(), asyncio.Event()

    async def endless(request):
        try:
            if stream:
                reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
                await reply.prepare(request)
                await reply.write(b'data: {"id":"c1","choices":[{"index":0,"delta":{"content":"he"}}]}\n\n')
            begun.set()
            await asyncio.sleep(60)
        finally:
            ended.set()

    async with gateway(tmp_path, upstream=upstream_of(endless)) as g:

        async def ask():
            async with g.client.post(URL, json=chat(stream=stream)) as answer:
                await answer.read()

        task = asyncio.create_task(ask())
        await asyncio.wait_for(begun.wait(), 10)
        await asyncio.sleep(0.2)
        task.cancel()
        await asyncio.wait_for(ended.wait(), 10)
        (span,) = await recorded(g.log, 1)
    assert span.attributes["error.type"] == "client_disconnected"
    assert span.attributes["http.response.status_code"] == 499
    if stream:
        assert span.attributes["gen_ai.response.id"] == "c1"


# ---------------------------------------------------------------- Responses


def response_object(body, **more):
    call = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_9",
        "name": "look",
        "arguments": '{"a": 1}',
        "status": "completed",
    }
    logprobs = [
        {"token": "h", "logprob": -0.5, "bytes": [104], "top_logprobs": []},
        {"token": "i", "logprob": -0.25, "bytes": [105], "top_logprobs": []},
    ]
    asked = "message.output_text.logprobs" in (body.get("include") or [])
    said = {"type": "output_text", "text": "hi", "annotations": [], "logprobs": logprobs if asked else None}
    message = {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [said],
    }
    raw = bool(body.get("enable_response_messages"))
    return {
        "id": "resp_1", "object": "response", "created_at": 1, "model": body["model"], "status": "completed", "output": [message, call],
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "top_logprobs": body.get("top_logprobs"),
        "input_messages": [{"type": "raw_message_tokens", "message": "m", "tokens": [1, 2, 3]}] if raw else None,
        "output_messages": [{"type": "raw_message_tokens", "message": "m", "tokens": [8, 9]}] if raw else None,
        "usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5, "input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}},
        **more,
    }  # fmt: skip


def response_events(body):
    whole = response_object(body)
    message, call = whole["output"]
    part = message["content"][0]
    begun = {
        **whole,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "input_messages": None,
        "output_messages": None,
    }
    events = [
        {"type": "response.created", "response": begun},
        {"type": "response.output_item.added", "output_index": 0, "item": {**message, "content": []}},
        {"type": "response.content_part.added", "output_index": 0, "part": {**part, "text": ""}},
        {
            "type": "response.output_text.delta",
            "output_index": 0,
            "delta": "h",
            "logprobs": (part["logprobs"] or [])[:1],
        },
        {
            "type": "response.output_text.delta",
            "output_index": 0,
            "delta": "i",
            "logprobs": (part["logprobs"] or [])[1:],
        },
        {
            "type": "response.output_text.done",
            "output_index": 0,
            "text": "hi",
            "logprobs": part["logprobs"] or [],
        },
        {"type": "response.output_item.done", "output_index": 0, "item": message},
        {"type": "response.output_item.added", "output_index": 1, "item": {**call, "arguments": ""}},
        {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": '{"a": 1}'},
        {"type": "response.output_item.done", "output_index": 1, "item": call},
        {"type": "response.completed", "response": whole},
    ]
    return [
        f"event: {e['type']}\ndata: ".encode()
        + json.dumps({**e, "sequence_number": i}, separators=(",", ":")).encode()
        + b"\n\n"
        for i, e in enumerate(events)
    ]


def responses_upstream(seen, *, cut=None, name=""):
    async def create(request):
        body = await request.json()
        seen.append((request.path, body))
        if body.get("stream"):
            return await stream_of(response_events(body)[:cut])(request)
        return web.json_response(
            response_object(body, id=f"resp_{name}{len(seen)}"),
            dumps=lambda v: json.dumps(v, separators=(",", ":")),
        )

    async def get(request):
        seen.append((request.path, None))
        return web.json_response({"id": request.match_info["id"], "object": "response"})

    app = upstream_of(create, "/v1/responses")
    app.router.add_get("/v1/responses/{id}", get)
    app.router.add_delete("/v1/responses/{id}", get)
    app.router.add_post("/v1/responses/{id}/cancel", get)
    return app


@pytest.mark.parametrize("stream", [False, True])
async def test_responses_are_recorded_with_tokens_and_shown_without(tmp_path, stream):
    seen = []
    async with gateway(tmp_path, upstream=responses_upstream(seen)) as g:
        tool = {"type": "function", "name": "look", "parameters": {}}
        items = [{"role": "user", "content": [{"type": "input_text", "text": "red"}]},
                 {"type": "function_call", "call_id": "c0", "name": "look", "arguments": "{}"},
                 {"type": "function_call_output", "call_id": "c0", "output": "blue"}]  # fmt: skip
        body = {
            "model": "policy",
            "instructions": "be brief",
            "input": items,
            "tools": [tool],
            "max_output_tokens": 9,
            "stream": stream,
        }
        async with g.client.post(
            "/sessions/s1/v1/responses", json=body, headers={"X-Turn-Type": "plan"}
        ) as answer:
            through = await answer.read()
        async with g.client.session.post(
            g.server.make_url("/v1/responses"), json={**body, "model": "policy@v1"}
        ) as answer:
            direct = await answer.read()
        assert through.replace(b"resp_1", b"resp_2") == direct.replace(b"resp_1", b"resp_2")
        (span,) = await recorded(g.log, 1)
    asked = seen[0][1]
    assert (asked["model"], asked["top_logprobs"], asked["enable_response_messages"]) == (
        "policy@v1",
        TOP_LOGPROBS,
        True,
    )
    a = span.attributes
    assert (a["gen_ai.operation.name"], a["spanloop.api"], a["spanloop.turn.type"]) == (
        "chat",
        "responses",
        "plan",
    )
    assert (a["spanloop.prompt_token_ids"], a["spanloop.response_token_ids"]) == ([1, 2, 3], [8, 9])
    assert a["spanloop.response_logprobs"] == [-0.5, -0.25]
    assert (
        a["gen_ai.usage.input_tokens"],
        a["gen_ai.usage.output_tokens"],
        a["gen_ai.request.max_tokens"],
    ) == (3, 2, 9)
    assert a["gen_ai.response.finish_reasons"] == ["tool_calls"]
    said = json.loads(a["gen_ai.output.messages"])[0]["parts"]
    assert [p.get("content") or p.get("id") for p in said] == ["hi", "call_9"]
    heard = json.loads(a["gen_ai.input.messages"])
    assert [m["role"] for m in heard] == ["system", "user", "assistant", "tool"]
    assert heard[1]["parts"][0]["content"] == "red"


async def test_a_responses_stream_that_breaks_off_keeps_what_came(tmp_path):
    async with gateway(tmp_path, upstream=responses_upstream([], cut=9)) as g:
        async with g.client.post(
            "/v1/responses", json={"model": "gpt-5", "input": "red", "stream": True}
        ) as answer:
            await answer.read()
        (span,) = await recorded(g.log, 1)
    said = json.loads(span.attributes["gen_ai.output.messages"])[0]["parts"]
    assert [p.get("content") or p.get("arguments") for p in said] == ["hi", '{"a": 1}']


async def test_an_answer_that_goes_on_stays_in_its_conversation_and_with_its_server(tmp_path):
    one, two = [], []
    async with (
        TestServer(responses_upstream(one, name="a")) as a,
        TestServer(responses_upstream(two, name="b")) as b,
    ):
        urls = [str(a.make_url("")), str(b.make_url(""))]
        sections = {"serving": {"engine": "vllm", "urls": urls}, "gateway": {"upstream": ""}}
        async with gateway(tmp_path, upstream=web.Application(), **sections) as g:
            ids = {}
            for word in ("red", "green", "blue", "black"):
                body = {"model": "policy", "input": word}
                async with g.client.post("/v1/responses", json=body) as answer:
                    ids[word] = (await answer.json())["id"]
            await recorded(g.log, 4)
            served = [(len(one), len(two))]
            for i, word in enumerate(ids):
                before = (len(one), len(two))
                body = {"model": "policy", "input": f"more {i}", "previous_response_id": ids[word]}
                async with g.client.post("/v1/responses", json=body) as answer:
                    assert (await answer.json())["id"]
                served.append((len(one) - before[0], len(two) - before[1]))
            found = await recorded(g.log, 8)
    first, second = found[:4], found[4:]
    assert [s.attributes["server.port"] for s in first] == [s.attributes["server.port"] for s in second]
    assert [s.attributes["spanloop.conversation"] for s in first] == [
        s.attributes["spanloop.conversation"] for s in second
    ]


async def test_another_tenants_answers_are_not_found(tmp_path):
    keys = [{"key": f"key-{t}", "tenant": t, "role": "agent"} for t in ("t1", "t2")]
    seen = []
    async with gateway(tmp_path, upstream=responses_upstream(seen), credentials=keys) as g:

        async def ask(method, path, key, **more):
            async with g.client.request(
                method, path, headers={"Authorization": f"Bearer key-{key}"}, **more
            ) as answer:
                return answer.status, await answer.json()

        status, body = await ask("POST", "/v1/responses", "t1", json={"model": "gpt-5", "input": "x"})
        assert status == 200
        await recorded(g.log, 1)
        name = body["id"]
        for method, path in (
            ("GET", f"/v1/responses/{name}"),
            ("DELETE", f"/v1/responses/{name}"),
            ("POST", f"/v1/responses/{name}/cancel"),
        ):
            assert (await ask(method, path, "t1"))[0] == 200
            assert (await ask(method, path, "t2"))[0] == 404
            assert (await ask(method, path.replace(name, "resp_unknown"), "t1"))[0] == 404
        going_on = {"model": "gpt-5", "input": "y", "previous_response_id": name}
        assert (await ask("POST", "/v1/responses", "t2", json=going_on))[0] == 404
        assert (await ask("POST", "/v1/responses", "t1", json=going_on))[0] == 200


async def test_the_openai_clients_responses(tmp_path):
    upstream = responses_upstream([])
    async with (
        gateway(tmp_path, upstream=upstream) as g,
        openai.AsyncOpenAI(base_url=g.url + "v1", api_key="none", max_retries=0) as client,
    ):
        whole = await client.responses.create(model="policy", input="red")
        assert whole.output_text == "hi"
        kinds = [
            event.type
            async for event in await client.responses.create(model="policy", input="red", stream=True)
        ]
        assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
        assert (await client.responses.retrieve("resp_1")).id == "resp_1"


# ---------------------------------------------------------------- completions, embeddings, several upstreams


@pytest.mark.parametrize("stream", [False, True])
async def test_completions(tmp_path, stream):
    async def complete(request):
        body = await request.json()
        choice = {
            "index": 0,
            "text": "hi",
            "finish_reason": "stop",
            "logprobs": None,
            "token_ids": None,
            "prompt_token_ids": None,
        }
        if body.get("logprobs"):
            choice["logprobs"] = {
                "tokens": ["token_id:8"],
                "token_logprobs": [-0.5],
                "top_logprobs": [{"token_id:8": -0.5, "token_id:9": -0.9328}],
                "text_offset": [0],
            }
        if body.get("return_token_ids"):
            choice.update(token_ids=[8], prompt_token_ids=[1, 2])
        answer = {
            "id": "cmpl-1",
            "object": "text_completion",
            "model": body["model"],
            "choices": [choice],
            "usage": {"prompt_tokens": 2, "completion_tokens": 1},
        }
        if not body.get("stream"):
            return web.json_response(answer, dumps=lambda v: json.dumps(v, separators=(",", ":")))
        usage = answer.pop("usage")
        events = (
            [answer, {**answer, "choices": [], "usage": usage}]
            if body["stream_options"]["include_usage"]
            else [answer]
        )
        datas = [b"data: " + json.dumps(e, separators=(",", ":")).encode() + b"\n\n" for e in events]
        return await stream_of([*datas, b"data: [DONE]\n\n"])(request)

    async with gateway(tmp_path, upstream=upstream_of(complete, "/v1/completions")) as g:
        body = {
            "model": "policy",
            "prompt": "red",
            "stream": stream,
            "stream_options": {"include_usage": False},
        }
        async with g.client.post("/v1/completions", json=body) as answer:
            through = await answer.read()
        async with g.client.session.post(
            g.server.make_url("/v1/completions"), json={**body, "model": "policy@v1"}
        ) as answer:
            assert through == await answer.read()
        (span,) = await recorded(g.log, 1)
    a = span.attributes
    assert (a["gen_ai.operation.name"], span.name) == ("text_completion", "text_completion policy")
    assert (
        a["spanloop.prompt_token_ids"],
        a["spanloop.response_token_ids"],
        a["spanloop.response_logprobs"],
    ) == ([1, 2], [8], [-0.5])
    assert a["spanloop.menus"] == [[[8, -0.5], [9, -0.9328]]]
    assert json.loads(a["gen_ai.output.messages"])[0]["parts"][0]["content"] == "hi"
    assert a["gen_ai.usage.output_tokens"] == 1


@asynccontextmanager
async def two_upstreams(tmp_path, seen, **more):
    def server(name):
        async def any_post(request):
            seen.append((name, request.path_qs, request.headers.get("Authorization"), dict(request.headers)))
            return web.json_response({"id": f"{name}-{len(seen)}", "choices": []})

        async def models(_):
            return web.json_response({"data": [{"id": f"{name}-large"}, {"id": "gpt-5"}, {"id": "gpt-4"}]})

        app = web.Application()
        app.router.add_get("/v1/models", models)
        app.router.add_post("/v1/{rest:.*}", any_post)
        return app

    async with (
        TestServer(server("own")) as own,
        TestServer(server("other")) as other,
        TestServer(server("third")) as third,
    ):
        upstreams = [
            {"models": ["gpt-5", "other-*"], "url": str(other.make_url("/v1")), "key": "provider-key"},
            {"models": ["gpt-*"], "url": str(third.make_url("/v1")), "tokens": True},
        ]
        sections = {"gateway": {"upstream": str(own.make_url("/v1")), "upstreams": upstreams}, **more}
        async with gateway(tmp_path, upstream=web.Application(), **sections) as g:
            yield g


async def test_upstreams_by_the_models_name(tmp_path):
    seen = []
    async with two_upstreams(tmp_path, seen) as g:
        headers = {
            "Authorization": "Bearer mine",
            "Cookie": "c=1",
            "X-Session-Id": "s",
            "OpenAI-Organization": "org",
            "traceparent": "x",
        }
        for model in ("policy", "gpt-5", "gpt-4", "llama"):
            async with g.client.post(URL + "?api-version=1", json=chat(model), headers=headers) as answer:
                assert answer.status == 200
        async with g.client.post(
            "/v1/embeddings", json={"model": "gpt-5", "input": "x"}, headers=headers
        ) as answer:
            assert answer.status == 200
        for session in ("score", "v1", "a%2Fv1", "..%2F"):
            url = yarl.URL(f"{g.url}sessions/{session}/v1/embeddings", encoded=True)
            async with g.client.session.post(url, json={"model": "gpt-5", "input": "x"}) as answer:
                assert answer.status == 200
            assert seen.pop()[:2] == ("other", "/v1/embeddings")
        async with g.client.get("/v1/models") as answer:
            listed = [m["id"] for m in (await answer.json())["data"]]
        found = await recorded(g.log, 4)  # embeddings are passed on and not recorded
        data = b"".join(r.value for r in g.log.read(["spans"], {}, 100))
    assert [s[:3] for s in seen] == [
        ("own", URL + "?api-version=1", "Bearer mine"),
        ("other", URL + "?api-version=1", "Bearer provider-key"),
        ("third", URL + "?api-version=1", "Bearer mine"),
        ("own", URL + "?api-version=1", "Bearer mine"),
        ("other", "/v1/embeddings", "Bearer provider-key"),
    ]
    for *_, sent in seen:
        assert sent["OpenAI-Organization"] == "org"
        assert not {"Cookie", "X-Session-Id", "traceparent"} & set(sent)
    assert sorted(listed) == ["gpt-4", "gpt-5", "other-large", "own-large", "policy"]
    assert b"mine" not in data
    assert b"provider-key" not in data
    assert [s.attributes.get("spanloop.backend_gave_none") for s in found] == [True] * 4


async def test_with_credentials_the_providers_key_travels_beside_ours(tmp_path):
    seen = []
    keys = [{"key": "agent-key", "tenant": "t1", "role": "agent"}]
    async with two_upstreams(tmp_path, seen, credentials=keys) as g:
        both = {"X-Spanloop-Key": "agent-key", "Authorization": "Bearer mine"}
        for headers, status in ((both, 200), ({"Authorization": "Bearer agent-key"}, 200), ({"Authorization": "Bearer mine"}, 401),
                                ({"X-Spanloop-Key": "wrong", "Authorization": "Bearer agent-key"}, 401)):  # fmt: skip
            async with g.client.post(URL, json=chat("gpt-4"), headers=headers) as answer:
                assert answer.status == status
    assert [s[2] for s in seen] == ["Bearer mine", None]
    assert not any("X-Spanloop-Key" in s[3] for s in seen)


async def test_what_is_recorded_of_a_request(tmp_path):
    seen = []
    async with two_upstreams(tmp_path, seen) as g:
        sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "frequency_penalty": 0.2,
                    "presence_penalty": 0.3, "repetition_penalty": 1.1, "n": 1}  # fmt: skip
        for headers in (
            {"X-Session-Id": "s1", "X-Turn-Type": "tool"},
            {"X-Spanloop-Session": "s1", "X-Turn-Type": "no<b>"},
        ):
            async with g.client.post(URL, json=chat("gpt-4", **sampling), headers=headers) as answer:
                await answer.read()
        async with g.client.post("/sessions/s1" + URL, json=chat("gpt-4")) as answer:
            await answer.read()
        found = await recorded(g.log, 3)
    a = found[0].attributes
    assert [
        a[f"gen_ai.request.{n}"]
        for n in ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")
    ] == [0.5, 0.9, 7, 3, 0.2, 0.3]
    assert (a["spanloop.request.min_p"], a["spanloop.request.repetition_penalty"]) == (0.1, 1.1)
    assert [s.attributes.get("spanloop.turn.type") for s in found] == ["tool", None, None]
    assert len({s.attributes["spanloop.conversation"] for s in found}) == 1
    assert {s.attributes["spanloop.conversation.source"] for s in found} == {"session"}


def test_settings_refuse_what_cannot_be(tmp_path):
    from serving_support import settings_of

    for upstream in (
        {"models": [], "url": "http://x/v1"},
        {"models": ["a"], "url": "ftp://x"},
        {"models": ["a"], "url": "http://u:p@x/v1"},
    ):
        with pytest.raises(SpanloopError):
            settings_of(tmp_path, gateway={"upstreams": [upstream]})


async def test_nothing_waits_for_ever(tmp_path):
    async with gateway(tmp_path, training=False) as g:
        async with g.client.post(URL, json=chat()) as answer:
            assert answer.status == 200
        await until(lambda: len(spans(g.log)) == 1)
        assert (
            "spanloop.backend_gave_none" not in spans(g.log)[0].attributes
        )  # content is off: nothing was asked for


HOSTILE = [
    b'data: {"choices": [{"index": 1e400}]}\n\n',
    b'data: {"choices": [{"index": -1, "delta": {"tool_calls": [{"index": 1e18}, {"index": "x"}]}}], "usage": []}\n\n',
    b'data: {"choices": {"a": 1}, "id": 7, "model": null}\n\ndata: 5\n\ndata: [1]\n\ndata: {\n\ndata: \xff\n\n',
    b'data: {"type": "response.output_text.delta", "output_index": 1e9, "delta": 5}\n\n',
    b'data: {"type": "response.output_item.added", "output_index": 0, "item": {"content": 5}}\n\n',
    b'data: {"type": "response.output_text.delta", "output_index": 0, "delta": [5]}\n\n',
    b'data: {"choices": [{"index": 0, "text": 5, "logprobs": {"tokens": [1], "token_logprobs": 5}, "token_ids": {"a": 1}}]}\n\n',
    b"\r\n\r\n\n\n: \n\nretry: 5\n\ndata\n\n" + b"data: x\n" * 100 + b"\n",
    b"data: " + b"x" * (17 * 2**20) + b"\n\n",
]


@pytest.mark.parametrize("path", [URL, "/v1/responses", "/v1/completions"])
async def test_whatever_an_upstream_streams_goes_on_as_it_came(tmp_path, path):
    async with gateway(tmp_path, upstream=upstream_of(stream_of(HOSTILE), path)) as g:
        async with g.client.post(path, json={"model": "gpt-5", "stream": True}) as answer:
            assert await answer.read() == b"".join(HOSTILE)
        await recorded(g.log, 1)
        for piece in HOSTILE[:-1]:
            async with TestServer(upstream_of(stream_of([piece]), path)) as other:
                g.gateway.targets.own = type(g.gateway.targets.own)((str(other.make_url("/v1")),))
                request = {"model": "policy", "stream": True, "messages": []}
                async with g.client.post(path, json=request) as answer:
                    assert answer.status == 200
                    assert b"gateway failed" not in await answer.read()
        await until(lambda: len(spans(g.log)) + g.gateway.recorder.num_lost == len(HOSTILE))
        assert g.gateway.recorder.num_lost == 0
