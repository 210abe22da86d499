"""Background recording: finished calls wait in a bounded queue and reach the log in groups; no client waits for it.

Invariants: calls are appended in order; while the log fails they stay in memory and are tried again, up to
``queue_max``, then new ones are counted as lost; ``close`` flushes. A call that cannot be turned into a span is
counted and logged, never retried.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from spanloop.collectors.gateway_record import CallRecord
from spanloop.pipeline.ports import Log, NewRecord, new_record
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import SpansReceived

__all__ = ["Recorder"]

_log = logging.getLogger(__name__)

GROUP_S = 0.020
"""Calls that end within this time share one commit."""
GROUP_MAX = 500
RETRY_S = (0.1, 2.0)
"""First and longest pause after a failed append; it doubles."""


class Recorder:
    """Owner of the recording thread.

    Args:
        log: Where the spans go.
        build: A finished call to its event.
        queue_max: Calls that may wait.
        close_s: How long ``close`` tries to reach a log that fails.
    """

    def __init__(
        self,
        log: Log,
        build: Callable[[CallRecord], SpansReceived],
        *,
        queue_max: int,
        group_s: float = GROUP_S,
        close_s: float = 5.0,
    ) -> None:
        self._log = log
        self._build = build
        self._queue_max = queue_max
        self._group_s = group_s
        self._close_s = close_s
        self._queue: deque[CallRecord] = deque()
        self._built: list[NewRecord] = []
        self._changed = threading.Condition()
        self._closing_at: float | None = None
        self._thread = threading.Thread(target=self._work, name="spanloop-recorder", daemon=True)
        self.num_recorded = 0
        self.num_lost = 0
        self.num_failed_appends = 0

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def depth(self) -> int:
        """Calls that wait for the log."""
        return len(self._queue) + len(self._built)

    def put(self, record: CallRecord) -> bool:
        """Hand over a finished call; False: the queue is full and the call is counted as lost."""
        with self._changed:
            if self.depth >= self._queue_max or self._closing_at is not None:
                self.num_lost += 1
                return False
            self._queue.append(record)
            if len(self._queue) == 1:
                self._changed.notify()
            return True

    def close(self) -> None:
        """Flush and stop. What the log still refuses after ``close_s`` is counted as lost."""
        with self._changed:
            self._closing_at = time.monotonic()
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        self.num_lost += self.depth
        if self.depth:
            _log.error("%d calls could not be recorded before the end", self.depth)

    def _work(self) -> None:
        pause = 0.0
        while True:
            if not self._collect():
                return
            if self._append():
                pause = 0.0
                continue
            pause = min(max(RETRY_S[0], 2 * pause), RETRY_S[1])
            if self._out_of_time():
                return
            with self._changed:
                self._changed.wait(min(pause, 0.2) if self._closing_at is not None else pause)

    def _out_of_time(self) -> bool:
        return self._closing_at is not None and time.monotonic() - self._closing_at > self._close_s

    def _collect(self) -> bool:
        """Wait for calls and turn a group into records. False: closing and nothing is left."""
        with self._changed:
            while not self._queue and not self._built:
                if self._closing_at is not None:
                    return False
                self._changed.wait()
            if not self._built and self._closing_at is None and len(self._queue) < GROUP_MAX:
                self._changed.wait(self._group_s)
            taken: list[CallRecord] = []
            while self._queue and len(taken) + len(self._built) < GROUP_MAX:
                taken.append(self._queue.popleft())
        for call in taken:
            self._build_one(call)
        return True

    def _build_one(self, call: CallRecord) -> None:
        try:
            self._built.append(new_record(self._build(call)))
        except Exception:  # one odd answer of an upstream must not end recording
            self.num_lost += 1
            _log.exception("a call could not be recorded")

    def _append(self) -> bool:
        if not self._built:
            return True
        try:
            self._log.append(self._built)
        except SchemaError:
            self._append_singly()
            return True
        except Exception as exc:  # whatever the log's trouble is, calls wait for its end
            self.num_failed_appends += 1
            if self.num_failed_appends == 1 or self.num_failed_appends % 50 == 0:
                _log.warning("the log refuses %d calls, they wait: %s", len(self._built), exc)
            return False
        self.num_recorded += len(self._built)
        self._built = []
        return True

    def _append_singly(self) -> None:
        """One record is malformed: find it, count it as lost, keep the others (what fails otherwise stays)."""
        records, self._built = self._built, []
        for record in records:
            try:
                self._log.append([record])
                self.num_recorded += 1
            except SchemaError:
                self.num_lost += 1
                _log.exception("the log refuses a call as malformed")
            except Exception:
                self._built.append(record)
