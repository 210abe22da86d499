"""One SQLite file that holds the log and the state: opening, turns, transactions, and what its errors mean.

Shared by ``log/sqlite.py`` and ``state/sqlite.py``, which put their tables into the same file so that state,
offsets and outputs are one transaction. Invariants:

- A transaction is durable when it returns (WAL, synchronous=FULL).
- Writing *and* checkpointing need the turn, an advisory lock on ``FILE.turn`` that all processes share, and the
  automatic checkpoint is off. SQLite before 3.51.3 can lose a committed transaction when a checkpoint in one
  process overlaps a commit in another (its "WAL-reset bug"); with the turn they never overlap.
- Nothing is acknowledged that was written into a file which no longer stands under its path.
- Driver errors leave here as TransientError (try again: disk full, busy) or TerminalError (damaged, read-only).
- The file and its companions are readable by their owner only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from spanloop.schemas.errors import ConfigError, SpanloopError, TerminalError, TransientError

__all__ = ["SqliteFile", "translate"]

APPLICATION_ID = 0x53504C50
"""Stands in the file's header ("SPLP"), so that a foreign database is recognised."""
FORMAT = 1
"""PRAGMA user_version: layout of the tables below."""
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
BUSY_S = 30.0
"""How long a writer waits for its turn before it raises TransientError."""
CHECKPOINT_BYTES = 32 * 2**20
"""The write-ahead log is copied into the database when it holds more than this, and then begun anew in place; only a file
that one commit made four times as large is cut."""
CACHE_KIB = 32 * 1024
"""Pages that the writer keeps: the indexes' leaves, which ids hit at random."""

_TABLES = """
CREATE TABLE IF NOT EXISTS records (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  topic TEXT NOT NULL,
  key TEXT NOT NULL,
  event_id TEXT NOT NULL,
  value BLOB NOT NULL,
  appended_ns INTEGER NOT NULL
);
CREATE UNIQUE INDEX IF NOT EXISTS records_identity ON records (topic, event_id);
CREATE INDEX IF NOT EXISTS records_order ON records (topic, seq);
CREATE TABLE IF NOT EXISTS consumers (
  name TEXT NOT NULL, topic TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (name, topic)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS stages (stage TEXT PRIMARY KEY, generation INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS stage_offsets (
  stage TEXT NOT NULL, topic TEXT NOT NULL, seq INTEGER NOT NULL, PRIMARY KEY (stage, topic)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
  stage TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, PRIMARY KEY (stage, key)
);
"""
"""``entries`` has rowids: its values are long, and in a tree ordered by key every put would move those beside it. Files made
before have the same table without rowids, which every statement serves as well."""

_TRANSIENT = {
    "SQLITE_FULL": "the disk is full (or the file's size limit is reached): free some space, then try again",
    "SQLITE_IOERR": "reading or writing failed: check the disk's space and health, then try again",
    "SQLITE_BUSY": "another process keeps it locked: find who holds it (`fuser FILE`), then try again",
    "SQLITE_LOCKED": "another connection keeps a table locked: try again",
    "SQLITE_PROTOCOL": "its locks could not be taken: try again; is it on a network file system?",
    "SQLITE_NOMEM": "memory ran out: try again with smaller batches",
}
_TERMINAL = {
    "SQLITE_READONLY": "it is read-only: give this user write permission on the file and its folder",
    "SQLITE_PERM": "permission was refused: give this user write permission on the file and its folder",
    "SQLITE_CANTOPEN": "it cannot be opened: does its folder exist, and may this user write there?",
    "SQLITE_AUTH": "access was refused: check its permissions",
    "SQLITE_CORRUPT": "it is damaged: stop spanloop, keep a copy, and try `sqlite3 FILE .recover` or a backup",
    "SQLITE_NOTADB": "it is not a SQLite database: was another file put in its place?",
    "SQLITE_TOOBIG": "a record is larger than SQLite allows (1 GB): send smaller batches",
}


def translate(exc: sqlite3.Error, path: Path) -> SpanloopError:
    """The error of our tree that says what a driver error means for the caller, and what to do.

    Args:
        exc: as raised by sqlite3.
        path: the database, named in the message.
    """
    name = getattr(exc, "sqlite_errorname", "") or ""
    for table, family in ((_TRANSIENT, TransientError), (_TERMINAL, TerminalError)):
        for prefix, meaning in table.items():
            if name == prefix or name.startswith(prefix + "_"):
                return family(f"{path}: {meaning} ({name}: {exc})", path=str(path), code=name)
    if isinstance(exc, sqlite3.ProgrammingError) and "closed" in str(exc):
        return TerminalError(f"{path}: it was closed; open it again", path=str(path), code="CLOSED")
    if "Could not decode to UTF-8" in str(
        exc
    ):  # damage that SQLite itself did not see; the driver gives no code
        meaning = _TERMINAL["SQLITE_CORRUPT"]
        return TerminalError(f"{path}: {meaning} (a text in it is not UTF-8)", path=str(path), code=name)
    return TerminalError(f"{path}: {name or type(exc).__name__}: {exc}", path=str(path), code=name)


class SqliteFile:
    """A writing and a reading connection to one file, each used by one thread at a time.

    Args:
        path: the database; made with its folder (0700, file 0600) when missing.
        create: False raises ConfigError instead of making it, and reads also what this user cannot write, such as a read-only mount.
    """

    def __init__(self, path: Path | str, *, create: bool = True) -> None:
        self.path = Path(path)
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._connections: list[sqlite3.Connection] = []
        self._closed = False
        self._checkpoint_after = 0.0
        if not create and not self.path.exists():
            raise ConfigError(
                f"no log at {self.path}: nothing was recorded there yet; is this the right workspace?"
            )
        self._turn = -1
        try:
            self._make_private()
            self._turn = os.open(f"{self.path}.turn", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            if create or exc.errno not in _READ_ONLY:
                raise TerminalError(
                    f"{self.path}: {exc.strerror or exc}: give this user write permission on {self.path.parent}",
                    path=str(self.path),
                ) from exc
        try:
            self._writer = self._connect()
            self._writer.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
            self._reader = self._connect()
            self._prepare()
            self._identity = self._on_disk()
        except (sqlite3.Error, SpanloopError) as exc:
            self.close()
            if isinstance(exc, sqlite3.Error):
                raise translate(exc, self.path) from exc
            raise

    def _make_private(self) -> None:
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # O_EXCL: an existing file is never opened here, because closing it would drop SQLite's own locks.
        with contextlib.suppress(FileExistsError):
            os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path if self._turn >= 0 else self._read_only_uri(),
            uri=self._turn < 0, timeout=BUSY_S, isolation_level=None, check_same_thread=False, cached_statements=256,
        )  # fmt: skip
        self._connections.append(connection)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        return connection

    def _read_only_uri(self) -> str:
        """What opens the file where nothing can be written. Without a write-ahead log beside it nobody has it open, and it says all;
        with one, SQLite reads both by way of the index that its writers keep there."""
        wal = self.path.with_name(self.path.name + "-wal")
        alone = not wal.exists() or not wal.stat().st_size
        return f"file:{quote(str(self.path.absolute()))}?mode=ro{'&immutable=1' if alone else ''}"

    def _prepare(self) -> None:
        """Make the tables where they are missing; a file that has them is not locked."""
        one = self._writer.execute
        if self._format() == FORMAT or self._turn < 0:
            return
        with self._write_lock, self._turn_held():
            if self._format() == 0 and one("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise ConfigError(
                    f"{self.path} is a SQLite database of something else: use another workspace"
                )
            one("PRAGMA journal_mode = WAL")
            if self._format() < FORMAT:  # another process may have been first
                self._writer.executescript(
                    f"BEGIN IMMEDIATE; {_TABLES} PRAGMA application_id = {APPLICATION_ID}; "
                    f"PRAGMA user_version = {FORMAT}; COMMIT;"
                )

    def _format(self) -> int:
        """Layout of the tables, 0 for none. Raises TerminalError for one that this build does not know."""
        version = int(self._writer.execute("PRAGMA user_version").fetchone()[0])
        application = int(self._writer.execute("PRAGMA application_id").fetchone()[0])
        if application not in {0, APPLICATION_ID} or (version and not application):
            raise ConfigError(f"{self.path} is a SQLite database of something else: use another workspace")
        if version > FORMAT:
            raise TerminalError(
                f"{self.path} has layout {version}, this build knows {FORMAT}: upgrade spanloop"
            )
        return version

    def _on_disk(self) -> tuple[int, int] | None:
        """Which file stands under our path; None: none does."""
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    @contextlib.contextmanager
    def _turn_held(self) -> Iterator[None]:
        deadline = time.monotonic() + BUSY_S
        pause = 0.0002
        while True:
            try:
                fcntl.flock(self._turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TransientError(
                        f"{self.path}: another process has kept the write turn for {BUSY_S:.0f} s: "
                        f"find it with `fuser {self.path}.turn`, then try again",
                        path=str(self.path),
                    ) from None
                time.sleep(pause)
                pause = min(pause * 1.5, 0.002)
        try:
            yield
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A write transaction over all processes: committed and durable when the block ends, else rolled back."""
        with self._write_lock:
            if self._closed:
                raise TerminalError(f"{self.path}: the log is closed; nothing was written", code="CLOSED")
            if self._turn < 0:
                raise TerminalError(
                    f"{self.path} was opened for reading: give this user write permission on it and its folder",
                    code="READ_ONLY",
                )
            if (
                self._on_disk() != self._identity
            ):  # SQLite would write on, into a file that nobody finds again
                raise TransientError(
                    f"{self.path} was removed or replaced while it is in use; nothing is written until it is back or this process "
                    "is started again",
                    path=str(self.path),
                )
            with self._turn_held():
                try:
                    self._writer.execute("BEGIN IMMEDIATE")
                    yield self._writer
                    self._writer.execute("COMMIT")
                except BaseException as exc:
                    if self._writer.in_transaction:
                        with contextlib.suppress(sqlite3.Error):
                            self._writer.execute("ROLLBACK")
                    if isinstance(exc, sqlite3.Error):
                        raise translate(exc, self.path) from exc
                    raise
                self._checkpoint_when_large()

    def _checkpoint_when_large(self) -> None:
        """Copy the write-ahead log into the database; failing is no error of the commit before it."""
        how = _overfull(f"{self.path}-wal")
        now = time.monotonic()
        if not how or now < self._checkpoint_after:
            return
        with contextlib.suppress(sqlite3.Error):
            self._writer.execute("PRAGMA busy_timeout = 50")
            busy = self._writer.execute(f"PRAGMA wal_checkpoint({how})").fetchone()[0]
            self._checkpoint_after = now + 1.0 if busy else 0.0
        with contextlib.suppress(sqlite3.Error):
            self._writer.execute(f"PRAGMA busy_timeout = {round(BUSY_S * 1000)}")

    def query(self, sql: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """All rows of a reading statement, in one snapshot."""
        with self._read_lock:
            if self._closed:
                raise TerminalError(f"{self.path}: it was closed; open it again", code="CLOSED")
            try:
                return self._reader.execute(sql, parameters).fetchall()
            except sqlite3.Error as exc:
                raise translate(exc, self.path) from exc

    def close(self) -> None:
        """Close both connections; harmless when done twice."""
        with self._write_lock, self._read_lock:
            if self._closed:
                return
            self._closed = True
            if self._turn < 0:
                for connection in self._connections:
                    connection.close()
                return
            # The last connection to close checkpoints: under the turn, like any other checkpoint.
            with contextlib.suppress(TransientError), self._turn_held():
                for connection in self._connections:
                    with contextlib.suppress(sqlite3.Error):
                        connection.close()
            os.close(self._turn)


def _overfull(path: str) -> str:
    """How a write-ahead log wants to be checkpointed, empty: not yet. A log that was begun anew keeps its length: it is full where
    the frame at the limit has the salt of its header (SQLite's file format, section 4). Its locks are on other files, so that
    opening it here drops none."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        size = os.fstat(fd).st_size
        if size < CHECKPOINT_BYTES:
            return ""
        if size > 4 * CHECKPOINT_BYTES:
            return "TRUNCATE"
        header = os.pread(fd, 32, 0)
        frame_bytes = 24 + int.from_bytes(header[8:12], "big")
        last = max(0, CHECKPOINT_BYTES // frame_bytes - 1)
        frame = os.pread(fd, 24, 32 + last * frame_bytes)
        return "RESTART" if frame[8:16] == header[16:24] else ""
    except OSError:
        return ""
    finally:
        os.close(fd)
