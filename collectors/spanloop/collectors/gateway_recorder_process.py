"""The recorder's process: takes finished calls from its gateway, spools them and moves them to the log.

Place: started by the gateway (``gateway_sender``), which it outlives by moments: a gateway that is killed leaves calls in the
socket, which are spooled still. Whatever it is doing, it ends when its gateway has; signals that a terminal or an init system sends
to a whole group are the gateway's to obey. Run: ``python -m spanloop.collectors.gateway_recorder_process FD``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from spanloop.collectors.gateway_finished import Events, Finished
from spanloop.collectors.gateway_handover import Messages, Start, Status, packed
from spanloop.collectors.gateway_log import LateLog
from spanloop.collectors.gateway_recorder import Recorder
from spanloop.collectors.gateway_spool import Spool
from spanloop.collectors.gateway_spools import open_spools, spool_folder
from spanloop.collectors.redaction import Redactor, workspace_key
from spanloop.collectors.sealing import open_sealer
from spanloop.pipeline.log.open import open_log
from spanloop.schemas.errors import SpanloopError, TransientError
from spanloop.schemas.events import SpansReceived
from spanloop.schemas.settings import Settings, load_settings

__all__ = ["Work", "events_of", "main"]

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_start = msgspec.msgpack.Decoder(Start).decode
_finished = msgspec.msgpack.Decoder(Finished).decode

READ_BYTES = 2**18
GATHER_S = 0.015
"""Between two readings, so that not each call wakes this process."""
STATUS_S = 0.050
"""Between two statuses."""
IDLE_S = 0.2
"""A look after oneself while nothing comes."""
AHEAD_MAX = 1000
"""Calls that are read before they are spooled; more wait with the gateway, which counts them."""
ORPHAN_S = 0.2
"""How long it goes on moving calls to the log when its gateway was killed: another one may wait for the spool."""


def events_of(settings: Settings) -> Events:
    """How this deployment makes spans of calls."""
    key = workspace_key(settings)
    redact = partial(Redactor(settings.content, key).span, trusted=True)
    sealer = open_sealer(settings)
    seal = None if sealer is None else lambda span, tenant: sealer.call(span, redact(span), tenant)
    return Events(settings, key=key, redact=redact, seal=seal)


def _open_spools(settings: Settings, start: Start) -> Sequence[Spool]:
    try:
        return open_spools(
            spool_folder(settings),
            max_bytes=int(settings.gateway.spool_mb * 2**20),
            fsync_s=settings.gateway.spool_fsync_s,
            resume=Path(start.resume) if start.resume else None,
            owner=start.owner,
        )
    except TransientError as exc:
        _log.error("%s. Calls wait in memory only.", exc.message)
        return ()


class _Line:
    """The socket to the gateway."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._messages = Messages()
        self._told: Status | None = None
        self._told_s = 0.0

    def receive(self, wait_s: float) -> list[bytes] | None:
        """Messages that have come, after ``wait_s`` at the latest; None: the gateway has ended."""
        ready, _, _ = select.select([self._line], [], [], wait_s)
        if not ready:
            return []
        try:
            data = self._line.recv(READ_BYTES)
        except ConnectionError:
            data = b""
        return self._messages.feed(data) if data else None

    def tell(self, status: Status, *, at_once: bool = False) -> bool:
        """Send what has changed, not too often; False: it is too early. A gateway that does not listen has ended, which the next
        reading shows."""
        if status == self._told:
            return True
        now = time.monotonic()
        if now - self._told_s < STATUS_S and not at_once:
            return False
        with contextlib.suppress(OSError):
            self._line.sendall(packed(_encode(status)))
        self._told, self._told_s = status, now
        return True


class Work:
    """One gateway's recording, from its first message to its last.

    Args:
        start: The gateway's first message.
        talk: With the gateway.
    """

    def __init__(self, start: Start, talk: _Line) -> None:
        settings = load_settings(flags=start.settings)
        make = events_of(settings)

        def build(message: bytes) -> SpansReceived:
            return make(_finished(message))

        self._owner = start.owner
        self._talk = talk
        self._log = LateLog(lambda: open_log(settings))
        spools = _open_spools(settings, start)
        self._spool = spools[0] if spools else None
        self._first = self._spool.next if self._spool is not None else 0
        self._recorder = Recorder(self._log, build, queue_max=2 * AHEAD_MAX, spools=spools, group_s=GATHER_S)

    def run(self, messages: list[bytes] | None) -> None:
        """Record ``messages`` and what follows them, until the gateway says that was all, or has ended."""
        self._recorder.start()
        self._talk.tell(self._status(), at_once=True)
        while messages is not None and self._take(messages):
            idle = self._talk.tell(self._status()) and not self._recorder.waiting
            time.sleep(GATHER_S)
            messages = self._talk.receive(IDLE_S if idle else STATUS_S)
        self._recorder.close(ORPHAN_S if messages is None else None)
        self._talk.tell(self._status(), at_once=True)
        self._log.close()

    def _take(self, messages: list[bytes]) -> bool:
        """Hand messages to the recorder; False: that was the last."""
        for message in messages:
            if not message:
                return False
            while self._recorder.depth >= AHEAD_MAX and os.getppid() == self._owner:
                time.sleep(GATHER_S)
                self._talk.tell(self._status())
            self._recorder.put(message)
        return True

    def _status(self) -> Status:
        spool, recorder = self._spool, self._recorder
        settled = recorder.num_settled
        return Status(
            folder="" if spool is None else str(spool.folder),
            next=self._first + settled,
            restored=0 if spool is None else spool.num_restored,
            waiting=recorder.num_kept,
            spool_bytes=recorder.spool_bytes,
            recorded=recorder.num_recorded,
            failed_appends=recorder.num_failed_appends,
            failed_writes=recorder.num_failed_writes,
            log_fails=recorder.log_fails,
            lost=dict(recorder.lost),
        )


def _serve(line: socket.socket) -> None:
    """Serve one gateway until it ends. Raises SpanloopError when its settings or keys cannot be used."""
    talk = _Line(line)
    messages: list[bytes] | None = []
    while messages == []:
        messages = talk.receive(60.0)
    if messages is not None:
        Work(_start(messages[0]), talk).run(messages[1:])


def main() -> None:
    """Run the process over the socket whose descriptor is the argument."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, AttributeError):  # never before the process that serves
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s gateway-recorder %(levelname)s %(message)s"
    )
    with socket.socket(fileno=int(sys.argv[1])) as line:
        try:
            _serve(line)
        except SpanloopError as exc:
            sys.stderr.write(f"error: {exc.message}\n")
            sys.exit(exc.exit_code)


if __name__ == "__main__":
    main()
