"""The embedded server over HTTP: vLLM's shapes, OpenAI's errors, versions by name."""

import asyncio
import json
import math
import re

import pytest
from aiohttp.test_utils import TestClient, TestServer
from serving_support import TOKENIZER, TOOLS, chat, save_version, settings_of, sse, tool

from spanloop.learner.serving.adapters import GRACE_S, HARD_FACTOR, Adapters, AlreadyLoaded, NotFound
from spanloop.learner.serving.embedded import EmbeddedServer
from spanloop.learner.tokenizer import Tokenizer
from spanloop.schemas.errors import SchemaError, TransientError

TOKENS = {"logprobs": True, "top_logprobs": 20, "return_token_ids": True, "return_tokens_as_token_ids": True}


@pytest.fixture
async def server(tmp_path):
    for version in (1, 2):
        save_version(tmp_path, version)
    return EmbeddedServer(settings_of(tmp_path, serving={"exploration": 0.1}))


@pytest.fixture
async def client(server):
    async with TestClient(TestServer(server.application())) as found:
        yield found


async def ask(client, **more):
    async with client.post("/v1/chat/completions", json=chat(**{"model": "policy@v1", **more})) as answer:
        return answer.status, await answer.json()


async def test_the_shape_is_vllms(client):
    status, body = await ask(client, seed=3, **TOKENS)
    assert status == 200
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", body["id"])
    assert (body["object"], body["model"]) == ("chat.completion", "policy@v1")
    assert body["prompt_token_ids"] == [1, *TOKENIZER.encode(["red", "green"]), 3]
    (choice,) = body["choices"]
    ids = choice["token_ids"]
    assert body["usage"] == {"prompt_tokens": 4, "completion_tokens": len(ids), "total_tokens": 4 + len(ids)}
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert (message["role"], message["content"]) == ("assistant", None)
    (call,) = message["tool_calls"]
    assert call["type"] == "function"
    assert call["id"]
    words = [call["function"]["name"], *json.loads(call["function"]["arguments"]).values()]
    assert TOKENIZER.decode(ids) == words
    entries = choice["logprobs"]["content"]
    assert [e["token"] for e in entries] == [f"token_id:{i}" for i in ids]
    for entry in entries:
        assert entry["bytes"] == list(entry["token"].encode())
        top = entry["top_logprobs"]
        assert sum(math.exp(t["logprob"]) for t in top) == pytest.approx(1.0, abs=1e-6)
        assert [t["logprob"] for t in top] == sorted((t["logprob"] for t in top), reverse=True)
        assert entry["logprob"] in [t["logprob"] for t in top if t["token"] == entry["token"]]
        assert min(t["logprob"] for t in top) >= math.log(0.1 / len(top)) - 1e-6  # the exploration floor
    assert {t["token"] for t in entries[0]["top_logprobs"]} == {
        f"token_id:{TOKENIZER.id_of(w)}" for w in ("close", "look", "spawn")
    }


async def test_nothing_more_than_asked(client):
    _, body = await ask(client)
    assert body["prompt_token_ids"] is None
    assert body["choices"][0]["token_ids"] is None
    assert body["choices"][0]["logprobs"] is None
    _, body = await ask(client, logprobs=True, top_logprobs=1)
    (first, *_) = body["choices"][0]["logprobs"]["content"]
    assert first["token"] in ("close", "look", "spawn")
    assert len(first["top_logprobs"]) == 1


async def test_a_seed_reproduces_and_without_one_the_server_goes_on(client):
    async def token_ids(**more):
        _, body = await ask(client, return_token_ids=True, temperature=5.0, **more)
        return tuple(body["choices"][0]["token_ids"])

    assert len({await token_ids(seed=7) for _ in range(5)}) == 1
    assert len({await token_ids(seed=s) for s in range(30)}) > 3
    assert len({await token_ids() for _ in range(30)}) > 3


async def test_temperature_zero_is_greedy(client):
    answers = [(await ask(client, temperature=0, **TOKENS))[1]["choices"][0] for _ in range(5)]
    assert len({tuple(a["token_ids"]) for a in answers}) == 1
    for entry in answers[0]["logprobs"]["content"]:
        assert entry["logprob"] == 0.0
        assert {t["logprob"] for t in entry["top_logprobs"]} <= {0.0, -9999.0}


async def test_a_stream_spells_the_same_answer(client):
    _, whole = await ask(client, seed=11, **TOKENS)
    request = chat("policy@v1", seed=11, stream=True, stream_options={"include_usage": True}, **TOKENS)
    async with client.post("/v1/chat/completions", json=request) as answer:
        assert answer.content_type == "text/event-stream"
        chunks = sse(await answer.text())
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert chunks[-1]["choices"] == []
    parts = [c["choices"][0] for c in chunks[:-1]]
    assert [i for p in parts for i in p["token_ids"]] == whole["choices"][0]["token_ids"]
    assert [e for p in parts if p["logprobs"] for e in p["logprobs"]["content"]] == whole["choices"][0][
        "logprobs"
    ]["content"]
    calls = [d for p in parts for d in p["delta"].get("tool_calls", ())]
    function = whole["choices"][0]["message"]["tool_calls"][0]["function"]
    assert calls[0]["function"]["name"] == function["name"]
    assert "".join(c["function"]["arguments"] for c in calls) == function["arguments"]
    assert [p["finish_reason"] for p in parts] == [None] * (len(parts) - 1) + ["tool_calls"]


@pytest.mark.parametrize(
    ("more", "status", "says"),
    [
        ({"model": "policy@v9"}, 404, "The model `policy@v9` does not exist."),
        ({"model": "../policies/policy@v1"}, 404, "does not exist"),
        ({"tools": None}, 400, "only generates tool calls"),
        (
            {"tools": [tool("look", note={"type": "string"})]},
            400,
            "not an enum; the embedded server only generates enum",
        ),
        ({"tools": [tool("look", skill=["zebra"])]}, 400, "'zebra' is not in the vocabulary"),
        ({"content": "red " * 13}, 400, "more than the 16 of the context"),
        ({"max_tokens": 2}, 400, "max_tokens = 2 cannot hold the longest response of 3"),
        ({"n": 2}, 400, "n = 2"),
        ({"temperature": -1}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"top_logprobs": 3}, 400, "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "0 to 20"),
        ({"seed": "x"}, 400, "Expected `int | null`, got `str` - at `$.seed`"),
        ({"messages": [{"role": "system", "content": "red"}]}, 400, "role user or tool"),
        ({"model": None}, 400, "$.model"),
    ],
)
async def test_errors_are_openais(client, more, status, says):
    found, body = await ask(client, **more)
    assert found == status
    assert says in body["error"]["message"]
    assert body["error"]["code"] == status
    assert body["error"]["type"] == {400: "BadRequestError", 404: "NotFoundError"}[status]


async def test_malformed_bodies_and_unknown_routes(client):
    for data, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400), (b"[" * 100_000, 400)):
        async with client.post("/v1/chat/completions", data=data) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["message"]
    async with client.get("/v1/nothing") as answer:
        assert answer.status == 404
        assert "error" in await answer.json()
    async with client.post("/v1/chat/completions", data=b"x" * (5 * 2**20)) as answer:
        assert answer.status == 413


async def test_load_list_unload_as_vllm(client, tmp_path):
    path = str(tmp_path / "policies" / "policy@v2")
    load = {"lora_name": "canary", "lora_path": path}
    async with client.post("/v1/load_lora_adapter", json=load) as answer:
        assert (answer.status, await answer.text()) == (
            200,
            "Success: LoRA adapter 'canary' added successfully.",
        )
    async with client.post("/v1/load_lora_adapter", json=load) as answer:
        assert answer.status == 400
        assert "already been loaded" in (await answer.json())["error"]["message"]
    async with client.post(
        "/v1/load_lora_adapter", json={**load, "lora_name": "x", "lora_path": path + "0"}
    ) as answer:
        assert answer.status == 404
    async with client.get("/v1/models") as answer:
        (card,) = (await answer.json())["data"]
        assert (card["id"], card["root"], card["object"]) == ("canary", path, "model")
    assert (await ask(client, model="canary"))[0] == 200
    async with client.post("/v1/unload_lora_adapter", json={"lora_name": "canary"}) as answer:
        assert answer.status == 200
    assert (await ask(client, model="canary"))[0] == 404
    async with client.post("/v1/unload_lora_adapter", json={"lora_name": "canary"}) as answer:
        assert answer.status == 404
    async with client.get("/health") as answer:
        assert answer.status == 200


async def test_a_corrupt_artifact_is_refused_and_a_restored_one_served(client, tmp_path):
    file = tmp_path / "policies" / "policy@v2" / "model.safetensors"
    good = file.read_bytes()
    file.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    status, body = await ask(client, model="policy@v2")
    assert status == 400
    assert "corrupt" in body["error"]["message"]
    file.write_bytes(good)
    assert (await ask(client, model="policy@v2"))[0] == 200


async def test_many_first_requests_load_once(client, server, monkeypatch):
    reads = []
    read = server.adapters.read
    monkeypatch.setattr(server.adapters, "read", lambda path: reads.append(path) or read(path))
    assert {status for status, _ in await asyncio.gather(*[ask(client) for _ in range(8)])} == {200}
    assert len(reads) == 1


async def test_prompts_are_scored_as_vllm_does(client):
    body = {
        "model": "policy@v1",
        "prompt": [[1, 5, 3], [1, 6]],
        "max_tokens": 1,
        "prompt_logprobs": 1,
        "return_token_ids": True,
    }
    async with client.post("/v1/completions", json=body) as answer:
        found = await answer.json()
    assert [c["index"] for c in found["choices"]] == [0, 1]
    first, second = (c["prompt_logprobs"] for c in found["choices"])
    assert first[0] is None
    assert second[0] is None
    assert set(first[1]) >= {"5"}
    assert first[1]["5"]["decoded_token"] == "red"
    assert min(entry["rank"] for entry in first[1].values()) == 1
    assert found["choices"][1]["prompt_token_ids"] == [1, 6]
    for wrong in (
        {"prompt": [99]},
        {"prompt": []},
        {"prompt": [1, [2]]},
        {"prompt": [1] * 17},
        {"max_tokens": 5},
        {"prompt": "red"},
    ):
        async with client.post("/v1/completions", json={**body, **wrong}) as answer:
            assert answer.status == 400, wrong


def test_versions_leave_memory_longest_unused_first(tmp_path):
    now = [0.0]
    adapters = Adapters(tmp_path / "policies", limit=2, now_s=lambda: now[0], wall_s=lambda: 0.0)
    artifact = adapters.read(save_version(tmp_path, 1))

    def names():
        return [a.name for a in adapters.all()]

    adapters.add("v1", tmp_path, artifact)
    adapters.add("v2", tmp_path, artifact)
    with pytest.raises(AlreadyLoaded):
        adapters.add("v2", tmp_path, artifact)
    now[0] = GRACE_S - 1
    assert adapters.get("v1") is not None
    adapters.add("v3", tmp_path, artifact)  # all were used a moment ago: none goes
    assert names() == ["v2", "v1", "v3"]
    now[0] = GRACE_S + 1
    adapters.add("v4", tmp_path, artifact)  # only v2 is old enough
    assert names() == ["v1", "v3", "v4"]
    for i in range(5, 5 + HARD_FACTOR * 2 - 3):
        adapters.add(f"v{i}", tmp_path, artifact)
    with pytest.raises(TransientError, match="unload some"):
        adapters.add("more", tmp_path, artifact)
    now[0] = 3 * GRACE_S
    adapters.add("more", tmp_path, artifact)
    assert len(names()) == 2
    with pytest.raises(NotFound):
        adapters.remove("v1")


def test_another_vocabulary_is_refused(tmp_path):
    other = Adapters(tmp_path, limit=2, now_s=lambda: 0.0, wall_s=lambda: 0.0, vocabulary=Tokenizer(["x"]))
    with pytest.raises(SchemaError, match="another vocabulary"):
        other.read(save_version(tmp_path, 1))


async def test_grammars_are_compiled_once_and_bounded(client, server):
    for i in range(3):
        assert (await ask(client, tools=TOOLS, user=str(i)))[0] == 200
    assert len(server._grammars) == 1
