"""Tables to Parquet files and back to what a manifest says of them.

Place in the flow: ``writer`` and ``compaction`` encode, ``repair`` checks. Files are zstd with page checksums; rows of one
trace or orchestration lie side by side, in row groups of at most ``ROW_GROUP_ROWS`` with statistics and bloom filters on the
ids, so that a query for one reads one row group of each file.
"""

from __future__ import annotations

import errno
import hashlib
import zlib
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from spanloop.pipeline.archive.files import Files
from spanloop.pipeline.archive.manifest import FileInfo
from spanloop.pipeline.archive.repeats import INDEX

__all__ = ["ROW_GROUP_ROWS", "fault", "footer_hash", "parquet", "sort"]

ROW_GROUP_ROWS = 65_536
_SORTED = ("tenant", "orchestration_id", "trace_id", "revision")
"""Rows are sorted by those of these columns that a table has, then stay in log order."""
_BLOOM = ("trace_id", "orchestration_id")
_compute: Any = pyarrow.compute  # its functions are made at run time, type checkers know none
_PLAIN = (
    "attributes", "events", "links", "span_id", "parent_span_id", "id", "details", "data", "parameters", "content_hash",
    "response_id", "call_id", "started", "ended", "start_ns", "end_ns", "duration_ms", "t_ns", "t", "event_id", "value",
    "offset", "appended_ns", "key", "prompt_token_ids.list.element", "response_token_ids.list.element",
    "logprobs.list.element",
)  # fmt: skip
"""Columns whose values rarely repeat: no dictionary."""


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


def parquet(table: pa.Table, *, row_group: int = ROW_GROUP_ROWS) -> pa.Buffer:
    """A Parquet file in memory: zstd, page checksums, statistics, bloom filters on ids."""
    names = table.column_names
    dictionary: Any = [path for path in _leaves(table.schema) if path not in _PLAIN]
    distinct = max(1, min(table.num_rows, row_group))
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        row_group_size=row_group,
        write_page_checksum=True,
        use_dictionary=dictionary,
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
    return table.take(_compute.sort_indices(table, sort_keys=keys))


def fault(files: Files, info: FileInfo, *, deep: bool = False) -> str:
    """What is wrong with a file, compared with what its manifest says; empty: nothing.

    Args:
        files: Where it lies.
        info: From the manifest.
        deep: Read all of it and compare its checksum, not only the footer.

    Raises:
        OSError: the medium does not answer, which says nothing about the file.
    """
    size = files.sizes([info.path])[0]
    if size != info.bytes:
        return f"has {size} bytes, expected {info.bytes}" if size is not None else "is missing"
    try:
        if deep or info.kind == INDEX:
            end = files.read(info.path)
        else:
            end = files.read_end(info.path, 64 * 1024)
            length = int.from_bytes(end[-8:-4], "little") + 8
            if len(end) < length <= info.bytes:
                end = files.read_end(info.path, length)
    except FileNotFoundError:
        return "is missing"
    except OSError as exc:
        if exc.errno == errno.EIO:
            return "cannot be read from the disk"
        raise
    found = hashlib.sha256(end).hexdigest() if info.kind == INDEX else footer_hash(end)
    if found != info.footer:
        return "has not the footer that its manifest names"
    if deep and info.crc32 >= 0:
        return "" if zlib.crc32(end) == info.crc32 else "is not what was written (checksum)"
    return _damaged_pages(end) if deep and info.kind != INDEX else ""


def _damaged_pages(data: bytes) -> str:
    try:
        with pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True) as file:
            for _ in file.iter_batches():
                pass
    except (OSError, pa.ArrowException) as exc:
        return f"has damaged pages ({str(exc).splitlines()[0]})"
    return ""
