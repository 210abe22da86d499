"""What the archive asks of the log: the records of a range, what follows it, and whether it is the log it was made from.

Invariants: a record that the log has between its oldest and its last one is there for good, so an archived record that is
missing in between means another log. A log that has forgotten its beginning (Kafka's retention) contradicts nothing. All
partitions of a topic are followed by one reader, at the place where it stands: a Kafka log need not seek.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from spanloop.pipeline.archive.manifest import Range
from spanloop.pipeline.ports import Log, LogRecord, topic_of
from spanloop.schemas.errors import TerminalError

__all__ = ["chunk", "contradicts", "first_offset", "following", "read_range", "records_of"]

READ_RECORDS = 1_000
CHUNK_BYTES = 64 * 2**20
"""Values read before something is written, so that it fits in memory whatever the number of records."""


def first_offset(log: Log, source: str) -> int | None:
    """Offset of the first record that the log still has of a source; None: it has none."""
    kept: Callable[[str], int] | None = getattr(log, "first", None)  # a Kafka log
    if kept is not None:
        offset = kept(source)
        return offset if offset <= log.end(source) else None
    found = log.read([_alone(log, source)], {}, 1)
    return found[0].offset if found else None


def _alone(log: Log, source: str) -> str:
    """The name to read one source by: a topic's name stands for all its partitions."""
    topic, partition = topic_of(source)
    return f"{topic}/0" if partition == 0 and len(log.sources(topic)) > 1 else source


def read_range(log: Log, source: str, first: int, last: int) -> Iterator[LogRecord]:
    """Records with first <= offset <= last that the log has, in offset order."""
    if first > last:
        return
    start = first_offset(log, source) if getattr(log, "first", None) else first
    if start is None:
        return
    name, after = _alone(log, source), max(first, start) - 1
    while after < last:
        records = log.read([name], {source: after}, READ_RECORDS)
        if not records:
            return
        for record in records:
            if record.offset > last:
                return
            yield record
        after = records[-1].offset


def following(
    log: Log,
    topic: str,
    after: Mapping[str, int],
    ends: Mapping[str, int],
    *,
    batch: int = READ_RECORDS,
    on_gone: Callable[[str, int, int], None] = lambda _source, _first, _last: None,
) -> Iterator[list[LogRecord]]:
    """Records of all partitions of a topic behind ``after`` and up to ``ends`` (offsets by source), a batch at a time.

    ``on_gone`` is told which offsets of a source the log does not have any more, when it says so.
    """
    position = {source: offset for source, offset in after.items() if offset >= 0}
    while any(position.get(source, -1) < end for source, end in ends.items()):
        try:
            records = log.read([topic], position, batch)
        except TerminalError as exc:
            source, first = exc.attributes.get("source"), exc.attributes.get("first")
            if not isinstance(source, str) or not isinstance(first, int) or first <= position.get(source, -1):
                raise
            on_gone(source, position.get(source, -1) + 1, first - 1)
            position[source] = first - 1
            continue
        if not records:
            return
        for record in records:
            position[record.source] = record.offset
        yield [record for record in records if record.offset <= ends.get(record.source, -1)]


def chunk(
    log: Log,
    topic: str,
    after: Mapping[str, int],
    ends: Mapping[str, int],
    limit: int,
    *,
    on_gone: Callable[[str, int, int], None] = lambda _source, _first, _last: None,
) -> dict[str, list[LogRecord]]:
    """The next records by source: until one has about ``limit`` of them (at least, at most twice), all are at their end, or
    ``CHUNK_BYTES`` of values are there."""
    found: dict[str, list[LogRecord]] = {}
    size = 0
    for records in following(log, topic, after, ends, batch=min(limit, READ_RECORDS), on_gone=on_gone):
        for record in records:
            found.setdefault(record.source, []).append(record)
            size += len(record.value)
        if size > CHUNK_BYTES or max(map(len, found.values()), default=0) >= limit:
            break
    return found


def records_of(log: Log | None, item: Range) -> list[LogRecord] | None:
    """All records of a range from the log; None where the log does not have them (any more).

    A Kafka log may give a copy of an event again that it kept back when the range was written; it is kept back here too.
    """
    if log is None:
        return None
    records = list(read_range(log, item.source, item.first, item.last))
    if len(records) > item.records:
        records = list({record.event_id: record for record in reversed(records)}.values())[::-1]
    if len(records) < item.records or not records:
        return None
    found = {record.offset: record.event_id for record in records}
    ends = {item.first_offset: item.first_event_id, item.last_offset: item.last_event_id}
    return records if all(found.get(offset) == event_id for offset, event_id in ends.items()) else None


def contradicts(log: Log, source: str, ranges: Sequence[Range]) -> bool:
    """Whether the log holds something else where these ranges end and begin: they were made from another log."""
    known = [item for item in ranges if item.records]
    start = first_offset(log, source) if known else None
    if start is None:
        return False
    end = log.end(source)
    probes = [(known[0].first_offset, known[0].first_event_id)]
    probes += [(item.last_offset, item.last_event_id) for item in known if item.last_offset <= end][-1:]
    for offset, event_id in probes:
        if start <= offset <= end:
            found = next(read_range(log, source, offset, offset), None)
            if found is None:  # a Kafka log keeps back what it takes for a copy
                if not hasattr(log, "first"):
                    return True
            elif found.event_id != event_id:
                return True
    return False
