"""Cases 39 and 41 (shared/cases), with a size: short in the default suite, as the cases say in tests/full."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from archive_support import T0, PartitionedLog, check_archived, check_loaded, spans

from spanloop.pipeline.archive import Archive, ArchiveStore
from spanloop.pipeline.archive.archiver import STATUS_FILE, Archiver
from spanloop.pipeline.archive.cleaning import quarantined
from spanloop.pipeline.archive.files import LocalFiles
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.schemas.settings import load_settings

LOOP = Path(__file__).with_name("archive_loop.py")


def queries_while_the_archiver_is_killed(
    workspace: Path, *, kills: int, readers: int, seconds: float, queries: int = 0
) -> int:
    """Case 39: how many queries ran; none failed, rows never went back, and at the end every row is there once."""
    workspace.mkdir(exist_ok=True)
    SqliteLog(workspace / "spanloop.db").close()
    rng = random.Random(39)
    stop = threading.Event()
    failures: list[str] = []
    counts: list[int] = []
    threads = [
        threading.Thread(target=_reader, args=(workspace, stop, failures, counts), daemon=True)
        for _ in range(readers)
    ]
    for thread in threads:
        thread.start()
    try:
        for number in range(kills + 1):
            loop = subprocess.Popen(
                [sys.executable, str(LOOP), str(workspace), str(number)], stdout=subprocess.PIPE, text=True
            )
            assert loop.stdout is not None
            assert loop.stdout.readline().strip() == "ready"
            time.sleep(seconds / kills * rng.uniform(0.5, 1.0))
            if number == kills:  # the last one runs until there were enough queries
                _wait(lambda: len(counts) >= queries or bool(failures), seconds=600)
            loop.send_signal(signal.SIGKILL)
            loop.wait()
            loop.stdout.close()
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert failures == []
    log = SqliteLog(workspace / "spanloop.db", create=False)
    options = load_settings(None, {"workspace": workspace, "archive": {"records": 50}})
    store = ArchiveStore.open(options)
    archiver = Archiver(log, store, options)
    with archiver.writing():
        report = archiver.start()
        archiver.drain()
    assert (report.quarantined, report.lost, report.open_gaps) == ([], [], [])
    assert not list((workspace / "archive").rglob("*.tmp"))
    found = [r for file in store.raw_files("spans") for batch in store.records(file.path) for r in batch]
    expected = log.read(["spans"], {}, 10**9)
    assert found == expected
    log.close()
    return len(counts)


def _reader(workspace: Path, stop: threading.Event, failures: list[str], counts: list[int]) -> None:
    from spanloop.pipeline.query.session import Query

    log = SqliteLog(workspace / "spanloop.db", create=False)
    last = -1
    try:
        while not stop.is_set():
            try:
                with Query(log, workspace / "archive") as query:
                    _, rows = query.run("SELECT count(*) AS n FROM spans")
                    now = next(iter(rows))[0]
            except Exception as exc:
                failures.append(repr(exc))
                return
            if now < last:
                failures.append(f"{now} rows after {last}")
                return
            last = now
            counts.append(now)
    finally:
        log.close()


@contextlib.contextmanager
def small_volume(megabytes: int = 16) -> Iterator[Path]:
    """A file system of that size; skipped where this user may not mount one."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder],
            capture_output=True,
            check=False,
        )
        if done.returncode:
            pytest.skip("mounting a small tmpfs needs root")
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


def bad_files_and_a_full_volume(volume: Path, workspace: Path, *, full_s: float) -> None:
    """Case 41: ten good files, one cut to half, one empty, one temporary; then the volume is full for a while."""
    workspace.mkdir(exist_ok=True)
    log = PartitionedLog(ManualClock(T0))
    options = load_settings(
        None,
        {"workspace": workspace, "archive": {"url": str(volume / "archive"), "records": 40, "every_s": 0.05}},
    )
    store = ArchiveStore(LocalFiles(volume / "archive"), log.clock)
    said: list[str] = []

    def archiver() -> Archiver:
        return Archiver(log, store, options, say=said.append)

    for number in range(12):
        log.add(spans(number, range(3)))
        archiver().drain()
    tables = sorted(
        (volume / "archive").glob("tables/spans/**/*.parquet"), key=lambda p: int(p.name.split("-")[1])
    )
    assert len(tables) == 12
    tables[10].write_bytes(tables[10].read_bytes()[: tables[10].stat().st_size // 2])
    tables[11].write_bytes(b"")
    tables[0].with_name(".0-12-12-0000.parquet.1.tmp").write_bytes(b"PAR1")
    loaded = Archive(log, store, fill=False).load(["spans"])["spans"]
    assert (len(loaded.files), loaded.tail.num_rows) == (10, 6)  # the other two from their raw files
    check_loaded(log, store)

    stop = threading.Event()
    worker = archiver()
    thread = threading.Thread(target=worker.follow, args=(stop.wait,))
    thread.start()
    try:
        _wait(lambda: worker.status.state == "ok")
        assert len(quarantined(store)) == 2
        filler = volume / "filler"
        with filler.open("wb") as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(2**16))
        with filler.open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x")
        end = time.monotonic() + full_s
        number = 100
        while time.monotonic() < end:
            log.add(*(spans(number + i, range(3)) for i in range(10)))
            number += 10
            time.sleep(full_s / 40)
        _wait(lambda: worker.status.state == "red")
        assert json.loads((workspace / STATUS_FILE).read_text())["state"] == "red"
        written = worker.status.records
        check_loaded(log, store)
        filler.unlink()
        _wait(lambda: worker.status.state == "ok" and worker.status.records > written)
    finally:
        stop.set()
        thread.join(30)
    assert any("No space left" in line for line in said)
    assert not list((volume / "archive").rglob("*.tmp"))
    assert len(quarantined(store)) == 2
    check_archived(log, store)
    check_loaded(log, store)


def _wait(holds, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
