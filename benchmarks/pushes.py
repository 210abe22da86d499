"""Fifty pushes of a LoRA version to a real vLLM under load: no request fails, none mixes versions, and what a push costs.

vLLM and the gateway run as processes; clients ask the gateway for the policy without a pause, each call a conversation of its own. A
push is what the learner does: load the new version under its own name, verify it by probes, name it in routing, and, once the
one before the last runs nothing, unload that. The same number of seconds without a push comes before and after, for the latencies that a
push adds to. Afterwards each recorded call is scored again by transformers and peft under the version that it names: a token
that came from other weights would show. Needs vLLM (`make vllm-env` or SPANLOOP_VLLM_PYTHON).

Run: .venv/bin/python benchmarks/pushes.py [--pushes 50] [--models tiny,smollm2]
"""

# ruff: noqa: E402 - the path comes first
from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _harness import ROOT, percentile, write
from _smollm import smollm2

sys.path[:0] = [str(ROOT / "tests")]

from vllm_support import WORDS, peft_scores, start_server, stop_server, vllm_interpreter

from spanloop.learner.serving.calls import ServerCalls
from spanloop.learner.serving.vllm import VllmServing
from spanloop.learner.tiny_model import build_tiny_model
from spanloop.pipeline.child import die_with_parent
from spanloop.pipeline.log import scan
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas import topics
from spanloop.schemas.events import RoutingChanged, SpansReceived, decode

CLIENTS, TOKENS = 4, 24
PAUSE_S = 1.0
"""Between the end of a push and the next."""
SCORED = 200
"""Calls that are scored again; those that were under way during a push first."""
PROMISED_S = 1.0
TOLERANCE = 1e-2
"""Nats at a token, between vLLM and transformers with the same weights; another version is off by ten times as much and more."""


class Clients:
    """Threads that ask the gateway without a pause; notes (begin, end, status) of each call."""

    def __init__(self, url: str) -> None:
        self.calls: list[tuple[float, float, int]] = []
        self._url = url
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(120)

    def _run(self, number: int) -> None:
        asking = ServerCalls(self._url, timeout_s=120.0)
        count = 0
        while not self._stop.is_set():
            count += 1
            text = f"{WORDS[(number * 7 + count) % len(WORDS)]} {WORDS[count % len(WORDS)]}"
            body = {"model": "policy", "messages": [{"role": "user", "content": text}], "max_tokens": TOKENS,
                    "temperature": 1.0, "user": f"{number}-{count}"}  # fmt: skip
            begin = time.perf_counter()
            try:
                status = asking.call("POST", "/v1/chat/completions", body).status
            except Exception:
                status = 0
            self.calls.append((begin, time.perf_counter(), status))


def start_gateway(workspace: Path, upstream: str, base: Path) -> tuple[subprocess.Popen[str], str]:
    environment = {
        **os.environ, "SPANLOOP_WORKSPACE": str(workspace), "SPANLOOP_GATEWAY__UPSTREAM": upstream + "/v1",
        "SPANLOOP_GATEWAY__PORT": "0", "SPANLOOP_SERVING__ENGINE": "vllm", "SPANLOOP_LEARNER__MODEL": str(base),
        "SPANLOOP_CONTENT__TRAINING": "true",
    }  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "spanloop.collectors.gateway"], stdout=subprocess.PIPE, env=environment, text=True,
        preexec_fn=die_with_parent if sys.platform == "linux" else None,  # noqa: PLW1509
    )  # fmt: skip
    line = process.stdout.readline() if process.stdout else ""
    return process, json.loads(line)["url"]


def routed(gateway: ServerCalls, version: int) -> None:
    """Wait until new conversations go to ``version``."""
    while gateway.ask("GET", "/healthz").body.get("champion") != f"policy@v{version}":
        time.sleep(0.005)


def latencies(calls: list[tuple[float, float, int]], during: list[tuple[float, float]]) -> dict[str, Any]:
    """Milliseconds of calls, of those that a push overlapped and of the others."""
    near, far = [], []
    for begin, end, _ in calls:
        overlaps = any(begin < last and end > first for first, last in during)
        (near if overlaps else far).append(1e3 * (end - begin))
    found: dict[str, Any] = {}
    for name, values in (("during_a_push", near), ("without", far)):
        if values:
            found[name] = {
                "calls": len(values), "p50_ms": round(statistics.median(values), 1),
                "p99_ms": round(percentile(values, 0.99), 1), "most_ms": round(max(values), 1),
            }  # fmt: skip
    if near and far:
        for name in ("p50_ms", "p99_ms", "most_ms"):
            found[f"added_{name}"] = round(found["during_a_push"][name] - found["without"][name], 1)
    return found


def recorded(log: SqliteLog) -> list[dict[str, Any]]:
    """Attributes and times of each call that the gateway recorded."""
    events = (decode(record.value) for record in scan(log, [topics.SPANS]))
    return [
        {**span.attributes, "begin_ns": span.start_ns, "end_ns": span.end_ns}
        for event in events
        if isinstance(event, SpansReceived)
        for span in event.spans
    ]


def scored_again(
    spans: list[dict[str, Any]], base: Path, workspace: Path, pushes: list[tuple[int, int]]
) -> dict[str, Any]:
    """How far recorded log-probabilities are from those of the version that each call names."""

    def near(span: dict[str, Any]) -> bool:
        return any(span["begin_ns"] < last and span["end_ns"] > first for first, last in pushes)

    chosen = sorted(spans, key=lambda span: not near(span))[:SCORED]
    by_version: dict[str, list[dict[str, Any]]] = {}
    for span in chosen:
        by_version.setdefault(span["spanloop.policy.version"], []).append(span)
    worst, other, mixed = 0.0, [], 0
    for name, theirs in by_version.items():
        rows = [[*s["spanloop.prompt_token_ids"], *s["spanloop.response_token_ids"]] for s in theirs]
        scores = peft_scores(base, workspace / "policies" / name, rows)
        wrong = peft_scores(base, workspace / "policies" / _neighbour(name), rows)
        for span, row, unlike in zip(theirs, scores, wrong, strict=True):
            logged = span["spanloop.response_logprobs"]
            gaps = [abs(a - b) for a, b in zip(row[-len(logged) :], logged, strict=True)]
            worst = max(worst, *gaps)
            mixed += max(gaps) > TOLERANCE
            other.append(max(abs(a - b) for a, b in zip(unlike[-len(logged) :], logged, strict=True)))
    return {
        "scored_again": len(chosen), "of_them_during_a_push": sum(map(near, chosen)), "versions": len(by_version),
        "mixed_versions": mixed, "largest_difference_nats": float(f"{worst:.2g}"),
        "difference_to_another_version_nats_p05": round(percentile(other, 0.05), 3),
    }  # fmt: skip


def _neighbour(name: str) -> str:
    number = int(name.rpartition("@v")[2])
    return f"policy@v{number - 1 if number > 1 else 2}"


def run(base: Path, folder: Path, pushes: int) -> dict[str, Any]:
    workspace = folder / "workspace"
    server = start_server(workspace, base, max_adapters=8)
    log = SqliteLog(workspace / "spanloop.db")
    serving = VllmServing([server.url])
    gateway_process, url = start_gateway(workspace, server.url, base)
    gateway = ServerCalls(url)
    try:

        def push(version: int) -> dict[str, float]:
            path = server.version(workspace / "policies" / f"policy@v{version}", version)
            begin = time.perf_counter()
            serving.load(f"policy@v{version}", path)
            loaded = time.perf_counter()
            log.append([new_record(RoutingChanged(sequence=version, champion=version))])
            routed(gateway, version)
            return {"begin": begin, "load": loaded - begin, "whole": time.perf_counter() - begin}

        push(1)
        with Clients(url) as warm:
            time.sleep(8.0)
        if any(status != 200 for _, _, status in warm.calls):
            raise RuntimeError("calls fail before any push; see the server's log")
        took: list[dict[str, float]] = []
        walls: list[tuple[int, int]] = []
        with Clients(url) as clients:
            quiet_s = max(10.0, pushes * PAUSE_S / 4)
            time.sleep(quiet_s)
            for version in range(2, pushes + 2):
                wall = time.time_ns()
                took.append(push(version))
                walls.append((wall, time.time_ns()))
                if version > 2:
                    serving.unload(f"policy@v{version - 2}")
                time.sleep(PAUSE_S)
            time.sleep(quiet_s)
        during = [(t["begin"], t["begin"] + t["whole"]) for t in took]
        loads, wholes = [t["load"] for t in took], [t["whole"] for t in took]
        figures: dict[str, Any] = {
            "pushes": pushes, "calls": len(clients.calls),
            "failed": sum(status != 200 for _, _, status in clients.calls),
            "load_and_verify_s": {"median": round(statistics.median(loads), 3), "most": round(max(loads), 3)},
            "push_s": {"median": round(statistics.median(wholes), 3), "most": round(max(wholes), 3)},
            "push_under_1_s": sum(w < PROMISED_S for w in wholes),
            **latencies(clients.calls, during),
        }  # fmt: skip
        time.sleep(1.5)
    finally:
        gateway_process.terminate()
        gateway_process.wait(60)
        stop_server(server)
    spans = [s for s in recorded(log) if s.get("spanloop.policy.version")]
    log.close()
    figures["recorded"] = len(spans)
    figures |= scored_again(spans, base, workspace, walls)
    return figures


def main() -> None:
    """Run for each model and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pushes", type=int, default=50)
    parser.add_argument(
        "--models", default="tiny,smollm2", help="tiny, smollm2 or model folders, with commas"
    )
    parser.add_argument("--cache", type=Path, help="keep SmolLM2 there")
    options = parser.parse_args()
    if not vllm_interpreter():
        raise SystemExit("needs a real vLLM: `make vllm-env`, or set SPANLOOP_VLLM_PYTHON")
    figures: dict[str, Any] = {"clients": CLIENTS, "tokens_a_call": TOKENS}
    with tempfile.TemporaryDirectory(prefix="spanloop-pushes-") as name:
        for model in options.models.split(","):
            folder = Path(name) / Path(model).name
            if model == "tiny":
                base = build_tiny_model(folder / "base", WORDS, hidden=64, heads=2, context=256)
            elif model == "smollm2":
                base = smollm2((options.cache or Path(name)) / "smollm2-135m")
            else:
                base = Path(model)
            figures[Path(model).name] = run(base, folder, options.pushes)
            print(model, json.dumps(figures[Path(model).name]), flush=True)
    write("pushes", ".venv/bin/python benchmarks/pushes.py", figures)


if __name__ == "__main__":
    main()
