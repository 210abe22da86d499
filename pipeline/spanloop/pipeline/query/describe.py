"""The names that SQL may use, with columns, meaning and an example: what ``spanloop query`` without SQL lists."""

from __future__ import annotations

from typing import Any

import duckdb

from spanloop.pipeline.macros import MACROS
from spanloop.pipeline.query.functions import register
from spanloop.pipeline.query.plan import sql_columns
from spanloop.pipeline.query.sandbox import table_sql
from spanloop.pipeline.tables import TABLES
from spanloop.pipeline.views import VIEWS

__all__ = ["describe"]


def describe() -> list[dict[str, Any]]:
    """For each view and macro: name (``view`` or ``macro``), meaning, columns with types, and an example."""
    connection: Any = duckdb.connect(":memory:")
    try:
        for name in TABLES:
            connection.execute(
                f"CREATE TEMP VIEW t_{name} AS {table_sql({'columns': sql_columns(name), 'parts': []}, None)}"
            )
        found = []
        for view in VIEWS.values():
            if view.function:
                register(connection, view.function)
            connection.execute(f"CREATE TEMP VIEW {view.name} AS {view.sql}")
            columns = _columns(connection, f"DESCRIBE {view.name}")
            found.append(
                {"view": view.name, "meaning": view.meaning, "columns": columns, "example": view.example}
            )
        for macro in MACROS.values():
            if macro.function:
                register(connection, macro.function)
            connection.execute(f"CREATE TEMP MACRO {macro.name}({macro.parameters}) AS TABLE {macro.sql}")
            argument = {"provenance": "1", "staleness": ""}.get(macro.name, "''")
            columns = _columns(connection, f"DESCRIBE FROM {macro.name}({argument})")
            found.append(
                {"macro": macro.call, "meaning": macro.meaning, "columns": columns, "example": macro.example}
            )
        return found
    finally:
        connection.close()


def _columns(connection: Any, sql: str) -> dict[str, str]:
    return {row[0]: row[1] for row in connection.execute(sql).fetchall()}
