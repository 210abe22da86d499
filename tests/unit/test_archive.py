"""The archive's parts: layout, what readers see, repeats, damage and repair, older columns, merging and sweeping."""

from __future__ import annotations

import datetime as dt
import json
import random
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from archive_support import (
    DAY_NS,
    T0,
    PartitionedLog,
    check_archived,
    check_loaded,
    loaded_table,
    orchestration,
    read_files,
    spans,
    traffic,
)

from spanloop.pipeline.archive import Archive, ArchiveStore, write_range
from spanloop.pipeline.archive import compaction as compaction_module
from spanloop.pipeline.archive.cleaning import quarantined, sweep
from spanloop.pipeline.archive.compaction import compact, plan
from spanloop.pipeline.archive.encoding import footer_hash
from spanloop.pipeline.archive.files import LocalFiles, ObjectFiles, open_files
from spanloop.pipeline.archive.manifest import Range
from spanloop.pipeline.archive.repair import stale_tables, verify
from spanloop.pipeline.archive.writer import save
from spanloop.pipeline.clock import ManualClock
from spanloop.schemas.errors import ConfigError, TerminalError, TransientError


@pytest.fixture
def log() -> PartitionedLog:
    return PartitionedLog(ManualClock(T0))


@pytest.fixture
def store(tmp_path: Path, log: PartitionedLog) -> ArchiveStore:
    return ArchiveStore(LocalFiles(tmp_path / "archive"), log.clock)


def write(store: ArchiveStore, log: PartitionedLog, topic: str = "spans") -> None:
    """All that is new, one range a source."""
    for number, source in enumerate(log.sources(topic)):
        after = store.contained_of(topic, number)
        write_range(store, topic, number, [r for r in log.records.get(source, []) if r.offset > after])


def paths(store: ArchiveStore, pattern: str) -> list[Path]:
    return sorted(Path(store.files.root).glob(pattern))


def test_records_lie_by_tenant_and_day_and_come_back_as_they_were(
    log: PartitionedLog, store: ArchiveStore
) -> None:
    log.add(spans(1), spans(2, tenant="a b"))
    log.clock.advance(ns=DAY_NS)
    log.add(spans(3), orchestration(1))
    write(store, log)
    write(store, log, "orchestrations")
    files = store.raw_files("spans")
    assert {(f.tenant, f.date.isoformat(), f.rows, f.first, f.last) for f in files} == {
        ("default", "2027-01-15", 1, 0, 2), ("a b", "2027-01-15", 1, 0, 2), ("default", "2027-01-16", 1, 0, 2),
    }  # fmt: skip
    assert all(f"tenant={t}" in "".join(f.path for f in files) for t in ("default", "a%20b"))
    check_archived(log, store)
    assert store.contained() == {"spans": 2, "orchestrations": 0}
    assert len(store.table_files("events")) == 1
    day = dt.date(2027, 1, 16)
    assert [f.date for f in store.raw_files("spans", since=day)] == [day]
    assert [f.tenant for f in store.raw_files("spans", tenant="a b")] == ["a b"]
    assert len(store.table_files("spans", until=dt.date(2027, 1, 15))) == 2


def test_a_range_begins_where_the_last_ended_even_over_skipped_offsets(
    log: PartitionedLog, store: ArchiveStore
) -> None:
    log.add(spans(1), spans(2), spans(3), spans(4))
    records = log.records["spans"]
    write_range(store, "spans", 0, [records[0]])
    write_range(store, "spans", 0, [records[3]])
    assert [(r.name, r.first_offset, r.records) for r in store.ranges("spans")] == [
        ("0-0", 0, 1),
        ("1-3", 3, 1),
    ]
    with pytest.raises(TerminalError, match="another archiver"):
        write_range(store, "spans", 0, [records[2]])


def test_rows_of_one_trace_lie_together_with_bloom_filters(log: PartitionedLog, store: ArchiveStore) -> None:
    rng = random.Random(1)
    for _ in range(30):
        log.append([_unique(spans(rng.randrange(9), [rng.randrange(10**6)]), rng)])
    write(store, log)
    file = pq.ParquetFile(store.table_files("spans")[0])
    traces = file.read()["trace_id"].to_pylist()
    assert traces == sorted(traces)
    column = next(
        file.metadata.row_group(0).column(i)
        for i in range(file.metadata.num_columns)
        if file.metadata.row_group(0).column(i).path_in_schema == "trace_id"
    )
    assert column.compression == "ZSTD"
    assert column.statistics.min == min(traces)


def _unique(event, rng):
    from spanloop.pipeline.ports import NewRecord, new_record

    record = new_record(event)
    return NewRecord(record.topic, record.key, f"{record.event_id}{rng.random()}", record.value)


def test_a_span_is_a_repeat_wherever_it_came_before(log: PartitionedLog, store: ArchiveStore) -> None:
    log.add(spans(1, [1, 2]), spans(1, [2, 3], name="again"), spans(1, [2], tenant="other"))
    write(store, log)
    log.add(spans(1, [3, 4], name="third"), spans(2, [1]))
    write(store, log)
    log.add(spans(1, [4, 5], name="tail"))
    table = loaded_table(log, store, "spans").select(["tenant", "name", "span_id", "repeat"]).to_pylist()
    repeats = sorted((row["name"], int(row["span_id"], 16) % 1000) for row in table if row["repeat"])
    assert repeats == [("again", 2), ("tail", 4), ("third", 3)]
    check_loaded(log, store)


def test_repeats_are_found_across_partitions(tmp_path: Path) -> None:
    log = PartitionedLog(ManualClock(T0), partitions=3)
    store = ArchiveStore(LocalFiles(tmp_path), log.clock)
    rng = random.Random(3)
    for step in range(6):
        for partition in range(3):
            record = _unique(spans(step % 2, [1, 2 + step]), rng)
            log.append([msgspec.structs.replace(record, partition=partition)])
        write(store, log)
        check_loaded(log, store)
    assert set(store.contained()) == {"spans", "spans/1", "spans/2"}


def test_broken_files_are_set_aside_and_rebuilt_from_raw_or_log(
    log: PartitionedLog, store: ArchiveStore
) -> None:
    """Without the log a table comes back from its raw file; a raw file needs the log."""
    for number in range(4):
        log.add(spans(number), orchestration(number))
        write(store, log)
        write(store, log, "orchestrations")
    tables = paths(store, "tables/spans/**/*.parquet")
    tables[0].write_bytes(tables[0].read_bytes()[: tables[0].stat().st_size // 2])
    tables[1].write_bytes(b"")
    tables[2].unlink()
    check_loaded(log, store)
    report = verify(store, None)
    assert (len(report.quarantined), report.lost) == (3, [])
    assert {"bytes, expected" in note["reason"] for note in quarantined(store)} == {True, False}
    check_loaded(log, store)
    raw = paths(store, "raw/topic=spans/**/*.parquet")
    raw[3].write_bytes(raw[3].read_bytes()[:-1])
    assert len(verify(store, log).quarantined) == 1
    check_archived(PartitionedLog(log.clock), store)
    assert verify(store, log).quarantined == []
    check_loaded(log, store)


def test_broken_pages_behind_a_sound_footer_are_found_by_a_deep_look(
    log: PartitionedLog, store: ArchiveStore
) -> None:
    log.add(spans(1), spans(2))
    write(store, log)
    file = paths(store, "tables/spans/**/*.parquet")[0]
    whole = file.read_bytes()
    footer = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    file.write_bytes(b"PAR1" + bytes(footer - 4) + whole[footer:])
    assert verify(store, log).quarantined == []
    assert "checksum" in verify(store, log, deep=True).quarantined[0]
    check_loaded(log, store)


def test_another_ranges_file_in_place_of_the_right_one_is_noticed(
    log: PartitionedLog, store: ArchiveStore
) -> None:
    for number in (1, 2):
        log.add(spans(number))
        write(store, log)
    first, second = paths(store, "tables/spans/**/*.parquet")
    if first.stat().st_size == second.stat().st_size:
        assert footer_hash(first.read_bytes()) != footer_hash(second.read_bytes())
    second.write_bytes(first.read_bytes())
    assert len(verify(store, log).quarantined) == 1
    check_loaded(log, store)


def test_what_neither_raw_file_nor_log_has_is_lost_loudly_and_the_rest_answers(
    log: PartitionedLog, store: ArchiveStore
) -> None:
    for number in range(3):
        log.add(spans(number))
        write(store, log)
    log.trim("spans", 2)
    for pattern in ("raw/topic=spans/**/*.parquet", "tables/spans/**/*.parquet"):
        paths(store, pattern)[1].write_bytes(b"")
    loaded = Archive(log, store, fill=False).load(["spans"])["spans"]
    assert len(loaded.files) == 2
    assert "cannot be read" in loaded.lost[0]
    report = verify(store, log)
    assert (len(report.quarantined), len(report.lost)) == (2, 2)
    loaded = Archive(log, store, fill=False).load(["spans"])["spans"]
    assert read_files(store, loaded.files, "spans").num_rows == 6
    assert "neither a raw file nor the log" in loaded.lost[0]
    assert verify(store, log).quarantined == []


@pytest.mark.parametrize("log_is_there", [True, False])
@pytest.mark.parametrize("merged", [True, False])
def test_a_broken_manifest_comes_back_from_raw_files_or_the_log(
    log: PartitionedLog, store: ArchiveStore, merged: bool, log_is_there: bool
) -> None:
    for number in range(4):
        log.add(spans(number), spans(number, tenant="other"))
        write(store, log)
    log.clock.advance(ns=DAY_NS)
    if merged:
        assert compact(store, below_bytes=2**30) == 3
        sweep(store, grace_s=0)
        log.clock.advance(ns=DAY_NS)
        sweep(store)
        log.add(spans(9))
        write(store, log)
    path = paths(store, "_ranges/spans/0/0-7.json" if merged else "_ranges/spans/0/2-3.json")[0]
    path.write_bytes(path.read_bytes()[:200])
    assert store.contained()["spans"] == log.end("spans")
    check_loaded(log, store)
    sweep(store)  # must not remove what is left of the range
    report = verify(store, log if log_is_there else None)
    assert (len(report.quarantined), report.lost, report.open_gaps) == (1, [], [])
    check_archived(log, store)
    check_loaded(log, store)


def test_a_gap_that_only_the_log_can_fill_stays_open_without_it(
    log: PartitionedLog, store: ArchiveStore
) -> None:
    for number in range(3):
        log.add(spans(number))
        write(store, log)
    for pattern in ("_ranges/spans/0/1-1.json", "raw/topic=spans/**/0-1-1-*"):
        paths(store, pattern)[0].unlink()
    assert verify(store, None).open_gaps == ["spans 1-1"]
    check_loaded(log, store)
    assert verify(store, log).open_gaps == []
    assert store.gaps() == {}
    check_archived(log, store)


def test_a_gap_that_nobody_can_fill_is_closed_as_lost(log: PartitionedLog, store: ArchiveStore) -> None:
    for number in range(3):
        log.add(spans(number))
        write(store, log)
    for pattern in ("_ranges/spans/0/1-1.json", "raw/topic=spans/**/0-1-1-*"):
        paths(store, pattern)[0].unlink()
    log.trim("spans", 2)
    assert "1-1 stand in no file" in verify(store, log).lost[0]
    assert store.gaps() == {}
    assert "1-1" in Archive(log, store, fill=False).load(["spans"])["spans"].lost[0]


def _rewrite(store: ArchiveStore, item: Range, change) -> None:
    """Put another table into the place of the range's spans, as an older version would have written it."""
    info = next(info for info in item.files if info.kind == "spans")
    table = change(pq.read_table(store.files.full(info.path), partitioning=None))
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    data = sink.getvalue().to_pybytes()
    store.files.write(info.path, data)
    new = msgspec.structs.replace(info, bytes=len(data), footer=footer_hash(data))
    schemas = {"spans": {field.name: str(field.type) for field in table.schema}}
    files = tuple(new if old == info else old for old in item.files)
    save(store.files, msgspec.structs.replace(item, files=files, schemas=schemas))


def test_columns_that_came_later_are_null_and_those_that_went_are_ignored(
    log: PartitionedLog, store: ArchiveStore
) -> None:
    log.add(spans(1))
    write(store, log)
    extra = pa.array([1, 2, 3])
    _rewrite(store, store.ranges("spans")[0], lambda t: t.drop(["service"]).append_column("gone", extra))
    assert stale_tables(store.ranges("spans")[0]) == set()
    table = loaded_table(log, store, "spans")
    assert table["service"].null_count == 3
    assert "gone" not in table.column_names
    log.add(spans(2))
    write(store, log)
    log.clock.advance(ns=DAY_NS)
    assert compact(store, below_bytes=2**30) == 1
    check_loaded(log, store)


@pytest.mark.parametrize("change", ["type", "new table", "version"])
def test_a_column_of_another_type_is_rebuilt_from_the_raw_file(
    log: PartitionedLog, store: ArchiveStore, change: str
) -> None:
    log.add(spans(1))
    write(store, log)
    item = store.ranges("spans")[0]
    if change == "type":
        kind = item.files[0].kind
        assert kind
        _rewrite(
            store, item, lambda t: t.set_column(t.schema.get_field_index("kind"), "kind", pa.array(["x"] * 3))
        )
    else:
        old = {"schemas": {}} if change == "new table" else {"version": "0"}
        save(store.files, msgspec.structs.replace(item, **old))
    assert stale_tables(store.ranges("spans")[0]) == {"spans"}
    check_loaded(log, store)  # from the raw file, before anything was rebuilt
    report = verify(store, None)
    assert (report.rebuilt, report.quarantined) == (2, [])  # the table and its index
    assert stale_tables(store.ranges("spans")[0]) == set()
    check_loaded(log, store)


def test_small_ranges_of_finished_days_become_one_while_a_query_runs(
    log: PartitionedLog, store: ArchiveStore
) -> None:
    rng = random.Random(5)
    for _ in range(6):
        traffic(log, rng, 4)
        write(store, log)
        write(store, log, "orchestrations")
    log.clock.advance(ns=DAY_NS)
    reader = Archive(log, store, fill=False).load(["spans"])["spans"]
    before = read_files(store, reader.files, "spans").num_rows
    assert compact(store, below_bytes=2**30) > 0
    assert [r.name for r in store.ranges("spans")] == [f"0-{log.end('spans')}"]
    check_loaded(log, store)
    check_archived(log, store)
    sweep(store)
    assert read_files(store, reader.files, "spans").num_rows == before  # within the grace period
    log.clock.advance(seconds=601)
    assert sweep(store) > 0
    with pytest.raises(FileNotFoundError):
        read_files(store, reader.files, "spans")
    check_loaded(log, store)
    check_archived(log, store)
    assert verify(store, None, deep=True).quarantined == []
    assert compact(store, below_bytes=2**30) == 0


def test_large_ranges_and_few_of_today_stay_as_they_are() -> None:
    def item(first: int, records: int = 10, size: int = 10**6) -> Range:
        return Range("spans", 0, first, first + 9, records, 0, value_bytes=size, schemas={}, version="x")

    ranges = [item(i * 10) for i in range(7)]
    today = "2030-01-01"
    empty = [msgspec.structs.replace(r, records=0) for r in ranges]  # an empty range is never outdated
    assert plan(empty[:1], today, 1e9) == []
    assert [len(group) for group in plan(empty, today, 1e9)] == [7]
    huge = [msgspec.structs.replace(r, value_bytes=200 * 2**20) for r in empty]
    assert plan(huge, today, 1e9) == []
    assert plan(ranges, today, 1e9) == []  # outdated: the repair comes first


def test_many_small_ranges_of_today_are_merged_step_by_step(
    log: PartitionedLog, store: ArchiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction_module, "FAN_IN", 3)
    most = 0
    for number in range(27):
        log.add(spans(number, [1]))
        write(store, log)
        compact(store, below_bytes=2**30)
        most = max(most, len(store.ranges("spans")))
    assert most <= 6
    check_loaded(log, store)


def test_an_archive_that_does_not_answer_is_said_so(
    log: PartitionedLog, store: ArchiveStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> None:
        raise OSError("connection refused")

    log.add(spans(1))
    monkeypatch.setattr(store.files, "list", refuse)
    with pytest.raises(TransientError, match="cannot be read: connection refused"):
        Archive(log, store, fill=False).load(["spans"])
    assert Archive(log, store, fill=True).load(["spans"])["spans"].tail.num_rows == 3  # only a cache


@pytest.mark.parametrize("url", ["gs://bucket/x", "s3:///x"])
def test_a_wrong_url_names_the_setting(url: str) -> None:
    with pytest.raises(ConfigError, match=r"archive\.url"):
        open_files(url)


def test_urls_name_their_medium(tmp_path: Path) -> None:
    assert isinstance(open_files(str(tmp_path)), LocalFiles)
    assert isinstance(open_files(f"file://{tmp_path}"), LocalFiles)
    found = open_files("s3://bucket/a/b", "http://127.0.0.1:9")
    assert isinstance(found, ObjectFiles)
    assert (found.full("x"), found.uri("x")) == ("bucket/a/b/x", "s3://bucket/a/b/x")


def test_only_one_process_writes(store: ArchiveStore) -> None:
    with store.files.writer() as first, store.files.writer() as second:
        assert (first, second) == (True, False)


def test_no_listing_shows_what_a_kill_left(store: ArchiveStore, log: PartitionedLog) -> None:
    log.add(spans(1))
    write(store, log)
    folder = paths(store, "tables/spans/**/*.parquet")[0].parent
    (folder / ".x.parquet.1.abc.tmp").write_bytes(b"half")
    (folder / "0-7-9-00000000.parquet").write_bytes(b"whole, but no manifest names it")
    assert len(store.table_files("spans")) == 1
    check_loaded(log, store)
    assert sweep(store) == 2
    assert len(list(folder.iterdir())) == 1


def test_manifests_are_json_that_people_can_read(store: ArchiveStore, log: PartitionedLog) -> None:
    log.add(spans(1))
    write(store, log)
    found = json.loads(paths(store, "_ranges/spans/0/0-0.json")[0].read_text())
    assert found["files"][0].keys() >= {"path", "kind", "rows", "bytes", "footer", "tenant", "date"}
    assert (found["topic"], found["first"], found["last"], found["records"]) == ("spans", 0, 0, 1)
