"""Records of one partition to a range of the archive: raw file and tables by tenant and UTC day, manifest last.

Place in the flow: ``archiver`` and the query side's ``load`` call ``write_range``; ``repair`` and ``compaction`` use its
parts. Records are decoded once for all tables.

Invariants: a range begins where the last one ended. Nothing is visible before the manifest is; what was written is read back
(size, footer) first. A failure removes what it wrote, as far as the medium allows, and leaves no trace for readers.
"""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from spanloop.pipeline.archive.files import Files
from spanloop.pipeline.archive.manifest import RAW, FileInfo, Range, data_path, date_of, tenant_of
from spanloop.pipeline.archive.raw import RAW_SCHEMA, ArchiveStore
from spanloop.pipeline.columns import build
from spanloop.pipeline.ports import LogRecord
from spanloop.pipeline.views import TABLES, TABLES_OF_TOPIC
from spanloop.schemas.errors import TerminalError

__all__ = ["TABLES_VERSION", "footer_hash", "parquet", "schema_of", "write_range"]

TABLES_VERSION = "2"
"""Raise it when a column's meaning changes: tables of older ranges are then rebuilt from their raw files. New columns and
new tables need no new version."""
ROW_GROUP_ROWS = 65_536
_RAW_GROUP_BYTES = 16 * 2**20
_SORTED = ("tenant", "orchestration_id", "trace_id", "revision")
"""Rows are sorted by those of these columns that a table has, then stay in log order."""
_BLOOM = ("trace_id", "orchestration_id")
_PLAIN = (
    "attributes", "events", "links", "span_id", "parent_span_id", "id", "details", "data", "parameters", "content_hash",
    "response_id", "call_id", "started", "ended", "start_ns", "end_ns", "duration_ms", "t_ns", "t", "event_id", "value",
    "offset", "appended_ns", "key", "prompt_token_ids.list.element", "response_token_ids.list.element",
    "logprobs.list.element",
)  # fmt: skip
"""Columns whose values rarely repeat: no dictionary."""

_Group = tuple[str, str]
"""Tenant and UTC day."""


class Built(NamedTuple):
    """Tables of some records, ready to write."""

    tables: dict[str, pa.Table]
    unreadable: int


def footer_hash(data: bytes) -> str:
    """sha256 of the Parquet footer at the end of ``data``; of all of ``data`` where there is none.

    >>> footer_hash(b"") == hashlib.sha256(b"").hexdigest()
    True
    """
    if len(data) >= 8 and data[-4:] == b"PAR1":
        size = int.from_bytes(data[-8:-4], "little") + 8
        if size <= len(data):
            data = data[-size:]
    return hashlib.sha256(data).hexdigest()


def schema_of(table: pa.Table | pa.Schema) -> dict[str, str]:
    """Column -> Arrow type, as manifests keep it."""
    schema = table if isinstance(table, pa.Schema) else table.schema
    return {field.name: str(field.type) for field in schema}


def parquet(table: pa.Table, *, row_group: int = ROW_GROUP_ROWS) -> pa.Buffer:
    """A Parquet file in memory: zstd, page checksums, statistics, bloom filters on ids."""
    names = table.column_names
    distinct = max(1, min(table.num_rows, row_group))
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        row_group_size=row_group,
        write_page_checksum=True,
        use_dictionary=[path for path in _leaves(table.schema) if path not in _PLAIN],
        bloom_filter_options={name: {"ndv": distinct, "fpp": 0.01} for name in _BLOOM if name in names}
        or None,
    )
    return sink.getvalue()


def _leaves(schema: pa.Schema) -> Iterator[str]:
    for field in schema:
        path, type_ = field.name, field.type
        while pa.types.is_list(type_):
            path, type_ = f"{path}.list.element", type_.value_type
        yield path


def sort(table: pa.Table) -> pa.Table:
    """Rows of one orchestration or trace side by side, so that a query for one reads one row group."""
    keys = [(name, "ascending") for name in _SORTED if name in table.column_names]
    if len(keys) < 2 or table.num_rows < 2:
        return table
    return table.take(pc.sort_indices(table, sort_keys=keys))


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

    def add(
        self, kind: str, tenant: str, date: str, table: pa.Table, *, row_group: int = ROW_GROUP_ROWS
    ) -> None:
        """Write one Parquet file and read its end back. Raises OSError."""
        data = parquet(table, row_group=row_group)
        path = data_path(kind, self._topic, tenant, date, self._name)
        size = len(data)
        footer_size = int.from_bytes(data[size - 8 : size - 4].to_pybytes(), "little") + 8
        info = FileInfo(
            path,
            kind,
            table.num_rows,
            size,
            footer_hash(data[size - footer_size :].to_pybytes()),
            tenant,
            date,
        )
        self.written.append(info)
        self._files.write(path, data)
        check(self._files, info)

    def undo(self) -> None:
        """Remove what was written; what cannot be removed is unnamed and swept at the next start."""
        for info in self.written:
            try:
                self._files.delete(info.path)
            except OSError:
                return


def check(files: Files, info: FileInfo) -> None:
    """Compare a file's size and footer with what its manifest says.

    Raises:
        OSError: it is missing, cut, or another file; the message says which.
    """
    size = files.sizes([info.path])[0]
    if size != info.bytes:
        raise OSError(
            f"{files.uri(info.path)} has {size if size is not None else 'no'} bytes, expected {info.bytes}"
        )
    end = files.read_end(info.path, 64 * 1024)
    length = int.from_bytes(end[-8:-4], "little") + 8
    if length > len(end):
        end = files.read_end(info.path, length)
    if footer_hash(end) != info.footer:
        raise OSError(f"{files.uri(info.path)} has a footer that is not the one its manifest names")


def write_range(
    store: ArchiveStore, topic: str, partition: int, records: Sequence[LogRecord], *, first: int | None = None
) -> Range | None:
    """Append a range to the archive; all of it or nothing is visible afterwards.

    Args:
        store: Where to.
        topic, partition: Source of the records.
        records: In offset order, all later than what the archive contains. None: nothing is done.
        first: Begin of the range where it is not the offset after the last contained one (a gap is filled).

    Raises:
        OSError: the medium refused; nothing was added.
        TerminalError: the records begin inside what is contained: another archiver is at work.
    """
    if not records:
        return None
    if first is None:
        first = store.contained_of(topic, partition) + 1
    if records[0].offset < first:
        raise TerminalError(
            f"offset {records[0].offset} of {records[0].source} is in the archive already (up to {first - 1}): is another "
            "archiver running on it?"
        )
    tables, unreadable = build(topic, records)
    return write_built(store, topic, partition, records, Built(tables, unreadable), first=first)


def write_built(
    store: ArchiveStore,
    topic: str,
    partition: int,
    records: Sequence[LogRecord],
    built: Built,
    *,
    first: int,
) -> Range:
    """``write_range`` of records that are decoded already."""
    files = store.files
    attempt = Attempt(files, topic, partition, first, records[-1].offset)
    try:
        for group, part in _by_group(records):
            average = sum(len(r.value) for r in part) // len(part) + 1
            rows = max(1_000, _RAW_GROUP_BYTES // average)
            attempt.add(RAW, *group, raw_table(part), row_group=rows)
        write_tables(attempt, records, built.tables)
        item = Range(
            topic, partition, first, records[-1].offset, len(records), time.time_ns(), records[0].offset,
            records[0].event_id, records[-1].event_id, built.unreadable, TABLES_VERSION,
            {name: schema_of(TABLES[name].schema) for name in TABLES_OF_TOPIC[topic]}, tuple(attempt.written),
        )  # fmt: skip
        save(files, item)
    except BaseException:
        attempt.undo()
        raise
    return item


def write_tables(attempt: Attempt, records: Sequence[LogRecord], tables: dict[str, pa.Table]) -> None:
    """Write the columns of ``records``, by tenant and day; tables without rows give no file."""
    groups = [group for group, _ in _by_group(records)]
    numbers = {group: number for number, group in enumerate(groups)}
    offsets = np.array([r.offset for r in records], np.int64)
    owner = np.array([numbers[_group(r)] for r in records], np.int32)
    for name, table in tables.items():
        if not table.num_rows:
            continue
        if len(groups) == 1:
            attempt.add(name, *groups[0], sort(table))
            continue
        rows = owner[np.searchsorted(offsets, table["offset"].to_numpy())]
        for number in np.unique(rows):
            attempt.add(name, *groups[number], sort(table.filter(pa.array(rows == number))))


def save(files: Files, item: Range) -> None:
    """Write the manifest: from now on the range exists."""
    files.write(item.path, msgspec.json.format(msgspec.json.encode(item), indent=1))


def _group(record: LogRecord) -> _Group:
    return tenant_of(record.key), date_of(record.appended_ns)


def _by_group(records: Sequence[LogRecord]) -> list[tuple[_Group, list[LogRecord]]]:
    groups: dict[_Group, list[LogRecord]] = {}
    for record in records:
        groups.setdefault(_group(record), []).append(record)
    return sorted(groups.items())
