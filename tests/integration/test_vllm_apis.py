"""The gateway's further APIs before a real vLLM: token ids and log-probabilities are asked for and taken out of the answer again."""

import asyncio
import json
import math
from contextlib import asynccontextmanager
from types import SimpleNamespace

import openai
import pytest
from aiohttp.test_utils import TestClient, TestServer
from serving_support import until
from vllm_support import FIRST, WORDS, ids, need_vllm, vllm_server

from spanloop.collectors.gateway import Gateway
from spanloop.learner.serving.vllm import VllmServing
from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.events import RoutingChanged, decode
from spanloop.schemas.settings import load_settings

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(360)]


@pytest.fixture
def server():
    need_vllm()
    return vllm_server()


@asynccontextmanager
async def before_vllm(server, tmp_path):
    """A gateway before the run's vLLM with one version of the policy."""
    serving = VllmServing([server.url])
    folder = server.version(tmp_path / "policy@v1", 1)
    await asyncio.to_thread(serving.load, "policy@v1", folder)
    settings = load_settings(
        flags={"workspace": str(tmp_path), "content": {"training": True}, "gateway": {"port": 0, "upstream": server.url + "/v1"}}
    )  # fmt: skip
    log = MemoryLog(SystemClock())
    log.append([new_record(RoutingChanged(sequence=1, champion=1))])
    try:
        async with TestClient(TestServer(Gateway(settings, log).application())) as client:
            yield SimpleNamespace(client=client, log=log, url=str(client.make_url("/")), direct=server.url)
    finally:
        await asyncio.to_thread(serving.unload, "policy@v1")


def spans(log):
    return [span for r in log.read(["spans"], {}, 10_000) for span in decode(r.value).spans]


def fields(value, at=""):
    """Every field with a value, by its place; ids and times apart."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from fields(item, f"{at}.{key}")
    elif isinstance(value, list):
        for item in value:
            yield from fields(item, at + "[]")
    elif value is not None:
        yield at


@pytest.mark.parametrize("stream", [False, True])
async def test_responses(server, tmp_path, stream):
    async with before_vllm(server, tmp_path) as g:
        body = {
            "model": "policy",
            "input": "red look",
            "max_output_tokens": 4,
            "temperature": 1.0,
            "seed": 3,
            "stream": stream,
            "store": False,
        }
        async with g.client.post("/v1/responses", json=body) as answer:
            assert answer.status == 200, await answer.text()
            through = await answer.text()
        async with g.client.session.post(
            g.direct + "/v1/responses", json={**body, "model": "policy@v1"}
        ) as answer:
            direct = await answer.text()
        await until(lambda: spans(g.log))
        a = spans(g.log)[0].attributes
    if stream:
        through, direct = (
            [json.loads(e.partition("data: ")[2]) for e in t.split("\n\n") if "data: {" in e]
            for t in (through, direct)
        )
        assert [e["type"] for e in through] == [e["type"] for e in direct]
    else:
        through, direct = json.loads(through), json.loads(direct)
    assert sorted(fields(through)) == sorted(fields(direct))
    assert a["gen_ai.response.id"].startswith("resp_")
    assert a["spanloop.policy.version"] == "policy@v1"
    assert len(a["spanloop.response_token_ids"]) == a["gen_ai.usage.output_tokens"]
    assert len(a["spanloop.prompt_token_ids"]) == a["gen_ai.usage.input_tokens"]
    assert len(a["spanloop.response_logprobs"]) == len(a["spanloop.response_token_ids"])
    assert all(math.isfinite(p) and p <= 0 for p in a["spanloop.response_logprobs"])
    assert "spanloop.backend_gave_none" not in a


@pytest.mark.parametrize("stream", [False, True])
async def test_completions(server, tmp_path, stream):
    async with before_vllm(server, tmp_path) as g:
        prompt = [1, *ids("red", "look"), 3]
        body = {
            "model": "policy",
            "prompt": prompt,
            "max_tokens": 3,
            "temperature": 1.0,
            "seed": 3,
            "stream": stream,
        }
        async with g.client.post("/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            text = await answer.text()
        await until(lambda: spans(g.log))
        a = spans(g.log)[0].attributes
    assert "token_id:" not in text
    assert a["gen_ai.operation.name"] == "text_completion"
    assert a["spanloop.prompt_token_ids"] == prompt
    assert (
        len(a["spanloop.response_logprobs"])
        == len(a["spanloop.response_token_ids"])
        == a["gen_ai.usage.output_tokens"]
    )
    assert all(t < FIRST + len(WORDS) + 64 for t in a["spanloop.response_token_ids"])


async def test_the_openai_client_and_other_models(server, tmp_path):
    async with (
        before_vllm(server, tmp_path) as g,
        openai.AsyncOpenAI(base_url=g.url + "v1", api_key="none", max_retries=0) as client,
    ):
        names = [m.id async for m in client.models.list()]
        assert {"policy", "policy@v1", "policy-base"} <= set(names)
        base = "policy-base"
        said = await client.chat.completions.create(
            model=base, messages=[{"role": "user", "content": "red"}], max_tokens=2, n=2
        )
        assert len(said.choices) == 2
        await until(lambda: spans(g.log))
        a = spans(g.log)[0].attributes
    assert (a["spanloop.policy.route"], a["gen_ai.request.choice.count"]) == ("pass", 2)
    assert (
        a["spanloop.backend_gave_none"] is True
    )  # it was not asked: only the policy's tokens are learned from
