"""What the archive asks of the log: the records of a range, and whether it is the log that the archive was made from.

Invariants: a record that the log has between its oldest and its last one is there for good, so an archived record that is
missing in between means another log. A log that has forgotten its beginning (Kafka's retention) contradicts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from spanloop.pipeline.archive.manifest import Range
from spanloop.pipeline.ports import Log, LogRecord

__all__ = ["chunk", "contradicts", "oldest", "read_range", "records_of"]

READ_RECORDS = 1_000
RANGE_BYTES = 64 * 2**20
"""Values of one range at most, so that it fits in memory whatever its number of records."""


def oldest(log: Log, source: str) -> LogRecord | None:
    """The first record that the log still has of a source."""
    found = log.read([source], {source: -1}, 1)
    return found[0] if found else None


def read_range(log: Log, source: str, first: int, last: int) -> Iterator[LogRecord]:
    """Records with first <= offset <= last that the log has, in offset order."""
    after = first - 1
    while after < last:
        records = log.read([source], {source: after}, READ_RECORDS)
        if not records:
            return
        for record in records:
            if record.offset > last:
                return
            yield record
        after = records[-1].offset


def chunk(log: Log, source: str, after: int, end: int, limit: int) -> list[LogRecord]:
    """The next records, no further than offset ``end``, ``limit`` records and ``RANGE_BYTES`` of values (one at least)."""
    found: list[LogRecord] = []
    size = 0
    for record in read_range(log, source, after + 1, end):
        size += len(record.value)
        if found and size > RANGE_BYTES:
            break
        found.append(record)
        if len(found) == limit:
            break
    return found


def records_of(log: Log | None, item: Range) -> list[LogRecord] | None:
    """All records of a range from the log; None where the log does not have them (any more)."""
    if log is None:
        return None
    records = list(read_range(log, item.source, item.first, item.last))
    if len(records) != item.records or not records:
        return None
    ends = (records[0].event_id, records[-1].event_id)
    return records if ends == (item.first_event_id, item.last_event_id) else None


def contradicts(log: Log, source: str, ranges: Sequence[Range]) -> bool:
    """Whether the log holds something else where these ranges end and begin: they were made from another log."""
    known = [item for item in ranges if item.records]
    start = oldest(log, source)
    if not known or start is None:
        return False
    end = log.end(source)
    probes = [(known[0].first_offset, known[0].first_event_id)]
    probes += [(item.last_offset, item.last_event_id) for item in known if item.last_offset <= end][-1:]
    for offset, event_id in probes:
        if start.offset <= offset <= end:
            found = log.read([source], {source: offset - 1}, 1)
            if not found or (found[0].offset, found[0].event_id) != (offset, event_id):
                return True
    return False
