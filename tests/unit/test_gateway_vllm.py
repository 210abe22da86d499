"""What the gateway asks vLLM for beyond the embedded server's shapes, and how it goes on without one of several servers."""

import math
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from serving_support import until

from spanloop.collectors.gateway import Gateway
from spanloop.collectors.gateway_tokens import ask_for_tokens, call_tokens, is_greedy
from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.events import RoutingChanged, decode
from spanloop.schemas.settings import load_settings

BODY = {"model": "policy", "messages": [{"role": "user", "content": "red look"}]}


@pytest.mark.parametrize(
    ("count", "listed"), [(4, False), (20, False), (21, True), (128, True), (129, False)]
)
def test_a_long_list_of_allowed_tokens_is_asked_for_by_name(count, listed):
    allowed = list(range(100, 100 + count))
    asking, asked = ask_for_tokens({**BODY, "allowed_token_ids": allowed}, "policy@v1", tokens=True)
    assert (asking.get("logprob_token_ids") == allowed) is listed
    assert asking["logprobs"]
    assert not asked.logprobs
    assert (
        "logprob_token_ids"
        not in ask_for_tokens({**BODY, "allowed_token_ids": allowed}, "policy@v1", tokens=False)[0]
    )


def test_a_clients_own_choice_stays():
    own = {**BODY, "allowed_token_ids": list(range(30)), "logprobs": True, "logprob_token_ids": [1, 2]}
    asking, asked = ask_for_tokens(own, "policy@v1", tokens=True)
    assert asking["logprob_token_ids"] == [1, 2]
    assert asked.logprobs
    odd = {**BODY, "allowed_token_ids": "all of them"}
    assert "logprob_token_ids" not in ask_for_tokens(odd, "policy@v1", tokens=True)[0]


def test_greedy_answers_have_probability_one():
    top = [{"token": f"token_id:{t}", "logprob": math.log(p)} for t, p in ((7, 0.6), (8, 0.4))]
    entry = {"token": "token_id:7", "logprob": math.log(0.6), "top_logprobs": top}
    response = {
        "prompt_token_ids": [1, 5],
        "choices": [{"index": 0, "token_ids": [7], "logprobs": {"content": [entry]}}],
    }
    sampled = call_tokens(response)
    assert sampled.menus == (((7, math.log(0.6)), (8, math.log(0.4))),)
    greedy = call_tokens(response, greedy=True)
    assert (greedy.response_ids, greedy.logprobs, greedy.menus) == ((7,), (0.0,), (((7, 0.0),),))
    assert [is_greedy({"temperature": t}) for t in (0, 0.0, 1e-6, 0.1, None, "0", True)] == [
        True, True, True, False, False, False, False,
    ]  # fmt: skip


@asynccontextmanager
async def gateway_before(tmp_path, urls):
    settings = load_settings(
        flags={"workspace": str(tmp_path), "content": {"training": True}, "gateway": {"port": 0},
               "serving": {"engine": "vllm", "urls": urls}}
    )  # fmt: skip
    log = MemoryLog(SystemClock())
    log.append([new_record(RoutingChanged(sequence=1, champion=1))])
    async with TestClient(TestServer(Gateway(settings, log).application())) as client:
        yield client, log


def server_named(name, seen):
    async def chat(request):
        seen.append(name)
        body = await request.json()
        return web.json_response({"id": f"{name}-{len(seen)}", "model": body["model"], "choices": []})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    return app


async def ask(client, session):
    async with client.post("/v1/chat/completions", json=BODY, headers={"X-Session-Id": session}) as answer:
        return answer.status


async def test_a_conversation_stays_with_its_server(tmp_path):
    seen = []
    async with (
        TestServer(server_named("a", seen)) as a,
        TestServer(server_named("b", seen)) as b,
        gateway_before(tmp_path, [str(a.make_url("")), str(b.make_url(""))]) as (client, log),
    ):
        for _ in range(3):
            for session in "stuvwxyz":
                assert await ask(client, session) == 200
        assert seen[:8] == seen[8:16] == seen[16:]
        assert set(seen) == {"a", "b"}
        await b.close()
        del seen[:]
        for session in "stuvwxyz":
            assert await ask(client, session) == 200
        assert seen == ["a"] * 8
        await until(lambda: len(log.read(["spans"], {}, 100)) == 32)
        last = decode(log.read(["spans"], {}, 100)[-1].value).spans[0]
        assert last.attributes["server.port"] == a.port
        await a.close()
        assert await ask(client, "s") == 502
