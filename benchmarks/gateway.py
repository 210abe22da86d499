"""What the gateway adds to a call at half load, against asking serving directly: whole and streamed answers, the log there and away.

Gateway and embedded serving run as processes in their default configuration with training on; each call is a chat
request with three tools, answered by the 61k-parameter policy and recorded in the SQLite log by way of the spool. The most calls a
second that the gateway passes with 16 clients, whole or streamed, is its load; half of it, at fixed times, is what latencies are
measured at. Direct and proxied rounds alternate, each first as often as second, so that both see the same machine. Two p99 are told:
of the calls of all rounds together (``pooled``), and the median of the rounds' own (``median``), which one bad second of the host does
not decide. While the log is away (another process keeps its write turn) calls collect on the spool; they are moved before the next
round; in the end every call must be on the log, once.
Run: .venv/bin/python benchmarks/gateway.py [--seconds 3] [--rounds 7]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
from _harness import percentile, write

from spanloop.learner.policy import PolicyConfig, PolicyNet, save_artifact
from spanloop.learner.tokenizer import Tokenizer
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.events import RoutingChanged

SETTLE_S = 60.0
CLOSED_S, CONNECTIONS = 3.0, 16
PROMISED_MS = 10.0
"""p99 over direct serving, at half load."""
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
        self.num_calls = 0

    async def call(self, *, stream: bool = False) -> tuple[float, float]:
        """Seconds to the first byte and to the last."""
        self.num_calls += 1
        body = {**self._body, "stream": True} if stream else self._body
        started, first = time.perf_counter(), 0.0
        async with self._session.post(
            self._url, json=body, headers={"X-Session-Id": str(self.num_calls)}
        ) as answer:
            async for _ in answer.content.iter_any():
                first = first or time.perf_counter() - started
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}")
        return first, time.perf_counter() - started

    async def at_rate(self, rate: float, seconds: float, *, stream: bool) -> list[tuple[float, float]]:
        """Latencies of calls that start ``rate`` times a second, whatever the answers take."""
        tasks, begin = [], time.perf_counter()
        for number in range(int(rate * seconds)):
            await asyncio.sleep(max(0.0, begin + number / rate - time.perf_counter()))
            tasks.append(asyncio.create_task(self.call(stream=stream)))
        return list(await asyncio.gather(*tasks))

    async def closed(self, seconds: float, *, stream: bool) -> float:
        """Calls a second with CONNECTIONS clients that ask again at once."""
        deadline, done = time.perf_counter() + seconds, 0

        async def client() -> None:
            nonlocal done
            while time.perf_counter() < deadline:
                await self.call(stream=stream)
                done += 1

        begin = time.perf_counter()
        await asyncio.gather(*[client() for _ in range(CONNECTIONS)])
        return done / (time.perf_counter() - begin)


@contextlib.contextmanager
def log_away(workspace: Path, away: bool) -> Iterator[None]:
    """While ``away``, this process keeps the log's write turn."""
    if not away:
        yield
        return
    turn = os.open(workspace / "spanloop.db.turn", os.O_RDWR | os.O_CREAT)
    fcntl.flock(turn, fcntl.LOCK_EX)
    try:
        yield
    finally:
        os.close(turn)


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def recorder_of(gateway: int) -> int:
    """The process that records for a gateway."""
    (pid,) = [
        c for path in Path(f"/proc/{gateway}/task").glob("*/children") for c in path.read_text().split()
    ]
    return int(pid)


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


Rounds = dict[str, list[list[tuple[float, float]]]]
"""By target the rounds, of each its calls: seconds to the first byte and to the last."""


def p_ms(calls: list[tuple[float, float]], place: int, share: float) -> float:
    """A percentile of calls, ms to the first byte (place 0) or the last (1)."""
    return 1000 * percentile([call[place] for call in calls], share)


def added(rounds: Rounds) -> dict[str, float | list[float]]:
    """Latencies in ms, direct and through the gateway, and what the gateway adds to each percentile."""
    found: dict[str, float | list[float]] = {}
    pooled = {name: [call for calls in many for call in calls] for name, many in rounds.items()}
    for place, what in ((1, ""), (0, "first_byte_")):
        for share, name in ((0.5, "p50"), (0.99, "p99")):
            ms = {k: p_ms(calls, place, share) for k, calls in pooled.items()}
            found |= {f"{k}_{what}{name}_ms": round(v, 2) for k, v in ms.items()}
            found[f"added_{what}{name}_ms"] = round(ms["gateway"] - ms["direct"], 2)
        of_rounds = {k: [p_ms(calls, place, 0.99) for calls in many] for k, many in rounds.items()}
        medians = {k: statistics.median(values) for k, values in of_rounds.items()}
        found[f"added_{what}p99_median_ms"] = round(medians["gateway"] - medians["direct"], 2)
        if place:
            found |= {
                f"{k}_p99_ms_of_rounds": [round(v, 2) for v in values] for k, values in of_rounds.items()
            }
    found["calls"] = len(pooled["gateway"])
    return found


async def settled(session: aiohttp.ClientSession, url: str) -> int:
    """Wait until the gateway's calls are on the log: calls lost so far."""
    deadline = time.perf_counter() + SETTLE_S
    while True:
        async with session.get(url + "/healthz") as answer:
            health = await answer.json()
        if not health["queue"]:
            return health["lost"]
        if time.perf_counter() > deadline:
            raise RuntimeError(f"{health['queue']} calls still wait for the log")
        await asyncio.sleep(0.05)


async def measure(
    urls: dict[str, str], processes: list[subprocess.Popen], workspace: Path, seconds: float, num_rounds: int
) -> tuple[dict, int]:
    """The figures, and how many calls went through the gateway."""
    figures: dict = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=512)) as session:
        targets = {
            "direct": Target(session, urls["direct"], "policy@v1"),
            "gateway": Target(session, urls["gateway"], "policy"),
        }
        for target in targets.values():
            for number in range(60):
                await target.call(stream=number % 2 == 0)
        rates: dict[bool, float] = {}
        for stream in (False, True):
            most: dict[str, float] = {}
            for _ in range(2):
                for name, target in targets.items():
                    most[name] = max(most.get(name, 0.0), await target.closed(CLOSED_S, stream=stream))
            rates[stream] = most["gateway"] / 2
            kind = "streamed" if stream else "whole"
            figures[f"most_{kind}_calls_per_s_{CONNECTIONS}_clients"] = {k: round(v) for k, v in most.items()}
            figures[f"half_load_{kind}_calls_per_s"] = round(rates[stream], 1)
        pids = {"gateway": processes[1].pid, "recorder": recorder_of(processes[1].pid)}
        for away in (False, True):
            for stream in (False, True):
                rounds: Rounds = {"direct": [], "gateway": []}
                used_s = dict.fromkeys(pids, 0.0)
                for number in range(num_rounds):
                    for name in sorted(targets, reverse=bool(number % 2)):
                        before = {process: cpu_s(pid) for process, pid in pids.items()}
                        with log_away(workspace, away):
                            calls = await targets[name].at_rate(rates[stream], seconds, stream=stream)
                        rounds[name].append(calls)
                        if name == "gateway":
                            figures["lost"] = await settled(session, urls["gateway"])
                            for process, pid in pids.items():
                                used_s[process] += cpu_s(pid) - before[process]
                what = f"{'streamed' if stream else 'whole'}_log_{'away' if away else 'there'}"
                figures[what] = found = added(rounds)
                for process, used in used_s.items():
                    found[f"{process}_cpu_ms_per_call"] = round(
                        1000 * used / sum(map(len, rounds["gateway"])), 2
                    )
        return figures, targets["gateway"].num_calls


def main() -> None:
    """Run both processes over a temporary workspace."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0, help="of each round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        workspace = Path(name)
        tokenizer = Tokenizer(WORDS)
        net = PolicyNet.initial(PolicyConfig(tokenizer.size), 1)
        save_artifact(workspace / "policies" / "policy@v1", net, tokenizer)
        log = SqliteLog(workspace / "spanloop.db")
        log.append([new_record(RoutingChanged(sequence=1, champion=1))])
        config = workspace / "spanloop.toml"
        config.write_text(
            f'workspace = "{workspace}"\n[content]\ntraining = true\n[learner]\nvocabulary = {json.dumps(list(WORDS))}\n'
            "[serving]\nport = 0\n[gateway]\nport = 0\n"
        )
        serving, direct = start("spanloop.learner.serving.embedded", config)
        gateway, proxied = start(
            "spanloop.collectors.gateway", config, SPANLOOP_GATEWAY__UPSTREAM=direct + "/v1"
        )
        processes = [serving, gateway]
        try:
            load_before = os.getloadavg()[0]
            urls = {"direct": direct, "gateway": proxied}
            figures, num_calls = asyncio.run(
                measure(urls, processes, workspace, options.seconds, options.rounds)
            )
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(60)
        modes = [m for m in figures.values() if isinstance(m, dict) and "added_p99_ms" in m]
        figures["promised_added_p99_ms"] = PROMISED_MS
        for how, figure in (("pooled", "added_p99_ms"), ("median", "added_p99_median_ms")):
            figures[f"kept_{how}"] = all(mode[figure] <= PROMISED_MS for mode in modes)
        figures["load_average_before"] = round(load_before, 2)
        figures["calls_through_gateway"] = num_calls
        figures["spans_on_log"] = len(log.read(["spans"], {}, 10**7))
        log.close()
    write("gateway", ".venv/bin/python benchmarks/gateway.py", figures)


if __name__ == "__main__":
    main()
