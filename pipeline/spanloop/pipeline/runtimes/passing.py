"""Events on their way from one stage to the next in one process: what was just encoded need not be decoded again.

An event is passed on only with a record whose bytes are the very bytes that it was encoded to; whatever else is on the log (a
record that was there before under the same id) is decoded by the stage.
Invariants: a record with its event and the same record without one mean the same; bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from spanloop.pipeline.ports import LogRecord, NewRecord
from spanloop.schemas.events import Event

__all__ = ["PASSED_MAX", "Passing"]

PASSED_MAX = 4096
"""Events that wait for a stage; the oldest goes first, to be decoded by who still wants it."""


class Passing:
    """Events of committed outputs, until each stage that reads their topic has read them.

    Args:
        topics: what each stage reads.
    """

    def __init__(self, topics: Iterable[Sequence[str]]) -> None:
        self._readers = Counter(name for names in topics for name in names)
        self._waiting: dict[tuple[str, str], tuple[Event, bytes, int]] = {}

    def put(self, events: Sequence[Event], records: Sequence[NewRecord]) -> None:
        """Remember events with the records that carry them."""
        for event, record in zip(events, records, strict=True):
            readers = self._readers[record.topic]
            if readers:
                self._waiting[(record.topic, record.event_id)] = (event, record.value, readers)
        while len(self._waiting) > PASSED_MAX:
            del self._waiting[next(iter(self._waiting))]

    def attach(self, records: Sequence[LogRecord]) -> list[LogRecord]:
        """Records as one stage reads them, with their events where they are known."""
        return [self._attached(record) for record in records] if self._waiting else list(records)

    def _attached(self, record: LogRecord) -> LogRecord:
        name = (record.topic, record.event_id)
        known = self._waiting.get(name)
        if known is None:
            return record
        event, value, readers = known
        if readers > 1:
            self._waiting[name] = (event, value, readers - 1)
        else:
            del self._waiting[name]
        if value != record.value:
            return record
        return LogRecord(
            record.topic, record.offset, record.key, record.event_id, value, record.appended_ns, record.partition, event
        )  # fmt: skip
