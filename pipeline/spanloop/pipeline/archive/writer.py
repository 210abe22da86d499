"""Records of one partition to a range of the archive: raw file and tables by tenant and UTC day, manifest last.

Place in the flow: ``archiver`` and the query side's ``load`` call ``write_range``; ``repair`` and ``compaction`` use its
parts. Records are decoded once for all tables.

Invariants: a range begins where the last one ended. Nothing is visible before the manifest is; what was written is read back
(size, footer) first. A failure removes what it wrote, as far as the medium allows, and leaves no trace for readers.
"""

from __future__ import annotations

import hashlib
import uuid
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute

from spanloop.pipeline.archive.encoding import ROW_GROUP_ROWS, fault, footer_hash, parquet, sort
from spanloop.pipeline.archive.files import Files
from spanloop.pipeline.archive.manifest import RAW, FileInfo, Lost, Range, data_path, date_of, tenant_of
from spanloop.pipeline.archive.raw import RAW_SCHEMA, ArchiveStore
from spanloop.pipeline.archive.repeats import INDEX, index_of, index_path, mark
from spanloop.pipeline.columns import build
from spanloop.pipeline.ports import LogRecord, source_of
from spanloop.pipeline.views import TABLES, TABLES_OF_TOPIC
from spanloop.schemas.errors import TerminalError

__all__ = [
    "RECORDS",
    "TABLES_VERSION",
    "Attempt",
    "Built",
    "Group",
    "by_group",
    "decode",
    "group_of",
    "raw_table",
    "save",
    "schemas_of",
    "write_range",
    "write_tables",
]

TABLES_VERSION = "2"
"""Raise it when a column's meaning changes: tables of older ranges are then rebuilt from their raw files. New columns and
new tables need no new version."""
RECORDS = b"spanloop.records"
"""Key in a raw file's footer: records of the whole range."""
_DECODE_RECORDS = 2_000
"""Records that are Python objects at the same time."""
_RAW_GROUP_BYTES = 16 * 2**20
Group = tuple[str, str]
"""Tenant and UTC day."""


class Built(NamedTuple):
    """Tables of some records, ready to write."""

    tables: dict[str, pa.Table]
    unreadable: int


def schemas_of(topic: str) -> dict[str, dict[str, str]]:
    """Table -> column -> Arrow type of all tables of a topic, as manifests keep it."""
    return {
        name: {field.name: str(field.type) for field in TABLES[name].schema}
        for name in TABLES_OF_TOPIC[topic]
    }


def raw_table(records: Sequence[LogRecord]) -> pa.Table:
    """Records as rows."""
    columns = [
        pa.array([r.topic for r in records], pa.string()),
        pa.array([r.partition for r in records], pa.int32()),
        pa.array([r.offset for r in records], pa.int64()),
        pa.array([r.key for r in records], pa.string()),
        pa.array([r.event_id for r in records], pa.string()),
        pa.array([r.value for r in records], pa.binary()),
        pa.array([r.appended_ns for r in records], pa.int64()),
    ]
    return pa.Table.from_arrays(columns, schema=RAW_SCHEMA)


def decode(topic: str, records: Sequence[LogRecord], store: ArchiveStore, others: Sequence[Range]) -> Built:
    """All tables of some records; ``others`` are the live ranges that may have had the same spans."""
    parts = [
        build(topic, records[at : at + _DECODE_RECORDS])
        for at in range(0, max(1, len(records)), _DECODE_RECORDS)
    ]
    tables = {name: pa.concat_tables([part[name] for part, _ in parts]) for name in TABLES_OF_TOPIC[topic]}
    if topic in tables and "repeat" in tables[topic].column_names:
        tables[topic] = mark(store, tables[topic], others)
    return Built(tables, sum(bad for _, bad in parts))


class Attempt:
    """Files of one range being written; all carry the same random suffix, so no attempt touches another's.

    Args:
        files: Where to.
        topic, partition, first, last: The range.
    """

    def __init__(self, files: Files, topic: str, partition: int, first: int, last: int) -> None:
        self._files = files
        self._topic = topic
        self._name = f"{partition}-{first}-{last}-{uuid.uuid4().hex[:8]}"
        self.written: list[FileInfo] = []

    def add(self, kind: str, group: Group, table: pa.Table, *, row_group: int = ROW_GROUP_ROWS) -> None:
        """Write one Parquet file and read its end back. Raises OSError."""
        data = parquet(table, row_group=row_group)
        size = len(data)
        footer = int.from_bytes(data[size - 8 : size - 4].to_pybytes(), "little") + 8
        path = data_path(kind, self._topic, *group, self._name)
        hashed = footer_hash(data[size - footer :].to_pybytes())
        self._write(FileInfo(path, kind, table.num_rows, size, hashed, *group, zlib.crc32(data)), data)

    def add_raw(self, group: Group, table: pa.Table, total: int) -> None:
        """Write the records of one tenant and day; ``total`` records has the whole range, which the footer says, so that
        it can be put together without manifest."""
        average = table.nbytes // max(1, table.num_rows) + 1
        table = table.replace_schema_metadata({RECORDS: str(total)})
        self.add(RAW, group, table, row_group=max(1_000, _RAW_GROUP_BYTES // average))

    def add_index(self, hashes: np.ndarray) -> None:
        """Write the index of a range of spans."""
        data = hashes.astype("<u8").tobytes()
        path = index_path(self._topic, self._name)
        self._write(FileInfo(path, INDEX, len(hashes), len(data), hashlib.sha256(data).hexdigest()), data)

    def _write(self, info: FileInfo, data: bytes | pa.Buffer) -> None:
        self.written.append(info)
        self._files.write(info.path, data)
        reason = fault(self._files, info)
        if reason:
            raise OSError(f"{self._files.uri(info.path)} was written and {reason}")

    def undo(self) -> None:
        """Remove what was written; what cannot be removed is unnamed and swept at the next start."""
        for info in self.written:
            try:
                self._files.delete(info.path)
            except OSError:
                return


def write_range(
    store: ArchiveStore,
    topic: str,
    partition: int,
    records: Sequence[LogRecord],
    *,
    first: int | None = None,
    last: int | None = None,
    lost: Sequence[Lost] = (),
) -> Range | None:
    """Append a range to the archive; all of it or nothing is visible afterwards.

    Args:
        store: Where to.
        topic, partition: Source of the records.
        records: In offset order, all later than what the archive contains. None: nothing is done.
        first, last: The range where it is not the one from the last contained offset to the last record (to fill a gap).
        lost: What is known to be missing from it.

    Raises:
        OSError: the medium refused; nothing was added.
        TerminalError: the records begin inside what is contained: another archiver is at work.
    """
    if not records and first is None:
        return None
    live = store.listing([topic]).live
    if first is None:
        own = live.get(source_of(topic, partition))
        first = own[-1].last + 1 if own else 0
    if records and records[0].offset < first:
        raise TerminalError(
            f"offset {records[0].offset} of {records[0].source} is in the archive already (up to {first - 1}): is another "
            "archiver running on it?"
        )
    last = records[-1].offset if last is None else last
    source = source_of(topic, partition)
    others = [
        item
        for ranges in live.values()
        for item in ranges
        if item.source != source
        or item.last < first
        or item.first > last  # of two that overlap only one stays live
    ]
    built = decode(topic, records, store, others) if records else Built({}, 0)
    attempt = Attempt(store.files, topic, partition, first, last)
    try:
        for group, part in by_group(records).items():
            attempt.add_raw(group, raw_table(part), len(records))
        write_tables(attempt, records, built.tables)
        if topic in built.tables and "repeat" in built.tables[topic].column_names:
            attempt.add_index(index_of([built.tables[topic]["trace_id"]]))
        item = Range(
            topic, partition, first, last, len(records), store.clock.now_ns(),
            first_offset=records[0].offset if records else -1,
            first_event_id=records[0].event_id if records else "",
            last_event_id=records[-1].event_id if records else "",
            last_offset=records[-1].offset if records else -1,
            value_bytes=sum(len(r.value) for r in records),
            unreadable=built.unreadable, version=TABLES_VERSION, schemas=schemas_of(topic),
            files=tuple(attempt.written), lost=tuple(lost),
        )  # fmt: skip
        save(store.files, item)
    except BaseException:
        attempt.undo()
        raise
    return item


def write_tables(attempt: Attempt, records: Sequence[LogRecord], tables: dict[str, pa.Table]) -> None:
    """Write the columns of ``records``, by tenant and day; tables without rows give no file."""
    of_record = [group_of(record) for record in records]
    groups = sorted(set(of_record))
    numbers = {group: number for number, group in enumerate(groups)}
    offsets = np.array([record.offset for record in records], np.int64)
    owner = np.array([numbers[group] for group in of_record], np.int32)
    for name, table in tables.items():
        if not table.num_rows:
            continue
        if len(groups) == 1:
            attempt.add(name, groups[0], sort(table))
            continue
        rows = owner[np.searchsorted(offsets, table["offset"].to_numpy())]
        for number in np.unique(rows):
            attempt.add(name, groups[number], sort(table.filter(pa.array(rows == number))))


def save(files: Files, item: Range) -> None:
    """Write the manifest: from now on the range exists."""
    files.write(item.path, msgspec.json.format(msgspec.json.encode(item), indent=1))


def group_of(record: LogRecord) -> Group:
    """Tenant and UTC day of a record."""
    return tenant_of(record.key), date_of(record.appended_ns)


def by_group(records: Sequence[LogRecord]) -> dict[Group, list[LogRecord]]:
    """Records by tenant and UTC day, each in the order given."""
    groups: dict[Group, list[LogRecord]] = {}
    for record in records:
        groups.setdefault(group_of(record), []).append(record)
    return dict(sorted(groups.items()))
