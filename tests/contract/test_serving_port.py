"""Any serving adapter behaves like the one in memory."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from aiohttp import web
from serving_support import TOKENIZER, net, save_version, settings_of
from vllm_support import need_vllm, peft_scores, vllm_server

from spanloop.learner.serving.embedded import EmbeddedServer
from spanloop.learner.serving.http import HttpServing
from spanloop.learner.serving.lora_files import WEIGHTS
from spanloop.learner.serving.memory import MemoryServing
from spanloop.learner.serving.port import ServingPort
from spanloop.learner.serving.vllm import VllmServing
from spanloop.schemas.errors import ConfigError, SchemaError, StaleError, TransientError


@contextmanager
def running(app_of):
    """An aiohttp application in a thread of its own; gives its URL."""
    started, url, stop = threading.Event(), [], []

    async def serve():
        runner = web.AppRunner(app_of())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        url.append(f"http://127.0.0.1:{runner.addresses[0][1]}")
        stop.append((asyncio.get_running_loop(), ended := asyncio.Event()))
        started.set()
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert started.wait(20)
    try:
        yield url[0]
    finally:
        stop[0][0].call_soon_threadsafe(stop[0][1].set)
        thread.join(20)


@dataclass
class World:
    """A serving adapter, versions that it can serve, and what a probe of one must answer."""

    serving: ServingPort
    weights: str
    """Name of the file that holds an artifact's weights."""
    save: Callable[[int], Path]
    scores: Callable[[int, list[list[int]]], list[list[float]]]


def _scores(version, prompts):
    found = []
    for prompt in prompts:
        logp = torch.log_softmax(net(version)(torch.tensor([prompt]))[0], -1)
        found.append([float(logp[t, token]) for t, token in enumerate(prompt[1:])])
    return found


@pytest.fixture(
    params=["memory", "http", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.timeout(360)])]
)
def world(request, tmp_path):
    if request.param == "memory":
        yield World(MemoryServing(), "model.safetensors", lambda v: save_version(tmp_path, v), _scores)
    elif request.param == "http":
        with running(lambda: EmbeddedServer(settings_of(tmp_path)).application()) as url:
            yield World(
                HttpServing(url + "/v1"), "model.safetensors", lambda v: save_version(tmp_path, v), _scores
            )
    else:
        need_vllm()
        server = vllm_server()
        folders: dict[int, Path] = {}

        def save(version):
            if version not in folders:
                folders[version] = server.version(tmp_path / "policies" / f"policy@v{version}", version)
            return folders[version]

        serving = VllmServing([server.url + "/v1"])
        yield World(serving, WEIGHTS, save, lambda v, prompts: peft_scores(server.base, folders[v], prompts))
        for name in serving.loaded():
            serving.unload(name)


@pytest.fixture
def serving(world):
    return world.serving


def test_load_list_unload(serving, world):
    one, two = world.save(1), world.save(2)
    assert serving.loaded() == []
    serving.load("policy@v2", two)
    serving.load("policy@v1", one)
    serving.load("policy@v1", one)
    assert serving.loaded() == ["policy@v1", "policy@v2"]
    with pytest.raises(StaleError, match="use a new name"):
        serving.load("policy@v1", two)
    serving.unload("policy@v1")
    serving.unload("policy@v1")
    assert serving.loaded() == ["policy@v2"]


def test_a_probe_tells_the_weights(serving, world):
    for version in (1, 2):
        serving.load(f"policy@v{version}", world.save(version))
    prompts = [[1, 5, 6, 3], [1, 7, 3, 8]]
    for version in (1, 2):
        found = serving.probe(f"policy@v{version}", prompts)
        for logprobs, expected in zip(found, world.scores(version, prompts), strict=True):
            assert logprobs == pytest.approx(expected, abs=1e-5)
    assert serving.probe("policy@v1", prompts) != serving.probe("policy@v2", prompts)


def test_refusals(serving, world, tmp_path):
    with pytest.raises(SchemaError):
        serving.load("policy@v3", tmp_path / "policies" / "policy@v3")
    broken = world.save(4)
    (broken / world.weights).write_bytes(b"x")
    with pytest.raises(SchemaError, match="corrupt"):
        serving.load("policy@v4", broken)
    with pytest.raises(SchemaError, match="does not exist"):
        serving.probe("policy@v9", [[1, 5]])
    assert serving.loaded() == []


def test_a_server_that_is_away_or_odd(tmp_path):
    away = HttpServing("http://127.0.0.1:1", timeout_s=2)
    with pytest.raises(TransientError, match="cannot be reached"):
        away.loaded()
    with pytest.raises(ConfigError):
        HttpServing("127.0.0.1:80")

    async def odd(request):
        if request.path == "/v1/models":
            return web.json_response({"error": {"message": "warming up"}}, status=503)
        return web.json_response({"choices": [{"index": 0}]})

    def app():
        made = web.Application()
        made.router.add_route("*", "/{path:.*}", odd)
        return made

    with running(app) as url:
        with pytest.raises(TransientError, match="warming up"):
            HttpServing(url).loaded()
        with pytest.raises(SchemaError, match="vLLM's shape"):
            HttpServing(url).probe("policy@v1", [[1, TOKENIZER.size - 1]])
