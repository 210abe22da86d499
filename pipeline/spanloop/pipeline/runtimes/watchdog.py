"""The watchdog of a worker: writes its status once a second and names what has work and makes no progress."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path

from spanloop.pipeline.runtimes.workers import Workers

__all__ = ["Watchdog", "where_is"]

EVERY_S = 1.0
_log = logging.getLogger("spanloop.process")


class Watchdog(threading.Thread):
    """Looks at the workers' counters from a thread of its own.

    Args:
        workers: to be watched.
        path: the status file.
    """

    def __init__(self, workers: Workers, path: Path) -> None:
        super().__init__(name="spanloop-watchdog", daemon=True)
        self._workers = workers
        self._path = path
        self._done = threading.Event()
        self._named: set[str] = set()

    def run(self) -> None:
        """Until ``stop``."""
        while not self._done.wait(EVERY_S):
            self.look()

    def stop(self) -> None:
        """End, with a last look."""
        self._done.set()
        self.join(timeout=5)
        self.look()

    def look(self) -> None:
        """Write the status; say once about each stall that it began, and that it ended."""
        self._workers.write_status(self._path)
        stalled = self._workers.stalled()
        doing = self._workers.metrics()
        for source, seconds in stalled.items():
            if source not in self._named:
                what = doing[source].doing if source in doing else ""
                _log.error(
                    "stalled: %s has work and made no progress for %.0f s (%s, at %s)",
                    source or "the engine", seconds, what or "waiting", where_is(self._workers.thread_id),
                )  # fmt: skip
        for source in self._named - stalled.keys():
            _log.warning("%s goes on", source or "the engine")
        self._named = set(stalled)


def where_is(thread_id: int) -> str:
    """Where a thread is in our own code, and innermost: files, lines and functions, nothing of what they hold."""
    frame = sys._current_frames().get(thread_id)
    if frame is None:
        return "no thread"
    inner = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
    while frame is not None and "spanloop" not in frame.f_code.co_filename:
        frame = frame.f_back
    if frame is None:
        return inner
    ours = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
    return ours if ours == inner else f"{ours} > {inner}"
