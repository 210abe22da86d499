"""The process ``archiver`` of ``spanloop up``: ``python -m spanloop.pipeline.archive.process [--config TOML]``.

Prints one JSON line when it has log and archive, writes WORKSPACE/archiver.json, and ends with 0 on SIGTERM or SIGINT after
writing what is left.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["main", "stopper"]


def stopper() -> threading.Event:
    """An event that SIGTERM and SIGINT set; the second signal ends the process as usual."""
    event = threading.Event()

    def stop(number: int, _: object) -> None:
        event.set()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return event


def run(config: Path | None, on_line: Callable[[str], None]) -> None:
    """Follow the log of a configuration until a signal."""
    from spanloop.pipeline.archive.archiver import Archiver
    from spanloop.pipeline.archive.raw import ArchiveStore
    from spanloop.pipeline.log.open import open_log
    from spanloop.schemas.settings import load_settings

    settings = load_settings(config)
    stop = stopper()
    log = open_log(settings)
    try:
        archiver = Archiver(log, ArchiveStore.open(settings), settings, say=on_line)
        with archiver.writing():
            print(json.dumps({"ready": "archiver", "url": ""}), flush=True)  # noqa: T201 - the supervisor waits for it
            archiver.follow(stop.wait)
    finally:
        log.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the process."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when numpy is imported: small arrays, busy machine
    from spanloop.schemas.errors import SpanloopError

    parser = argparse.ArgumentParser(prog="python -m spanloop.pipeline.archive.process", description=__doc__)
    parser.add_argument("--config", type=Path, help="settings file (TOML)")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s archiver %(levelname)s %(message)s"
    )
    try:
        run(options.config, logging.getLogger("spanloop.archiver").warning)
    except SpanloopError as exc:
        print(f"error: {exc.message}", file=sys.stderr)  # noqa: T201
        sys.exit(exc.exit_code)


if __name__ == "__main__":
    main()
