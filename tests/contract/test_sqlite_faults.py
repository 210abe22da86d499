"""SQLite adapter under faults: kill -9, several processes, disk full, damage, permissions."""

from __future__ import annotations

import os
import random
import sqlite3
import stat
import subprocess
import sys
import time
from contextlib import closing

import pytest

from spanloop.pipeline import sqlite_file
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import NewRecord
from spanloop.pipeline.state.sqlite import SqliteState
from spanloop.schemas.errors import ConfigError, SpanloopError, TerminalError, TransientError

_WRITER = """
import sys, threading
from spanloop.pipeline import sqlite_file
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import NewRecord
from spanloop.pipeline.state.sqlite import SqliteState

path, name, count, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
sqlite_file.CHECKPOINT_BYTES = 200_000  # checkpoint often, so that kills hit checkpoints too
log, lock = SqliteLog(path), threading.Lock()

def work(thread):
    for number in range(count):
        event_id = f"{name}-{thread}-{number}"
        log.append([NewRecord("spans", "k", event_id, b"x" * 3000)])
        with lock:
            sys.stdout.write(event_id + "\\n"); sys.stdout.flush()

workers = [threading.Thread(target=work, args=(n,)) for n in range(threads)]
[w.start() for w in workers]
[w.join() for w in workers]
"""

_STATE_WRITER = """
import sys
from spanloop.pipeline.ports import NewRecord
from spanloop.pipeline.state.sqlite import SqliteState

state = SqliteState(sys.argv[1])
count = int(state.load("counter").get("count", b"0"))
while True:
    count += 1
    state.commit("counter", writes={"count": str(count).encode()}, offsets={"spans": count},
                 outputs=[NewRecord("rewards", "k", f"r{count}", b"{}")])
    sys.stdout.write(f"{count}\\n"); sys.stdout.flush()
"""


def _start(program, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _check(path):
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone()[0] == "ok"


def test_kill_9_loses_nothing_that_was_acknowledged(tmp_path):
    path, acknowledged, rng = tmp_path / "spanloop.db", [], random.Random(7)
    for round_ in range(5):
        child = _start(_WRITER, path, f"r{round_}", 100_000, 3)
        first = child.stdout.readline()
        time.sleep(rng.uniform(0.01, 0.25))
        child.kill()
        rest, _ = child.communicate()
        acknowledged += [line for line in (first + rest).split("\n")[:-1] if line]
    with closing(SqliteLog(path)) as log:
        found, position = [], {}
        while page := log.read(["spans"], position, 5_000):
            found += [r.event_id for r in page]
            position = {"spans": page[-1].offset}
    assert len(acknowledged) > 50
    assert set(acknowledged) <= set(found)
    assert len(found) == len(set(found))
    _check(path)


def test_kill_9_never_separates_state_offsets_and_outputs(tmp_path):
    path, rng, last = tmp_path / "spanloop.db", random.Random(11), 0
    for _ in range(4):
        child = _start(_STATE_WRITER, path)
        child.stdout.readline()
        time.sleep(rng.uniform(0.01, 0.15))
        child.kill()
        out, _ = child.communicate()
        with closing(SqliteState(path)) as state, closing(SqliteLog(path)) as log:
            count = int(state.load("counter")["count"])
            assert state.offsets("counter") == {"spans": count}
            assert log.counts() == {"rewards": count}
            acknowledged = [int(line) for line in out.split("\n")[:-1] if line]
            assert count >= max(acknowledged, default=last)
            last = count
    assert last > 4
    _check(path)


def test_three_processes_write_one_file(tmp_path):
    path = tmp_path / "spanloop.db"
    children = [_start(_WRITER, path, f"p{n}", 60, 2) for n in range(3)]
    outputs = [child.communicate(timeout=60) for child in children]
    assert [child.returncode for child in children] == [0, 0, 0], outputs
    acknowledged = [line for out, _ in outputs for line in out.split()]
    with closing(SqliteLog(path)) as log:
        found = [r.event_id for r in log.read(["spans"], {}, 10_000)]
    assert sorted(found) == sorted(acknowledged)
    assert len(found) == 360
    for child in range(3):
        for thread in range(2):
            own = [e for e in found if e.startswith(f"p{child}-{thread}-")]
            assert own == [f"p{child}-{thread}-{n}" for n in range(60)]
    _check(path)


def test_a_full_disk_is_transient_and_loses_nothing(tmp_path, make):
    path = tmp_path / "spanloop.db"
    with closing(SqliteLog(path)) as log:
        log.append([make("before")])
        pages = log._file._writer.execute("PRAGMA page_count").fetchone()[0]
        log._file._writer.execute(f"PRAGMA max_page_count = {pages + 3}")
        with pytest.raises(TransientError, match="disk is full") as caught:
            log.append([make("big", value=b"x" * 200_000), make("small")])
        assert caught.value.exit_code == 4
        assert [r.event_id for r in log.read(["spans"], {}, 10)] == ["before"]
        log._file._writer.execute("PRAGMA max_page_count = 1000000")
        log.append([make("big", value=b"x" * 200_000), make("small")])
        assert [r.event_id for r in log.read(["spans"], {}, 10)] == ["before", "big", "small"]


_FULL = """
import resource, sys
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import NewRecord
from spanloop.schemas.errors import TransientError

log = SqliteLog(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
for number in range(1000):
    try:
        log.append([NewRecord("spans", "k", f"e{number}", b"x" * 5000)])
    except TransientError as exc:
        print("refused", exc.message)
        break
    print(f"e{number}")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
log.append([NewRecord("spans", "k", "after", b"")])
print("after")
"""


def test_a_write_that_the_system_refuses_is_transient_and_can_be_repeated(tmp_path):
    child = _start(_FULL, tmp_path / "spanloop.db")
    out, err = child.communicate(timeout=60)
    assert child.returncode == 0, err
    lines = out.splitlines()
    (refused,) = [line for line in lines if line.startswith("refused")]
    assert "try again" in refused
    with closing(SqliteLog(tmp_path / "spanloop.db")) as log:
        found = [r.event_id for r in log.read(["spans"], {}, 10_000)]
    assert found == [line for line in lines if not line.startswith("refused")]
    assert len(found) > 10


def test_the_write_turn_is_waited_for_and_then_transient(tmp_path, monkeypatch, make):
    path = tmp_path / "spanloop.db"
    monkeypatch.setattr(sqlite_file, "BUSY_S", 0.2)
    with closing(SqliteLog(path)) as log, closing(SqliteLog(path)) as other:
        with other._file.transaction(), pytest.raises(TransientError, match="turn"):
            log.append([make("a")])
        log.append([make("a")])


def test_a_foreign_lock_is_transient(tmp_path, monkeypatch, make):
    path = tmp_path / "spanloop.db"
    monkeypatch.setattr(sqlite_file, "BUSY_S", 0.2)
    with closing(SqliteLog(path)) as log, closing(sqlite3.connect(path, isolation_level=None)) as foreign:
        foreign.execute("BEGIN IMMEDIATE")
        with pytest.raises(TransientError, match="locked"):
            log.append([make("a")])
        foreign.execute("ROLLBACK")
        log.append([make("a")])


def test_a_bad_append_does_not_fail_the_others_of_its_group(tmp_path, make):
    with closing(SqliteLog(tmp_path / "spanloop.db")) as log:
        from spanloop.pipeline.log.sqlite import _Ticket

        good, bad = _Ticket([make("good")]), _Ticket([make("bad", key="\ud800")])
        log._commit_group([bad, good])
        assert good.results is not None
        assert isinstance(bad.error, SpanloopError)
        assert [r.event_id for r in log.read(["spans"], {}, 10)] == ["good"]


def test_group_commit_shares_transactions(tmp_path, make):
    from spanloop.pipeline.log.sqlite import _Ticket

    with closing(SqliteLog(tmp_path / "spanloop.db")) as log:
        begun = []
        log._file._writer.set_trace_callback(
            lambda sql: begun.append(sql) if sql.startswith("BEGIN") else None
        )
        waiting = [_Ticket([make()]) for _ in range(20)]
        log._waiting += waiting
        log.append([make("last")])
        assert all(ticket.results for ticket in waiting)
        assert len(begun) == 1


def test_the_checkpoint_bounds_the_write_ahead_log(tmp_path, monkeypatch, make):
    monkeypatch.setattr(sqlite_file, "CHECKPOINT_BYTES", 100_000)
    path = tmp_path / "spanloop.db"
    with closing(SqliteLog(path)) as log:
        for _ in range(60):
            log.append([make(value=b"x" * 10_000)])
        assert os.stat(f"{path}-wal").st_size < 200_000
        assert len(log.read(["spans"], {}, 100)) == 60


def test_files_and_folder_belong_to_their_owner_only(tmp_path, make):
    path = tmp_path / "workspace" / "spanloop.db"
    with closing(SqliteLog(path)) as log:
        log.append([make()])
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        for file in path.parent.iterdir():
            assert stat.S_IMODE(file.stat().st_mode) == 0o600, file


def test_damage_is_terminal_and_says_what_to_do(tmp_path, make):
    path = tmp_path / "spanloop.db"
    with closing(SqliteLog(path)) as log:
        log.append([make(value=b"x" * 3_000) for _ in range(200)])
    data = bytearray(path.read_bytes())
    data[4096 : len(data)] = b"\xff" * (len(data) - 4096)
    path.write_bytes(bytes(data))
    with pytest.raises(TerminalError, match=r"damaged.*recover"), closing(SqliteLog(path)) as log:
        log.append([make()])


def test_other_files_are_refused(tmp_path):
    text = tmp_path / "text.db"
    text.write_bytes(b"not a database, but long enough to be looked at " * 100)
    with pytest.raises(TerminalError, match="not a SQLite database"):
        SqliteLog(text)
    foreign = tmp_path / "foreign.db"
    with closing(sqlite3.connect(foreign)) as connection:
        connection.execute("CREATE TABLE t (a)")
    with pytest.raises(ConfigError, match="something else"):
        SqliteLog(foreign)
    newer = tmp_path / "newer.db"
    SqliteLog(newer).close()
    with closing(sqlite3.connect(newer)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(TerminalError, match="upgrade"):
        SqliteLog(newer)


def test_a_reading_verb_makes_no_file(tmp_path):
    with pytest.raises(ConfigError, match="no log at"):
        SqliteLog(tmp_path / "none" / "spanloop.db", create=False)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("SQLITE_FULL", TransientError),
        ("SQLITE_IOERR_FSYNC", TransientError),
        ("SQLITE_BUSY_SNAPSHOT", TransientError),
        ("SQLITE_READONLY_DBMOVED", TerminalError),
        ("SQLITE_CORRUPT_INDEX", TerminalError),
        ("SQLITE_CANTOPEN", TerminalError),
        ("SQLITE_SOMETHING_NEW", TerminalError),
    ],
)
def test_driver_errors_become_ours(tmp_path, name, family):
    exc = sqlite3.OperationalError("driver text")
    exc.sqlite_errorname = name
    ours = sqlite_file.translate(exc, tmp_path / "spanloop.db")
    assert type(ours) is family
    assert "spanloop.db" in ours.message
    assert "driver text" in ours.message
    assert ours.attributes["code"] == name


def test_a_text_that_is_not_utf8_is_damage(tmp_path):
    exc = sqlite3.OperationalError("Could not decode to UTF-8 column 'NULL' with text 'c/'")
    assert "it is damaged" in sqlite_file.translate(exc, tmp_path / "spanloop.db").message


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_nothing_is_acknowledged_into_a_file_that_nobody_finds_again(tmp_path, how):
    path = tmp_path / "spanloop.db"
    with closing(SqliteLog(path)) as log:
        log.append([NewRecord("spans", "k", "1", b"{}")])
        path.rename(tmp_path / "kept")
        if how == "replaced":
            path.touch()
        with pytest.raises(TransientError, match="removed or replaced"):
            log.append([NewRecord("spans", "k", "2", b"{}")])
        path.unlink(missing_ok=True)
        (tmp_path / "kept").rename(path)
        log.append([NewRecord("spans", "k", "2", b"{}")])
        assert [record.event_id for record in log.read(["spans"], {}, 9)] == ["1", "2"]
