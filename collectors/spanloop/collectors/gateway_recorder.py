"""Background recording: finished calls become records on the spool within milliseconds, and reach the log from there in order.

Place: in the recorder's own process (``gateway_recording``), so that the event loop that serves has its interpreter for itself. Two
threads, so that a log that hangs keeps nothing in memory: the writer turns calls into records and spools them, the mover appends
them to the log. Invariants: no client waits for either; order is kept; appending again what a killed process had appended changes
nothing (records are idempotent by event id); every call that will not reach the log is counted, with its reason. Calls wait in
memory only until they are spooled, ``queue_max`` at most.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

import msgspec

from spanloop.collectors.gateway_spool import Spool
from spanloop.collectors.gateway_spool_memory import Batch, MemorySpool
from spanloop.pipeline.ports import Log, NewRecord, new_record
from spanloop.schemas.errors import SchemaError, TransientError
from spanloop.schemas.events import SpansReceived

__all__ = ["Recorder"]

_log = logging.getLogger(__name__)
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(NewRecord).decode

GROUP_S = 0.020
"""Calls that end within this time are spooled and committed together."""
GROUP_MAX = 500
GROUP_BYTES = 2**20
"""A group with more is spooled in several writes."""
RETRY_S = (0.1, 2.0)
"""First and longest pause after a failed append; it doubles."""
NOTHING = b""
"""Stands on the spool for a call that could not be read, so that each call that was handed over has its place there."""
MOVE_S = 0.05
"""Between two appends to the log while less than a group waits: each is a commit, and a sync of the disk."""
IDLE_S = 0.5
"""The mover looks after the disk at least so often."""


Call = TypeVar("Call")


class Recorder(Generic[Call]):
    """Owner of the recording threads.

    Args:
        log: Where the spans go.
        build: A finished call to its event. Raises what it likes: such a call is lost alone.
        queue_max: Calls that may wait in memory.
        spools: The first takes new calls; the others are emptied. None: only in memory.
        close_s: How long ``close`` tries to reach a log that fails.
    """

    def __init__(
        self,
        log: Log,
        build: Callable[[Call], SpansReceived],
        *,
        queue_max: int,
        spools: Sequence[Spool | MemorySpool] = (),
        group_s: float = GROUP_S,
        close_s: float = 5.0,
    ) -> None:
        self._log = log
        self._build = build
        self._queue_max = queue_max
        self._group_s = group_s
        self._close_s = close_s
        self._spool: Spool | MemorySpool = spools[0] if spools else MemorySpool()
        self._left: list[Spool | MemorySpool] = list(spools[1:])
        self._queue: deque[Call] = deque()
        self._built: list[bytes] = []
        self._changed = threading.Condition()
        self._spooled = threading.Event()
        self._closing_at: float | None = None
        self._writer_ended = False
        self._writer = threading.Thread(target=self._write, name="spanloop-recorder", daemon=True)
        self._mover = threading.Thread(target=self._move, name="spanloop-recorder-log", daemon=True)
        self._lost: Counter[str] = Counter()
        self.num_recorded = 0
        self.num_settled = 0
        """Calls that are spooled, or were found unreadable: nobody needs to keep them."""
        self.num_failed_appends = 0
        self.num_failed_writes = 0
        self.runs = True
        self.num_starts = 1
        self.log_fails = False
        """The last append to the log failed."""

    def start(self) -> None:
        """Start the threads."""
        self._writer.start()
        self._mover.start()

    @property
    def depth(self) -> int:
        """Calls that wait in memory."""
        kept = self._spool.waiting if self._spool.in_memory else 0
        return len(self._queue) + len(self._built) + kept

    @property
    def waiting(self) -> int:
        """Calls that are not on the log yet."""
        return len(self._queue) + len(self._built) + self.num_kept

    @property
    def num_kept(self) -> int:
        """Calls that are settled and not on the log yet."""
        return sum(spool.waiting for spool in (self._spool, *self._left))

    @property
    def spooled(self) -> bool:
        """Calls wait on disk, not in memory."""
        return not self._spool.in_memory

    @property
    def spool_bytes(self) -> int:
        """Size of the spool on the disk."""
        return self._spool.num_bytes

    @property
    def lost(self) -> Counter[str]:
        """Calls that never reach the log, by reason; an earlier process's among them, where they were found out at the start."""
        found: Counter[str] = Counter()
        for part in (self._lost, *(spool.lost for spool in (self._spool, *self._left))):
            found.update(part)
        return found

    @property
    def num_lost(self) -> int:
        """Sum of ``lost``."""
        return sum(self.lost.values())

    def begin(self) -> None:
        """A call goes to an upstream. Who is told of it here ends with the process."""

    def put(self, call: Call) -> bool:
        """Hand over a finished call; False: there is no room and the call is counted as lost."""
        with self._changed:
            if self.depth >= self._queue_max or self._closing_at is not None:
                self._lose("queue_full")
                return False
            self._queue.append(call)
            if len(self._queue) == 1:
                self._changed.notify()
            return True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Record while the block runs; closes at its end."""
        self.start()
        yield
        await asyncio.to_thread(self.close)

    def close(self, close_s: float | None = None) -> None:
        """Spool everything, try to reach the log for ``close_s``, and stop. What is on the disk then waits for the next start."""
        if close_s is not None:
            self._close_s = close_s
        with self._changed:
            self._closing_at = time.monotonic()
            self._changed.notify()
        if self._writer.is_alive():
            self._writer.join()
        if self._mover.is_alive():
            self._mover.join(self._close_s + 1.0)
        hangs = self._mover.is_alive()
        if unwritten := len(self._queue) + len(self._built):
            self._lose("closed", unwritten)
            _log.error("%d calls could not be recorded before the end", unwritten)
            self._queue.clear()
            self._built = []
        for spool in (self._spool, *self._left):
            if spool.waiting:
                _log.warning("%d calls wait on %s", spool.waiting, getattr(spool, "folder", "no disk"))
            if not hangs:  # else the log still has records of it in its hands: the files stay as they are
                spool.close()

    def _lose(self, reason: str, count: int = 1) -> None:
        """Count calls that were never spooled."""
        self._lost[reason] += count
        if self._spool.counters is not None:
            self._spool.counters.unspooled += count

    def _out_of_time(self) -> bool:
        return self._closing_at is not None and time.monotonic() - self._closing_at > self._close_s

    # ------------------------------------------------------------ call -> spool

    def _write(self) -> None:
        pause = 0.0
        while self._collect():
            if self._to_spool():
                pause = 0.0
                continue
            pause = min(max(RETRY_S[0], 2 * pause), RETRY_S[1])
            if self._out_of_time():
                break
            with self._changed:
                self._changed.wait(min(pause, 0.2) if self._closing_at is not None else pause)
        self._writer_ended = True
        self._spooled.set()

    def _collect(self) -> bool:
        """Wait for calls and turn a group into records. False: closing and nothing is left."""
        with self._changed:
            while not self._queue and not self._built:
                if self._closing_at is not None:
                    return False
                self._changed.wait()
            if not self._built and self._closing_at is None and len(self._queue) < GROUP_MAX:
                self._changed.wait(self._group_s)
            taken: list[Call] = []
            while self._queue and len(taken) + len(self._built) < GROUP_MAX:
                taken.append(self._queue.popleft())
        for call in taken:
            try:
                self._built.append(_encode(new_record(self._build(call))))
            except Exception:  # one odd answer of an upstream must not end recording
                self._lost["unreadable"] += 1
                self._built.append(NOTHING)
                _log.exception("a call could not be recorded")
        return True

    def _to_spool(self) -> bool:
        while self._built:
            size = count = 0
            while count < len(self._built) and (not count or size + len(self._built[count]) <= GROUP_BYTES):
                size += len(self._built[count])
                count += 1
            try:
                self._spool.append(self._built[:count])
            except TransientError as exc:
                self.num_failed_writes += 1
                if self.num_failed_writes == 1 or self.num_failed_writes % 50 == 0:
                    _log.error("%d calls wait in memory: %s", len(self._built), exc.message)
                return False
            del self._built[:count]
            self.num_settled += count
            self._spooled.set()
        return True

    # ------------------------------------------------------------ spool -> log

    def _move(self) -> None:
        pause = 0.0
        while True:
            moved = self._move_batch()
            if moved is None:
                if self._writer_ended:
                    return
                self._spooled.wait(IDLE_S)
                self._spooled.clear()
                self._spool.sync()
            elif moved:
                pause = 0.0
                if not self._left and self._spool.waiting < GROUP_MAX:
                    self._rest(MOVE_S)
            else:
                pause = min(max(RETRY_S[0], 2 * pause), RETRY_S[1])
                if self._out_of_time():
                    return
                self._rest(pause)
                self._spool.sync()

    def _rest(self, seconds: float) -> None:
        """A pause that ends early when ``close`` is called."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 0.1))
            if self._closing_at is not None:
                return

    def _move_batch(self) -> bool | None:
        """Move a batch; False: the log or the disk refused, None: nothing waits."""
        spool = self._left[0] if self._left else self._spool
        try:
            batch = spool.read(GROUP_MAX)
        except TransientError as exc:
            _log.warning("%s", exc.message)
            return False
        if batch is not None:
            return self._to_log(spool, batch)
        if self._left:
            self._lost.update(spool.lost)
            self._left.remove(spool)
            spool.close()
            return True
        return None

    def _to_log(self, spool: Spool | MemorySpool, batch: Batch) -> bool:
        records: list[NewRecord | None] = [self._read(payload) for payload in batch.payloads]
        whole = [record for record in records if record is not None]
        try:
            if whole:
                self._log.append(whole)
            self.num_recorded += len(whole)
            done, fails = len(records), False
        except SchemaError:
            done, fails = self._append_singly(records)
        except Exception as exc:  # whatever the log's trouble is, calls wait for its end
            self._failed(exc, len(records))
            done, fails = 0, True
        self.log_fails = fails
        spool.done(batch, done)
        return not fails

    def _read(self, payload: bytes) -> NewRecord | None:
        if payload == NOTHING:
            return None
        try:
            return _decode(payload)
        except msgspec.DecodeError:
            self._lost["unreadable"] += 1
            _log.exception("a record of the spool is passed over")
            return None

    def _append_singly(self, records: Sequence[NewRecord | None]) -> tuple[int, bool]:
        """A record is malformed: find it and count it as lost. (How many are done, whether the log failed otherwise.)"""
        for number, record in enumerate(records):
            try:
                if record is not None:
                    self._log.append([record])
                    self.num_recorded += 1
            except SchemaError:
                self._lost["refused"] += 1
                _log.exception("the log refuses a call as malformed")
            except Exception as exc:
                self._failed(exc, len(records) - number)
                return number, True
        return len(records), False

    def _failed(self, exc: Exception, count: int) -> None:
        self.num_failed_appends += 1
        if self.num_failed_appends == 1 or self.num_failed_appends % 50 == 0:
            _log.warning("the log refuses %d calls, they wait: %s", count, exc)
