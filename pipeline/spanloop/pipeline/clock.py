"""Processing time. Event time comes from spans; a reducer is told the time, it never asks.

``SystemClock`` is for the shells, ``ManualClock`` for tests and replays that set the time by hand.
"""

from __future__ import annotations

import threading
import time

__all__ = ["ManualClock", "SystemClock"]


class SystemClock:
    """The machine's wall clock."""

    def now_ns(self) -> int:
        """Nanoseconds since the epoch."""
        return time.time_ns()


class ManualClock:
    """A clock that stands still until it is moved.

    >>> clock = ManualClock(5)
    >>> clock.advance(seconds=1); clock.now_ns()
    1000000005
    """

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns
        self._lock = threading.Lock()

    def now_ns(self) -> int:
        """Nanoseconds since the epoch, as set."""
        with self._lock:
            return self._now_ns

    def set(self, now_ns: int) -> None:
        """Jump to a time; backwards is allowed, as wall clocks do it."""
        with self._lock:
            self._now_ns = now_ns

    def advance(self, *, seconds: float = 0.0, ns: int = 0) -> None:
        """Move on by a duration."""
        with self._lock:
            self._now_ns += round(seconds * 1e9) + ns
