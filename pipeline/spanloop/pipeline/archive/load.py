"""Parquet cache of the log for the read side: ``WORKSPACE/archive/TABLE/FROM-TO.parquet`` plus a live tail.

Place in the flow: ``query`` asks for tables; full segments of ``SEGMENT_RECORDS`` records of a topic are decoded once and
kept, what comes after the last full segment is decoded at each query. Segments are cut by record count from the start of
the topic, so every process cuts them alike and two queries at once write the same files.

Invariants: the log is the truth and the archive a cache, to be deleted at will. A file appears by rename after fsync; a
file is used only when its footer can be read and names the table's schema version, its range, and the event id that the log
holds at the range's end; any other file is rebuilt.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from spanloop.pipeline.columns import build
from spanloop.pipeline.ports import Log, LogRecord
from spanloop.pipeline.views import TABLES, TABLES_OF_TOPIC

__all__ = ["SEGMENT_RECORDS", "TABLES_VERSION", "Archive", "Loaded"]

SEGMENT_RECORDS = 5_000
"""Records of a topic in one file; also the most that a query decodes afresh per topic."""
TABLES_VERSION = "1"
"""Raise it when a table's columns or their meaning change: older files are then rebuilt."""
_READ_RECORDS = 1_000

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A table as files and a tail in memory."""

    name: str
    files: tuple[Path, ...]
    tail: pa.Table
    unreadable: int
    """Records of the tail and of segments built now that could not be decoded."""


class _Segment(NamedTuple):
    first: int
    last: int


class Archive:
    """Reads tables of a log through the cache below ``folder``."""

    def __init__(self, log: Log, folder: Path, *, segment_records: int = SEGMENT_RECORDS) -> None:
        self._log = log
        self._folder = folder
        self._segment_records = segment_records
        self._writable = True

    def load(self, names: Iterable[str]) -> dict[str, Loaded]:
        """Tables by name, up to the log's end at the time of the call."""
        wanted = sorted(set(names))
        loaded: dict[str, Loaded] = {}
        for topic in sorted({TABLES[name].topic for name in wanted}):
            tables = tuple(name for name in wanted if TABLES[name].topic == topic)
            loaded |= self._load_topic(topic, tables)
        return loaded

    def discard(self, names: Iterable[str]) -> None:
        """Delete the files of these tables (a reader found one damaged behind a sound footer)."""
        for name in names:
            for segment in self._listed(name):
                self._path(name, segment).unlink(missing_ok=True)

    def _load_topic(self, topic: str, tables: tuple[str, ...]) -> dict[str, Loaded]:
        files: dict[str, list[Path]] = {name: [] for name in tables}
        extra: dict[str, list[pa.Table]] = {name: [] for name in tables}
        unreadable, after, end = 0, -1, self._log.end(topic)
        listed = self._listed(tables[0])
        while after < end:
            segment = self._known_segment(topic, tables, after, listed)
            if segment is None:
                records = self._chunk(topic, after, end)
                if not records:
                    break
                built, bad = build(topic, records)
                unreadable += bad
                segment = _Segment(records[0].offset, records[-1].offset)
                full = len(records) == self._segment_records
                if not (full and self._save(topic, built, segment, records[-1].event_id)):
                    for name in tables:
                        extra[name].append(built[name])
                    after = segment.last
                    continue
            for name in tables:
                files[name].append(self._path(name, segment))
            after = segment.last
        return {
            name: Loaded(name, tuple(files[name]), self._concat(name, extra[name]), unreadable)
            for name in tables
        }

    @staticmethod
    def _concat(name: str, parts: Sequence[pa.Table]) -> pa.Table:
        return pa.concat_tables(parts) if parts else TABLES[name].schema.empty_table()

    def _path(self, table: str, segment: _Segment) -> Path:
        return self._folder / table / f"{segment.first}-{segment.last}.parquet"

    def _known_segment(
        self, topic: str, tables: tuple[str, ...], after: int, listed: list[_Segment]
    ) -> _Segment | None:
        """The segment that begins with the next record after ``after``, where all ``tables`` have a sound file of it."""
        start = self._log.read([topic], {topic: after}, 1) if listed else []
        for segment in listed:
            if not start or segment.first != start[0].offset:
                continue
            last = self._log.read([topic], {topic: segment.last - 1}, 1)
            if last and last[0].offset == segment.last:
                event_id = last[0].event_id
                if all(self._sound(name, segment, event_id) for name in tables):
                    return segment
        return None

    def _listed(self, table: str) -> list[_Segment]:
        found = []
        folder = self._folder / table
        for path in folder.glob("*-*.parquet") if folder.is_dir() else ():
            first, _, last = path.stem.partition("-")
            if first.isdigit() and last.isdigit():
                found.append(_Segment(int(first), int(last)))
        return sorted(found)

    def _sound(self, table: str, segment: _Segment, event_id: str) -> bool:
        try:
            schema = pq.read_schema(self._path(table, segment))
        except (OSError, pa.ArrowInvalid):
            return False
        expected = _footer(table, segment, event_id)
        return all((schema.metadata or {}).get(key) == value for key, value in expected.items())

    def _chunk(self, topic: str, after: int, end: int) -> list[LogRecord]:
        """The next records after ``after``, no further than offset ``end`` and no more than a segment."""
        chunk: list[LogRecord] = []
        while after < end and len(chunk) < self._segment_records:
            records = self._log.read(
                [topic], {topic: after}, min(_READ_RECORDS, self._segment_records - len(chunk))
            )
            if not records:
                break
            chunk += [record for record in records if record.offset <= end]
            after = records[-1].offset
        return chunk

    def _save(self, topic: str, built: dict[str, pa.Table], segment: _Segment, event_id: str) -> bool:
        """Write one file for each table of the topic; False where the disk does not take them (the query goes on)."""
        if not self._writable:
            return False
        try:
            for name in TABLES_OF_TOPIC[topic]:
                self._write(name, built[name], segment, event_id)
        except OSError as exc:
            self._writable = False
            logger.warning(
                "archive_not_written: %s; queries work, only slower. Free space below %s", exc, self._folder
            )
            return False
        return True

    def _write(self, name: str, table: pa.Table, segment: _Segment, event_id: str) -> None:
        path = self._path(name, segment)
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        try:
            with temporary.open("wb") as file:
                pq.write_table(
                    table.replace_schema_metadata(_footer(name, segment, event_id)),
                    file,
                    compression="zstd",
                    write_page_checksum=True,
                )
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _footer(table: str, segment: _Segment, event_id: str) -> dict[bytes, bytes]:
    return {
        b"spanloop.tables": TABLES_VERSION.encode(),
        b"spanloop.table": table.encode(),
        b"spanloop.first": str(segment.first).encode(),
        b"spanloop.last": str(segment.last).encode(),
        b"spanloop.last_event_id": event_id.encode(),
    }
