"""SQL over a workspace: DuckDB views on the archive's Parquet files and the live tail.

Place in the flow: the read side's engine, behind ``spanloop query`` and whatever else reads a workspace. It only reads: one
statement that returns rows, no files or network from SQL, bounded memory and time.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds

from spanloop.pipeline.archive import Archive, Loaded
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import Log
from spanloop.pipeline.views import TABLES, VIEWS
from spanloop.schemas.errors import ConfigError, SchemaError, TransientError

__all__ = ["Query", "QueryError", "describe", "open_query"]

_FETCH_ROWS = 10_000
_HINT = "Views: " + ", ".join(name for name in VIEWS if not name.endswith("_all"))


class QueryError(SchemaError):
    """The SQL was refused or failed; one line."""

    exit_code = 1


class Query:
    """One read-only connection over a log.

    Args:
        log: The workspace's log.
        archive: Folder of the Parquet cache.
        memory_mb: DuckDB's memory limit in MiB.
        timeout_s: A query that runs longer is interrupted.
        segment_records: Records of a topic in one archive file.
    """

    def __init__(
        self,
        log: Log,
        archive: Path,
        *,
        memory_mb: int = 1024,
        timeout_s: float = 60.0,
        segment_records: int | None = None,
    ) -> None:
        sizes = {} if segment_records is None else {"segment_records": segment_records}
        self._archive = Archive(log, archive, **sizes)
        self._timeout_s = timeout_s
        self._connection = duckdb.connect(
            ":memory:",
            config={
                "memory_limit": f"{memory_mb}MiB",
                "threads": 2,
                "enable_external_access": False,
                "autoinstall_known_extensions": False,
            },
        )
        self._connection.execute("SET TimeZone = 'UTC'")
        self.unreadable = 0
        """Records that the last query could not decode."""

    def __enter__(self) -> Query:
        return self

    def __exit__(self, *error: object) -> None:
        self._connection.close()

    def run(self, sql: str) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
        """Column names and rows (streamed) of one SELECT.

        Raises:
            QueryError: not one SELECT, a name that does not exist, an error while it ran; the message is one line.
            TransientError: it took longer than the limit.
        """
        self._check(sql)
        tables = self._tables_in(sql)
        try:
            return self._run(sql, tables)
        except QueryError:
            if not self._damaged(tables):
                raise
            self._archive.discard(tables)
            return self._run(sql, tables)

    def _check(self, sql: str) -> None:
        try:
            sql.encode()
            statements = self._connection.extract_statements(sql)
        except UnicodeEncodeError as exc:
            raise QueryError(f"the SQL is not valid UTF-8 (character {exc.start + 1}). {_HINT}") from exc
        except duckdb.Error as exc:
            raise _failed(exc) from exc
        if len(statements) != 1:
            raise QueryError(f"expected one SQL statement, got {len(statements)}. {_HINT}")
        kind = statements[0].type
        if kind not in (duckdb.StatementType.SELECT, duckdb.StatementType.EXPLAIN):
            raise QueryError(
                f"{kind.name} is refused: a workspace is read with SELECT (or EXPLAIN) only. {_HINT}"
            )

    @staticmethod
    def _tables_in(sql: str) -> list[str]:
        """Tables behind the views whose names occur in the text: only these are decoded."""
        words = set(re.findall(r"[a-z_]+", sql.lower()))
        used = {table for name, view in VIEWS.items() if name in words for table in view.tables}
        return sorted(used | {name for name in TABLES if f"t_{name}" in words})

    def _run(self, sql: str, tables: list[str]) -> tuple[list[str], Iterator[tuple[Any, ...]]]:
        self._register(self._archive.load(tables))
        expired = threading.Event()

        def interrupt() -> None:
            expired.set()
            self._connection.interrupt()

        timer = threading.Timer(self._timeout_s, interrupt)
        timer.daemon = True
        timer.start()
        try:
            cursor = self._connection.execute(sql)
            names = [column[0] for column in cursor.description or ()]
            first = cursor.fetchmany(_FETCH_ROWS)
        except duckdb.Error as exc:
            timer.cancel()
            raise self._ended(exc, expired) from exc
        return names, self._rows(cursor, first, timer, expired)

    def _ended(self, exc: duckdb.Error, expired: threading.Event) -> QueryError | TransientError:
        if expired.is_set():
            return TransientError(
                f"the query ran longer than {self._timeout_s:g} s and was stopped: narrow it or raise --timeout"
            )
        return _failed(exc)

    def _rows(
        self,
        cursor: duckdb.DuckDBPyConnection,
        rows: list[tuple[Any, ...]],
        timer: threading.Timer,
        expired: threading.Event,
    ) -> Iterator[tuple[Any, ...]]:
        try:
            while rows:
                yield from rows
                rows = cursor.fetchmany(_FETCH_ROWS)
        except duckdb.Error as exc:
            raise self._ended(exc, expired) from exc
        finally:
            timer.cancel()

    def _register(self, loaded: dict[str, Loaded]) -> None:
        self.unreadable = sum(
            {TABLES[name].topic: table.unreadable for name, table in loaded.items()}.values()
        )
        for name, table in TABLES.items():
            parts = loaded.get(name) or Loaded(name, (), table.schema.empty_table(), 0)
            sources = []
            if parts.files:
                self._connection.register(f"f_{name}", _files(parts.files, table.schema))
                sources.append(f"SELECT * FROM f_{name}")  # noqa: S608
            if parts.tail.num_rows or not sources:
                self._connection.register(f"m_{name}", parts.tail)
                sources.append(f"SELECT * FROM m_{name}")  # noqa: S608
            self._connection.execute(f"CREATE OR REPLACE TEMP VIEW t_{name} AS {' UNION ALL '.join(sources)}")
        for view in VIEWS.values():
            self._connection.execute(f"CREATE OR REPLACE TEMP VIEW {view.name} AS {view.sql}")

    def _damaged(self, tables: list[str]) -> bool:
        """Whether a file of these tables has a sound footer and broken pages (read all of them)."""
        for loaded in self._archive.load(tables).values():
            try:
                if loaded.files:
                    for _ in _files(loaded.files, TABLES[loaded.name].schema).to_batches():
                        pass
            except (OSError, pa.ArrowException):
                return True
        return False


def _files(paths: tuple[Path, ...], schema: pa.Schema) -> ds.Dataset:
    options = ds.ParquetFragmentScanOptions(page_checksum_verification=True)
    parquet = ds.ParquetFileFormat(default_fragment_scan_options=options)
    return ds.dataset([str(path) for path in paths], schema=schema, format=parquet)


def _failed(exc: duckdb.Error) -> QueryError:
    text = str(exc)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    message = " ".join(line for line in lines if not line.startswith(("LINE ", "^")))
    at = next((line for line in lines if line.startswith("LINE ")), "")
    place = f" (at {at})" if at else ""
    return QueryError(f"{message}{place}. {_HINT}")


def describe() -> list[dict[str, Any]]:
    """For each view: name, meaning, columns with types, and an example."""
    connection = duckdb.connect(":memory:")
    try:
        for name, table in TABLES.items():
            connection.register(f"t_{name}", table.schema.empty_table())
        found = []
        for view in VIEWS.values():
            connection.execute(f"CREATE TEMP VIEW {view.name} AS {view.sql}")
            rows = connection.execute(f"DESCRIBE {view.name}").fetchall()
            columns = {row[0]: row[1] for row in rows}
            found.append(
                {"view": view.name, "meaning": view.meaning, "columns": columns, "example": view.example}
            )
        return found
    finally:
        connection.close()


@contextmanager
def open_query(workspace: Path, **limits: Any) -> Iterator[Query]:
    """A ``Query`` over a workspace folder; ``limits`` as for ``Query``.

    Raises:
        ConfigError: there is no workspace.
    """
    database = workspace / "spanloop.db"
    if not database.exists():
        raise ConfigError(
            f"no workspace in {workspace} ({database.name} is missing): give one with --workspace, or make one with "
            "`spanloop up`, `spanloop demo` or `spanloop import`"
        )
    log = SqliteLog(database, create=False)
    try:
        with Query(log, workspace / "archive", **limits) as query:
            yield query
    finally:
        log.close()
