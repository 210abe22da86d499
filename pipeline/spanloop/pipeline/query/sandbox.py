"""The process that runs SQL: it can read the files it is told of, answer its parent, and nothing else.

Place in the flow: started by ``session``, one for each statement. The parent writes one plan (a length and JSON) to its
standard input; rows leave as text or an Arrow stream on standard output, and lines of JSON about how it goes on standard
error. It imports DuckDB, the standard library and its two neighbours, and pyarrow only where Arrow is asked for.

Invariants: whatever was open or could be opened is closed before the statement is looked at: guards first, then DuckDB's own
(only the listed files, no extensions, configuration locked), then one SELECT. Memory, time and files are bounded.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

try:
    import _duckdb as duckdb  # what duckdb re-exports, without its 60 ms of Python
except ImportError:
    import duckdb

from spanloop.pipeline.query import guards, render
from spanloop.pipeline.query.lines import lines_sql

__all__ = ["Refused", "check", "main"]

_FETCH_ROWS = 2_000
_ARROW_ROWS = 10_000
_PROGRESS_S = 0.25
_WARM = """SELECT 1::HUGEINT, 1.5::DECIMAL(10, 2), now(), TIMESTAMP '2020-01-01', INTERVAL 1 MONTH, uuid(), {'a': [1]},
MAP {'k': 1}, 'x'::BLOB, TIME '10:00', DATE '2020-01-01', 'a'::ENUM('a'), TIMESTAMPTZ '2020-01-01 00:00:00+00'"""
"""Makes DuckDB import what it will need of Python's library while files can still be opened."""
_POINTERS = re.compile(
    r"\b(arrow_scan|arrow_scan_dumb|pandas_scan|python_arrow_scan|python_map_function|query|query_table|"
    r"json_execute_serialized_sql)\b\"?\s*\(",
    re.IGNORECASE,
)
"""Functions that take addresses in memory, or SQL as a text where one of those could hide."""
_EXPLAIN = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*explain\b(?:\s+analyze\b|\s*\([^()]*\))?", re.IGNORECASE | re.DOTALL
)


class Refused(Exception):
    """Not one SELECT."""


def check(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Refuse everything but one SELECT (or EXPLAIN of one). Raises Refused, duckdb.Error."""
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise Refused(f"expected one SQL statement, got {len(statements)}.")
    kind = statements[0].type
    if kind == duckdb.StatementType.EXPLAIN:
        start = _EXPLAIN.match(sql)
        inner = connection.extract_statements(sql[start.end() :]) if start else []
        kind = inner[0].type if len(inner) == 1 else kind
    if kind != duckdb.StatementType.SELECT:
        raise Refused(f"{kind.name} is refused: a workspace is read with SELECT (or EXPLAIN of one) only.")
    found = _POINTERS.search(sql)
    if found:
        raise Refused(
            f"the function {found.group(1).lower()} is refused: it could reach beyond the workspace."
        )


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _name(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def table_sql(table: dict[str, Any], tenant: str | None) -> str:
    """SELECT of all rows of a table from its files and tail.

    Args:
        table: ``columns`` (name -> SQL type) and ``parts``: ``files`` that all have the columns ``has``.
        tenant: Only this one's rows.
    """
    columns = table["columns"]
    where = "" if tenant is None else f" WHERE tenant = {_quoted(tenant)}"
    selects = []
    for part in table["parts"]:
        has = set(part["has"])
        listed = ", ".join(
            _name(column) if column in has else f"NULL::{type_} AS {_name(column)}"
            for column, type_ in columns.items()
        )
        files = ", ".join(_quoted(file) for file in part["files"])
        selects.append(f"SELECT {listed} FROM read_parquet([{files}], hive_partitioning = false){where}")  # noqa: S608
    if not selects:
        nothing = ", ".join(f"NULL::{type_} AS {_name(column)}" for column, type_ in columns.items())
        return f"SELECT {nothing} LIMIT 0"
    return " UNION ALL ".join(selects)


def open_connection(plan: dict[str, Any], connection: duckdb.DuckDBPyConnection) -> None:
    """DuckDB's own limits, then tables, views and macros, then the lock."""
    files = [file for table in plan["tables"].values() for part in table["parts"] for file in part["files"]]
    settings = {
        "memory_limit": f"{plan['memory_mb']}MiB", "threads": plan["threads"], "TimeZone": "UTC", "temp_directory": "",
        "python_enable_replacements": False, "autoinstall_known_extensions": False, "autoload_known_extensions": False,
        "allow_community_extensions": False, "allow_persistent_secrets": False, "enable_external_file_cache": False,
        "preserve_insertion_order": True,
        "enable_progress_bar": True,
        "enable_progress_bar_print": False,
    }  # fmt: skip
    for name, value in settings.items():
        connection.execute(f"SET {name} = {_quoted(str(value))}")
    connection.execute(f"SET allowed_paths = [{', '.join(map(_quoted, files))}]")
    connection.execute("SET enable_external_access = false")
    for name, table in plan["tables"].items():
        connection.execute(f"CREATE TEMP VIEW t_{name} AS {table_sql(table, plan['tenant'])}")
    for statement in plan["setup"]:
        connection.execute(statement)
    connection.execute("SET lock_configuration = true")


class _Progress(threading.Thread):
    """Tells the parent how far DuckDB is, from when it takes long."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        super().__init__(daemon=True)
        self._connection = connection
        self.done = threading.Event()

    def run(self) -> None:
        while not self.done.wait(_PROGRESS_S):
            with contextlib.suppress(Exception):  # a progress bar must not end a query
                _say({"progress": float(self._connection.query_progress())})


def _say(line: dict[str, Any]) -> None:
    os.write(2, json.dumps(line).encode() + b"\n")


def _rows(connection: duckdb.DuckDBPyConnection) -> Iterator[Sequence[Any]]:
    while rows := connection.fetchmany(_FETCH_ROWS):
        yield from rows


def _lines(connection: duckdb.DuckDBPyConnection, sql: str) -> str | None:
    """SQL that makes the JSON of each row in DuckDB; None where Python has to."""
    if connection.extract_statements(sql)[0].type != duckdb.StatementType.SELECT:
        return None
    bare = sql.rstrip().removesuffix(";")
    try:
        connection.execute(f"DESCRIBE {bare}")
        lines = lines_sql(bare, [(row[0], row[1]) for row in connection.fetchall()])
        return lines if lines and len(connection.extract_statements(lines)) == 1 else None
    except duckdb.Error:
        return None  # the statement itself says better what is wrong with it


def _write_text(connection: duckdb.DuckDBPyConnection, plan: dict[str, Any], out: BinaryIO) -> None:
    if plan["form"] in render.FRAMES:
        lines = _lines(connection, plan["sql"])
        if lines is not None:
            connection.execute(lines)
            blocks = iter(lambda: [row[0] for row in connection.fetchmany(_FETCH_ROWS)], [])
            for text in render.framed(plan["form"], blocks):
                out.write(text.encode())
                out.flush()
            return
    connection.execute(plan["sql"])
    names = [column[0] for column in connection.description or ()]
    for text in render.FORMS[plan["form"]](names, _rows(connection)):
        out.write(text.encode("utf-8", "backslashreplace"))
        out.flush()


def _write_arrow(connection: Any, plan: dict[str, Any], out: BinaryIO) -> None:
    from pyarrow import ipc

    reader = connection.sql(plan["sql"]).to_arrow_reader(_ARROW_ROWS)
    batches = iter(reader)
    batch = next(batches, None)  # what fails, fails before a byte is out
    writer = ipc.new_stream(out, reader.schema)
    while batch is not None:
        writer.write_batch(batch)
        out.flush()
        batch = next(batches, None)
    writer.close()
    out.flush()


def _read_plan(source: BinaryIO) -> dict[str, Any] | None:
    size = source.read(4)
    if len(size) < 4:
        return None
    return json.loads(source.read(int.from_bytes(size, "little")))


def run(plan: dict[str, Any], connection: duckdb.DuckDBPyConnection, out: BinaryIO) -> None:
    """Check and run one statement."""
    check(connection, plan["sql"])
    _say({"ready": True})
    progress = _Progress(connection)
    progress.start()
    try:
        (_write_arrow if plan["form"] == "arrow" else _write_text)(connection, plan, out)
    finally:
        progress.done.set()


def main(parent: int) -> None:
    """Entry point; ``parent`` is the process whose end ends this one."""
    guards.with_parent(parent)
    connection: Any = duckdb.connect(":memory:", config={"threads": "1"})
    connection.execute(_WARM)
    connection.fetchall()
    plan = _read_plan(sys.stdin.buffer)
    if plan is None:
        return
    if plan["form"] == "arrow":
        import duckdb as _relations  # noqa: F401 - gives the connection its relations
        import pyarrow as pa
        import pyarrow.ipc

        pa.set_cpu_count(1)
        connection.sql("SELECT 1").to_arrow_reader(1).read_all()
    if plan["functions"]:
        from spanloop.pipeline.query.functions import register

        for name in plan["functions"]:
            register(connection, name)
    held = guards.limit(
        memory_bytes=(plan["memory_mb"] + plan["slack_mb"]) * 2**20,
        cpu_s=plan["cpu_s"],
        files=plan["open_files"],
    )
    held += guards.confine_files(plan["folders"]) + guards.confine_syscalls()
    begin = time.perf_counter()
    try:
        open_connection(plan, connection)
        if plan["threads"] > 1:
            connection.execute("SELECT count(*) FROM range(300000) WHERE range % 7 = 3")
            connection.fetchall()
        run(plan, connection, sys.stdout.buffer)
        _say({"ok": True, "guards": held, "seconds": time.perf_counter() - begin})
    except Refused as exc:
        _say({"error": "Refused", "message": str(exc), "guards": held})
    except BrokenPipeError:
        pass
    except Exception as exc:
        _say({"error": type(exc).__name__, "message": str(exc), "guards": held})
    sys.stdout = None  # nothing is left to flush
    os._exit(0)
