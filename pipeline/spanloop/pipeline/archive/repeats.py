"""Which spans were received before: found once, when a range is written, so that no query has to group all spans.

Place in the flow: ``writer`` marks the spans of a new range, ``load`` those of the live tail. Each range of spans has an
*index*, the sorted 64-bit hashes of its trace ids (8 bytes a trace). Only where an earlier range has one of the new traces are
that range's ids read and compared.

Invariants: of all rows of one (tenant, trace id, span id) in the archive exactly one is not a repeat. Exact: hashes only choose
where to look. Horizon: the whole archive. A range written again in place of a damaged one is compared with the others' first
rows, so a span whose repeat was hidden stays visible once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.dataset as ds

from spanloop.pipeline.archive.manifest import Range
from spanloop.pipeline.archive.raw import ArchiveStore

__all__ = ["INDEX", "index_of", "index_path", "mark"]

INDEX = "index"
"""Kind of the file with the hashes of a range's traces."""
pc: Any = pyarrow.compute  # its functions are made at run time, type checkers know none
_KEY = ["tenant", "trace_id", "span_id"]
_SEPARATOR = "\x1f"


def index_path(topic: str, name: str) -> str:
    """Where an index lies, relative to the root."""
    return f"{INDEX}/topic={topic}/{name}.u64"


def trace_hash(trace_id: str) -> int:
    """The same in every process."""
    return int.from_bytes(
        hashlib.blake2b(trace_id.encode("utf-8", "replace"), digest_size=8).digest(), "little"
    )


def index_of(trace_ids: Iterable[pa.ChunkedArray]) -> np.ndarray:
    """Sorted distinct hashes (uint64) of trace ids."""
    parts = [_hashes(pc.unique(ids)) for ids in trace_ids]
    return np.unique(np.concatenate(parts)) if parts else np.empty(0, np.uint64)


def _hashes(ids: pa.Array) -> np.ndarray:
    return np.array([trace_hash(trace_id) for trace_id in ids.to_pylist()], "<u8")


def mark(store: ArchiveStore, spans: pa.Table, ranges: Sequence[Range]) -> pa.Table:
    """Fill the column ``repeat``.

    Args:
        store: Where the ranges lie.
        spans: Rows of the table ``spans``, in log order.
        ranges: All other live ranges of spans. Files that cannot be read count as not there.
    """
    if not spans.num_rows:
        return spans
    repeat = _within(spans)
    traces = pc.unique(spans["trace_id"])
    hashes = _hashes(traces)
    order = np.argsort(hashes)
    ordered = hashes[order]
    for item in ranges:
        found = _known(store, item, ordered)
        if found.any():
            common = traces.take(pa.array(order[found]))
            firsts = _firsts(store, item, common)
            if firsts is not None:
                repeat |= _among(spans, common, firsts)
    column = spans.schema.get_field_index("repeat")
    return spans.set_column(column, spans.schema.field(column), pa.array(repeat))


def _within(spans: pa.Table) -> np.ndarray:
    """Rows whose span stands in an earlier row of the same table."""
    rows = spans.select(_KEY).append_column("row", pa.array(np.arange(spans.num_rows)))
    firsts = rows.group_by(_KEY, use_threads=False).aggregate([("row", "min")])["row_min"].to_numpy()
    repeat = np.ones(spans.num_rows, bool)
    repeat[firsts] = False
    return repeat


def _known(store: ArchiveStore, item: Range, ordered: np.ndarray) -> np.ndarray:
    """For each of the sorted hashes, whether the range may have it."""
    index = _index(store, item)
    if index is None:
        return np.ones(len(ordered), bool)
    if not len(index):
        return np.zeros(len(ordered), bool)
    at = np.minimum(np.searchsorted(index, ordered), len(index) - 1)
    return index[at] == ordered


def _index(store: ArchiveStore, item: Range) -> np.ndarray | None:
    """None: the range has no index that can be read."""
    for info in item.files:
        if info.kind == INDEX:
            known = store.indexes.get(info.path)
            if known is None:
                try:
                    known = np.frombuffer(store.files.read(info.path), "<u8")
                except (OSError, ValueError):
                    return None
                if len(known) != info.rows:
                    return None
                store.indexes[info.path] = known
            return known
    return None


def _firsts(store: ArchiveStore, item: Range, traces: pa.Array) -> pa.Table | None:
    """Tenant, trace and span id of the range's rows of these traces that are no repeats."""
    wanted = (pc.field("trace_id").isin(traces)) & ~pc.field("repeat")
    parts = []
    for info in item.files:
        if info.kind == item.topic:
            try:
                file = ds.dataset(store.files.full(info.path), format="parquet", filesystem=store.filesystem)
                parts.append(file.to_table(_KEY, filter=wanted))
            except (OSError, pa.ArrowException):
                continue
    return pa.concat_tables(parts) if parts else None


def _among(spans: pa.Table, traces: pa.Array, firsts: pa.Table) -> np.ndarray:
    candidate = pc.is_in(spans["trace_id"], value_set=traces).to_numpy()
    rows = np.flatnonzero(candidate)
    keys = _joined(spans.select(_KEY).take(pa.array(rows)))
    known = pc.is_in(keys, value_set=_joined(firsts).combine_chunks()).to_numpy()
    found = np.zeros(spans.num_rows, bool)
    found[rows[known]] = True
    return found


def _joined(table: pa.Table) -> pa.ChunkedArray:
    return pc.binary_join_element_wise(*(table[name] for name in _KEY), _SEPARATOR)
