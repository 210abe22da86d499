"""Group commit: requests wait in a bounded queue, one thread appends them together, each learns its fate.

Invariants: a request is acknowledged only after ``Log.append`` returned; a full queue refuses at once; what the log
refuses is refused to every request of that group and nothing of it is kept; ``close`` appends what was accepted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter

import msgspec

from spanloop.pipeline.ports import Appended, Log, NewRecord
from spanloop.schemas.errors import TransientError

__all__ = ["GroupCommitter", "QueueFullError"]

_log = logging.getLogger(__name__)

GROUP_BYTES = 16 * 2**20
"""Most bytes in one commit."""
QUEUE_BYTES = 64 * 2**20
"""Most bytes waiting: a bound on memory beside the one on requests."""


class QueueFullError(TransientError):
    """The queue is at its bound; try again shortly (HTTP 429)."""


class _Waiting(msgspec.Struct):
    records: list[NewRecord]
    size: int
    done: asyncio.Future[list[Appended]]


class GroupCommitter:
    """Owner of the commit thread of one log.

    Args:
        log: where to append.
        group_s: how long the first request of a group waits for others.
        queue_max: requests that may wait.
        observe: told (seconds, requests) of each commit.
    """

    def __init__(
        self, log: Log, *, group_s: float, queue_max: int, observe: Callable[[float, int], None] | None = None
    ) -> None:
        self._log = log
        self._group_s = group_s
        self._queue_max = queue_max
        self._observe = observe
        self._queue: list[_Waiting] = []
        self._queue_bytes = 0
        self._ready = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spanloop-commit")
        self._task: asyncio.Task[None] | None = None
        self._closing = False
        self.busy = False
        """Whether a commit is under way."""

    @property
    def depth(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    def start(self) -> None:
        """Start committing; call it inside the event loop."""
        self._task = asyncio.create_task(self._run())

    async def append(self, records: list[NewRecord]) -> list[Appended]:
        """Wait until ``records`` are durable.

        Raises:
            QueueFullError: too many requests wait.
            TransientError: the log refused.
        """
        if not records:
            return []
        size = sum(len(r.value) for r in records)
        self.check_room(size)
        waiting = _Waiting(records, size, asyncio.get_running_loop().create_future())
        self._queue.append(waiting)
        self._queue_bytes += size
        self._ready.set()
        return await asyncio.shield(waiting.done)

    def check_room(self, size: int = 0) -> None:
        """Whether ``size`` bytes may wait now; asked before a body is decoded too, since refusing must cost little.

        Raises:
            QueueFullError: too much waits, or the committer closes.
        """
        full = len(self._queue) >= self._queue_max or (self._queue and self._queue_bytes + size > QUEUE_BYTES)
        if full or self._closing:
            raise QueueFullError(
                f"{len(self._queue)} requests wait for the log (collector.queue_max); try again"
            )

    async def close(self) -> None:
        """Append what waits, then stop."""
        self._closing = True
        self._ready.set()
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._ready.wait()
            if self._group_s and not self._closing:
                await asyncio.sleep(self._group_s)
            group = self._take()
            if not group:
                if self._closing:
                    return
                continue
            began = perf_counter()
            self.busy = True
            outcomes = await loop.run_in_executor(self._thread, self._append_group, group)
            self.busy = False
            if self._observe is not None:
                self._observe(perf_counter() - began, len(group))
            for waiting, outcome in zip(group, outcomes, strict=True):
                if waiting.done.done():
                    continue
                if isinstance(outcome, Exception):
                    waiting.done.set_exception(outcome)
                    waiting.done.exception()  # its request may have gone away: not an unhandled error
                else:
                    waiting.done.set_result(outcome)

    def _take(self) -> list[_Waiting]:
        count = size = 0
        for waiting in self._queue:
            size += waiting.size
            if count and size > GROUP_BYTES:
                break
            count += 1
        group, self._queue = self._queue[:count], self._queue[count:]
        self._queue_bytes -= sum(w.size for w in group)
        if not self._queue and not self._closing:
            self._ready.clear()
        return group

    def _append_group(self, group: list[_Waiting]) -> list[list[Appended] | Exception]:
        """In the commit thread: all together; when that fails for another reason than the disk, one by one."""
        try:
            flat = self._log.append([record for waiting in group for record in waiting.records])
        except TransientError as exc:
            _log.warning("the log refused %d requests: %s", len(group), exc.message)
            return [TransientError(exc.message) for _ in group]
        except Exception as exc:
            _log.exception("append failed")
            if len(group) == 1:
                return [exc]
            return [outcome for waiting in group for outcome in self._append_group([waiting])]
        outcomes: list[list[Appended] | Exception] = []
        at = 0
        for waiting in group:
            outcomes.append(flat[at : at + len(waiting.records)])
            at += len(waiting.records)
        return outcomes
