"""Which orchestrations differ between two result sets, and both sides' credit and samples of those that do, by DuckDB.

Place in the flow: only ``diff`` uses it. Hashes are joined first; what differs is spread over files by id where it is more than fits,
so that memory is bounded whatever the size of the sets.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from spanloop.pipeline.replay.results import ResultSet

__all__ = ["HASHES", "Pairing"]

HASHES = ("content_hash", "rewards_hash", "credit_hash", "samples_hash")
_KEYS = "tenant, orchestration_id"
_PAIRS_TOGETHER = 2_000
"""Orchestrations that are compared in one go; more are spread over files first."""


class Pairing:
    """Two result sets side by side. A context manager: its scratch files lie beside the sets.

    Args:
        a, b: The sets.
    """

    def __init__(self, a: ResultSet, b: ResultSet) -> None:
        import duckdb

        self._scratch = Path(tempfile.mkdtemp(prefix=".diff-", dir=b.folder.parent))
        self._db: Any = duckdb.connect(
            ":memory:", config={"memory_limit": "1GB", "temp_directory": str(self._scratch / "spill")}
        )
        for letter, found in (("a", a), ("b", b)):
            _view(self._db, letter, found)
        self.changed = _changed(self._db)
        """Orchestrations that differ."""

    def __enter__(self) -> Pairing:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def totals(self, side: str) -> tuple[int, int, int]:
        """Orchestrations, credited ones, and the sum of team rewards in micro-units, of side a or b."""
        sql = f"SELECT count(*), count(*) FILTER (credit_hash <> ''), sum(team) FROM {side}"  # noqa: S608
        count, credited, team = _one(self._db, sql)
        return count, credited, int(team or 0)

    def definitions(self, side: str) -> tuple[str, ...]:
        """Digests of the definitions under which the rewards of side a or b were made; older ones have none."""
        rows = self._db.execute(
            f'SELECT DISTINCT regexp_extract(decode(rewards), \'"definitions":"([0-9a-f]+)"\', 1) AS d FROM {side} '  # noqa: S608
            "WHERE rewards IS NOT NULL ORDER BY d"
        ).fetchall()
        return tuple(found for (found,) in rows if found)

    def erased(self) -> int:
        """Orchestrations whose token ids only one side could read: their credit and samples are not compared."""
        return _one(self._db, f"SELECT count(*) FROM a JOIN b USING ({_KEYS}) WHERE a.erased <> b.erased")[0]  # noqa: S608

    def same(self) -> int:
        """Orchestrations that are equal."""
        both = _one(self._db, f"SELECT count(*) FROM a JOIN b USING ({_KEYS})")[0]  # noqa: S608
        other = "SELECT count(*) FROM changed WHERE a_content_hash IS NOT NULL AND b_content_hash IS NOT NULL"
        return both - _one(self._db, other)[0]

    def different(self) -> Iterator[dict[str, Any]]:
        """Ids, hashes and team rewards of what differs; a side that has it not is None."""
        yield from _rows(self._db.execute("SELECT * FROM changed"))

    def pairs(self) -> Iterator[dict[str, Any]]:
        """Credit and samples of what differs, as JSON of both sides."""
        yield from _pairs(self._db, self.changed, self._scratch)


def _view(db: Any, name: str, found: ResultSet) -> None:
    """The orchestrations of a set; rows that only note what the log has are none."""
    paths = [str(path) for path in found.paths]
    if not paths:
        db.execute(
            f"CREATE VIEW {name} AS SELECT NULL::VARCHAR tenant, NULL::VARCHAR orchestration_id, NULL::BIGINT team, "
            "NULL::BLOB rewards, NULL::BLOB credit, NULL::BLOB samples, NULL::BOOLEAN erased, "
            + ", ".join(f"NULL::VARCHAR {h}" for h in HASHES)
            + " WHERE false"
        )
        return
    known = "erased" in pq.read_schema(paths[0]).names  # a set of an older version has not
    listed = ", ".join("'" + path.replace("'", "''") + "'" for path in paths)
    more = "" if known else ", false AS erased"
    db.execute(f"CREATE VIEW {name} AS SELECT *{more} FROM read_parquet([{listed}]) WHERE content_hash <> ''")  # noqa: S608


def _changed(db: Any) -> int:
    """Make the table of orchestrations that differ; returns how many."""
    sides = ", ".join(f"{s}.{n} AS {s}_{n}" for s in "ab" for n in (*HASHES, "team"))
    unequal = [f"a.{n} IS DISTINCT FROM b.{n}" for n in HASHES]
    partly = "coalesce(a.erased <> b.erased, false)"
    db.execute(
        f"CREATE TABLE changed AS SELECT {_KEYS}, {sides}, {partly} AS partly FROM a FULL JOIN b USING ({_KEYS}) "  # noqa: S608
        f"WHERE {' OR '.join(unequal[:2])} OR NOT {partly} AND ({' OR '.join(unequal[2:])})"
    )
    return _one(db, "SELECT count(*) FROM changed")[0]


def _pairs(db: Any, changed: int, scratch: Path) -> Iterator[dict[str, Any]]:
    """Credit and samples of what differs, from both sides, a part of the ids at a time."""
    parts = -(-changed // _PAIRS_TOGETHER)
    if not parts:
        return
    tables = {"a": "a", "b": "b"}
    if parts > 1:
        for side in "ab":
            db.execute(
                f"COPY (SELECT {_KEYS}, credit, samples, (hash({_KEYS}) % {parts})::INT AS part FROM {side} SEMI JOIN changed "  # noqa: S608
                f"USING ({_KEYS})) TO '{scratch / side}' (FORMAT parquet, PARTITION_BY part, COMPRESSION lz4)"
            )
            tables[side] = f"read_parquet('{scratch / side}/*/*.parquet', hive_partitioning = true)"
            if not (scratch / side).is_dir():
                tables[side] = f"(SELECT {_KEYS}, credit, samples, 0 AS part FROM {side} WHERE false)"  # noqa: S608
    for part in range(parts):
        own = {s: f"(SELECT * FROM {t} WHERE part = {part})" if parts > 1 else t for s, t in tables.items()}  # noqa: S608
        which = f"WHERE NOT partly AND hash({_KEYS}) % {parts} = {part}"
        yield from _rows(
            db.execute(
                f"SELECT {_KEYS}, a.credit a_credit, a.samples a_samples, b.credit b_credit, b.samples b_samples "  # noqa: S608
                f"FROM (SELECT {_KEYS} FROM changed {which}) LEFT JOIN {own['a']} a USING ({_KEYS}) "
                f"LEFT JOIN {own['b']} b USING ({_KEYS})"
            )
        )


def _one(db: Any, sql: str) -> tuple[Any, ...]:
    return db.execute(sql).fetchone()


def _rows(cursor: Any, size: int = 200) -> Iterator[dict[str, Any]]:
    """Rows of a query, read whole first: the connection runs one query at a time."""
    names = [column[0] for column in cursor.description]
    while rows := cursor.fetchmany(size):
        for row in rows:
            yield dict(zip(names, row, strict=True))
