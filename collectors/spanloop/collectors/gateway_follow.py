"""Follows the ``policies`` topic and tells the router; reading is idle most of the time and never blocks a request."""

from __future__ import annotations

import logging
import threading

from spanloop.collectors.routing import Router
from spanloop.pipeline.ports import Log
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError, SpanloopError
from spanloop.schemas.events import Event, decode

__all__ = ["Follower"]

_log = logging.getLogger(__name__)

POLL_S = 0.2
READ_MAX = 500


class Follower:
    """A thread that reads from the beginning, then polls. A record that cannot be read is logged and passed over."""

    def __init__(self, log: Log, router: Router, *, poll_s: float = POLL_S) -> None:
        self._log = log
        self._router = router
        self._poll_s = poll_s
        self._after = -1
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="spanloop-follower", daemon=True)
        self.num_failed_reads = 0

    def start(self) -> None:
        """Read what is there, then follow in the background."""
        self._poll()
        self._thread.start()

    def close(self) -> None:
        """Stop following."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _work(self) -> None:
        while not self._stop.wait(self._poll_s):
            self._poll()

    def _poll(self) -> None:
        try:
            while records := self._log.read([topics.POLICIES], {topics.POLICIES: self._after}, READ_MAX):
                self._router.apply(_decoded(record.value, record.offset) for record in records)
                self._after = records[-1].offset
        except SpanloopError as exc:
            self.num_failed_reads += 1
            _log.warning("the log cannot be read, routing stays as it is: %s", exc)


def _decoded(value: bytes, offset: int) -> Event:
    try:
        return decode(value)
    except SchemaError as exc:
        _log.warning("record %d of the policies topic is passed over: %s", offset, exc)
        return _NOTHING


_NOTHING = Event()
