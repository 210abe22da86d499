"""The archiver: what is due, order, pauses that keep everything, and a log that is not the one it knew."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from archive_support import (
    DAY_NS,
    T0,
    FailingFiles,
    PartitionedLog,
    check_archived,
    check_loaded,
    orchestration,
    spans,
)
from click.testing import CliRunner

from spanloop.pipeline.archive import Archive, ArchiveStore
from spanloop.pipeline.archive import archiver as module
from spanloop.pipeline.archive.archiver import STATUS_FILE, Archiver
from spanloop.pipeline.archive.cli import archive as command
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.errors import ConfigError, SpanloopError, TerminalError, TransientError
from spanloop.schemas.settings import load_settings


class World:
    """An archiver over a log in memory and a folder that can fill up."""

    def __init__(self, folder: Path, partitions: int = 1, **archive: object) -> None:
        self.log = PartitionedLog(ManualClock(T0), partitions)
        self.files = FailingFiles(folder / "archive")
        self.store = ArchiveStore(self.files, self.log.clock)
        (folder / "ws").mkdir(exist_ok=True)
        self.status_file = folder / "ws" / STATUS_FILE
        self.said: list[str] = []
        options = {"records": 5, "every_s": 0.02, **archive}
        settings = load_settings(None, {"workspace": folder / "ws", "archive": options})
        self.archiver = Archiver(self.log, self.store, settings, say=self.said.append)

    def follow(self, *turns: Callable[[], object], until: Callable[[], bool] = lambda: True) -> None:
        """Run it; each turn happens between two steps, and it is stopped when ``until`` holds after the last."""
        todo = list(turns)
        deadline = time.monotonic() + 20

        def stop(seconds: float) -> bool:
            time.sleep(min(seconds, 0.01))
            if todo:
                todo.pop(0)()
                return False
            assert time.monotonic() < deadline, self.said
            return until()

        self.archiver.follow(stop)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_ranges_are_written_by_number_and_by_age(tmp_path: Path) -> None:
    world = World(tmp_path, every_s=1000.0)
    world.log.add(*(spans(i) for i in range(4)))
    assert world.archiver.step() == 0
    world.log.add(*(spans(i) for i in range(4, 13)))
    assert world.archiver.step() == 13
    assert [r.records for r in world.store.ranges("spans")] == [5, 5, 3]
    world.log.add(spans(99))
    assert world.archiver.step() == 0
    world.archiver._settings = world.archiver._settings.model_copy(update={"every_s": 0.001})
    time.sleep(0.01)
    assert world.archiver.step() == 1


def test_it_follows_all_partitions_and_writes_the_rest_when_it_is_stopped(tmp_path: Path) -> None:
    world = World(tmp_path, partitions=3, every_s=1000.0)

    def more(number: int) -> Callable[[], None]:
        return lambda: world.log.add(*(spans(number * 10 + i) for i in range(7)), orchestration(number))

    world.follow(*(more(n) for n in range(6)))
    check_archived(world.log, world.store)
    check_loaded(world.log, world.store)
    assert len(world.store.contained()) == 6
    assert json.loads(world.status_file.read_text())["state"] == "stopped"


def test_a_full_disk_pauses_and_loses_nothing(world: World) -> None:
    """Case 41: red while it is full, goes on by itself, the ranges in order."""
    states: list[str] = []

    def fill() -> None:
        world.files.no_space = True
        world.log.add(*(spans(i) for i in range(20)))

    def look() -> None:
        states.append(json.loads(world.status_file.read_text())["state"])

    def free() -> None:
        world.files.no_space = False

    world.log.add(*(spans(i) for i in range(100, 112)))
    world.follow(
        *(lambda: time.sleep(0.03) for _ in range(3)), fill, *[lambda: time.sleep(0.03)] * 3, look, look, free,
        until=lambda: len(world.store.ranges("spans")) >= 7,
    )  # fmt: skip
    assert states == ["red", "red"]
    assert any("No space left" in line and "nothing is lost" in line for line in world.said)
    check_archived(world.log, world.store)
    check_loaded(world.log, world.store)
    manifests = [path for path in world.files.written if path.startswith("_ranges/spans/")]
    firsts = [int(Path(path).stem.partition("-")[0]) for path in manifests]
    assert firsts == sorted(firsts)
    assert not list(Path(world.files.root).rglob("*.tmp"))


def test_a_store_that_cannot_be_reached_at_the_start_is_waited_for(world: World) -> None:
    world.log.add(spans(1))
    world.archiver.drain()
    original = world.files.list
    calls = []

    def refuse(folder: str):
        calls.append(folder)
        if len(calls) < 3:
            raise OSError("connection refused")
        return original(folder)

    world.files.list = refuse
    world.follow(*[lambda: time.sleep(0.01)] * 4, until=lambda: world.archiver.status.state == "ok")
    assert "connection refused" in world.said[0]


def test_a_damaged_file_found_while_merging_is_repaired_on_the_way(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "COMPACT_EVERY_S", 0.0)
    for number in range(3):
        world.log.add(spans(number))
        world.archiver.drain()
    victim = sorted(Path(world.files.root).glob("raw/**/*.parquet"))[1]

    def damage() -> None:
        victim.write_bytes(b"")
        world.log.clock.advance(ns=DAY_NS)

    world.follow(lambda: None, damage, until=lambda: len(world.store.ranges("spans")) == 1)
    assert len(world.archiver.status.quarantined) == 1
    check_archived(world.log, world.store)


def test_records_that_left_the_log_before_they_were_archived_are_named(world: World) -> None:
    world.log.add(spans(1))
    world.archiver.drain()
    world.log.add(*(spans(i) for i in range(2, 7)))
    world.log.trim("spans", 4)
    world.archiver.drain()
    assert "1-3 left the log before" in world.archiver.status.lost[0]
    assert [r.name for r in world.store.ranges("spans")] == ["0-0", "1-5"]
    assert "1-3 left the log" in Archive(world.log, world.store, fill=False).load(["spans"])["spans"].lost[0]


def test_a_log_that_begins_late_is_not_a_loss(world: World) -> None:
    world.log.add(*(spans(i) for i in range(6)))
    world.log.trim("spans", 4)
    world.archiver.drain()
    assert world.archiver.status.lost == []
    assert [r.name for r in world.store.ranges("spans")] == ["0-5"]


def test_an_archive_of_another_log_is_refused(world: World, tmp_path: Path) -> None:
    world.log.add(spans(1), spans(2))
    world.archiver.drain()
    other = World(tmp_path)
    other.log.add(spans(11), spans(12), spans(13))
    with pytest.raises(TerminalError, match="made from another log"):
        other.archiver.start()


def test_a_log_that_came_back_empty_turns_red_and_is_never_mixed_in(world: World) -> None:
    world.log.add(*(spans(i) for i in range(4)))
    world.archiver.drain()
    full = dict(world.log.records)
    world.log.records, world.log.next = {}, {}
    with pytest.raises(TransientError, match="was the log emptied"):
        world.archiver.step()
    world.log.records, world.log.next = full, {"spans": 4}
    world.archiver.step()  # put back: goes on
    world.log.records, world.log.next = {}, {}
    world.log.add(spans(90))
    with pytest.raises(TerminalError, match="made from another log"):
        world.archiver.step()


class TestCommand:
    @pytest.fixture
    def workspace(self, tmp_path: Path) -> Path:
        log = SqliteLog(tmp_path / "spanloop.db")
        log.append([new_record(event) for event in (spans(1), spans(2), orchestration(1))])
        log.close()
        return tmp_path

    def run(self, workspace: Path, *args: str, code: int = 0) -> str:
        result = CliRunner().invoke(command, [*args, "--workspace", str(workspace)], catch_exceptions=False)
        assert result.exit_code == code, result.output
        return result.output

    def test_once_status_verify_compact(self, workspace: Path) -> None:
        assert "3 records archived in 2 ranges" in self.run(workspace, "once")
        assert json.loads(self.run(workspace, "once", "--json"))["records"] == 0
        found = json.loads(self.run(workspace, "status", "--json"))
        rows = {row["source"]: row for row in found["sources"]}
        assert (rows["spans"]["records"], rows["spans"]["behind"], found["archiver"]) == (2, 0, "none")
        assert "spans" in self.run(workspace, "status")
        victim = next((workspace / "archive").glob("tables/events/**/*.parquet"))
        victim.write_bytes(b"")
        assert "1 quarantined, 1 rebuilt, 0 lost" in self.run(workspace, "verify", "--deep")
        assert "quarantined" in self.run(workspace, "status")
        assert json.loads(self.run(workspace, "verify", "--json"))["quarantined"] == []
        assert "0 ranges fewer" in self.run(workspace, "compact")
        assert json.loads(self.run(workspace, "compact", "--json"))["fewer_ranges"] == 0

    def test_what_is_lost_gives_exit_code_1(self, workspace: Path) -> None:
        self.run(workspace, "once")
        log = SqliteLog(workspace / "spanloop.db")
        with log._file.transaction() as connection:
            connection.execute("DELETE FROM records WHERE topic = 'spans' AND seq = 1")
        log.close()
        for victim in (workspace / "archive").glob("raw/topic=spans/**/*.parquet"):
            victim.write_bytes(b"")
        assert "lost" in self.run(workspace, "verify", code=1)
        assert "lost" in self.run(workspace, "status", code=1)

    def test_two_at_once_are_refused(self, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "LOCK_WAIT_S", 0.1)
        store = ArchiveStore.open(load_settings(None, {"workspace": workspace}))
        with store.files.writer(), pytest.raises(ConfigError, match="another process writes"):
            self.run(workspace, "once")

    def test_a_disk_that_refuses_is_a_transient_error(self, workspace: Path) -> None:
        (workspace / "archive").write_text("a file where the folder should be")
        with pytest.raises(SpanloopError) as caught:
            self.run(workspace, "once")
        assert caught.value.exit_code == 4
