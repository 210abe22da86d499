"""Controls: where credit says nothing, nothing may be learned.

Live, with the gate on, TRAFFIC_S seconds each: *withheld* (no outcome ever arrives) and *shuffled* (each outcome is sent for another
ticket). Replayed, with no gate in between, on the samples of a finished demo: *credit* as it was, and *shuffled credit*, where the
values of each decision are those of a decision of another orchestration, with the options permuted; several permutations.
Reported is f on fresh tickets with a 95 % interval, for the champion and the learner's last weights, beside the first policy's.
Needs a workspace of `make demo`. Run: .venv/bin/python benchmarks/controls.py --workspace demo-out/workspace
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path

import aiohttp
import msgspec
from _harness import ROOT, write
from aiohttp import web

sys.path.insert(0, str(ROOT / "examples"))
from dispatch_desk import evaluate

from spanloop.learner.history import read_policies
from spanloop.learner.policy import load_artifact, save_artifact
from spanloop.learner.promotion import fold
from spanloop.learner.provenance import policy_config
from spanloop.learner.training import Training, exact_numerics
from spanloop.pipeline.log import scan
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.schemas import topics
from spanloop.schemas.events import BatchCommitted, SamplesBuilt, decode, encode

TRAFFIC_S, TICKETS, PERMUTATIONS = 100.0, 3_000, 4
CONFIG = ROOT / "examples" / "dispatch_desk" / "spanloop.toml"


class Middleman:
    """Stands where the desk thinks the feedback endpoint is: forwards nothing, or each value for another ticket."""

    def __init__(self, target: str, shuffle: bool) -> None:
        self._target, self._shuffle, self._held, self._rng = target, shuffle, [], random.Random(0)
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)

    async def _start(self) -> None:
        app = web.Application()
        app.router.add_post("/v1/feedback", self._take)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/feedback"

    async def _take(self, request: web.Request) -> web.Response:
        items = await request.json()
        if self._shuffle:
            self._held += items
            if len(self._held) >= 200:
                values = [item["value"] for item in self._held]
                self._rng.shuffle(values)
                body = [{**item, "value": value} for item, value in zip(self._held, values, strict=True)]
                self._held = []
                async with (
                    aiohttp.ClientSession() as session,
                    session.post(self._target, json=body) as answer,
                ):
                    assert answer.status == 200, await answer.text()
        return web.json_response({"accepted": len(items)})


def live(name: str, *, shuffle: bool, seed: int) -> dict:
    """One live run with the gate on; f of champion, last weights and first policy."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = Path(folder) / "w"
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "SPANLOOP_LEARNER__SEED": str(seed)}
        command = [
            sys.executable,
            "-m",
            "spanloop.schemas.cli",
            "up",
            "--config",
            str(CONFIG),
            "--workspace",
            str(workspace),
        ]
        up = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            run: dict = {}
            while run.get("state") != "running":
                time.sleep(0.3)
                assert up.poll() is None, "spanloop up ended"
                if (workspace / "run.json").exists():
                    run = json.loads((workspace / "run.json").read_text())
            urls = run["urls"]
            between = Middleman(urls["collector"] + "/v1/feedback", shuffle)
            desk = {
                **environment, "OPENAI_BASE_URL": urls["gateway"] + "/v1", "OPENAI_API_KEY": "none",
                "OTEL_EXPORTER_OTLP_ENDPOINT": urls["collector"], "FEEDBACK_URL": between.url,
            }  # fmt: skip
            clients = [
                subprocess.Popen(
                    [sys.executable, "-m", "dispatch_desk.main", "--seconds", str(TRAFFIC_S), "--seed", str(seed),
                     "--first-ticket", str(n * 10**7)], cwd=ROOT / "examples", env=desk, stdout=subprocess.DEVNULL,
                )
                for n in range(2)
            ]  # fmt: skip
            for client in clients:
                client.wait()
            time.sleep(3)
        finally:
            up.send_signal(signal.SIGINT)
            up.wait(60)
        with closing(SqliteLog(workspace / "spanloop.db")) as log:
            state = fold(read_policies(log, "default", "policy"))
            tickets = log.counts().get(topics.ORCHESTRATIONS, 0)
        last = max(state.versions)
        folders = {v: workspace / "policies" / f"policy@v{v}" for v in {0, state.champion, last}}
        found = evaluate.evaluate(folders, champion=state.champion, exploration=0.0, num_tickets=TICKETS)[
            "versions"
        ]
        return {
            "arm": name, "seed": seed, "orchestrations": tickets, "promotions": state.epoch - 1, "updates": last,
            "first": found[0]["f"], "champion": found[state.champion]["f"], "last_weights": found[last]["f"],
        }  # fmt: skip


class ShuffledLog:
    """A log whose samples carry the credit of other orchestrations' decisions; everything else as it is."""

    def __init__(self, log: SqliteLog, seed: int) -> None:
        self._log, self._rng = log, random.Random(seed)
        self._pool: dict[int, list[tuple[int, ...]]] = {}
        for record in scan(log, [topics.SAMPLES]):
            for row in decode(record.value).rows:
                for values in row.menu_values:
                    self._pool.setdefault(len(values), []).append(values)
        for values in self._pool.values():
            self._rng.shuffle(values)
        self._next = dict.fromkeys(self._pool, 0)

    def __getattr__(self, name: str):
        return getattr(self._log, name)

    def read(self, names, after, limit):
        return [
            self._changed(record) if record.topic == topics.SAMPLES else record
            for record in self._log.read(names, after, limit)
        ]

    def _other(self, values: tuple[int, ...]) -> tuple[int, ...]:
        pool = self._pool[len(values)]
        self._next[len(values)] = (self._next[len(values)] + 1) % len(pool)
        return tuple(self._rng.sample(pool[self._next[len(values)]], len(values)))

    def _changed(self, record):
        built = decode(record.value)
        assert isinstance(built, SamplesBuilt)
        rows = tuple(
            msgspec.structs.replace(row, menu_values=tuple(self._other(v) for v in row.menu_values))
            for row in built.rows
        )
        return msgspec.structs.replace(record, value=encode(msgspec.structs.replace(built, rows=rows)))


def replayed(workspace: Path, out: Path, seed: int | None) -> Path:
    """Train the log's batches again, with shuffled credit where a seed is given; returns the artifact."""
    with closing(SqliteLog(workspace / "spanloop.db")) as log:
        events = read_policies(log, "default", "policy")
        state = fold(events)
        batches = [e for e, _ in events if isinstance(e, BatchCommitted)]
        first = load_artifact(workspace / "policies" / "policy@v0")
        training = Training(policy_config(workspace, state), first.net, None)
        with exact_numerics():
            training.resume(log if seed is None else ShuffledLog(log, seed), state, batches, "default")
        save_artifact(out, training.updater.net, first.tokenizer)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workspace", type=Path, default=ROOT / "demo-out" / "workspace")
    parser.add_argument("--no-live", action="store_true")
    options = parser.parse_args()
    if not (options.workspace / "spanloop.db").exists():
        sys.exit(f"no workspace {options.workspace}: run `make demo` first, or name one with --workspace")
    with tempfile.TemporaryDirectory() as folder:
        made = {0: replayed(options.workspace, Path(folder) / "credit", None)}
        for seed in range(1, PERMUTATIONS + 1):
            made[seed] = replayed(options.workspace, Path(folder) / f"shuffled-{seed}", seed)
        made[99] = options.workspace / "policies" / "policy@v0"
        found = evaluate.evaluate(made, champion=99, exploration=0.0, num_tickets=TICKETS)["versions"]
    shuffled = [found[seed]["f"]["mean"] for seed in range(1, PERMUTATIONS + 1)]
    figures = {
        "replayed_without_gate": {
            "first_policy": found[99]["f"], "true_credit": found[0]["f"],
            "shuffled_credit": [found[seed]["f"] for seed in range(1, PERMUTATIONS + 1)],
            "shuffled_mean": round(statistics.mean(shuffled), 4), "shuffled_sd": round(statistics.stdev(shuffled), 4),
        }
    }  # fmt: skip
    if not options.no_live:
        figures["live_with_gate"] = [
            live("withheld", shuffle=False, seed=1), live("shuffled_outcomes", shuffle=True, seed=1),
            live("shuffled_outcomes", shuffle=True, seed=2),
        ]  # fmt: skip
    write("controls", ".venv/bin/python benchmarks/controls.py --workspace demo-out/workspace", figures)


if __name__ == "__main__":
    main()
