"""Tables for the read side: the archive's files plus what is not in them, up to the log's end at the time of the call.

Place in the flow: ``query`` asks for tables and puts SQL on top. In a workspace with the embedded log a query also fills the
archive with full ranges where nobody else does, so that the next one decodes less.

Invariants: every record of the log is in exactly one of files and tail, whatever an archiver, a merge or a repair does
meanwhile. A file that is missing or cut is not used: its rows come from the raw file or the log. What neither has is named in
``lost``. An archive of another log is not believed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from spanloop.pipeline.archive.encoding import fault
from spanloop.pipeline.archive.files import LocalFiles
from spanloop.pipeline.archive.manifest import RAW, Range, gaps
from spanloop.pipeline.archive.raw import ArchiveStore, Listing
from spanloop.pipeline.archive.repair import stale_tables, verify
from spanloop.pipeline.archive.source import chunk, contradicts, following, read_range, records_of
from spanloop.pipeline.archive.writer import decode, write_range
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import Log, LogRecord, topic_of
from spanloop.pipeline.views import TABLES
from spanloop.schemas.errors import TransientError

__all__ = ["SEGMENT_RECORDS", "Archive", "Loaded"]

SEGMENT_RECORDS = 5_000
"""Records of a source that a query leaves undecoded at most before it writes them to an embedded workspace's archive."""
_FAR = 4
"""A query that finds this many segments missing writes them as one range."""

logger = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A table as files and a tail in memory."""

    name: str
    files: tuple[str, ...]
    """As ``ArchiveStore.filesystem`` opens them; read by column name, since older files may lack columns."""
    tail: pa.Table
    unreadable: int
    """Records of the topic that gave no rows."""
    lost: tuple[str, ...] = ()
    """What is missing from this table, and why."""


class Archive:
    """Reads tables of a log through its archive.

    Args:
        log: Of the deployment.
        store: Its archive; a path stands for a folder.
        segment_records: Records of one range that a query writes itself.
        fill: Whether queries write full ranges. Default: over an embedded log with an archive on the local disk, which is
            then a cache.
    """

    def __init__(
        self,
        log: Log,
        store: ArchiveStore | Path,
        *,
        segment_records: int = SEGMENT_RECORDS,
        fill: bool | None = None,
    ) -> None:
        self.store = store if isinstance(store, ArchiveStore) else ArchiveStore(LocalFiles(store))
        self._log = log
        self._segment_records = segment_records
        embedded = isinstance(log, SqliteLog | MemoryLog)
        self._fill = self.store.files.local and embedded if fill is None else fill
        self._distrusted: set[str] = set()

    def load(self, names: Iterable[str]) -> dict[str, Loaded]:
        """Tables by name, up to the log's end at the time of the call.

        Raises:
            TransientError: log or archive do not answer.
        """
        wanted = sorted(set(names))
        topics = sorted({TABLES[name].topic for name in wanted})
        ends = {source: self._log.end(source) for topic in topics for source in self._log.sources(topic)}
        listing = self._listing(topics)
        if self._fill and self._filled(ends, listing):
            listing = self._listing(topics)
        loaded: dict[str, Loaded] = {}
        for topic in topics:
            tables = tuple(name for name in wanted if TABLES[name].topic == topic)
            loaded |= self._topic(topic, tables, listing, ends)
        return loaded

    def discard(self, names: Iterable[str]) -> None:
        """A reader found a file of these tables damaged behind a sound footer: find it, and use it no more.

        The next ``load`` takes the rows from elsewhere; an embedded workspace's archive is repaired at once.
        """
        wanted = set(names)
        topics = sorted({TABLES[name].topic for name in wanted})
        try:
            for live in self._listing(topics).live.values():
                for info in (info for item in live for info in item.files if info.kind in wanted):
                    if fault(self.store.files, info, deep=True):
                        self._distrusted.add(info.path)
            if self._fill and self._distrusted:
                with self.store.files.writer() as mine:
                    if mine:
                        verify(self.store, self._log, topics=topics, deep=True)
        except OSError as exc:
            logger.warning("archive_not_repaired: %s", exc)

    def _listing(self, topics: Sequence[str]) -> Listing:
        try:
            listing = self.store.listing(topics)
        except OSError as exc:
            if not self._fill:
                raise TransientError(
                    f"the archive in {self.store.files.uri('')} cannot be read: {exc}; is it reachable, are archive.url and "
                    "archive.endpoint right?"
                ) from exc
            logger.warning("archive_not_read: %s; queries decode the log itself, which is slower", exc)
            return Listing({}, {}, [])
        if self._fill:
            for source in [s for s, live in listing.live.items() if contradicts(self._log, s, live)]:
                logger.warning(
                    "archive_of_another_log: what %s holds of %s was made from another log and is not used; move it away",
                    self.store.files.uri(""),
                    source,
                )
                del listing.live[source]
        return listing

    def _filled(self, ends: dict[str, int], listing: Listing) -> bool:
        """Write the full ranges that are missing at the end; False where there are none or nobody may."""
        behind = {source: live[-1].last if (live := listing.live.get(source)) else -1 for source in ends}
        if all(ends[source] - behind[source] < self._segment_records for source in ends):
            return False
        written = False
        try:
            with self.store.files.writer() as mine:
                if not mine:
                    return False
                for source, end in ends.items():  # an embedded log has one source a topic
                    topic, partition = topic_of(source)
                    live = self.store.listing([topic]).live.get(source, [])
                    if live and contradicts(self._log, source, live):
                        continue
                    after = live[-1].last if live else -1
                    while end - after >= self._segment_records:
                        far = end - after >= _FAR * self._segment_records
                        limit = self._segment_records * (_FAR if far else 1)
                        records = chunk(self._log, topic, {source: after}, {source: end}, limit).get(
                            source, []
                        )
                        if len(records) < self._segment_records:
                            break
                        write_range(self.store, topic, partition, records)
                        written = True
                        after = records[-1].offset
        except OSError as exc:
            self._fill = False
            logger.warning(
                "archive_not_written: %s; queries work, only slower. Free space below %s",
                exc,
                self.store.files.uri(""),
            )
        return written

    def _topic(
        self, topic: str, tables: tuple[str, ...], listing: Listing, ends: dict[str, int]
    ) -> dict[str, Loaded]:
        sources = [source for source in {**ends, **listing.live} if topic_of(source)[0] == topic]
        live = {source: listing.live.get(source, []) for source in sources}
        unusable = self._unusable([item for ranges in live.values() for item in ranges], tables)
        files: dict[str, list[str]] = {name: [] for name in tables}
        extra: dict[str, list[pa.Table]] = {name: [] for name in tables}
        lost: list[str] = []
        unreadable = 0
        sound = [item for ranges in live.values() for item in ranges if (item.path, topic) not in unusable]

        batches: dict[tuple[str, ...], list[LogRecord]] = {}
        for source in sources:
            for item in live[source]:
                unreadable += item.unreadable
                again = tuple(name for name in tables if (item.path, name) in unusable)
                lost += [
                    f"{item.source} {item.name}: {loss.reason}"
                    for loss in item.lost
                    if loss.kind in (*tables, RAW)
                ]
                for info in item.files:
                    if info.kind in tables and info.kind not in again:
                        files[info.kind].append(self.store.files.full(info.path))
                if again:
                    records = self._again(item)
                    if records is None:
                        lost.append(f"{item.source} {item.name}: its {', '.join(again)} cannot be read")
                    else:
                        batches.setdefault(again, []).extend(records)
            for first, last in gaps(live[source]):
                batches.setdefault(tables, []).extend(read_range(self._log, source, first, last))
        after = {source: ranges[-1].last for source, ranges in live.items() if ranges}
        mine = {source: end for source, end in ends.items() if source in live and end > after.get(source, -1)}
        for records in following(
            self._log, topic, after, mine,
            on_gone=lambda source, a, b: lost.append(f"{source} {a}-{b} left the log before they were archived"),
        ):  # fmt: skip
            batches.setdefault(tables, []).extend(records)
        for names, records in batches.items():
            built = decode(topic, records, self.store, sound)
            unreadable += built.unreadable if names == tables else 0
            for name in names:
                extra[name].append(built.tables[name])
        return {
            name: Loaded(name, tuple(files[name]), _concat(name, extra[name]), unreadable, tuple(lost))
            for name in tables
        }

    def _unusable(self, ranges: Sequence[Range], tables: tuple[str, ...]) -> set[tuple[str, str]]:
        """(manifest path, table) whose files cannot be used as they are."""
        found = set()
        checked = []
        for item in ranges:
            found |= {(item.path, name) for name in stale_tables(item) if name in tables}
            for info in item.files:
                if info.kind in tables:
                    checked.append((item, info))
                    if info.path in self._distrusted:
                        found.add((item.path, info.kind))
        if self.store.files.local:
            sizes = self.store.files.sizes([info.path for _, info in checked])
            found |= {
                (item.path, info.kind)
                for (item, info), size in zip(checked, sizes, strict=True)
                if size != info.bytes
            }
        return found

    def _again(self, item: Range) -> list[LogRecord] | None:
        """All records of a range, from its raw files or the log."""
        raw = [info for info in item.files if info.kind == RAW]
        try:
            records = [
                record
                for info in raw
                for part in self.store.records(self.store.files.full(info.path))
                for record in part
            ]
        except (OSError, pa.ArrowException):
            records = []
        if len(records) == item.records:
            return sorted(records, key=lambda record: record.offset)
        return records_of(self._log, item)


def _concat(name: str, parts: Sequence[pa.Table]) -> pa.Table:
    return pa.concat_tables(parts) if parts else TABLES[name].schema.empty_table()
