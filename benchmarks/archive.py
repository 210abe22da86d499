"""The archiver's cost: records a second into the archive, beside a bare Parquet write of the same bytes.

Rates are by CPU seconds of the process, so that they hold on a busy machine; the wait for fsync is not in them. Records are
the dispatch desk's recording with fresh ids, ``--spans`` spans in batches of five, one tenant. One core, one
thread of Arrow:

- ``archive``: ``write_range`` of ranges of ``archive.records`` records: raw file, tables, index, checks, fsyncs, manifest;
- ``raw only``: the same ranges as the raw file's columns, zstd, fsync, nothing else: the same bytes;
- ``decode``: records to columns, which every query over the undecoded tail would pay;
- ``compaction``: ranges of 1,000 records, 20,000 records in all, of a finished day;
- ``tail``: what ``Archive.load`` takes for a live tail of 20,000 spans behind the rest;
- ``follow``: share of a core that the archiver takes beside a log that grows by ``--rate`` spans a second.

``python benchmarks/archive.py [--spans N] [--rate N]`` writes benchmarks/results/archive.json.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import _harness
import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from spanloop.pipeline.archive import Archive, ArchiveStore
from spanloop.pipeline.archive.archiver import Archiver
from spanloop.pipeline.archive.compaction import compact
from spanloop.pipeline.archive.repair import verify
from spanloop.pipeline.archive.writer import raw_table, write_range
from spanloop.pipeline.columns import build
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.otlp.files import read_spans
from spanloop.pipeline.ports import LogRecord, NewRecord, new_record
from spanloop.schemas.events import SpansReceived
from spanloop.schemas.settings import load_settings

BATCH = 5


def events(count: int) -> Iterator[NewRecord]:
    """Batches of spans of one trace each, like the recording but for their ids."""
    recorded = [
        span
        for batch in read_spans(_harness.ROOT / "tests/golden/assembly/desk.otlp.jsonl")
        for span in batch.spans
    ]
    rng, made = random.Random(1), 0
    while made < count:
        trace = f"{rng.getrandbits(128):032x}"
        ids = {span.span_id: f"{rng.getrandbits(64):016x}" for span in recorded}
        spans = [
            msgspec.structs.replace(
                span,
                trace_id=trace,
                span_id=ids[span.span_id],
                parent_span_id=ids.get(span.parent_span_id or ""),
            )
            for span in recorded
        ]
        for at in range(0, len(spans), BATCH):
            part = tuple(spans[at : at + BATCH])
            made += len(part)
            yield new_record(SpansReceived(trace_id=trace, spans=part))


def records(count: int) -> list[LogRecord]:
    """``events`` as a log gives them."""
    now = time.time_ns()
    return [
        LogRecord(event.topic, offset, event.key, event.event_id, event.value, now)
        for offset, event in enumerate(events(count))
    ]


def _raw_only(folder: Path, parts: list[list[LogRecord]]) -> int:
    size = 0
    for number, part in enumerate(parts):
        path = folder / f"{number}.parquet"
        with path.open("wb") as file:
            pq.write_table(raw_table(part), file, compression="zstd")
            file.flush()
            os.fsync(file.fileno())
        size += path.stat().st_size
    return size


def _timed(call) -> tuple[float, object]:
    start = time.process_time()
    result = call()
    return time.process_time() - start, result


def _follow(folder: Path, rate: int, seconds: float) -> dict:
    """CPU of an archiver thread's process share beside appends: measured as thread time of the archiver's thread."""
    log = SqliteLog(folder / "spanloop.db")
    settings = load_settings(None, {"workspace": folder, "archive": {"every_s": 2.0}})
    archiver = Archiver(log, ArchiveStore.open(settings), settings)
    stop, used = threading.Event(), []

    def run() -> None:
        archiver.follow(stop.wait)
        used.append(time.thread_time())

    source = list(events(int(rate * seconds)))
    thread = threading.Thread(target=run)
    thread.start()
    start = time.perf_counter()
    per_tick = max(1, rate // BATCH // 20)
    for number, at in enumerate(range(0, len(source), per_tick)):
        log.append(source[at : at + per_tick])
        time.sleep(max(0.0, start + (number + 1) * 0.05 - time.perf_counter()))
    wall = time.perf_counter() - start
    stop.set()
    thread.join()
    log.close()
    spans = len(source) * BATCH
    return {"spans_per_s": round(spans / wall), "archiver_core_share": round(used[0] / wall, 3),
            "ranges": archiver.status.ranges}  # fmt: skip


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=500_000)
    parser.add_argument("--rate", type=int, default=2_000)
    options = parser.parse_args()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[-1]})
    pa.set_cpu_count(1)
    made = records(options.spans)
    spans, size = len(made) * BATCH, sum(len(record.value) for record in made)
    limit = load_settings().archive.records
    parts = [made[at : at + limit] for at in range(0, len(made), limit)]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "raw").mkdir()
        bare_s, bare_size = _timed(lambda: _raw_only(folder / "raw", parts))
        decode_s, _ = _timed(lambda: [build("spans", part) for part in parts])
        settings = load_settings(None, {"workspace": folder})
        store = ArchiveStore.open(settings)
        archive_s, _ = _timed(lambda: [write_range(store, "spans", 0, part) for part in parts])
        by_kind: dict[str, int] = {}
        for item in store.ranges("spans"):
            for info in item.files:
                by_kind[info.kind] = by_kind.get(info.kind, 0) + info.bytes
        verify_s, _ = _timed(lambda: verify(store, None))
        deep_s, _ = _timed(lambda: verify(store, None, deep=True))
        log = SqliteLog(folder / "spanloop.db")
        tail = [NewRecord(r.topic, r.key, r.event_id, r.value) for r in made]
        log.append(tail[: 20_000 // BATCH])
        load_s, _ = _timed(
            lambda: Archive(
                log, ArchiveStore.open(load_settings(None, {"workspace": folder / "new"})), fill=False
            ).load(["spans"])
        )
        log.close()
        small = ArchiveStore.open(load_settings(None, {"workspace": folder / "small"}))
        for at in range(0, 20_000, 1_000):
            write_range(small, "spans", 0, made[at : at + 1_000])
        small.clock = _Tomorrow()
        compact_s, fewer = _timed(lambda: compact(small, below_bytes=2**30))
        (folder / "follow").mkdir()
        followed = _follow(folder / "follow", options.rate, 12.0)
    _harness.write(
        "archive",
        f"python benchmarks/archive.py --spans {options.spans} --rate {options.rate}",
        {
            "spans": spans,
            "records": len(made),
            "value_bytes_per_span": round(size / spans, 1),
            "archive_records_per_cpu_s": round(len(made) / archive_s),
            "archive_spans_per_cpu_s": round(spans / archive_s),
            "raw_only_records_per_cpu_s": round(len(made) / bare_s),
            "archive_over_raw_only": round(archive_s / bare_s, 2),
            "decode_share_of_archive": round(decode_s / archive_s, 2),
            "raw_bytes_per_span": round(by_kind["raw"] / spans, 1),
            "raw_only_bytes_per_span": round(bare_size / spans, 1),
            "table_bytes_per_span": round(by_kind["spans"] / spans, 1),
            "index_bytes_per_span": round(by_kind["index"] / spans, 2),
            "verify_cpu_s": round(verify_s, 3),
            "verify_deep_cpu_s": round(deep_s, 2),
            "tail_of_20000_spans_cpu_s": round(load_s, 3),
            "compaction_ranges_fewer": fewer,
            "compaction_spans_per_cpu_s": round(min(spans, 20_000 * BATCH) / compact_s),
            "follow": followed,
            "peak_rss_mib": _harness.peak_rss_mib(),
        },
    )


class _Tomorrow:
    def now_ns(self) -> int:
        return time.time_ns() + 2 * 86_400 * 10**9


if __name__ == "__main__":
    main()
