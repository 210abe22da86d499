"""Laws of the archive: a kill at any change of the medium, in any order of writing, merging, repairing and sweeping, loses no
row and doubles none, neither for a query right after it nor after the restart."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path

import pytest
from archive_support import (
    DAY_NS,
    T0,
    FailingFiles,
    Killed,
    PartitionedLog,
    check_archived,
    check_loaded,
    traffic,
)
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from spanloop.pipeline.archive import ArchiveStore
from spanloop.pipeline.archive import compaction as compaction_module
from spanloop.pipeline.archive.archiver import Archiver
from spanloop.pipeline.archive.cleaning import orphans, sweep
from spanloop.pipeline.archive.compaction import compact
from spanloop.pipeline.archive.source import chunk
from spanloop.pipeline.archive.writer import write_range
from spanloop.pipeline.clock import ManualClock
from spanloop.schemas.settings import load_settings

SHARED_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108


@pytest.fixture(autouse=True)
def _merge_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction_module, "FAN_IN", 2)


def archiver(log: PartitionedLog, files: FailingFiles, records: int = 4) -> tuple[Archiver, ArchiveStore]:
    store = ArchiveStore(files, log.clock)
    options = load_settings(None, {"workspace": Path(files.root) / "ws", "archive": {"records": records}})
    return Archiver(log, store, options), store


def act(what: str, log: PartitionedLog, worker: Archiver, store: ArchiveStore, rng: random.Random) -> None:
    if what == "append":
        traffic(log, rng, rng.randrange(1, 6))
    elif what == "write":
        worker.drain()
    elif what == "merge":
        try:
            compact(store, below_bytes=2**30)
        except OSError:  # a damaged file: the archiver then verifies
            worker.start()
    elif what == "sweep":
        log.clock.advance(ns=DAY_NS)
        sweep(store)
    elif what == "verify":
        worker.start()
    elif what == "damage":
        files = sorted(Path(store.files.root).glob("[rti]*/**/*.parquet"))
        if files:
            victim = rng.choice(files)
            victim.write_bytes(victim.read_bytes()[: rng.choice([0, 50])])


@settings(
    max_examples=int(os.environ.get("SPANLOOP_TEST_EXAMPLES", "12")),
    phases=(Phase.reuse, Phase.generate, Phase.shrink),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 10**6),
    partitions=st.sampled_from([1, 2]),
    actions=st.lists(
        st.sampled_from(["append", "write", "merge", "sweep", "verify", "damage"]), min_size=3, max_size=9
    ),
    kills=st.lists(st.tuples(st.integers(0, 40), st.sampled_from(["before", "torn", "after"])), max_size=3),
)
def test_a_kill_at_any_point_loses_nothing_and_doubles_nothing(seed, partitions, actions, kills) -> None:
    rng = random.Random(seed)
    log = PartitionedLog(ManualClock(T0), partitions)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        pending = list(kills)
        todo = ["append", "write", *actions]
        files = FailingFiles(Path(folder))
        worker, store = archiver(log, files)
        while todo:
            if pending and files.at is None:
                files.at, files.how = files.calls + pending[0][0], pending[0][1]
                pending.pop(0)
            try:
                act(todo[0], log, worker, store, rng)
                todo.pop(0)
            except Killed:
                fresh = ArchiveStore(FailingFiles(Path(folder)), log.clock)
                check_loaded(log, fresh)  # a query right after the kill, before anything was repaired
                files = FailingFiles(Path(folder))
                worker, store = archiver(log, files)
                worker.start()
        check_loaded(log, ArchiveStore(FailingFiles(Path(folder)), log.clock))
        worker, store = archiver(log, FailingFiles(Path(folder)))
        report = worker.start()
        worker.drain()
        assert report.lost == []
        check_archived(log, store)
        check_loaded(log, store)
        log.clock.advance(ns=DAY_NS)
        sweep(store)
        assert orphans(store) == []
        assert not list(Path(folder).rglob("*.tmp"))
        check_loaded(log, store)
        assert all(ranges == [] for ranges in store.gaps().values())


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10**6), steps=st.lists(st.sampled_from([0, 1, 2, 3]), min_size=4, max_size=14))
def test_two_writers_without_a_lock_lose_nothing_and_double_nothing(seed, steps) -> None:
    """As in S3: both list, then both write; whoever's range is longer counts."""
    rng = random.Random(seed)
    log = PartitionedLog(ManualClock(T0))
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:
        writers = [
            archiver(log, FailingFiles(Path(folder)), records=rng.choice([2, 3, 50])) for _ in range(2)
        ]
        for step in steps:
            if step == 0:
                traffic(log, rng, 3)
            elif step == 3:
                _race(log, writers)
            else:
                writers[step - 1][0].drain()
            check_loaded(log, ArchiveStore(FailingFiles(Path(folder)), log.clock))
        writers[0][0].drain()
        check_archived(log, writers[0][1])


def _race(log: PartitionedLog, writers: list[tuple[Archiver, ArchiveStore]]) -> None:
    """The second writes a longer range from the same begin, while the first is between listing and writing."""
    first = writers[0][1].contained_of("spans", 0) + 1
    end = log.end("spans")
    for (_, store), limit in zip(writers, (1, 2), strict=True):
        records = chunk(log, "spans", {"spans": first - 1}, {"spans": end}, limit).get("spans", [])
        if records:
            write_range(store, "spans", 0, records, first=first)
