"""KeyStore in one SQLite file, shared by the processes of one machine.

A rollback journal and not a write-ahead log: after a commit no other file holds an old page, so that a destroyed key is gone
from the file (``secure_delete`` writes zeros over it) as soon as ``destroy`` returns. What the disk keeps of freed blocks, and
copies of the file that somebody made, are outside its reach. Invariants: durable when a call returns (synchronous=EXTRA);
keys are cached, and the cache is dropped when another process destroyed any (``meta.erasures`` counts that).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sqlite3
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from spanloop.pipeline.sealing.keys import KEY_BYTES, Found, subject_name
from spanloop.pipeline.sqlite_file import translate
from spanloop.schemas.errors import ConfigError, TerminalError

__all__ = ["SqliteKeys"]

APPLICATION_ID = 0x53504B59
"""Stands in the file's header ("SPKY")."""
BUSY_S = 30.0
CACHE_MAX = 50_000
"""Traces whose keys are kept in memory."""

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS keys (
  tenant TEXT NOT NULL, trace_id TEXT NOT NULL, key BLOB, erased_ns INTEGER, PRIMARY KEY (tenant, trace_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS links (
  tenant TEXT NOT NULL, subject TEXT NOT NULL, trace_id TEXT NOT NULL, PRIMARY KEY (tenant, subject, trace_id)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS erased (
  tenant TEXT NOT NULL, subject TEXT NOT NULL, erased_ns INTEGER NOT NULL, PRIMARY KEY (tenant, subject)
) WITHOUT ROWID;
"""


class SqliteKeys:
    """See the module.

    Args:
        path: the file; made with its folder (0700, file 0600) when missing.
        create: False raises ConfigError instead of making it.
    """

    def __init__(self, path: Path, *, create: bool = True) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[str, str], bytes | None] = OrderedDict()
        self._linked: set[tuple[str, str, str]] = set()
        if not create and not path.exists():
            raise ConfigError(f"no key store at {path}: content.subject_keys was never on here")
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        except OSError as exc:
            raise TerminalError(f"{path}: {exc.strerror or exc}", path=str(path)) from exc
        with self._errors():
            self._db = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
            self._prepare()
            self._version, self._erasures = self._data_version(), self._count()

    def _prepare(self) -> None:
        one = self._db.execute
        one("PRAGMA synchronous = EXTRA")
        one("PRAGMA secure_delete = ON")
        application = one("PRAGMA application_id").fetchone()[0]
        if application != APPLICATION_ID:
            if application or one("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                raise ConfigError(f"{self._path} is a SQLite database of something else: set content.keys")
            self._db.executescript(
                f"BEGIN IMMEDIATE; {_TABLES} PRAGMA application_id = {APPLICATION_ID}; COMMIT;"
            )
        one("INSERT OR IGNORE INTO meta VALUES ('salt', ?)", (secrets.token_bytes(32),))
        one("INSERT OR IGNORE INTO meta VALUES ('erasures', 0)")
        self._salt = bytes(one("SELECT value FROM meta WHERE name = 'salt'").fetchone()[0])

    def subject(self, tenant: str, attribute: str, value: str) -> str:
        return subject_name(self._salt, tenant, attribute, value)

    def ensure(self, tenant: str, traces: Mapping[str, Iterable[str]]) -> Found:
        with self._lock, self._errors():
            self._refresh()
            wanted = {trace: set(subjects) for trace, subjects in traces.items()}
            found: Found = {}
            missing: dict[str, set[str]] = {}
            for trace, subjects in wanted.items():
                name = (tenant, trace)
                if name in self._cache and all((tenant, s, trace) in self._linked for s in subjects):
                    self._cache.move_to_end(name)
                    found[trace] = self._cache[name]
                else:
                    missing[trace] = subjects
            if missing:
                found |= self._make(tenant, missing)
            return found

    def _make(self, tenant: str, traces: Mapping[str, set[str]]) -> Found:
        found: Found = {}
        links = [(tenant, subject, trace) for trace, subjects in traces.items() for subject in subjects]
        with self._transaction():
            many = self._db.executemany
            many(
                "INSERT OR IGNORE INTO keys VALUES (?, ?, ?, NULL)",
                [(tenant, trace, secrets.token_bytes(KEY_BYTES)) for trace in traces],
            )
            many("INSERT OR IGNORE INTO links VALUES (?, ?, ?)", links)
            before = self._db.total_changes
            many(
                "UPDATE keys SET key = NULL, erased_ns = e.erased_ns FROM erased e "
                "WHERE keys.key IS NOT NULL AND keys.tenant = ?1 AND keys.trace_id = ?3 AND e.tenant = ?1 AND e.subject = ?2",
                links,
            )
            if self._db.total_changes != before:
                self._bump()
            for trace in traces:
                row = self._db.execute(
                    "SELECT key FROM keys WHERE tenant = ? AND trace_id = ?", (tenant, trace)
                ).fetchone()
                found[trace] = row[0]
        for trace, key in found.items():
            self._remember(tenant, trace, key)
        if len(self._linked) > 4 * CACHE_MAX:
            self._linked.clear()
        self._linked.update(links)
        return found

    def find(self, tenant: str, trace_id: str) -> bytes | None:
        with self._lock, self._errors():
            self._refresh()
            name = (tenant, trace_id)
            if name in self._cache:
                self._cache.move_to_end(name)
                return self._cache[name]
            row = self._db.execute(
                "SELECT key FROM keys WHERE tenant = ? AND trace_id = ?", (tenant, trace_id)
            ).fetchone()
            if row is None:
                return None
            self._remember(tenant, trace_id, row[0])
            return row[0]

    def known(self, tenant: str, trace_ids: Iterable[str]) -> set[str]:
        with self._lock, self._errors():
            return {
                trace
                for trace in trace_ids
                if self._db.execute(
                    "SELECT 1 FROM keys WHERE tenant = ? AND trace_id = ?", (tenant, trace)
                ).fetchone()
            }

    def traces_of(self, tenant: str, subjects: Iterable[str]) -> set[str]:
        with self._lock, self._errors():
            return {
                row[0]
                for subject in subjects
                for row in self._db.execute(
                    "SELECT trace_id FROM links WHERE tenant = ? AND subject = ?", (tenant, subject)
                )
            }

    def destroy(self, tenant: str, trace_ids: Iterable[str], subjects: Iterable[str], now_ns: int) -> int:
        count = 0
        with self._lock, self._errors():
            with self._transaction():
                for trace in trace_ids:
                    row = self._db.execute(
                        "SELECT key IS NOT NULL FROM keys WHERE tenant = ? AND trace_id = ?", (tenant, trace)
                    ).fetchone()
                    count += bool(row and row[0])
                    self._db.execute(
                        "INSERT INTO keys VALUES (?, ?, NULL, ?) ON CONFLICT (tenant, trace_id) "
                        "DO UPDATE SET key = NULL, erased_ns = excluded.erased_ns WHERE key IS NOT NULL",
                        (tenant, trace, now_ns),
                    )
                self._db.executemany(
                    "INSERT OR IGNORE INTO erased VALUES (?, ?, ?)", [(tenant, s, now_ns) for s in subjects]
                )
                self._bump()
            self._forget()
            self._db.execute("VACUUM")  # a page that the update left half used keeps no old cell
        return count

    def readmit(self, tenant: str, subjects: Iterable[str]) -> None:
        with self._lock, self._errors(), self._transaction():
            self._db.executemany(
                "DELETE FROM erased WHERE tenant = ? AND subject = ?", [(tenant, s) for s in subjects]
            )

    def close(self) -> None:
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._db.close()

    # ------------------------------------------------------------ inside

    def _remember(self, tenant: str, trace_id: str, key: bytes | None) -> None:
        self._cache[tenant, trace_id] = key
        if len(self._cache) > CACHE_MAX:
            self._cache.popitem(last=False)

    def _forget(self) -> None:
        self._cache.clear()
        self._linked.clear()

    def _data_version(self) -> int:
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    def _refresh(self) -> None:
        version = self._data_version()
        if version != self._version:
            self._version, erasures = version, self._count()
            if erasures != self._erasures:
                self._erasures = erasures
                self._forget()

    def _count(self) -> int:
        return int(self._db.execute("SELECT value FROM meta WHERE name = 'erasures'").fetchone()[0])

    def _bump(self) -> None:
        self._db.execute("UPDATE meta SET value = value + 1 WHERE name = 'erasures'")

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            raise translate(exc, self._path) from exc
