"""The pipeline process of ``spanloop up``: assembly, signal and value over the workspace's log.

``python -m spanloop.pipeline.runtimes.embedded [--config TOML]`` prints one JSON line when it is ready, writes
WORKSPACE/pipeline.json (counters and lag) once a second, and ends with 0 on SIGTERM or SIGINT after a last commit.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import Stage
from spanloop.pipeline.runtimes.collecting import collect_rarely
from spanloop.pipeline.runtimes.embedded import EmbeddedRuntime
from spanloop.pipeline.sealing.opening import open_vault
from spanloop.pipeline.sealing.vault import Vault
from spanloop.pipeline.state.sqlite import SqliteState
from spanloop.schemas.errors import SpanloopError
from spanloop.schemas.settings import Pipeline, load_settings

__all__ = ["build_stages", "main"]

STATUS_EVERY_S = 1.0


def build_stages(pipeline: Pipeline, vault: Vault | None = None) -> list[Stage]:
    """The stages of a deployment, in the order of the flow."""
    from spanloop.pipeline.assembly.stage import AssemblyStage
    from spanloop.pipeline.credit.value import ValueStage
    from spanloop.pipeline.signal import SignalStage

    return [AssemblyStage(pipeline), SignalStage(pipeline, vault=vault), ValueStage(pipeline, vault=vault)]


def _write_status(path: Path, runtime: EmbeddedRuntime, clock: SystemClock) -> None:
    stages = {name: msgspec.to_builtins(metrics) for name, metrics in runtime.metrics().items()}
    temporary = path.with_suffix(".tmp")
    try:
        temporary.write_text(json.dumps({"pid": os.getpid(), "t_ns": clock.now_ns(), "stages": stages}))
        os.replace(temporary, path)
    except OSError as exc:  # a status that cannot be written must not stop the pipeline
        logging.getLogger("spanloop.pipeline").warning("cannot write %s: %s", path, exc)


def _report(runtime: EmbeddedRuntime, path: Path, clock: SystemClock, done: threading.Event) -> None:
    while not done.wait(STATUS_EVERY_S):
        _write_status(path, runtime, clock)


def run(config: Path | None) -> None:
    """Run the stages of a configuration until SIGTERM or SIGINT."""
    settings = load_settings(config)
    clock = SystemClock()
    log, state = SqliteLog(settings.database, clock), SqliteState(settings.database, clock)
    runtime = EmbeddedRuntime(
        build_stages(settings.pipeline, open_vault(settings)),
        log,
        state,
        clock,
        batch_max=settings.pipeline.batch_max,
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: runtime.stop())
    runtime.restore()
    collect_rarely()
    print(json.dumps({"ready": "pipeline", "url": ""}), flush=True)  # noqa: T201 - the supervisor waits for it
    done = threading.Event()
    status = settings.workspace / "pipeline.json"
    reporter = threading.Thread(target=_report, args=(runtime, status, clock, done), daemon=True)
    reporter.start()
    try:
        runtime.run()
    finally:
        done.set()
        reporter.join(timeout=5)
        _write_status(status, runtime, clock)
        log.close()
        state.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy is imported: small matrices, busy machine
    parser = argparse.ArgumentParser(
        prog="python -m spanloop.pipeline.runtimes.embedded", description=__doc__
    )
    parser.add_argument("--config", type=Path, help="settings file (TOML)")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    try:
        run(options.config)
    except SpanloopError as exc:
        print(f"error: {exc.message}", file=sys.stderr)  # noqa: T201
        sys.exit(exc.exit_code)
