"""Records of the gateway on bounded disk, between the call and the log: append-only segment files with checksums.

Place: the recorder writes each group of calls here, another thread moves them to the log in order. Invariants: what ``append``
returned for survives kill -9 of the process (it is in the operating system's cache; ``sync`` puts it on the disk); a record is
handed out once, in order, by each process, and again by the next one only until ``done`` was told; damage costs only the damaged
records; every record that will not reach the log is counted. When the limit is reached the oldest segment goes first.

A segment is a run of frames (``gateway_frames``). Sequence numbers have no gaps, so that what is missing can be counted.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from spanloop.collectors.gateway_counters import Counters
from spanloop.collectors.gateway_frames import frame, frames
from spanloop.collectors.gateway_spool_folder import hold, refused
from spanloop.collectors.gateway_spool_memory import Batch

__all__ = ["Spool"]

_log = logging.getLogger(__name__)

TRUNCATE_BYTES = 64 * 2**10
"""An active segment of this size is emptied once all of it is on the log; a smaller one is not worth a system call."""
READ_BYTES = 4 * 2**20


class _Segment:
    __slots__ = ("count", "handed", "number", "path", "read_at", "size")

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number
        self.size = 0
        self.count = 0
        """Whole records in it."""
        self.handed = 0
        """Of them, done."""
        self.read_at = 0
        """Everything before this offset is done."""


def _created(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC, 0o600)


class Spool:
    """One folder of segments. Safe to use from several threads.

    Args:
        folder: Where they are; held against other processes while this one uses it. Raises BlockingIOError where one does.
        max_bytes: Of all segments together.
        fsync_s: What waits is on the disk after so long; 0: when ``append`` returns.
        resumed: Only the recorder ended, its gateway lives: what it has in its hands is no loss.
        owner: The gateway's process.
        write: ``os.write``.
    """

    in_memory = False

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int,
        segment_bytes: int = 0,
        fsync_s: float = 1.0,
        resumed: bool = False,
        owner: int = 0,
        write: Callable[[int, bytes], int] = os.write,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_bytes = max_bytes
        self._segment_bytes = segment_bytes or max(2**16, min(8 * 2**20, max_bytes // 16))
        self._fsync_s = fsync_s
        self._write = write
        self._now_s = now_s
        self._turn = threading.Lock()
        self._segments: list[_Segment] = []
        self._fd = -1
        self._dirty_at: float | None = None
        self._num_dropped = 0
        """Segments."""
        self.lost: Counter[str] = Counter()
        """Records that never reach the log, by reason."""
        self.folder = folder
        self._owner = owner or os.getpid()
        self._lock_fd = hold(folder, self._owner)
        self.counters = Counters(folder / "counters")
        self.num_restored = 0
        """Times that the folder was made again."""
        self._next = 0
        self._done = 0
        """Records before this sequence number are done."""
        self._scan(resumed=resumed)

    # ------------------------------------------------------------ what there is

    @property
    def waiting(self) -> int:
        """Records that are not on the log yet."""
        return sum(segment.count - segment.handed for segment in self._segments)

    @property
    def next(self) -> int:
        """Sequence number of the next record."""
        return self._next

    @property
    def num_bytes(self) -> int:
        """Size of all segments."""
        return sum(segment.size for segment in self._segments)

    def _scan(self, *, resumed: bool) -> None:
        """Take stock of what an earlier process left, and count what it lost."""
        expected: int | None = None
        for path in sorted(self.folder.glob("*.seg")):
            try:
                number, data = int(path.stem), path.read_bytes()
            except (ValueError, OSError) as exc:
                _log.warning("%s is passed over: %s", path, exc)
                continue
            segment = _Segment(path, number)
            segment.size = len(data)
            for sequence, _, _ in frames(data):
                if expected is not None and sequence < expected:
                    continue  # the rest of a failed write, written again since
                if expected is not None and sequence > expected:
                    self.lost["damaged"] += sequence - expected
                expected = sequence + 1
                segment.count += 1
            if segment.count:
                self._segments.append(segment)
            else:
                path.unlink(missing_ok=True)
        told = self.counters.sequence
        if expected is not None and told > expected:
            self.lost["damaged"] += told - expected
        self._next = max(told, expected or 0)
        if resumed:
            self.counters.sequence = self._next
        else:
            queued = self.counters.put - self.counters.refused - self.counters.unspooled - self._next
            if queued > 0:
                self.lost["killed"] += queued
            if self.counters.begun > self.counters.put:
                self.lost["in_flight"] += self.counters.begun - self.counters.put
            self.counters.restart(self._next)
        if self.waiting:
            _log.warning("%d calls of an earlier process wait for the log", self.waiting)
        if self.lost:
            _log.error("calls of an earlier process are lost: %s", dict(self.lost))

    # ------------------------------------------------------------ writing

    def append(self, payloads: Sequence[bytes]) -> None:
        """Write records in order; all or none of them. Raises TransientError when the disk refuses."""
        with self._turn:
            data = b"".join(frame(self._next + i, payload) for i, payload in enumerate(payloads))
            self._make_room(len(data))
            try:
                self._restore()
                self._put(data)
            except OSError as exc:
                if exc.errno not in (errno.ENOSPC, errno.EDQUOT) or not self._drop_oldest():
                    raise refused(self.folder, exc) from exc
                try:
                    self._put(data)
                except OSError as again:
                    raise refused(self.folder, again) from again
            active = self._segments[-1]
            active.size += len(data)
            active.count += len(payloads)
            self._next += len(payloads)
            self.counters.sequence = self._next
            if self._dirty_at is None:
                self._dirty_at = self._now_s()
            if self._fsync_s == 0:
                self._sync()

    def _restore(self) -> None:
        """Make the folder and the active segment again where somebody removed them: their records can still be read from the open
        file, but would be gone with this process."""
        if not os.fstat(self._lock_fd).st_nlink:
            held = hold(self.folder, self._owner)
            os.close(self._lock_fd)
            self._lock_fd = held
            old, self.counters = self.counters, self.counters.again(self.folder / "counters")
            old.close()
            self.num_restored += 1
            _log.error("%s was removed while the gateway writes to it; it is made again", self.folder)
        if self._fd < 0 or os.fstat(self._fd).st_nlink:
            return
        active = self._segments[-1]
        fd = _created(active.path)
        try:
            self._write_all(fd, os.pread(self._fd, active.size, 0))
        except OSError:
            os.close(fd)
            active.path.unlink(missing_ok=True)
            raise
        os.close(self._fd)
        self._fd = fd
        _log.error("%s was removed; it is written again", active.path)

    def _write_all(self, fd: int, data: bytes) -> None:
        written = 0
        while written < len(data):
            written += self._write(fd, data[written:])

    def _put(self, data: bytes) -> None:
        if self._fd < 0 or self._segments[-1].size >= self._segment_bytes:
            self._roll()
        try:
            self._write_all(self._fd, data)
        except OSError:
            try:
                os.ftruncate(self._fd, self._segments[-1].size)
            except OSError:  # the torn record stays behind; a reader passes over it
                self._close_active()
            raise

    def _make_room(self, size: int) -> None:
        while self._segments and self.num_bytes + size > self._max_bytes:
            if len(self._segments) == 1:
                self._close_active()
            if not self._drop_oldest(even_active=True):
                return

    def _drop_oldest(self, *, even_active: bool = False) -> bool:
        if not self._segments or (len(self._segments) == 1 and not even_active and self._fd >= 0):
            return False
        oldest = self._segments.pop(0)
        gone = oldest.count - oldest.handed
        self.lost["spool_full"] += gone
        oldest.path.unlink(missing_ok=True)
        self._num_dropped += 1
        if self._num_dropped == 1 or self._num_dropped % 50 == 0:
            _log.error("the spool is full: its oldest calls are dropped, %d so far", self.lost["spool_full"])
        return True

    def _roll(self) -> None:
        self._close_active()
        number = self._segments[-1].number + 1 if self._segments else self.counters.segment + 1
        path = self.folder / f"{number:016d}.seg"
        self._fd = _created(path)
        self.counters.segment = number
        self._segments.append(_Segment(path, number))

    def _close_active(self) -> None:
        if self._fd >= 0:
            if self._dirty_at is not None:
                self._sync()
            os.close(self._fd)
            self._fd = -1

    # ------------------------------------------------------------ reading

    def read(self, limit: int) -> Batch | None:
        """The oldest records that are not done, up to ``limit`` of one segment; None: nothing waits. Raises TransientError when
        the disk refuses."""
        with self._turn:
            while self._segments:
                segment = self._segments[0]
                batch = self._read_from(segment, limit)
                if batch.payloads:
                    return batch
                if not self._finish(segment):
                    return None
            return None

    def _read_from(self, segment: _Segment, limit: int) -> Batch:
        batch = Batch(segment.number, [], [], [])
        try:
            file = segment.path.open("rb")
        except FileNotFoundError:  # somebody removed it
            if self._fd < 0 or segment is not self._segments[-1]:
                return batch  # its records are damaged
            file = os.fdopen(os.dup(self._fd), "rb")
        except OSError as exc:
            raise refused(segment.path, exc) from exc
        size = READ_BYTES
        with file:
            while not batch.payloads:
                file.seek(segment.read_at)
                data = file.read(min(size, segment.size - segment.read_at))
                whole = len(data) < size
                for sequence, payload, end in frames(data, last=whole):
                    if sequence < self._done:
                        continue
                    batch.payloads.append(payload)
                    batch.sequences.append(sequence)
                    batch.ends.append(segment.read_at + end)
                    if len(batch.payloads) == limit:
                        break
                if whole:
                    break
                size *= 4
        return batch

    def _finish(self, segment: _Segment) -> bool:
        """The oldest segment has nothing more to hand out. False: it is the one that is written."""
        missing = segment.count - segment.handed
        if missing:
            self.lost["damaged"] += missing
            _log.error("%s: %d calls cannot be read again and are lost", segment.path, missing)
            segment.handed = segment.count
        if segment is self._segments[-1] and self._fd >= 0:
            segment.read_at = segment.size
            if segment.size >= TRUNCATE_BYTES:
                os.ftruncate(self._fd, 0)
                segment.size = segment.read_at = segment.count = segment.handed = 0
                self._dirty_at = None
            return False
        self._segments.pop(0)
        segment.path.unlink(missing_ok=True)
        return True

    def done(self, batch: Batch, count: int) -> None:
        """The first ``count`` records of a batch are on the log, or will never be."""
        if not count:
            return
        with self._turn:
            if not self._segments or self._segments[0].number != batch.segment:
                self.lost["spool_full"] -= count  # dropped while they were under way, and yet they arrived
                return
            segment = self._segments[0]
            segment.handed += count
            segment.read_at = batch.ends[count - 1]
            self._done = batch.sequences[count - 1] + 1
            if segment.handed == segment.count:
                self._finish(segment)

    # ------------------------------------------------------------ the disk

    def sync(self) -> None:
        """Put on the disk what has waited for ``fsync_s``."""
        with self._turn:
            if self._dirty_at is not None and self._now_s() - self._dirty_at >= self._fsync_s:
                self._sync()

    def _sync(self) -> None:
        self._dirty_at = None
        if self._fd >= 0 and self.waiting:
            try:
                os.fsync(self._fd)
            except OSError as exc:
                _log.warning("%s cannot be synced: %s", self.folder, exc)

    def close(self) -> None:
        """Sync what waits, remove what does not, release the folder."""
        with self._turn:
            self._close_active()
            if not self.waiting:
                for segment in self._segments:
                    segment.path.unlink(missing_ok=True)
                self._segments = []
        self.abandon()

    def abandon(self) -> None:
        """Release files and the folder and do nothing else, as the end of the process would."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self.counters.close()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
