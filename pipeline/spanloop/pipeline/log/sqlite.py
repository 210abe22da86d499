"""The Log in one SQLite file: the embedded default, several processes on one workspace.

Offsets are one sequence over all topics, given under the write turn, so that append order is commit order.
Group commit: threads that append at the same time share one transaction, hence one fsync.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Mapping, Sequence
from operator import itemgetter
from pathlib import Path

from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.ports import Appended, Clock, LogRecord, NewRecord
from spanloop.pipeline.sqlite_file import SqliteFile
from spanloop.schemas.errors import SchemaError, TransientError

__all__ = ["SqliteLog", "insert_records"]

GROUP_RECORDS = 5_000
"""Records that one group commit takes at most (a single larger append goes alone)."""

_INSERT = (
    "INSERT INTO records (topic, key, event_id, value, appended_ns) VALUES (?, ?, ?, ?, ?) "
    "ON CONFLICT (topic, event_id) DO NOTHING"
)
_KNOWN = "SELECT seq FROM records WHERE topic = ? AND event_id = ?"
_PART = "SELECT * FROM (SELECT seq FROM records WHERE topic = ? AND seq > ? ORDER BY seq LIMIT ?)"


def insert_records(
    connection: sqlite3.Connection, records: Sequence[NewRecord], now_ns: int
) -> list[Appended]:
    """Insert inside the caller's transaction; a record that is there already keeps its offset."""
    results = []
    for record in records:
        try:
            cursor = connection.execute(
                _INSERT, (record.topic, record.key, record.event_id, record.value, now_ns)
            )
        except UnicodeEncodeError as exc:
            raise SchemaError(f"the key of a record on {record.topic} is not valid text: {exc}") from exc
        if cursor.rowcount == 1 and cursor.lastrowid is not None:
            results.append(Appended(offset=cursor.lastrowid, duplicate=False))
        else:
            known = connection.execute(_KNOWN, (record.topic, record.event_id)).fetchone()
            results.append(Appended(offset=int(known[0]), duplicate=True))
    return results


class _Ticket:
    """One caller's append, waiting for whoever leads the next group."""

    __slots__ = ("error", "records", "results")

    def __init__(self, records: Sequence[NewRecord]) -> None:
        self.records = records
        self.results: list[Appended] | None = None
        self.error: BaseException | None = None

    @property
    def done(self) -> bool:
        return self.results is not None or self.error is not None


class SqliteLog:
    """Log over a SQLite file.

    Args:
        path: the database file, made when missing.
        clock: stamps ``appended_ns``.
        create: False raises ConfigError when there is no file yet (reading verbs).
    """

    def __init__(self, path: Path | str, clock: Clock | None = None, *, create: bool = True) -> None:
        self._clock: Clock = clock or SystemClock()
        self._file = SqliteFile(path, create=create)
        self._waiting: list[_Ticket] = []
        self._waiting_lock = threading.Lock()
        self._leader = threading.Lock()

    @property
    def path(self) -> Path:
        """The database file."""
        return self._file.path

    def append(self, records: Sequence[NewRecord]) -> list[Appended]:
        """Append all or none, durable when it returns; may share its transaction with other threads' appends."""
        if not records:
            return []
        ticket = _Ticket(records)
        with self._waiting_lock:
            self._waiting.append(ticket)
        with self._leader:
            while not ticket.done:
                self._commit_group(self._take_group())
        if ticket.error is not None:
            raise ticket.error
        return ticket.results or []

    def _take_group(self) -> list[_Ticket]:
        with self._waiting_lock:
            count = size = 0
            for ticket in self._waiting:
                size += len(ticket.records)
                if count and size > GROUP_RECORDS:
                    break
                count += 1
            group, self._waiting = self._waiting[:count], self._waiting[count:]
        return group

    def _commit_group(self, group: list[_Ticket]) -> None:
        try:
            self._commit_together(group)
        except TransientError as exc:  # the disk or the turn: the same for all of them
            for ticket in group:
                ticket.error = TransientError(exc.message, **exc.attributes)
        except Exception as exc:
            if len(group) == 1:
                group[0].error = exc
                return
            for ticket in group:  # one bad append must not fail its neighbours
                self._commit_group([ticket])
        except BaseException as exc:
            for ticket in group:
                ticket.error = exc
            raise

    def _commit_together(self, group: list[_Ticket]) -> None:
        now_ns = self._clock.now_ns()
        with self._file.transaction() as connection:
            results = [insert_records(connection, ticket.records, now_ns) for ticket in group]
        for ticket, result in zip(group, results, strict=True):
            ticket.results = result

    def read(self, topic_names: Sequence[str], after: Mapping[str, int], limit: int) -> list[LogRecord]:
        """Up to ``limit`` records behind ``after``, merged in append order, from one snapshot."""
        names = list(dict.fromkeys(topic_names))
        if not names or limit <= 0:
            return []
        union = " UNION ALL ".join([_PART] * len(names))
        parameters: list[object] = []
        for name in names:
            parameters += [name, after.get(name, -1), limit]
        sql = (
            "SELECT r.topic, r.seq, r.key, r.event_id, r.value, r.appended_ns "  # noqa: S608 - placeholders only
            f"FROM (SELECT seq FROM ({union}) ORDER BY seq LIMIT ?) AS s "
            "CROSS JOIN records AS r ON r.seq = s.seq"
        )
        rows = self._file.query(sql, [*parameters, limit])
        rows.sort(key=itemgetter(1))
        return [LogRecord(*row) for row in rows]

    def end(self, source: str) -> int:
        """Offset of the last record of a topic, -1 when empty."""
        rows = self._file.query("SELECT max(seq) FROM records WHERE topic = ?", (source,))
        return -1 if rows[0][0] is None else int(rows[0][0])

    def nth_last(self, topic: str, count: int) -> int:
        """Offset behind which the newest ``count`` records of ``topic`` lie; -1 when it has no more than these."""
        sql = "SELECT seq FROM records WHERE topic = ? ORDER BY seq DESC LIMIT 1 OFFSET ?"
        rows = self._file.query(sql, (topic, count))
        return int(rows[0][0]) if rows else -1

    def keys_ending(self, topic: str, ending: str) -> list[str]:
        """Keys of ``topic`` that end so; reads the topic's keys once, never its values."""
        sql = "SELECT DISTINCT key FROM records WHERE topic = ? AND substr(key, ?) = ? ORDER BY key"
        return [str(row[0]) for row in self._file.query(sql, (topic, -len(ending), ending))]

    def counts(self) -> dict[str, int]:
        """Number of records by topic."""
        return dict(self._file.query("SELECT topic, count(*) FROM records GROUP BY topic ORDER BY topic"))

    def sources(self, topic: str) -> tuple[str, ...]:
        """The topic: there are no partitions."""
        return (topic,)

    def commit(self, group: str, offsets: Mapping[str, int]) -> None:
        """Remember how far ``group`` has read."""
        with self._file.transaction() as connection:
            connection.executemany(
                "INSERT INTO consumers (name, topic, seq) VALUES (?, ?, ?) "
                "ON CONFLICT (name, topic) DO UPDATE SET seq = excluded.seq",
                [(group, topic, offset) for topic, offset in offsets.items()],
            )

    def committed(self, group: str) -> dict[str, int]:
        """Offsets last committed by ``group``."""
        return dict(self._file.query("SELECT topic, seq FROM consumers WHERE name = ?", (group,)))

    def close(self) -> None:
        """Close the file."""
        self._file.close()
