"""A real vLLM on this machine: how long it takes to start, to take a version and prove it, and what it serves.

The help desk's tiny base model and random LoRA versions; vLLM, gateway, receiver, pipeline and learner run as ``spanloop up``
runs them. The last figure is the example's own traffic while the learner trains. Needs `make vllm-env` or SPANLOOP_VLLM_PYTHON.
Run: .venv/bin/python benchmarks/serving_vllm.py
"""

# ruff: noqa: E402 - the path comes first
from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from _harness import ROOT, percentile, write

sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "examples")]

from stack.tickets import SYMPTOMS, TEAMS, WORDS
from vllm_support import free_port, peft_scores, start_server, stop_server, vllm_interpreter

from spanloop.learner.serving.calls import ServerCalls
from spanloop.learner.serving.vllm import VllmServing
from spanloop.learner.tiny_model import build_tiny_model

VERSIONS, CALLS, TICKETS = 12, 600, 1_000
PROMPTS = [[1, 5 + i, 9 + i, 13 + i, 17 + i, 3] for i in range(4)]


def push(server, folder: Path) -> dict:
    """Load, probe and unload versions; the largest difference between a probe and transformers with peft."""
    serving = VllmServing([server.url])
    load, probe, unload, gaps = [], [], [], []
    for version in range(1, VERSIONS + 1):
        made = server.version(folder / f"policy@v{version}", version)
        begin = time.perf_counter()
        serving.load(f"policy@v{version}", made)
        loaded = time.perf_counter()
        scores = serving.probe(f"policy@v{version}", PROMPTS)
        load.append(loaded - begin)
        probe.append(time.perf_counter() - loaded)
        if version <= 4:
            wanted = peft_scores(server.base, made, PROMPTS)
            gaps += [
                abs(a - b) for s, t in zip(scores, wanted, strict=True) for a, b in zip(s, t, strict=True)
            ]
    for version in range(2, VERSIONS + 1):
        begin = time.perf_counter()
        serving.unload(f"policy@v{version}")
        unload.append(time.perf_counter() - begin)
    return {
        "load_and_verify_ms": round(1e3 * statistics.median(load), 1),
        "probe_20_tokens_ms": round(1e3 * statistics.median(probe), 1),
        "unload_ms": round(1e3 * statistics.median(unload), 1),
        "probe_mismatch_largest_nats": float(f"{max(gaps):.2g}"),
    }


def calls(server) -> dict:
    """One-token answers a second with LoRA, menus and token ids, by the number of clients."""
    asking = ServerCalls(server.url)
    body = {
        "model": "policy@v1", "messages": [{"role": "user", "content": f"{next(iter(SYMPTOMS))} laptop"}], "max_tokens": 1,
        "structured_outputs": {"choice": list(TEAMS)}, "logprobs": True, "top_logprobs": 20, "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }  # fmt: skip

    def one(_: int) -> float:
        begin = time.perf_counter()
        assert asking.call("POST", "/v1/chat/completions", body).status == 200
        return time.perf_counter() - begin

    found = {}
    for clients in (1, 8, 16):
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(one, range(2 * clients)))
            begin = time.perf_counter()
            took = list(pool.map(one, range(CALLS if clients > 1 else CALLS // 6)))
            seconds = time.perf_counter() - begin
        found[str(clients)] = {
            "calls_per_second": round(len(took) / seconds, 1),
            "p50_ms": round(1e3 * percentile(took, 0.5), 1),
            "p99_ms": round(1e3 * percentile(took, 0.99), 1),
        }
    return {"one_token_calls_by_clients": found}


def desk(folder: Path, base: Path) -> dict:
    """The example: tickets a second and outcomes, from the first to the last hundred, while the learner trains."""
    ports = {name: free_port() for name in ("collector", "gateway", "serving")}
    environment = {
        **os.environ, "SPANLOOP_LEARNER__MODEL": str(base), "SPANLOOP_VLLM_PYTHON": vllm_interpreter(),
        "PYTHONPATH": str(ROOT / "examples"), "OPENAI_API_KEY": "unused",
        "OPENAI_BASE_URL": f"http://127.0.0.1:{ports['gateway']}/v1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{ports['collector']}",
        "FEEDBACK_URL": f"http://127.0.0.1:{ports['collector']}/v1/feedback",
        **{f"SPANLOOP_{name.upper()}__PORT": str(port) for name, port in ports.items()},
    }  # fmt: skip
    up = [sys.executable, "-m", "spanloop.schemas.cli", "up", "--config", str(ROOT / "examples/stack/spanloop.toml"),
          "--workspace", str(folder / "workspace")]  # fmt: skip
    with (folder / "up.log").open("wb") as log:
        system = subprocess.Popen(up, env=environment, stdout=log, stderr=log)
    try:
        begin = time.monotonic()
        gateway = ServerCalls(f"http://127.0.0.1:{ports['gateway']}")
        while True:
            try:
                if gateway.ask("GET", "/healthz").body.get("champion"):
                    break
            except Exception:
                if time.monotonic() - begin > 300 or system.poll() is not None:
                    raise
            time.sleep(0.5)
        ready_s = time.monotonic() - begin
        agents = [sys.executable, "-m", "stack.main", "--tickets", str(TICKETS)]
        done = subprocess.run(agents, env=environment, capture_output=True, text=True, check=True)
    finally:
        system.send_signal(signal.SIGINT)
        system.wait(60)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {
        "first_version_serves_s": round(ready_s, 1),
        "tickets": TICKETS,
        "tickets_failed": lines[-1]["failed"],
        "tickets_per_second": lines[-1]["tickets_per_second"],
        "outcome_by_hundred": [line["outcome"] for line in lines[:-1]],
        "outcome_by_chance": lines[-1]["chance"],
    }


def main() -> None:
    """Measure and write."""
    if not vllm_interpreter():
        print("skipped: no vLLM (make vllm-env)")
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        base = build_tiny_model(folder / "base", WORDS)
        server = start_server(folder / "alone", base)
        try:
            figures = {
                "start_and_warm_up_s": round(server.ready_s, 1),
                **push(server, folder / "versions"),
                **calls(server),
            }
        finally:
            stop_server(server)
        figures |= {"help_desk": desk(folder, base)}
    write("serving_vllm", ".venv/bin/python benchmarks/serving_vllm.py", figures)


if __name__ == "__main__":
    main()
