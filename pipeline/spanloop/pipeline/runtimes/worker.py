"""``spanloop process``: a worker of the Kafka runtime, from spans to samples.

``python -m spanloop.pipeline.runtimes.worker [--config TOML] [--engine faust|loop]`` prints one JSON line when it is ready,
writes WORKSPACE/pipeline.json (or pipeline-NAME.json) once a second and ends with 0 on SIGTERM or SIGINT after a last snapshot.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from spanloop.schemas.errors import ConfigError, SpanloopError
from spanloop.schemas.settings import Settings, load_settings

__all__ = ["main", "process"]

_EPILOG = """\b
Examples:
  SPANLOOP_BOOTSTRAP_SERVERS=127.0.0.1:9092 spanloop process
  spanloop process --config spanloop.toml --worker 2         # a second one shares the partitions
  spanloop process --engine loop                             # a plain consumer instead of Faust
"""

_log = logging.getLogger("spanloop.process")


@click.command(epilog=_EPILOG)
@click.option("--config", type=click.Path(path_type=Path), help="Settings file (TOML).")
@click.option("--workspace", type=click.Path(path_type=Path), help="Folder for status and snapshots.")
@click.option(
    "--group",
    help="Consumer group, with snapshots of its own: its workers share the partitions. One group at a time writes to the topics.",
)
@click.option(
    "--worker",
    default="",
    help="Name of this worker in its status file; a number n also means metrics port + n - 1.",
)
@click.option("--engine", type=click.Choice(["faust", "loop"]),
              help="Who consumes: Faust, or a plain confluent-kafka loop.  [default: the settings' process.engine]")  # fmt: skip
def process(
    config: Path | None, workspace: Path | None, group: str | None, worker: str, engine: str | None
) -> None:
    """Turn spans on Kafka into orchestrations, rewards, credit and samples.

    Start as many as there are partitions to share; kill any of them at any time. Each partition's state is in snapshots;
    what a killed worker had not written yet is folded again from the log.
    """
    _configure_logging()
    flags: dict[str, Any] = {}
    if workspace is not None:
        flags["workspace"] = workspace
    chosen = {name: value for name, value in (("group", group), ("engine", engine)) if value is not None}
    if chosen:
        flags["process"] = chosen
    _run(load_settings(config, flags), worker)


def _configure_logging() -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )
    for noisy in ("faust", "aiokafka", "mode", "kafka"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


def _run(settings: Settings, worker: str) -> None:
    engine = settings.process.engine
    if not settings.bootstrap_servers:
        raise ConfigError(
            "no Kafka: set bootstrap_servers in the settings or SPANLOOP_BOOTSTRAP_SERVERS; without Kafka `spanloop up` runs "
            "the embedded pipeline"
        )
    try:
        from spanloop.pipeline.clock import SystemClock
        from spanloop.pipeline.log.kafka import KafkaLog
        from spanloop.pipeline.runtimes.collecting import collect_rarely
        from spanloop.pipeline.runtimes.metrics import serve, start_otel
        from spanloop.pipeline.runtimes.watchdog import Watchdog
        from spanloop.pipeline.runtimes.workers import Workers

        engines: dict[str, Callable[..., None]] = {}
        if engine == "faust":
            from spanloop.pipeline.runtimes.faust_app import run_faust

            engines["faust"] = run_faust
        else:
            from spanloop.pipeline.runtimes.consumer import run_loop

            engines["loop"] = run_loop
    except ModuleNotFoundError as exc:
        raise ConfigError(f"{exc.name} is not installed: pip install 'spanloop[process]'") from exc
    settings.workspace.mkdir(parents=True, exist_ok=True)
    clock = SystemClock()
    log = KafkaLog(settings.bootstrap_servers, settings.kafka, clock)
    workers = Workers(settings, log, clock)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    status = settings.workspace / (f"pipeline-{worker}.json" if worker else "pipeline.json")
    watchdog = Watchdog(workers, status)
    watchdog.start()
    host, port = settings.process.metrics_host, settings.process.metrics_port
    if port and worker.isdigit():
        port += max(0, int(worker) - 1)
    closers = [watchdog.stop, serve(host, port, workers), start_otel(workers)]
    collect_rarely()

    def ready() -> None:
        click.echo(json.dumps({"ready": "pipeline", "url": f"http://{host}:{port}/metrics" if port else ""}))
        sys.stdout.flush()

    try:
        engines[engine](settings, log, workers, stop=stop, ready=ready)
    finally:
        stop.set()
        for close in closers:
            close()
        log.close()


def main() -> None:
    """Entry point of the process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        process.main(standalone_mode=False)
    except SpanloopError as exc:
        click.echo(f"error: {exc.message}", err=True)
        sys.exit(exc.exit_code)
    except click.ClickException as exc:
        exc.show()
        sys.exit(exc.exit_code)
    except click.Abort:
        sys.exit(130)


if __name__ == "__main__":
    main()
