"""A real vLLM under the learner and behind the gateway: versions beside each other, pushed and withdrawn under traffic; what the
gateway records is what vLLM sampled from."""

import asyncio
import hashlib
import json
import math
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp.test_utils import TestClient, TestServer
from mlflow_support import Server as MlflowServer
from serving_support import sse, until
from vllm_support import (
    FIRST,
    WORDS,
    ids,
    need_vllm,
    peft_scores,
    start_server,
    stop_server,
    vllm_server,
    write_lora,
)

from spanloop.collectors.gateway import Gateway
from spanloop.learner.deployment import Deployment
from spanloop.learner.hf_base import base_of_settings
from spanloop.learner.hf_policy import HfPolicy
from spanloop.learner.registry import MlflowRegistry
from spanloop.learner.serving.calls import ServerCalls
from spanloop.learner.serving.vllm import VllmServing, serving_of
from spanloop.learner.tiny_model import build_tiny_model
from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.ports import new_record
from spanloop.pipeline.workspace import process_name
from spanloop.schemas.errors import SchemaError, TransientError
from spanloop.schemas.events import RoutingChanged, decode
from spanloop.schemas.settings import load_settings

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(360)]
URL = "/v1/chat/completions"
CHOICES = ("north", "south", "east", "west")
PROMPT = [1, *ids("red", "look"), 3]


@pytest.fixture
def server():
    need_vllm()
    return vllm_server()


@pytest.fixture
def serving(server):
    made = VllmServing([server.url])
    yield made
    for name in made.loaded():
        made.unload(name)


def chat(model, **more):
    messages = [{"role": "user", "content": "red look"}]
    body = {"model": model, "messages": messages, "max_tokens": 1, **more}
    if "allowed_token_ids" not in body:
        body["structured_outputs"] = {"choice": list(CHOICES)}
    return body


def menu_of(server, folder, prompt, options, *, exploration=0.0):
    """Log-probabilities of the options after a prompt, by transformers and peft."""
    raw = [peft_scores(server.base, folder, [[*prompt, option]])[0][-1] for option in options]
    total = math.log(sum(math.exp(value) for value in raw))
    count = len(options)
    return {
        option: math.log((1 - exploration) * math.exp(value - total) + exploration / count)
        for option, value in zip(options, raw, strict=True)
    }


def test_versions_answer_beside_each_other(server, serving, tmp_path):
    folders = {v: server.version(tmp_path / f"policy@v{v}", v) for v in (1, 2, 3)}
    for version, folder in folders.items():
        serving.load(f"policy@v{version}", folder)
    options = ids(*CHOICES)
    prompt = [1, *ids("red", "look"), 3]
    expected = {v: menu_of(server, folder, prompt, options) for v, folder in folders.items()}
    calls = ServerCalls(server.url)

    def ask(number):
        version = 1 + number % 3
        body = {"model": f"policy@v{version}", "prompt": [prompt], "max_tokens": 1, "logprobs": 4, "allowed_token_ids": options,
                "return_token_ids": True}  # fmt: skip
        return version, calls.call("POST", "/v1/completions", body).body

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(60)))
    assert len({v for v, _ in answers}) == 3
    for version, body in answers:
        (choice,) = body["choices"]
        assert body["model"] == f"policy@v{version}"
        (token,) = choice["token_ids"]
        assert choice["logprobs"]["token_logprobs"][0] == pytest.approx(expected[version][token], abs=1e-4)


def test_what_it_cannot_serve_is_refused_and_it_goes_on(server, serving, tmp_path):
    too_large = write_lora(tmp_path / "policy@v1", server.base, 1, rank=16)
    with pytest.raises(SchemaError, match="larger --max-lora-rank"):
        serving.load("policy@v1", too_large)
    other = json.loads((server.base / "config.json").read_text())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps({**other, "hidden_size": 96}))
    with pytest.raises(SchemaError, match="refuses policy@v2"):
        serving.load("policy@v2", write_lora(tmp_path / "policy@v2", tmp_path / "other", 1))
    assert serving.loaded() == []
    serving.load("policy@v3", server.version(tmp_path / "policy@v3", 3))
    assert serving.loaded() == ["policy@v3"]


def test_unloading_waits_for_what_runs_on_the_version(server, serving, tmp_path):
    serving.load("policy@v1", server.version(tmp_path / "policy@v1", 1))
    calls = ServerCalls(server.url, timeout_s=120)
    done = {}

    def long():
        body = {"model": "policy@v1", "prompt": [[1, 5, 6]], "max_tokens": 250, "ignore_eos": True}
        done["answer"] = calls.call("POST", "/v1/completions", body)
        done["at"] = time.monotonic()

    thread = threading.Thread(target=long)
    thread.start()
    while "policy@v1" not in str(ServerCalls(server.url).ask("GET", "/metrics").body):
        time.sleep(0.01)
    patient = VllmServing([server.url], grace_s=60.0)
    patient.unload("policy@v1")
    unloaded = time.monotonic()
    thread.join(120)
    assert done["answer"].status == 200
    assert done["answer"].body["usage"]["completion_tokens"] == 250
    assert unloaded >= done["at"] - 0.2
    assert serving.loaded() == []


def test_unloading_in_flight_fails_nothing(server, serving, tmp_path):
    serving.load("policy@v1", server.version(tmp_path / "policy@v1", 1))
    calls = ServerCalls(server.url, timeout_s=120)
    with ThreadPoolExecutor(4) as pool:
        body = {"model": "policy@v1", "prompt": [[1, 5, 6]], "max_tokens": 120, "ignore_eos": True}
        running = [pool.submit(calls.call, "POST", "/v1/completions", body) for _ in range(4)]
        time.sleep(0.3)
        VllmServing([server.url], grace_s=0.0).unload("policy@v1")
        answers = [future.result() for future in running]
    assert [a.status for a in answers] == [200] * 4
    assert [a.body["usage"]["completion_tokens"] for a in answers] == [120] * 4


def test_the_learners_version_passes_its_probe(server, tmp_path):
    settings = load_settings(
        flags={"workspace": str(tmp_path), "serving": {"engine": "vllm", "urls": [server.url]},
               "learner": {"model": str(server.base)}}
    )  # fmt: skip
    base = base_of_settings(settings.learner)
    nets = {0: HfPolicy(base, base.initial(0)), 1: HfPolicy(base, base.initial(1))}
    for name, tensor in nets[1].tensors().items():
        if "lora_B" in name:
            tensor.normal_(0.0, 0.1)
    for version, net in nets.items():
        net.save(tmp_path / "policies" / f"policy@v{version}", None, {})
    deployment = Deployment(
        serving_of(settings),
        "policy",
        net=lambda v: nets[v],
        folder=lambda v: tmp_path / "policies" / f"policy@v{v}",
    )
    assert deployment.ensure(0)
    assert deployment.ensure(1)
    nets[2], nets[3] = nets[1], nets[0]
    (tmp_path / "policies" / "policy@v2").symlink_to(tmp_path / "policies" / "policy@v0")
    assert not deployment.ensure(2)  # its weights are not the ones that it stands for
    assert deployment.unroutable == {2}
    deployment.drain({0}, 0.0)
    deployment.drain({0}, 1e6)
    assert serving_of(settings).loaded() == ["policy@v0"]
    serving_of(settings).unload("policy@v0")


def test_a_version_is_found_by_its_name_after_a_restart(server, serving):
    folder = server.version(server.workspace / "policies" / "policy@v77", 77)
    body = {"model": "policy@v77", "prompt": [PROMPT], "max_tokens": 1}
    answer = ServerCalls(server.url).call("POST", "/v1/completions", body)
    assert (answer.status, answer.body["model"]) == (200, "policy@v77")
    serving.load("policy@v77", folder)  # there already, from the same path
    prompts = [PROMPT]
    found, expected = serving.probe("policy@v77", prompts), peft_scores(server.base, folder, prompts)
    assert found[0] == pytest.approx(expected[0], abs=1e-5)


# ---------------------------------------------------------------- behind the gateway


@asynccontextmanager
async def gateway(server, workspace, **routing):
    settings = load_settings(
        flags={"workspace": str(workspace), "content": {"training": True}, "gateway": {"port": 0},
               "serving": {"engine": "vllm", "urls": [server.url]}, "learner": {"model": str(server.base)}}
    )  # fmt: skip
    log = MemoryLog(SystemClock())
    log.append([new_record(RoutingChanged(sequence=1, champion=1, **routing))])
    made = Gateway(settings, log)
    async with TestClient(TestServer(made.application())) as client:
        yield SimpleNamespace(client=client, log=log, gateway=made)


def spans(log):
    return [span for r in log.read(["spans"], {}, 10_000) for span in decode(r.value).spans]


async def asked(g, body, **headers):
    """Answer and recorded attributes of one call."""
    before = len(spans(g.log))
    async with g.client.post(URL, json=body, headers=headers) as answer:
        text = await answer.text()
        assert answer.status == 200, text
    await until(lambda: len(spans(g.log)) > before)
    span = spans(g.log)[-1]
    return sse(text) if body.get("stream") else json.loads(text), span.attributes


def menu(attributes):
    (options,) = attributes["spanloop.menus"]
    return {int(token): logprob for token, logprob in options}


async def test_the_gateway_records_what_vllm_sampled_from(server, serving, tmp_path):
    folder = server.version(tmp_path / "policy@v1", 1)
    await asyncio.to_thread(serving.load, "policy@v1", folder)
    options = ids(*CHOICES)
    async with gateway(server, tmp_path) as g:
        body, a = await asked(g, chat("policy"))
        assert body["model"] == "policy@v1"
        assert body["choices"][0]["message"]["content"].strip() in CHOICES
        assert body["choices"][0]["logprobs"] is None
        assert "prompt_token_ids" not in body
        assert "token_ids" not in body["choices"][0]
        prompt = a["spanloop.prompt_token_ids"]
        expected = menu_of(server, folder, prompt, options)
        assert a["spanloop.policy.version"] == a["gen_ai.response.model"] == "policy@v1"
        (token,) = a["spanloop.response_token_ids"]
        assert WORDS[token - FIRST] == body["choices"][0]["message"]["content"].strip()
        assert menu(a) == pytest.approx(expected, abs=1e-4)
        assert a["spanloop.response_logprobs"] == pytest.approx([expected[token]], abs=1e-4)

        # temperature is part of the behaviour
        _, a = await asked(g, chat("policy", temperature=0.5))
        total = math.log(sum(math.exp(2 * p) for p in expected.values()))
        assert menu(a) == pytest.approx({t: 2 * p - total for t, p in expected.items()}, abs=1e-4)

        # the same by a list of tokens, streamed
        chunks, a = await asked(g, chat("policy", allowed_token_ids=options, stream=True))
        assert a["spanloop.prompt_token_ids"] == prompt
        assert menu(a) == pytest.approx(expected, abs=1e-4)
        assert all("token_ids" not in c for chunk in chunks for c in chunk["choices"])
        assert all("prompt_token_ids" not in chunk for chunk in chunks)

        # more options than top_logprobs can tell
        many = [FIRST + i for i in range(len(WORDS))]
        _, a = await asked(g, chat("policy", allowed_token_ids=many))
        assert menu(a) == pytest.approx(menu_of(server, folder, prompt, many), abs=1e-4)

        # greedy: what was taken had probability one
        _, a = await asked(g, chat("policy", temperature=0))
        assert a["spanloop.response_token_ids"] == [max(expected, key=lambda t: expected[t])]
        assert a["spanloop.response_logprobs"] == [0.0]
        assert "spanloop.tokens.problem" not in a

        # more than one token: the end is forced
        _, a = await asked(g, chat("policy", max_tokens=4))
        assert len(a["spanloop.response_token_ids"]) == 2
        assert a["spanloop.response_logprobs"][1] == pytest.approx(0.0, abs=1e-6)


async def test_the_learning_share_explores(server, serving, tmp_path):
    folder = server.version(tmp_path / "policy@v1", 1)
    await asyncio.to_thread(serving.load, "policy@v1", folder)
    options = ids(*CHOICES)
    async with gateway(server, tmp_path, learner=1, learning_share=0.9, exploration=0.4) as g:
        seen = {}
        for number in range(12):
            _, a = await asked(g, chat("policy"), **{"X-Session-Id": f"s{number}"})
            seen[a["spanloop.policy.route"]] = a
        expected = menu_of(server, folder, a["spanloop.prompt_token_ids"], options, exploration=0.4)
        assert menu(seen["learning"]) == pytest.approx(expected, abs=1e-4)
        if "champion" in seen:
            assert menu(seen["champion"]) != pytest.approx(expected, abs=1e-2)
        # an open answer is not mixed with noise
        free = {"model": "policy", "messages": [{"role": "user", "content": "red look"}], "max_tokens": 1,
                "allowed_token_ids": list(range(len(WORDS) + 9))}  # fmt: skip
        _, a = await asked(g, free, **{"X-Session-Id": "s0"})
        everything = menu_of(server, folder, a["spanloop.prompt_token_ids"], free["allowed_token_ids"])
        assert menu(a) == pytest.approx(everything, abs=1e-4)
    answer = ServerCalls(server.url).ask("POST", URL, chat("policy@v1", vllm_xargs={"exploration": 0.7}))
    assert (answer.status, "out of range" in answer.body) == (400, True)


async def test_no_request_fails_while_versions_are_pushed(server, serving, tmp_path):
    await asyncio.to_thread(serving.load, "policy@v1", server.version(tmp_path / "policy@v1", 1))
    async with gateway(server, tmp_path) as g:
        stop, statuses, models = asyncio.Event(), [], []

        async def traffic(number):
            turn = 0
            while not stop.is_set():
                turn += 1
                headers = {"X-Session-Id": f"{number}/{turn}"}
                async with g.client.post(URL, json=chat("policy"), headers=headers) as answer:
                    body = await answer.json()
                    statuses.append(answer.status)
                    models.append(body.get("model"))

        workers = [asyncio.create_task(traffic(n)) for n in range(8)]
        for version in range(2, 8):
            folder = server.version(tmp_path / f"policy@v{version}", version)
            await asyncio.to_thread(serving.load, f"policy@v{version}", folder)
            g.log.append([new_record(RoutingChanged(sequence=version, champion=version))])
            name = f"policy@v{version}"
            await until(lambda name=name: models and models[-1] == name)
            if version > 2:
                await asyncio.to_thread(serving.unload, f"policy@v{version - 2}")
        stop.set()
        await asyncio.gather(*workers)
    assert set(statuses) == {200}
    assert set(models) == {f"policy@v{v}" for v in range(1, 8)}
    assert serving.loaded() == ["policy@v6", "policy@v7"]


# ---------------------------------------------------------------- the process


def group_members(group):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                if os.getpgid(int(entry)) == group and process_name(int(entry)):
                    found.append(int(entry))
            except OSError:
                continue
    return found


@pytest.mark.slow
def test_nothing_of_a_killed_vllm_is_left(server, tmp_path):
    second = start_server(tmp_path / "workspace", server.base)
    try:
        group = int((second.workspace / "vllm.group").read_text())
        assert len(group_members(group)) >= 2  # API server and engine
        serving = VllmServing([server.url, second.url])
        folder = server.version(tmp_path / "policy@v1", 1)
        serving.load("policy@v1", folder)
        assert serving.loaded() == ["policy@v1"]
        assert serving.probe("policy@v1", [PROMPT]) == VllmServing([server.url]).probe("policy@v1", [PROMPT])
        os.kill(group, signal.SIGKILL)
        assert second.process.wait(40) == TransientError.exit_code
        assert group_members(group) == []
        with pytest.raises(TransientError, match="cannot be reached"):
            serving.load("policy@v2", server.version(tmp_path / "policy@v2", 2))
        only = VllmServing([server.url])
        assert only.loaded() == ["policy@v1"]
        only.unload("policy@v1")
    finally:
        stop_server(second)


def test_a_server_without_the_learners_disk_fetches_versions_from_mlflow(tmp_path):
    need_vllm()
    base = build_tiny_model(tmp_path / "base", WORDS, hidden=64, heads=2, context=256)
    (tmp_path / "mlflow").mkdir()
    mlflow = MlflowServer(tmp_path / "mlflow")
    server = None
    try:
        mlflow.wait()
        server = start_server(
            tmp_path / "elsewhere",
            base,
            adapters="mlflow",
            environment={"SPANLOOP_LEARNER__TRACKING_URI": mlflow.url},
        )
        registry = MlflowRegistry(mlflow.url, "policy", tmp_path / "workspace")
        serving = VllmServing([server.url], by_name=True)
        made = {}
        for version in (1, 2):
            made[version] = server.version(
                tmp_path / "workspace" / "policies" / f"policy@v{version}", version
            )
            digest = sha256_of(made[version])
            registry.register(version, made[version], tags={"spanloop.sha256": digest}, metrics={})
        shutil.copytree(made[2], tmp_path / "policy@v3")
        registry.register(3, tmp_path / "policy@v3", tags={"spanloop.sha256": "0" * 64}, metrics={})
        for version, path in made.items():
            serving.load(f"policy@v{version}", path)
            scores = serving.probe(f"policy@v{version}", [PROMPT])
            assert scores[0] == pytest.approx(peft_scores(base, path, [PROMPT])[0], abs=1e-3)
        cached = {card["id"]: card["root"] for card in ServerCalls(server.url).cards()}["policy@v2"]
        assert Path(cached).is_relative_to(tmp_path / "elsewhere")
        with pytest.raises(TransientError, match="does not get policy@v3 from MLflow"):
            serving.load("policy@v3", tmp_path / "policy@v3")
        assert "is not served" in "\n".join(server.lines)
    finally:
        if server is not None:
            stop_server(server)
        mlflow.signal(signal.SIGKILL)
        mlflow.child.wait(20)


def sha256_of(folder):
    """A version's hash, as docs/models.md has it."""
    lines = "".join(
        f"{hashlib.sha256((folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("adapter_config.json", "adapter_model.safetensors")
    )
    return hashlib.sha256(lines.encode()).hexdigest()
