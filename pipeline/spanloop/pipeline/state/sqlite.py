"""The StateStore in the log's own SQLite file: entries, offsets and outputs are one transaction.

Each commit raises the stage's generation. A store that loaded a stage and finds that somebody else has
committed it since raises TerminalError: two processes must not run one stage (a zombie would repeat effects).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path

from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.log.sqlite import insert_records
from spanloop.pipeline.ports import Clock, NewRecord
from spanloop.pipeline.sqlite_file import SqliteFile
from spanloop.schemas.errors import TerminalError

__all__ = ["SqliteState"]


class SqliteState:
    """StateStore over a SQLite file; outputs go to the log tables of that file.

    Args:
        path: the same file as the SqliteLog's.
        clock: stamps ``appended_ns`` of outputs.
        create: False raises ConfigError when there is no file yet (reading verbs).
    """

    def __init__(self, path: Path | str, clock: Clock | None = None, *, create: bool = True) -> None:
        self._clock: Clock = clock or SystemClock()
        self._file = SqliteFile(path, create=create)
        self._generations: dict[str, int] = {}

    def load(self, stage: str) -> dict[str, bytes]:
        """All entries of a stage; from here on this store expects to be the only one that commits it."""
        generation = "SELECT coalesce((SELECT generation FROM stages WHERE stage = ?), 0)"
        rows = self._file.query(
            f"SELECT NULL, NULL, ({generation}) UNION ALL SELECT key, value, 0 FROM entries WHERE stage = ?",  # noqa: S608
            (stage, stage),
        )
        entries: dict[str, bytes] = {}
        for key, value, found in rows:
            if key is None:
                self._generations[stage] = int(found)
            else:
                entries[key] = value
        return entries

    def offsets(self, stage: str) -> dict[str, int]:
        """Input offsets contained in the state, by topic."""
        return dict(self._file.query("SELECT topic, seq FROM stage_offsets WHERE stage = ?", (stage,)))

    def commit(
        self,
        stage: str,
        *,
        writes: Mapping[str, bytes | None],
        offsets: Mapping[str, int],
        outputs: Sequence[NewRecord] = (),
    ) -> None:
        """Entries, offsets and outputs in one durable transaction."""
        now_ns = self._clock.now_ns()
        deletes = [(stage, key) for key, value in writes.items() if value is None]
        puts = [(stage, key, value) for key, value in writes.items() if value is not None]
        with self._file.transaction() as connection:
            generation = self._next_generation(connection, stage)
            connection.executemany("DELETE FROM entries WHERE stage = ? AND key = ?", deletes)
            connection.executemany(
                "INSERT INTO entries (stage, key, value) VALUES (?, ?, ?) "
                "ON CONFLICT (stage, key) DO UPDATE SET value = excluded.value",
                puts,
            )
            connection.executemany(
                "INSERT INTO stage_offsets (stage, topic, seq) VALUES (?, ?, ?) "
                "ON CONFLICT (stage, topic) DO UPDATE SET seq = excluded.seq",
                [(stage, topic, offset) for topic, offset in offsets.items()],
            )
            insert_records(connection, outputs, now_ns)
        self._generations[stage] = generation

    def _next_generation(self, connection: sqlite3.Connection, stage: str) -> int:
        row = connection.execute("SELECT generation FROM stages WHERE stage = ?", (stage,)).fetchone()
        current = int(row[0]) if row else 0
        expected = self._generations.get(stage, current)
        if expected != current:
            raise TerminalError(
                f"{self._file.path}: stage {stage!r} was committed by another process "
                f"(generation {current}, expected {expected}): run one pipeline a workspace, then restart this one",
                stage=stage,
            )
        connection.execute(
            "INSERT INTO stages (stage, generation) VALUES (?, ?) "
            "ON CONFLICT (stage) DO UPDATE SET generation = excluded.generation",
            (stage, current + 1),
        )
        return current + 1

    def close(self) -> None:
        """Close the file."""
        self._file.close()
