"""Damage in the archive: find it, set it aside with a reason, rebuild what can be rebuilt.

Place in the flow: ``archiver`` runs ``verify`` when it starts, ``spanloop archive verify`` runs it on demand. A table comes
back from its raw file, a raw file from the log while the log has the records, a damaged manifest from complete raw files or
the log. What comes back from neither is entered as lost in the range's manifest: other ranges still answer.

Invariants: the new files exist before the manifest names them, and the manifest is replaced before a bad file is moved, so a
crash at any point leaves a range that the next ``verify`` finds in the same state or repaired. A medium that does not answer
is no damage: OSError leaves.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from spanloop.pipeline.archive.cleaning import orphans, quarantine
from spanloop.pipeline.archive.encoding import fault
from spanloop.pipeline.archive.manifest import RAW, FileInfo, Lost, Range, gaps
from spanloop.pipeline.archive.raw import ArchiveStore
from spanloop.pipeline.archive.repeats import INDEX, index_of
from spanloop.pipeline.archive.source import first_offset, read_range, records_of
from spanloop.pipeline.archive.writer import (
    RECORDS,
    TABLES_VERSION,
    Attempt,
    Group,
    by_group,
    decode,
    raw_table,
    save,
    schemas_of,
    write_range,
    write_tables,
)
from spanloop.pipeline.ports import Log, LogRecord, topic_of
from spanloop.pipeline.views import TABLES_OF_TOPIC

__all__ = ["Report", "stale_tables", "verify"]

_THREADS = 16
_NOWHERE = "neither a raw file nor the log has its records"

logger = logging.getLogger(__name__)


class Report(msgspec.Struct):
    """What ``verify`` found and did."""

    ranges: int = 0
    files: int = 0
    quarantined: list[str] = []
    """Paths, with reasons."""
    rebuilt: int = 0
    """Files made anew."""
    lost: list[str] = []
    """What cannot be rebuilt, found now or before."""
    open_gaps: list[str] = []
    """Offsets that no range has and that cannot be judged, because the log was not to be had."""


def stale_tables(item: Range) -> set[str]:
    """Tables of a range to be rebuilt: columns changed their type or meaning, or the table is new.

    Missing columns and columns that are no more need no rebuild: files are read by name.
    """
    current = schemas_of(item.topic)
    if not item.records:
        return set()
    if item.version != TABLES_VERSION:
        return set(current)
    return {
        name
        for name, columns in current.items()
        if name not in item.schemas
        or any(item.schemas[name].get(column, type_) != type_ for column, type_ in columns.items())
    }


def verify(
    store: ArchiveStore,
    log: Log | None,
    *,
    topics: Iterable[str] = (),
    deep: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Report:
    """Check every file that a live manifest names, and repair.

    Args:
        store: To be held for writing by the caller.
        log: To rebuild from; None: only raw files are at hand, gaps stay open.
        topics: Only these; none: all.
        deep: Read every page, not only sizes and footers.
        progress: Called with ranges done and all.

    Raises:
        OSError: the medium does not answer. TransientError: the log does not.
    """
    names = list(topics)
    listing = store.listing(names)
    repair = _Repair(store, log)
    report = repair.report
    for entry in listing.broken:
        repair.set_aside(entry.path, "is no manifest that can be read")
    ranges = [item for live in listing.live.values() for item in live]
    with ThreadPoolExecutor(1 if store.files.local else _THREADS) as pool:
        faults = pool.map(
            lambda info: fault(store.files, info, deep=deep), (info for item in ranges for info in item.files)
        )
        for number, item in enumerate(ranges):
            progress(number, len(ranges))
            repair.check(item, {info.path: why for info in item.files if (why := next(faults))})
    progress(len(ranges), len(ranges))
    for source, live in store.listing(names).live.items():
        for first, last in gaps(live):
            repair.fill(source, first, last)
    for live in store.listing(names).live.values():
        report.lost += [
            f"{item.source} {item.name}: {loss.kind} {loss.reason}" for item in live for loss in item.lost
        ]
    return report


class _Repair:
    """One run of ``verify``."""

    def __init__(self, store: ArchiveStore, log: Log | None) -> None:
        self._store = store
        self._log = log
        self.report = Report()

    def set_aside(self, path: str, reason: str) -> None:
        """To quarantine, and into the report."""
        quarantine(self._store, path, reason)
        self.report.quarantined.append(f"{path}: {reason}")

    def check(self, item: Range, bad: dict[str, str]) -> None:
        """Write again what is bad (path -> reason) or outdated in a range."""
        self.report.ranges += 1
        self.report.files += len(item.files)
        stale = stale_tables(item)
        if bad or stale:
            records = self._records(item, bad, stale)
            self._write_again(item, bad, stale, records)

    def _records(
        self, item: Range, bad: dict[str, str], stale: set[str]
    ) -> dict[Group, list[LogRecord] | None]:
        """Records of the tenants and days to be written again: from the raw file, else from the log, else None.

        A raw file that turns out to be damaged joins ``bad``.
        """
        found: dict[Group, list[LogRecord] | None] = {}
        damaged = [info for info in item.files if info.path in bad and info.kind != INDEX]
        from_log: dict[Group, list[LogRecord]] | None = None
        for group in sorted(
            {(info.tenant, info.date) for info in (item.files if stale else damaged)} - {("", "")}
        ):
            raw = next((i for i in item.files if i.kind == RAW and (i.tenant, i.date) == group), None)
            if raw is not None and raw.path not in bad:
                try:
                    found[group] = [
                        record
                        for part in self._store.records(self._store.files.full(raw.path))
                        for record in part
                    ]
                    continue
                except (pa.ArrowException, OSError):
                    bad[raw.path] = fault(self._store.files, raw, deep=True) or "cannot be read"
            if from_log is None:
                from_log = dict(by_group(records_of(self._log, item) or []))
            records = from_log.get(group)
            found[group] = records if records and (raw is None or len(records) >= raw.rows) else None
        return found

    def _write_again(
        self,
        item: Range,
        bad: dict[str, str],
        stale: set[str],
        records: dict[Group, list[LogRecord] | None],
    ) -> None:
        """Write a range's bad and outdated files again and replace its manifest."""
        wrong = [info for info in item.files if info.path in bad or info.kind in stale]
        kept = [info for info in item.files if info not in wrong]
        lost: list[Lost] = []
        attempt = Attempt(self._store.files, item.topic, item.partition, item.first, item.last)
        try:
            for group, found in records.items():
                mine = [info for info in wrong if (info.tenant, info.date) == group]
                if found is None:
                    for info in mine:
                        why = bad.setdefault(info.path, "has columns of an older version")
                        lost.append(Lost(info.kind, f"{why}, and {_NOWHERE}", info.rows, info.path))
                    continue
                if any(info.kind == RAW for info in mine):
                    attempt.add_raw(group, raw_table(found), item.records)
                kinds = ({info.kind for info in mine} | stale) & set(TABLES_OF_TOPIC[item.topic])
                if kinds:
                    own = msgspec.structs.replace(item, files=(*kept, *attempt.written))
                    built = decode(item.topic, found, self._store, [*self._others(item), own])
                    write_tables(attempt, found, {name: built.tables[name] for name in sorted(kinds)})
            if self._index_again(item, attempt, kept):
                kept = [info for info in kept if info.kind != INDEX]
            outdated = [info.path for info in item.files if info not in kept and info.path not in bad]
            new = msgspec.structs.replace(
                item, files=tuple(kept + attempt.written), lost=item.lost + tuple(lost), schemas=schemas_of(item.topic),
                written_ns=self._store.clock.now_ns(), retired=(*item.retired, *outdated), version=TABLES_VERSION,
            )  # fmt: skip
            save(self._store.files, new)
        except BaseException:
            attempt.undo()
            raise
        self.report.rebuilt += len(attempt.written)
        for path, why in bad.items():
            self.set_aside(path, why)
        for loss in lost:
            logger.error("archive_lost: %s (%d rows): %s", loss.path, loss.rows, loss.reason)

    def _others(self, item: Range) -> list[Range]:
        return [
            other
            for live in self._store.listing([item.topic]).live.values()
            for other in live
            if other.path != item.path
        ]

    def _index_again(self, item: Range, attempt: Attempt, kept: Sequence[FileInfo]) -> bool:
        """Make the index of a range of spans again where it is bad or its spans were rebuilt."""
        if "repeat" not in schemas_of(item.topic).get(item.topic, {}):
            return False
        if any(info.kind == INDEX for info in kept) and not any(
            i.kind == item.topic for i in attempt.written
        ):
            return False
        spans = [info for info in (*kept, *attempt.written) if info.kind == item.topic]
        attempt.add_index(
            index_of(
                pq.read_table(
                    self._store.files.full(info.path), columns=["trace_id"], filesystem=self._store.filesystem
                )["trace_id"]
                for info in spans
            )
        )
        return True

    def fill(self, source: str, first: int, last: int) -> None:
        """Put ranges back that a damaged manifest named: from raw files where they are complete, else from the log."""
        topic, partition = topic_of(source)
        while first <= last:
            found = _from_orphans(self._store, source, first, last)
            if found is None:
                self._from_log(source, first, last)
                return
            begin, end, records = found
            if begin > first and not self._from_log(source, first, begin - 1):
                return
            write_range(self._store, topic, partition, records, first=begin, last=end)
            self.report.rebuilt += 1
            first = end + 1

    def _from_log(self, source: str, first: int, last: int) -> bool:
        """False where there is no log to ask."""
        if self._log is None:
            self.report.open_gaps.append(f"{source} {first}-{last}")
            return False
        topic, partition = topic_of(source)
        start = first_offset(self._log, source)
        records = list(read_range(self._log, source, first, last))
        lost = []
        if start is None or start > first:
            gone = last if start is None else min(last, start - 1)
            lost = [Lost(RAW, f"offsets {first}-{gone} stand in no file and not in the log any more")]
            logger.error("archive_lost: %s: %s", source, lost[0].reason)
        write_range(self._store, topic, partition, records, first=first, last=last, lost=lost)
        self.report.rebuilt += 1
        return True


def _from_orphans(
    store: ArchiveStore, source: str, first: int, last: int
) -> tuple[int, int, list[LogRecord]] | None:
    """The first range inside first..last whose raw files are all there, with its records."""
    topic, partition = topic_of(source)
    found: dict[tuple[int, int, str], list[str]] = {}
    pattern = re.compile(
        rf"{RAW}/topic={re.escape(topic)}/.*/{partition}-(\d+)-(\d+)-([0-9a-f]{{8}})\.parquet"
    )
    for entry in orphans(store):
        match = pattern.fullmatch(entry.path)
        if match and first <= int(match[1]) and int(match[2]) <= last:
            found.setdefault((int(match[1]), int(match[2]), match[3]), []).append(entry.path)
    for (begin, end, _), paths in sorted(found.items(), key=lambda f: (f[0][0], -f[0][1])):
        try:
            totals = {
                int(
                    (pq.read_schema(store.files.full(p), filesystem=store.filesystem).metadata or {})[RECORDS]
                )
                for p in paths
            }
            records = [r for p in paths for part in store.records(store.files.full(p)) for r in part]
        except (OSError, KeyError, ValueError, pa.ArrowException):
            continue
        if totals == {len(records)}:
            return begin, end, sorted(records, key=lambda r: r.offset)
    return None
