"""The Log in memory: the reference that the contract suite compares others with, and what batch runs use.

Same semantics as on disk (one sequence over all topics, idempotent by topic and event id), nothing durable.
"""

from __future__ import annotations

import bisect
import heapq
import threading
from collections.abc import Mapping, Sequence
from itertools import islice

from spanloop.pipeline.ports import Appended, Clock, LogRecord, NewRecord
from spanloop.schemas.errors import TerminalError

__all__ = ["MemoryLog"]


def _offset(record: LogRecord) -> int:
    return record.offset


class MemoryLog:
    """Append-only lists, one a topic, under one lock."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.RLock()
        self._topics: dict[str, list[LogRecord]] = {}
        self._offsets: dict[tuple[str, str], int] = {}
        self._committed: dict[str, dict[str, int]] = {}
        self._next = 0
        self._closed = False

    def append(self, records: Sequence[NewRecord]) -> list[Appended]:
        """Append all; a record whose event id its topic already has keeps the old offset."""
        with self._lock:
            if self._closed:
                raise TerminalError("the log is closed; nothing was appended")
            now_ns = self._clock.now_ns()
            return [self._append_one(record, now_ns) for record in records]

    def _append_one(self, record: NewRecord, now_ns: int) -> Appended:
        identity = (record.topic, record.event_id)
        known = self._offsets.get(identity)
        if known is not None:
            return Appended(offset=known, duplicate=True)
        offset = self._next
        self._next += 1
        self._offsets[identity] = offset
        self._topics.setdefault(record.topic, []).append(
            LogRecord(record.topic, offset, record.key, record.event_id, record.value, now_ns)
        )
        return Appended(offset=offset, duplicate=False)

    def read(self, topic_names: Sequence[str], after: Mapping[str, int], limit: int) -> list[LogRecord]:
        """Up to ``limit`` records behind ``after``, merged in append order."""
        with self._lock:
            parts = []
            for topic in dict.fromkeys(topic_names):
                records = self._topics.get(topic, [])
                start = bisect.bisect_right(records, after.get(topic, -1), key=_offset)
                parts.append(records[start : start + limit])
            return list(islice(heapq.merge(*parts, key=_offset), limit))

    def end(self, source: str) -> int:
        """Offset of the last record of a topic, -1 when empty."""
        with self._lock:
            records = self._topics.get(source)
            return records[-1].offset if records else -1

    def sources(self, topic: str) -> tuple[str, ...]:
        """The topic: there are no partitions."""
        return (topic,)

    def commit(self, group: str, offsets: Mapping[str, int]) -> None:
        """Remember how far ``group`` has read."""
        with self._lock:
            self._committed.setdefault(group, {}).update(offsets)

    def committed(self, group: str) -> dict[str, int]:
        """Offsets last committed by ``group``."""
        with self._lock:
            return dict(self._committed.get(group, {}))

    def close(self) -> None:
        """Refuse appends from here on."""
        with self._lock:
            self._closed = True
