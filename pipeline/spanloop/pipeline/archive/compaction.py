"""Small neighbouring ranges become one: fewer files for queries, fewer manifests to read.

Place in the flow: ``archiver`` runs ``compact`` now and then, ``spanloop archive compact`` on demand.

Invariants: a merged range holds exactly the rows of its parts, in the files that a range written at once would have. It takes
over the moment its manifest appears (``manifest.resolve``); before that its files are unnamed, afterwards its parts are
covered and stay for readers until ``cleaning.sweep``. So it can be cut off at any point.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from spanloop.pipeline.archive.encoding import sort
from spanloop.pipeline.archive.manifest import RAW, FileInfo, Range, date_of
from spanloop.pipeline.archive.raw import RAW_SCHEMA, ArchiveStore
from spanloop.pipeline.archive.repair import stale_tables
from spanloop.pipeline.archive.repeats import INDEX
from spanloop.pipeline.archive.writer import TABLES_VERSION, Attempt, Group, save, schemas_of
from spanloop.pipeline.views import TABLES

__all__ = ["FAN_IN", "VALUE_BYTES", "compact", "merge", "plan"]

FAN_IN = 8
"""Ranges of an unfinished day are merged when so many of about one size stand side by side: each row is rewritten about
log8(ranges) times."""
RANGES_MAX = 24
"""... or when so many small ones of any size do."""
VALUE_BYTES = 256 * 2**20
"""Uncompressed values in a merged range at most: what a repair holds in memory."""

logger = logging.getLogger(__name__)


def plan(ranges: Sequence[Range], today: str, below_bytes: float) -> list[list[Range]]:
    """Groups of neighbouring ranges to merge, oldest first.

    Args:
        ranges: Live ranges of one partition, in order.
        today: UTC day; days before it are finished, and their small ranges are merged however few they are.
        below_bytes: A range is small while none of its files is larger.
    """
    groups: list[list[Range]] = []
    for run in _runs(ranges, below_bytes):
        finished = [item for item in run if all(date < today for date in item.dates)]
        if len(finished) > 1 and finished == run[: len(finished)]:
            groups.append(finished)
            run = run[len(finished) :]  # noqa: PLW2901
        if len(run) >= RANGES_MAX:
            groups.append(run)
            continue
        tier: list[Range] = []
        for item in [*run, None]:
            if item is None or (tier and _tier(item) != _tier(tier[0])):
                if len(tier) >= FAN_IN:
                    groups.append(tier)
                tier = []
            if item is not None:
                tier.append(item)
    return groups


def _runs(ranges: Sequence[Range], below_bytes: float) -> list[list[Range]]:
    """Neighbours that touch, are small, and together not too large."""
    runs: list[list[Range]] = []
    run: list[Range] = []
    size = 0
    for item in ranges:
        fits = max((info.bytes for info in item.files), default=0) < below_bytes and not stale_tables(item)
        touches = bool(run) and run[-1].last + 1 == item.first and size + item.value_bytes <= VALUE_BYTES
        if run and not (fits and touches):
            runs.append(run)
            run, size = [], 0
        if fits:
            run.append(item)
            size += item.value_bytes
    return [*runs, run] if run else runs


def _tier(item: Range) -> int:
    return max(item.records, 1).bit_length() // 3


def compact(
    store: ArchiveStore,
    *,
    below_bytes: float,
    topics: Iterable[str] = (),
    progress: Callable[[Range, int], None] = lambda _merged, _parts: None,
    stop: Callable[[], bool] = lambda: False,
) -> int:
    """Merge what ``plan`` names: how many ranges became fewer.

    Args:
        store: To be held for writing by the caller.
        below_bytes: See ``plan``.
        topics: Only these; none: all.
        progress: Called after each merge with the new range and the number of its parts.
        stop: Asked between two merges.

    Raises:
        OSError: the medium refused, or a part's file is damaged; ``repair.verify`` says which.
    """
    merged = 0
    today = date_of(store.clock.now_ns())
    for ranges in store.listing(topics).live.values():
        for parts in plan(ranges, today, below_bytes):
            if stop():
                return merged
            progress(merge(store, parts), len(parts))
            merged += len(parts) - 1
    return merged


def merge(store: ArchiveStore, parts: Sequence[Range]) -> Range:
    """One range in place of neighbouring ones, none of them with outdated tables.

    Raises:
        OSError: the medium refused, or a file cannot be read; nothing changed.
    """
    first, last = parts[0], parts[-1]
    attempt = Attempt(store.files, first.topic, first.partition, first.first, last.last)
    by_file: dict[tuple[str, Group], list[FileInfo]] = {}
    for item in parts:
        for info in item.files:
            by_file.setdefault((info.kind, (info.tenant, info.date)), []).append(info)
    carried: list[FileInfo] = []
    records = sum(item.records for item in parts)
    try:
        for (kind, group), infos in sorted(by_file.items()):
            if kind == INDEX:
                hashes = [np.frombuffer(store.files.read(info.path), "<u8") for info in infos]
                attempt.add_index(np.unique(np.concatenate(hashes)))
            elif kind == RAW:
                attempt.add_raw(group, _read(store, infos, RAW_SCHEMA), records)
            elif len(infos) == 1:
                carried += infos
            elif kind in TABLES:
                attempt.add(kind, group, sort(_read(store, infos, TABLES[kind].schema)))
        filled = [item for item in parts if item.records]
        merged = Range(
            first.topic, first.partition, first.first, last.last, records, store.clock.now_ns(),
            first_offset=filled[0].first_offset if filled else -1,
            last_offset=filled[-1].last_offset if filled else -1,
            first_event_id=filled[0].first_event_id if filled else "",
            last_event_id=filled[-1].last_event_id if filled else "",
            value_bytes=sum(item.value_bytes for item in parts),
            unreadable=sum(item.unreadable for item in parts),
            version=TABLES_VERSION,
            schemas=schemas_of(first.topic),
            files=tuple(attempt.written + carried),
            lost=tuple(loss for item in parts for loss in item.lost),
            replaces=tuple(item.name for item in parts),
        )  # fmt: skip
        save(store.files, merged)
    except pa.ArrowException as exc:
        attempt.undo()
        raise OSError(
            f"ranges {first.name} to {last.name} of {first.source} cannot be merged: {exc}"
        ) from exc
    except BaseException:
        attempt.undo()
        raise
    return merged


def _read(store: ArchiveStore, infos: Sequence[FileInfo], schema: pa.Schema) -> pa.Table:
    """Rows of several files, with today's columns: a missing one is NULL."""
    tables = []
    for info in infos:
        with pq.ParquetFile(
            pa.BufferReader(store.files.read(info.path)), page_checksum_verification=True
        ) as file:
            tables.append(file.read())
    known = pa.concat_tables(tables, promote_options="default")
    if known.num_rows != sum(info.rows for info in infos):
        raise OSError(f"{infos[0].path} and its neighbours have not the rows that their manifests name")
    arrays = [
        known[field.name] if field.name in known.column_names else pa.nulls(known.num_rows, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)
