"""Gateways as processes before an embedded server, and the means to ask them."""

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager
from types import SimpleNamespace

import aiohttp
from aiohttp.test_utils import TestServer
from gateway_support import URL, spans
from serving_support import WORDS, chat, save_version, settings_of

from spanloop.learner.serving.embedded import EmbeddedServer


@contextmanager
def locked(workspace):
    """Nobody can write the workspace's log: another process holds its turn and does not give it back."""
    holder = os.open(workspace / "spanloop.db.turn", os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    fcntl.lockf(holder, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(holder)


@asynccontextmanager
async def deployment(tmp_path, *, stderr=subprocess.DEVNULL, start_new_session=False, **more):
    """Embedded serving in this process, and the means to start gateways before it."""
    save_version(tmp_path, 1)
    processes = []
    async with TestServer(EmbeddedServer(settings_of(tmp_path)).application()) as server:
        config = tmp_path / "spanloop.toml"
        lines = [f'workspace = "{tmp_path}"', "[content]", "training = true", "[learner]", f"vocabulary = {json.dumps(list(WORDS))}",
                 "[gateway]", "port = 0", f'upstream = "{server.make_url("/v1")}"', *(f"{k} = {json.dumps(v)}" for k, v in more.items())]  # fmt: skip
        config.write_text("\n".join(lines) + "\n")

        def start():
            process = subprocess.Popen(
                [sys.executable, "-m", "spanloop.collectors.gateway", "--config", str(config)],
                stdout=subprocess.PIPE, stderr=stderr, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
                start_new_session=start_new_session,
            )  # fmt: skip
            processes.append(process)
            return process, json.loads(process.stdout.readline())["url"]

        try:
            async with aiohttp.ClientSession() as session:
                yield SimpleNamespace(start=lambda: asyncio.to_thread(start), session=session, config=config)
        finally:
            for process in processes:
                process.kill()
                await asyncio.to_thread(process.wait)
                process.stdout.close()


async def ask(deployed, url, number):
    async with deployed.session.post(
        url + URL, json=chat(user=str(number)), headers={"X-Request-Id": f"call-{number}"}
    ) as answer:
        assert answer.status == 200, await answer.text()
        return (await answer.json())["id"]


async def health(deployed, url):
    async with deployed.session.get(url + "/healthz") as answer:
        assert answer.status == 200
        return await answer.json()


def ids_on(log):
    return [s.attributes["gen_ai.response.id"] for s in spans(log)]


async def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not (value := await condition()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    return value
