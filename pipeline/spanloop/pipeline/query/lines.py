"""JSON lines made by DuckDB itself: one text a row instead of one Python object a cell.

Place in the flow: ``sandbox`` asks for the SQL around a checked SELECT whose columns are all of plain types; any other statement
is rendered by ``render``. Texts go through ``to_json``, which costs less than to find out which rows
would need it.

Invariants: the same values as ``render`` gives, also for duplicate names (the last one counts), infinite numbers and times; only
what may stand in a number's shortest text (``1e16``) may differ. Rows keep their order.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

__all__ = ["lines_sql"]

_WHOLE = frozenset(
    {"BIGINT", "INTEGER", "SMALLINT", "TINYINT", "UBIGINT", "UINTEGER", "USMALLINT", "UTINYINT", "HUGEINT", "UHUGEINT", "BOOLEAN"}
)  # fmt: skip


def lines_sql(sql: str, columns: Sequence[tuple[str, str]]) -> str | None:
    """SQL of one column with the JSON object of each row of ``sql``; None where a column's type is not a plain one.

    Args:
        sql: One SELECT, without a semicolon.
        columns: Name and DuckDB type of each of its columns.

    >>> print(lines_sql("SELECT 1 AS n", [("n", "INTEGER")]).replace(chr(10), " "))
    SELECT concat('{"n":', coalesce(c0::VARCHAR, 'null'), '}') FROM (SELECT 1 AS n ) q(c0)
    """
    cells = [_cell(f"c{at}", type_) for at, (_, type_) in enumerate(columns)]
    if not cells or None in cells:
        return None
    shown = list({name: at for at, (name, _) in enumerate(columns)}.values())
    row = _object([(columns[at][0], str(cells[at])) for at in shown])
    names = ", ".join(f"c{at}" for at in range(len(columns)))
    return f"SELECT {row} FROM ({sql}\n) q({names})"  # noqa: S608 - a SELECT that was checked


def _cell(name: str, type_: str) -> str | None:
    """SQL of a cell's JSON; NULL for NULL."""
    if type_ in _WHOLE:
        return f"{name}::VARCHAR"
    if type_ == "VARCHAR":
        return f"to_json({name})::VARCHAR"
    if type_ == "DOUBLE":
        return f"CASE WHEN isfinite({name}) THEN {name}::VARCHAR ELSE '\"' || {name} || '\"' END"
    if type_ == "TIMESTAMP":
        shown = f"strftime({name}, '\"%Y-%m-%dT%H:%M:%S.%fZ\"')"
        return f"CASE WHEN isfinite({name}) THEN {shown} ELSE '\"' || {name} || '\"' END"
    return None


def _object(pairs: Sequence[tuple[str, str]]) -> str:
    parts = []
    for number, (name, value) in enumerate(pairs):
        key = ("," if number else "{") + json.dumps(name, ensure_ascii=False) + ":"
        parts += ["'" + key.replace("'", "''") + "'", f"coalesce({value}, 'null')"]
    return f"concat({', '.join(parts)}, '}}')"
