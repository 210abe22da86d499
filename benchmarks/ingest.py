"""Spans a second to durable append, CPU and p99: the receiver, bare handlers and, in the same run, MLflow's and Phoenix's OTLP
endpoints on the same requests (300 spans of about 1.5 kB, four connections).

Each peer is installed into an environment of its own under a temporary folder (or --peers FOLDER, kept for the next run) and is
skipped with a note where that fails. Run: .venv/bin/python benchmarks/ingest.py [--no-peers] [--seconds 8]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _harness import write
from _otlp_load import CONNECTIONS, SPANS, bodies, measure, wait_for

MLFLOW, PHOENIX = "mlflow==3.17.2", "arize-phoenix==20.26.*"
BARE = """
import asyncio, json, sqlite3, sys, time
from concurrent.futures import ThreadPoolExecutor
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
path = sys.argv[1]
waiting = []
def append(rows):
    database.executemany("INSERT INTO log VALUES (?)", rows); database.commit()
async def commit():
    loop = asyncio.get_running_loop(); thread = ThreadPoolExecutor(1)
    while True:
        await asyncio.sleep(0.005)
        if waiting:
            group = waiting[:]; del waiting[:]
            await loop.run_in_executor(thread, append, [(body,) for body, _ in group])
            for _, done in group: done.set_result(None)
async def traces(request):
    body = await request.read()
    ExportTraceServiceRequest.FromString(body)
    if path:
        done = asyncio.get_running_loop().create_future(); waiting.append((body, done)); await done
    return web.Response(body=b"", content_type="application/x-protobuf")
async def main():
    global database
    if path:
        database = sqlite3.connect(path, check_same_thread=False)
        database.execute("PRAGMA journal_mode=WAL"); database.execute("PRAGMA synchronous=FULL")
        database.execute("CREATE TABLE log (body BLOB)")
        asyncio.create_task(commit())
    app = web.Application(client_max_size=2**26)
    app.router.add_post("/v1/traces", traces)
    runner = web.AppRunner(app, access_log=None); await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0); await site.start()
    print(json.dumps({"url": "http://127.0.0.1:%d" % runner.addresses[0][1]}), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


@contextmanager
def started(
    command: list[str], environment: dict[str, str], *, quiet: bool = False
) -> Iterator[subprocess.Popen[str]]:
    """A server process; it is stopped at the end."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL if quiet else subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        text=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(20)


def ours(requests: list[bytes], seconds: float, **settings: str) -> dict[str, Any]:
    """The receiver as a process; every acknowledged span is looked for in its log afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {"SPANLOOP_WORKSPACE": folder, "SPANLOOP_COLLECTOR__PORT": "0"} | settings
        with started([sys.executable, "-m", "spanloop.collectors.receiver"], environment) as process:
            url = json.loads(process.stdout.readline())["url"]  # type: ignore[union-attr]
            return measure(process, f"{url}/v1/traces", requests, seconds, durable=lambda: _stored(folder))


def _stored(folder: str) -> int:
    from spanloop.pipeline.log.sqlite import SqliteLog
    from spanloop.schemas.events import decode

    log = SqliteLog(Path(folder) / "spanloop.db")
    total, after = 0, {}
    try:
        while records := log.read(["spans"], after, 5_000):
            total += sum(len(decode(r.value).spans) for r in records)  # type: ignore[attr-defined]
            after = {"spans": records[-1].offset}
    finally:
        log.close()
    return total


def bare(requests: list[bytes], seconds: float, *, append: bool) -> dict[str, Any]:
    """A handler that parses, and one that also appends the body to SQLite (WAL, FULL, group commit of 5 ms)."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "bare.db") if append else ""
        with started([sys.executable, "-c", BARE, path], {}) as process:
            url = json.loads(process.stdout.readline())["url"]  # type: ignore[union-attr]
            return measure(process, f"{url}/v1/traces", requests, seconds)


# ---------------------------------------------------------------- peers


def environment_of(folder: Path, *packages: str) -> Path:
    """A virtual environment with packages; its python. Raises CalledProcessError."""
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, capture_output=True)
        subprocess.run(
            [str(python), "-m", "pip", "install", "--quiet", *packages],
            check=True,
            capture_output=True,
            timeout=900,
        )
        (folder / ".ready").touch()
    return python


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def mlflow(requests: list[bytes], seconds: float, peers: Path, *, workers: int) -> dict[str, Any]:
    """MLflow's server over SQLite; its own ingest needs an experiment's id in a header."""
    python = environment_of(peers / "mlflow", MLFLOW)
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "mlflow.db"
        command = [
            str(python), "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", str(workers),
            "--backend-store-uri", f"sqlite:///{database}", "--default-artifact-root", folder,
        ]  # fmt: skip
        with started(
            command, {"MLFLOW_MODEL_CATALOG_URI": "", "MLFLOW_DISABLE_TELEMETRY": "true"}, quiet=True
        ) as process:
            wait_for(f"http://127.0.0.1:{port}/health", process, 120)
            return measure(
                process,
                f"http://127.0.0.1:{port}/v1/traces",
                requests,
                seconds,
                headers={"x-mlflow-experiment-id": "0"},
                durable=lambda: _rows(database, "SELECT count(*) FROM spans"),
            )


def phoenix(requests: list[bytes], seconds: float, peers: Path) -> dict[str, Any]:
    """Phoenix over SQLite."""
    python = environment_of(peers / "phoenix", PHOENIX)
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            "PHOENIX_WORKING_DIR": folder, "PHOENIX_PORT": str(port), "PHOENIX_GRPC_PORT": str(free_port()),
            "PHOENIX_HOST": "127.0.0.1", "PHOENIX_TELEMETRY_ENABLED": "false",
        }  # fmt: skip
        with started([str(python), "-m", "phoenix.server.main", "serve"], environment, quiet=True) as process:
            wait_for(f"http://127.0.0.1:{port}/healthz", process, 180)
            return measure(
                process,
                f"http://127.0.0.1:{port}/v1/traces",
                requests,
                seconds,
                durable=lambda: _rows(Path(folder) / "phoenix.db", "SELECT count(*) FROM spans"),
            )


def _rows(database: Path, query: str) -> int:
    try:
        connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True, timeout=5)
        try:
            return connection.execute(query).fetchone()[0]
        finally:
            connection.close()
    except sqlite3.Error:
        return 0


def attempted(name: str, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Figures of a peer, or why there are none."""
    print(f"-- {name}", file=sys.stderr)
    try:
        return call()
    except (subprocess.SubprocessError, RuntimeError, OSError) as exc:
        return {"skipped": f"{type(exc).__name__}: {exc}"[:300]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--requests", type=int, default=1_500)
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--peers", type=Path, help="folder of the peers' environments, kept")
    options = parser.parse_args()
    requests = bodies(options.requests)
    seconds = options.seconds
    figures: dict[str, Any] = {
        "bytes_per_span": round(sum(map(len, requests)) / len(requests) / SPANS),
        "spans_per_request": SPANS,
        "connections": CONNECTIONS,
        "receiver_default": ours(requests, seconds),
        "receiver_redaction_off": ours(requests, seconds, SPANLOOP_CONTENT__TRAINING="true"),
        "bare_parse_only": bare(requests, seconds, append=False),
        "bare_parse_and_append": bare(requests, seconds, append=True),
    }
    with tempfile.TemporaryDirectory() as folder:
        peers = options.peers or Path(folder)
        if not options.no_peers:
            figures["mlflow_one_worker"] = attempted(
                "mlflow", lambda: mlflow(requests, seconds, peers, workers=1)
            )
            figures["mlflow_four_workers"] = attempted(
                "mlflow", lambda: mlflow(requests, seconds, peers, workers=4)
            )
            figures["phoenix"] = attempted("phoenix", lambda: phoenix(requests, seconds, peers))
    fast = figures["receiver_redaction_off"]["spans_per_s"]
    best = max(
        (
            figures.get(f"mlflow_{n}_worker{'s' * (n != 'one')}", {}).get("visible_spans_per_s", 0)
            for n in ("one", "four")
        ),
        default=0,
    )
    figures["redaction_off_over_bare_append"] = round(
        fast / max(1, figures["bare_parse_and_append"]["spans_per_s"]), 3
    )
    figures["redaction_off_over_mlflows_best"] = round(fast / best, 1) if best else None
    write("ingest", ".venv/bin/python benchmarks/ingest.py", figures)


if __name__ == "__main__":
    main()
