"""Follows the ``policies`` topic and tells the router; reading is idle most of the time and never blocks a request.

While the log cannot be read at the start, routing is what the last process knew: each change is kept beside the spool.
"""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import msgspec

from spanloop.collectors.routing import Router
from spanloop.pipeline.ports import Log
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError, SpanloopError
from spanloop.schemas.events import Event, decode, encode

__all__ = ["Follower"]

_log = logging.getLogger(__name__)
_EVENTS = msgspec.json.Decoder(list[msgspec.Raw])

POLL_S = 0.2
READ_MAX = 500
START_S = 2.0
"""A start waits for the log no longer."""


class Follower:
    """A thread that reads from the beginning, then polls. A record that cannot be read is logged and passed over.

    Args:
        log: What to follow.
        router: Told of each event.
        kept: File of the last known routing; None: none is kept.
    """

    def __init__(self, log: Log, router: Router, *, kept: Path | None = None, poll_s: float = POLL_S) -> None:
        self._log = log
        self._router = router
        self._kept = kept
        self._poll_s = poll_s
        self._after = -1
        self._read_once = False
        self._turn = threading.Lock()
        self._tried = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="spanloop-follower", daemon=True)
        self.num_failed_reads = 0
        self.from_file = False
        """Routing is an earlier process's: the log has not been read yet."""

    def start(self) -> None:
        """Read what is there, then follow in the background. A log that hangs or fails holds nothing up."""
        self._thread.start()
        self._tried.wait(START_S)
        if not self._read_once:
            self._from_file()

    def close(self) -> None:
        """Stop following."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5.0)

    def _work(self) -> None:
        self._poll()
        self._tried.set()
        while not self._stop.wait(self._poll_s):
            self._poll()

    def _poll(self) -> None:
        try:
            if not self._read_once:
                self._read_all()
                return
            while records := self._log.read([topics.POLICIES], {topics.POLICIES: self._after}, READ_MAX):
                self._router.apply(_decoded(record.value, record.offset) for record in records)
                self._after = records[-1].offset
                self._keep()
        except SpanloopError as exc:
            self.num_failed_reads += 1
            if self.num_failed_reads == 1 or self.num_failed_reads % 300 == 0:
                _log.warning("the log cannot be read, routing stays as it is: %s", exc)

    def _read_all(self) -> None:
        """The first whole reading replaces whatever an earlier process left."""
        events: list[Event] = []
        after = self._after
        while records := self._log.read([topics.POLICIES], {topics.POLICIES: after}, READ_MAX):
            events += [_decoded(record.value, record.offset) for record in records]
            after = records[-1].offset
        with self._turn:
            self._router.apply(events, afresh=True)
            self._after, self._read_once, self.from_file = after, True, False
        if events:
            self._keep()

    def _keep(self) -> None:
        if self._kept is None:
            return
        data = b"[" + b",".join(encode(event) for event in self._router.events()) + b"]"
        part = self._kept.with_suffix(".part")
        try:
            part.write_bytes(data)
            os.replace(part, self._kept)
        except OSError as exc:
            _log.warning("the routing cannot be kept for the next start: %s", exc)

    def _from_file(self) -> None:
        if self._kept is None or not self._kept.exists():
            return
        try:
            events = [decode(bytes(raw)) for raw in _EVENTS.decode(self._kept.read_bytes())]
        except (SchemaError, msgspec.DecodeError, OSError) as exc:
            _log.warning("%s is passed over: %s", self._kept, exc)
            return
        with self._turn:
            if not self._read_once:
                _log.warning("the log cannot be read: routing is as the last process knew it")
                self._router.apply(events)
                self.from_file = True


def _decoded(value: bytes, offset: int) -> Event:
    try:
        return decode(value)
    except SchemaError as exc:
        _log.warning("record %d of the policies topic is passed over: %s", offset, exc)
        return _NOTHING


_NOTHING = Event()
