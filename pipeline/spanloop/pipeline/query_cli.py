"""``spanloop query``: SQL over a workspace, or the list of views. A thin layer over ``query``."""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from spanloop.schemas.settings import load_settings

__all__ = ["query"]

_TABLE_ROWS = 1_000
_CELL_WIDTH = 60


def _no_nan(context: click.Context, option: click.Parameter, value: float) -> float:
    if math.isnan(value):
        raise click.BadParameter("nan is no number of seconds", context, option)
    return value


@click.command()
@click.argument("sql", required=False)
@click.option(
    "--workspace",
    type=click.Path(path_type=Path),
    help="Folder of the workspace. Default: the settings' one.",
)
@click.option(
    "--table",
    "form",
    flag_value="table",
    default=True,
    help=f"Aligned columns, first {_TABLE_ROWS} rows (default).",
)
@click.option("--json", "form", flag_value="json", help="One JSON array of objects.")
@click.option("--ndjson", "form", flag_value="ndjson", help="One JSON object a line, streamed.")
@click.option("--csv", "form", flag_value="csv", help="CSV with a header, streamed.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=0.001, max=1e6),
    callback=_no_nan,
    default=60.0,
    show_default=True,
    help="Seconds before the query is stopped.",
)
@click.option("--memory", type=click.IntRange(min=64), default=1024, show_default=True, help="Memory limit in MiB.")  # fmt: skip
def query(sql: str | None, workspace: Path | None, form: str, timeout: float, memory: int) -> None:
    """Run one SELECT (DuckDB's dialect) over a workspace. It only reads; without SQL it lists the views.

    \b
    spanloop query
    spanloop query "SELECT type, count(*) FROM events GROUP BY 1"
    spanloop query --ndjson "FROM orchestrations WHERE num_calls > 3 LIMIT 10"

    Views show the last revision of each orchestration; NAME_all shows every revision. Times are UTC, rewards and
    credit are in units (NAME_micro: exact integers). A new workspace's first query builds a Parquet cache in its
    archive/ folder, which may be deleted at any time.
    """
    from spanloop.pipeline.query import open_query

    if sql is None or not sql.strip():
        _list_views(form)
        return
    folder = workspace or load_settings().workspace
    with open_query(folder, timeout_s=timeout, memory_mb=memory) as opened:
        names, rows = opened.run(sql)
        for text in _WRITERS[form](names, rows):
            sys.stdout.write(text)
        if opened.unreadable:
            click.echo(f"note: {opened.unreadable} records could not be read and give no rows", err=True)


def _list_views(form: str) -> None:
    from spanloop.pipeline.query import describe

    views = describe()
    if form in ("json", "ndjson"):
        lines = [_json(view) for view in views]
        sys.stdout.write(
            "[" + ",\n".join(lines) + "]\n" if form == "json" else "".join(line + "\n" for line in lines)
        )
        return
    for view in views:
        if view["view"].endswith("_all"):
            continue
        columns = ", ".join(f"{name} {_short(type_)}" for name, type_ in view["columns"].items())
        click.echo(f"{view['view']}: {view['meaning']}")
        click.echo(f"    {columns}")
        click.echo(f"    $ spanloop query {_quoted(view['example'])}")
    extra = [view["view"] for view in views if view["view"].endswith("_all")]
    click.echo(f"With every revision and the log offset: {', '.join(extra)}")


def _short(type_: str) -> str:
    return {
        "VARCHAR": "text",
        "BIGINT": "int",
        "DOUBLE": "float",
        "BOOLEAN": "bool",
        "TIMESTAMP": "time",
    }.get(type_.removesuffix("[]"), type_.lower()) + ("[]" if type_.endswith("[]") else "")


def _quoted(sql: str) -> str:
    return '"' + sql.replace('"', '\\"') + '"'


def _plain(value: Any) -> Any:
    """A cell as JSON has it."""
    if isinstance(value, datetime.datetime):
        return value.isoformat(timespec="microseconds") + "Z"
    if isinstance(value, decimal.Decimal):
        return int(value) if value == value.to_integral_value() else float(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return value if value - value == 0 else str(value)
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if value is None or isinstance(value, str | int):
        return value
    return str(value)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _objects(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    for row in rows:
        yield _json({name: _plain(value) for name, value in zip(names, row, strict=True)})


def _as_ndjson(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    return (line + "\n" for line in _objects(names, rows))


def _as_json(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    yield "["
    for number, line in enumerate(_objects(names, rows)):
        yield (",\n" if number else "") + line
    yield "]\n"


def _cell(value: Any) -> str:
    plain = _plain(value)
    if plain is None:
        return ""
    return plain if isinstance(plain, str) else _json(plain)


def _as_csv(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    for row in itertools.chain([names], rows):
        writer.writerow([_cell(value) for value in row])
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()


def _as_table(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> Iterator[str]:
    rows = iter(rows)
    shown = list(itertools.islice(rows, _TABLE_ROWS))
    is_number = [all(isinstance(row[i], int | float | None) for row in shown) for i in range(len(names))]
    cells = [[_clip(_cell(value)) for value in row] for row in shown]
    widths = [max(len(name), *(len(row[i]) for row in cells), 0) for i, name in enumerate(names)]
    for line in [list(names), ["-" * width for width in widths], *cells]:
        parts = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, is_number, strict=True)
        ]
        yield "  ".join(parts).rstrip() + "\n"
    more = next(rows, None) is not None
    yield f"({len(shown)} rows{'; there are more: LIMIT, --ndjson or --csv' if more else ''})\n"


def _clip(text: str) -> str:
    text = text.replace("\n", "\\n")
    return text if len(text) <= _CELL_WIDTH else text[: _CELL_WIDTH - 3] + "..."


_WRITERS = {"table": _as_table, "json": _as_json, "ndjson": _as_ndjson, "csv": _as_csv}
