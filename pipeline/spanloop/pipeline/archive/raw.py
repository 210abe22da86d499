"""The archive as readers see it: manifests, the files they name, and the records in the raw files.

Place in the flow: ``writer`` and ``compaction`` add ranges, ``query`` takes tables, ``replay`` takes raw files. Layout below
the root (``archive.url`` or WORKSPACE/archive)::

    raw/topic=spans/tenant=T/date=YYYY-MM-DD/PARTITION-FIRST-LAST-HEX.parquet   records as on the log
    tables/spans/tenant=T/date=YYYY-MM-DD/...                                    their columns, see views.TABLES
    _ranges/spans/0/FIRST-LAST.json                                              manifest: these files exist

Invariants: reading never locks and never writes. What a reader got from ``ranges`` stays readable for the grace period, also
while ranges are merged.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow.fs import FileSystem

from spanloop.pipeline.archive.files import Entry, Files, open_files
from spanloop.pipeline.archive.manifest import RANGES, RAW, FileInfo, Range, gaps, resolve
from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.ports import Clock, LogRecord, source_of
from spanloop.pipeline.views import TABLES
from spanloop.schemas.settings import Settings

__all__ = ["RAW_SCHEMA", "ArchiveStore", "RawFile"]

RAW_SCHEMA = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("key", pa.string()),
        ("event_id", pa.string()),
        ("value", pa.binary()),
        ("appended_ns", pa.int64()),
    ]
)
_NAME = re.compile(r"(\d+)-(\d+)\.json")
_THREADS = 16
_RETRIES = 5
_decoder = msgspec.json.Decoder(Range)


class RawFile(NamedTuple):
    """Records ``first``..``last`` of one partition, tenant and day, in offset order; other tenants' offsets lie between."""

    path: str
    """As ``ArchiveStore.filesystem`` opens it."""
    topic: str
    partition: int
    first: int
    last: int
    tenant: str
    date: dt.date
    rows: int
    bytes: int


class Listing(NamedTuple):
    """All manifests of some topics."""

    live: dict[str, list[Range]]
    """Source -> live ranges in order."""
    covered: dict[str, list[Range]]
    """Source -> ranges that a live one stands for."""
    broken: list[Entry]
    """Manifests that cannot be read."""


class ArchiveStore:
    """One archive.

    Args:
        files: Where it lies.
        clock: Says when a range was written and when a grace period is over.
    """

    def __init__(self, files: Files, clock: Clock | None = None) -> None:
        self.files = files
        self.clock = clock or SystemClock()
        self.indexes: dict[str, np.ndarray] = {}
        """Indexes that were read, by path; see ``repeats``."""
        self._cache: dict[Entry, Range | None] = {}

    @classmethod
    def open(cls, settings: Settings) -> ArchiveStore:
        """The archive of a deployment; nothing is made or read yet.

        Raises:
            ConfigError: ``archive.url`` is neither a folder nor s3://bucket/prefix.
        """
        return cls(
            open_files(settings.archive.url or str(settings.workspace / "archive"), settings.archive.endpoint)
        )

    @property
    def filesystem(self) -> FileSystem:
        """Opens the paths of ``RawFile`` and ``table_files``."""
        return self.files.filesystem

    def listing(self, topics: Iterable[str] = ()) -> Listing:
        """Manifests as they are now; of all topics when none is named.

        Raises:
            OSError: the store cannot be listed or read.
        """
        names = list(topics)
        folders = [f"{RANGES}/{name}" for name in names] or [RANGES]
        for attempt in range(_RETRIES):
            entries = [entry for folder in folders for entry in self.files.list(folder)]
            found = self._parsed([entry for entry in entries if entry.path.endswith(".json")])
            if found is not None:
                return found
            if attempt == _RETRIES - 1:
                break
        raise OSError(f"the manifests below {self.files.uri(RANGES)} change faster than they can be read")

    def _parsed(self, entries: list[Entry]) -> Listing | None:
        """None where one of them was deleted in between."""
        new = [entry for entry in entries if entry not in self._cache]
        try:
            if self.files.local or len(new) < 2:
                read = [self._parse(entry) for entry in new]
            else:
                with ThreadPoolExecutor(min(_THREADS, len(new))) as pool:
                    read = list(pool.map(self._parse, new))
        except FileNotFoundError:
            return None
        known = self._cache | dict(zip(new, read, strict=True))
        self._cache = {entry: known[entry] for entry in entries} if len(entries) < len(known) else known
        by_source: dict[str, list[Range]] = {}
        broken = []
        for entry in entries:
            item = known[entry]
            if item is None:
                broken.append(entry)
            else:
                by_source.setdefault(item.source, []).append(item)
        resolved = {source: resolve(ranges) for source, ranges in sorted(by_source.items())}
        return Listing(
            {source: live for source, (live, _) in resolved.items()},
            {source: covered for source, (_, covered) in resolved.items() if covered},
            broken,
        )

    def _parse(self, entry: Entry) -> Range | None:
        try:
            item = _decoder.decode(self.files.read(entry.path))
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return item if item.path == entry.path and _NAME.fullmatch(entry.path.rpartition("/")[2]) else None

    def ranges(self, topic: str) -> list[Range]:
        """Live ranges of a topic, partition by partition, in offset order."""
        return [item for ranges in self.listing([topic]).live.values() for item in ranges]

    def contained(self) -> dict[str, int]:
        """Last archived offset by source; a source without a range is absent."""
        return {source: ranges[-1].last for source, ranges in self.listing().live.items()}

    def contained_of(self, topic: str, partition: int) -> int:
        """Last archived offset of one source, -1: none."""
        ranges = self.listing([topic]).live.get(source_of(topic, partition))
        return ranges[-1].last if ranges else -1

    def gaps(self) -> dict[str, list[tuple[int, int]]]:
        """Offsets between ranges that no range has (a manifest was damaged), by source."""
        found = {source: gaps(ranges) for source, ranges in self.listing().live.items()}
        return {source: missing for source, missing in found.items() if missing}

    def raw_files(
        self,
        topic: str,
        *,
        tenant: str | None = None,
        since: dt.date | None = None,
        until: dt.date | None = None,
    ) -> list[RawFile]:
        """Files of records, by partition and offset.

        Args:
            topic: One of ``topics.ALL_TOPICS``.
            tenant: Only this one's.
            since: First UTC day, inclusive.
            until: Last UTC day, inclusive.
        """
        return [
            RawFile(
                self.files.full(file.path), topic, item.partition, item.first, item.last, file.tenant,
                dt.date.fromisoformat(file.date), file.rows, file.bytes,
            )
            for item in self.ranges(topic)
            for file in _selected(item, RAW, tenant, since, until)
        ]  # fmt: skip

    def table_files(
        self,
        table: str,
        *,
        tenant: str | None = None,
        since: dt.date | None = None,
        until: dt.date | None = None,
    ) -> list[str]:
        """Paths of a table's files, for ``filesystem``, in the order of ``raw_files``."""
        return [
            self.files.full(file.path)
            for item in self.ranges(TABLES[table].topic)
            for file in _selected(item, table, tenant, since, until)
        ]

    def records(self, path: str, *, batch: int = 1_000) -> Iterator[list[LogRecord]]:
        """Records of one raw file, in offset order, so many at once.

        Raises:
            OSError, pyarrow.ArrowException: it cannot be read.
        """
        with pq.ParquetFile(self.filesystem.open_input_file(path), page_checksum_verification=True) as file:
            for rows in file.iter_batches(batch, columns=RAW_SCHEMA.names):
                columns = [rows.column(name).to_pylist() for name in RAW_SCHEMA.names]
                yield [
                    LogRecord(topic, offset, key, event_id, value, appended_ns, partition)
                    for topic, partition, offset, key, event_id, value, appended_ns in zip(
                        *columns, strict=True
                    )
                ]


def _selected(
    item: Range, kind: str, tenant: str | None, since: dt.date | None, until: dt.date | None
) -> Iterator[FileInfo]:
    first = since.isoformat() if since else ""
    last = until.isoformat() if until else "9999-12-31"
    for file in item.files:
        if file.kind == kind and tenant in (None, file.tenant) and first <= file.date <= last:
            yield file
