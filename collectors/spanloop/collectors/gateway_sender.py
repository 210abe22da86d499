"""The gateway's side of recording: finished calls go to the recorder's process, and are kept here until it has spooled them.

Place: in the event loop that serves, which shares its interpreter with nobody: a call costs one small encoding and one write to a
socket. Invariants: nothing here waits; a call is kept until the recorder says that it is settled, so that a recorder that is killed
or ends loses none: another is started, and gets what the last one had not settled; what is kept is bounded by ``gateway.queue_max``
and QUEUE_BYTES_MAX, and what does not fit is counted. The numbers that tell a next gateway what this one lost by a kill are written
to the spool's mapped counters as they change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
from pydantic import SecretStr

from spanloop.collectors.gateway_counters import Counters
from spanloop.collectors.gateway_finished import Finished
from spanloop.collectors.gateway_handover import Messages, Start, Status, packed
from spanloop.schemas.settings import Settings

__all__ = ["Sender"]

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_status = msgspec.msgpack.Decoder(Status).decode

MODULE = "spanloop.collectors.gateway_recorder_process"
QUEUE_BYTES_MAX = 256 * 2**20
"""Of all calls that are kept."""
AHEAD_BYTES = 2**20
"""Written to the socket beyond what it takes; more waits with what is kept."""
FIRST_S = 10.0
"""A start waits for the recorder's first status no longer; calls are answered and kept without it."""
RESTART_S = (0.1, 5.0)
"""First and longest pause before a recorder is started again; it doubles until one has settled a call."""
DEATHS_MAX = 5
"""Recorders that end one after the other without having settled a call: the call that is first in line is given up."""
CLOSE_S = 5.0
"""An end waits so long until all is handed over, and again so long until the recorder has ended ..."""
END_S = 4.0
"""... and a little more."""
_NOTHING_TOLD = Status("", 0, 0, 0, 0, 0, 0, 0, log_fails=False, lost={})


class _Line(asyncio.Protocol):
    """The socket to one recorder.

    Args:
        told: Takes each status.
        send: Called when the socket takes more.
    """

    def __init__(self, told: Callable[[_Line, Status], None], send: Callable[[], None]) -> None:
        self._told = told
        self._send = send
        self._messages = Messages()
        self.transport: asyncio.Transport | None = None
        self.num_sent = 0
        """Of the calls that are kept, how many this recorder got."""
        self.num_settled = 0
        """Calls that this recorder settled."""
        self.is_met = False
        """It has told its first status."""
        self.is_full = False
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        if isinstance(transport, asyncio.Transport):
            transport.set_write_buffer_limits(high=AHEAD_BYTES)
            self.transport = transport

    def data_received(self, data: bytes) -> None:
        """See ``asyncio.Protocol``."""
        for message in self._messages.feed(data):
            self._told(self, _status(message))

    def pause_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        self.is_full = True

    def resume_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        self.is_full = False
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        del exc
        self.transport = None
        self.ended.set()


class Sender:
    """Keeps finished calls until the recorder has them; keeps the recorder running.

    Args:
        settings: The deployment, which the recorder gets as it is.
        close_s: See CLOSE_S.
    """

    def __init__(self, settings: Settings, *, close_s: float = CLOSE_S) -> None:
        self._settings = _in_the_clear(settings)
        self._queue_max = settings.gateway.queue_max
        self._close_s = close_s
        self._kept: deque[bytes] = deque()
        """Calls that are not settled, oldest first."""
        self._kept_bytes = 0
        self._num_settled = 0
        self._num_begun = 0
        self._num_put = 0
        self._num_refused = 0
        self._base: int | None = None
        """Number, in the spool's count, of the first call of this gateway."""
        self._counters: Counters | None = None
        self._line: _Line | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._status = _NOTHING_TOLD
        self._earlier: Counter[str] = Counter()
        """What ended recorders counted."""
        self._lost: Counter[str] = Counter()
        """Here, and by ended recorders."""
        self._met = asyncio.Event()
        self._all_settled = asyncio.Event()
        self._all_settled.set()
        self._closing = False
        self.num_starts = 0
        """Recorders that were started."""

    # ------------------------------------------------------------ what there is

    @property
    def depth(self) -> int:
        """Calls that wait in memory."""
        return len(self._kept) + (0 if self.spooled else self._status.waiting)

    @property
    def waiting(self) -> int:
        """Calls that are not on the log yet."""
        return len(self._kept) + self._status.waiting

    @property
    def spooled(self) -> bool:
        """Calls wait on disk, not in memory."""
        return bool(self._status.folder)

    @property
    def spool_bytes(self) -> int:
        """Size of the spool on the disk."""
        return self._status.spool_bytes

    @property
    def pid(self) -> int:
        """The recorder's process, the last one's where none runs; 0 before the first."""
        return self._process.pid if self._process is not None else 0

    @property
    def runs(self) -> bool:
        """There is a recorder."""
        return self._line is not None and self._line.is_met

    @property
    def log_fails(self) -> bool:
        """The last append to the log failed."""
        return self._status.log_fails

    @property
    def num_recorded(self) -> int:
        """Calls on the log."""
        return self._earlier["recorded"] + self._status.recorded

    @property
    def num_failed_appends(self) -> int:
        """Appends the log refused."""
        return self._earlier["failed_appends"] + self._status.failed_appends

    @property
    def num_failed_writes(self) -> int:
        """Writes the spool's disk refused."""
        return self._earlier["failed_writes"] + self._status.failed_writes

    @property
    def lost(self) -> Counter[str]:
        """Calls that never reach the log, by reason; an earlier gateway's among them, where they were found out at the start."""
        found = Counter(self._lost)
        found.update(self._status.lost)
        return found

    @property
    def num_lost(self) -> int:
        """Sum of ``lost``."""
        return sum(self.lost.values())

    # ------------------------------------------------------------ from the serving path

    def begin(self) -> None:
        """A call goes to an upstream; it will be ``put`` when it has ended, whatever becomes of it."""
        self._num_begun += 1
        if self._counters is not None:
            self._counters.begun = (self._base or 0) + self._num_begun

    def put(self, call: Finished) -> bool:
        """Hand over a finished call; False: there is no room and the call is counted as lost."""
        message = packed(_encode(call))
        self._num_put += 1
        if self._counters is not None:
            self._counters.put = (self._base or 0) + self._num_put
        if len(self._kept) >= self._queue_max or self._kept_bytes + len(message) > QUEUE_BYTES_MAX:
            self._refuse("queue_full")
            return False
        self._kept.append(message)
        self._all_settled.clear()
        self._kept_bytes += len(message)
        self._send()
        return True

    def _send(self) -> None:
        """Write to the recorder what it has not got, as far as the socket takes it."""
        line = self._line
        if line is None or line.transport is None or not line.is_met:
            return
        while line.num_sent < len(self._kept) and not line.is_full:
            line.num_sent += 1
            line.transport.write(self._kept[line.num_sent - 1])

    # ------------------------------------------------------------ from the recorder

    def _told(self, line: _Line, status: Status) -> None:
        """A recorder says how it stands: let go of what is settled."""
        before, self._status = self._status, status
        if not line.is_met:
            self._meet(before, status)
        elif status.restored != before.restored:
            self._open_counters()
        settled = min(status.next - (self._base or 0) - self._num_settled, len(self._kept))
        for _ in range(settled):
            self._kept_bytes -= len(self._kept.popleft())
        if settled > 0:
            self._num_settled += settled
            line.num_settled += settled
            line.num_sent = max(0, line.num_sent - settled)
            if not self._kept:
                self._all_settled.set()
        if not line.is_met:
            line.is_met = True
            self._met.set()
            self._send()

    def _meet(self, before: Status, status: Status) -> None:
        """The first status of a recorder: where it goes on. What the last one wrote without having told is settled; one that has
        another spool, or one that was emptied, gets all that is kept."""
        position = status.next - (self._base or 0) - self._num_settled
        if self._base is None or status.folder != before.folder or not 0 <= position <= len(self._kept):
            self._base = status.next - self._num_settled
        self._open_counters()

    def _open_counters(self) -> None:
        """Tell a next gateway, by the spool's counters, what this one has in its hands."""
        if self._counters is not None:
            self._counters.close()
            self._counters = None
        if not self._status.folder:
            return
        try:
            found = Counters(Path(self._status.folder) / "counters")
        except OSError as exc:
            _log.warning("a kill would lose calls uncounted: the counters cannot be opened: %s", exc)
            return
        base = self._base or 0
        found.begun, found.put = base + self._num_begun, base + self._num_put
        found.refused = self._num_refused
        self._counters = found

    # ------------------------------------------------------------ the recorder's process

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Record while the block runs; closes at its end."""
        keeping = asyncio.create_task(self._keep_running())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._met.wait(), FIRST_S)
        yield
        await self._close(keeping)

    async def _keep_running(self) -> None:
        pause, deaths = 0.0, 0
        while not self._closing:
            line = _Line(self._told, self._send)
            try:
                await self._run_one(line)
            except OSError as exc:
                _log.error("the recorder cannot be started: %s", exc)
            if self._closing:
                return
            self._ended()
            if line.num_settled:
                pause, deaths = 0.0, 0
            elif line.is_met and line.num_sent:
                deaths += 1
            if deaths >= DEATHS_MAX:
                deaths = 0
                self._give_up_first()
            pause = min(max(RESTART_S[0], 2 * pause), RESTART_S[1])
            await asyncio.sleep(pause)

    async def _run_one(self, line: _Line) -> None:
        """Start a recorder and wait for its end. Raises OSError."""
        ours, theirs = socket.socketpair()
        command = (sys.executable, "-m", MODULE, str(theirs.fileno()))
        try:
            with theirs:
                self._process = await asyncio.to_thread(_started, command, theirs.fileno())
            self.num_starts += 1
            transport, _ = await asyncio.get_running_loop().create_connection(lambda: line, sock=ours)
        except BaseException:
            ours.close()
            raise
        start = Start(self._settings, os.getpid(), self._status.folder)
        transport.write(packed(_encode(start)))
        self._line = line
        await line.ended.wait()
        self._line = None
        await asyncio.to_thread(_end, self._process)

    def _ended(self) -> None:
        """A recorder ended that should not have."""
        status = self._status
        code = self._process.returncode if self._process is not None else None
        _log.error("the recorder ended (%s); %d calls wait for the next one", code, len(self._kept))
        self._earlier.update(
            recorded=status.recorded, failed_appends=status.failed_appends, failed_writes=status.failed_writes
        )
        self._lost.update(status.lost)
        if status.waiting and not status.folder:
            self._lost["killed"] += status.waiting
        self._status = Status(
            folder=status.folder,
            next=status.next,
            restored=0,
            waiting=status.waiting if status.folder else 0,
            spool_bytes=status.spool_bytes,
            recorded=0,
            failed_appends=0,
            failed_writes=0,
            log_fails=status.log_fails,
            lost={},
        )

    def _give_up_first(self) -> None:
        """No recorder survives the oldest call that is kept."""
        self._kept_bytes -= len(self._kept.popleft())
        self._refuse("unreadable")
        _log.error("a call is lost: %d recorders ended over it", DEATHS_MAX)

    def _refuse(self, reason: str, count: int = 1) -> None:
        """Count calls that are never handed over."""
        self._lost[reason] += count
        self._num_refused += count
        if self._counters is not None:
            self._counters.refused = self._num_refused

    async def _close(self, keeping: asyncio.Task[None]) -> None:
        """Hand over what is kept, let the recorder end, and count what it did not get."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._all_settled.wait(), self._close_s)
        self._closing = True
        if self._line is not None and self._line.transport is not None:
            self._line.transport.write(packed(b""))
        try:
            await asyncio.wait_for(keeping, self._close_s + END_S)
        except TimeoutError:
            _log.warning("the recorder did not end and is killed; its spool waits for the next start")
            if self._process is not None:
                await asyncio.to_thread(_end, self._process, 0.0)
        if self._kept:
            _log.error("%d calls could not be recorded before the end", len(self._kept))
            self._refuse("closed", len(self._kept))
        if self._counters is not None:
            self._counters.close()


def _started(command: tuple[str, ...], descriptor: int) -> subprocess.Popen[bytes]:
    """A recorder, in a process group of its own: what ends the gateway's group must not keep it from writing what it was handed.
    Its settings come over the socket, so that the environment's do not mix in."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPANLOOP_")}
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(descriptor,),
        env=environment,
        process_group=0,
    )


def _end(process: subprocess.Popen[bytes], wait_s: float = END_S) -> None:
    """Wait for a recorder whose socket is closed; kill one that does not end."""
    try:
        process.wait(wait_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _in_the_clear(settings: Settings) -> dict[str, Any]:
    """Settings as JSON, with their secrets: for the recorder only."""

    def plain(value: Any) -> Any:
        return value.get_secret_value() if isinstance(value, SecretStr) else str(value)

    return msgspec.to_builtins(settings.model_dump(), enc_hook=plain)
