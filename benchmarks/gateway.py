"""What the gateway adds to a call: latency at the demo's rate, and the most calls a second, against serving directly.

Gateway and embedded serving run as processes in their default configuration with training on; each call is a chat
request with three tools, answered by the 61k-parameter policy and recorded in the SQLite log. Direct and proxied
rounds alternate, so that both see the same machine. Run: .venv/bin/python benchmarks/gateway.py
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
from _harness import percentile, write

from spanloop.learner.policy import PolicyConfig, PolicyNet, save_artifact
from spanloop.learner.tokenizer import Tokenizer
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.events import RoutingChanged

RATE, RATE_S, CLOSED_S, CONNECTIONS, ROUNDS = 100, 5.0, 4.0, 16, 3
WORDS = ("close", "look", "spawn", "a", "b", "c", "short", "full", *(f"w{i}" for i in range(40)))


def tool(name: str, **parameters: list[str]) -> dict:
    """A tool with enum parameters."""
    schema = {
        "type": "object",
        "properties": {k: {"type": "string", "enum": v} for k, v in parameters.items()},
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


BODY = {
    "messages": [{"role": "user", "content": " ".join(WORDS[8:21])}],
    "tools": [tool("close"), tool("look"), tool("spawn", skill=["a", "b", "c"], brief=["short", "full"])],
    "tool_choice": "required",
}


class Target:
    """One URL under load; each call has its own session id, as each ticket has."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str) -> None:
        self._session, self._url, self._body = session, url + "/v1/chat/completions", {**BODY, "model": model}
        self._count = 0

    async def call(self) -> float:
        """Seconds of one call."""
        self._count += 1
        started = time.perf_counter()
        async with self._session.post(
            self._url, json=self._body, headers={"X-Session-Id": str(self._count)}
        ) as answer:
            await answer.read()
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {await answer.text()}")
        return time.perf_counter() - started

    async def at_rate(self) -> list[float]:
        """Latencies of calls that start RATE times a second, whatever the answers take."""
        tasks, begin = [], time.perf_counter()
        for number in range(int(RATE * RATE_S)):
            await asyncio.sleep(max(0.0, begin + number / RATE - time.perf_counter()))
            tasks.append(asyncio.create_task(self.call()))
        return list(await asyncio.gather(*tasks))

    async def closed(self) -> float:
        """Calls a second with CONNECTIONS clients that ask again at once."""
        deadline, done = time.perf_counter() + CLOSED_S, 0

        async def client() -> None:
            nonlocal done
            while time.perf_counter() < deadline:
                await self.call()
                done += 1

        begin = time.perf_counter()
        await asyncio.gather(*[client() for _ in range(CONNECTIONS)])
        return done / (time.perf_counter() - begin)


def cpu_s(process: subprocess.Popen) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start(module: str, config: Path, **environment: str) -> tuple[subprocess.Popen, str]:
    """A process of `spanloop up` and its URL."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        [sys.executable, "-m", module, "--config", str(config)],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    return process, json.loads(process.stdout.readline())["url"]


async def measure(direct_url: str, proxied_url: str, processes: list[subprocess.Popen]) -> dict:
    """Alternate direct and proxied rounds."""
    rates: dict[str, list[float]] = {"direct": [], "gateway": []}
    most: dict[str, list[float]] = {"direct": [], "gateway": []}
    cpu: list[list[float]] = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=256)) as session:
        targets = {
            "direct": Target(session, direct_url, "policy@v1"),
            "gateway": Target(session, proxied_url, "policy"),
        }
        for target in targets.values():
            for _ in range(50):
                await target.call()
        for _ in range(ROUNDS):
            for name, target in targets.items():
                before = [cpu_s(p) for p in processes]
                rates[name] += await target.at_rate()
                if name == "gateway":
                    used = [cpu_s(p) - b for p, b in zip(processes, before, strict=True)]
                    cpu.append([1000 * u / (RATE * RATE_S) for u in used])
        for _ in range(ROUNDS):
            for name, target in targets.items():
                most[name].append(await target.closed())
    p50 = {name: 1000 * percentile(values, 0.5) for name, values in rates.items()}
    p99 = {name: 1000 * percentile(values, 0.99) for name, values in rates.items()}
    return {
        f"at_{RATE}_calls_per_s": {
            **{f"{name}_p50_ms": round(p50[name], 2) for name in p50},
            **{f"{name}_p99_ms": round(p99[name], 2) for name in p99},
            "added_p50_ms": round(p50["gateway"] - p50["direct"], 2),
            "added_p99_ms": round(p99["gateway"] - p99["direct"], 2),
            "serving_cpu_ms_per_call": round(sum(c[0] for c in cpu) / len(cpu), 2),
            "gateway_cpu_ms_per_call": round(sum(c[1] for c in cpu) / len(cpu), 2),
        },
        f"most_calls_per_s_{CONNECTIONS}_clients": {
            name: round(max(values)) for name, values in most.items()
        },
    }


def main() -> None:
    """Run both processes over a temporary workspace."""
    with tempfile.TemporaryDirectory() as name:
        workspace = Path(name)
        tokenizer = Tokenizer(WORDS)
        save_artifact(
            workspace / "policies" / "policy@v1",
            PolicyNet.initial(PolicyConfig(tokenizer.size), 1),
            tokenizer,
        )
        log = SqliteLog(workspace / "spanloop.db")
        log.append([new_record(RoutingChanged(sequence=1, champion=1))])
        config = workspace / "spanloop.toml"
        config.write_text(
            f'workspace = "{workspace}"\n[content]\ntraining = true\n[learner]\nvocabulary = {json.dumps(list(WORDS))}\n'
            "[serving]\nport = 0\n[gateway]\nport = 0\n"
        )
        serving, direct_url = start("spanloop.learner.serving.embedded", config)
        gateway, proxied_url = start(
            "spanloop.collectors.gateway", config, SPANLOOP_GATEWAY__UPSTREAM=direct_url + "/v1"
        )
        try:
            load_before = os.getloadavg()[0]
            figures = asyncio.run(measure(direct_url, proxied_url, [serving, gateway]))
        finally:
            for process in (gateway, serving):
                process.terminate()
                process.wait(30)
        figures["load_average_before"] = round(load_before, 2)
        figures["spans_on_log"] = len(log.read(["spans"], {}, 10**6))
        log.close()
    write("gateway", ".venv/bin/python benchmarks/gateway.py", figures)


if __name__ == "__main__":
    main()
