"""Rows as text: aligned table, JSON, JSON lines, CSV.

Place in the flow: the sandbox renders, so that the other side only copies bytes. Standard library only.

Invariants: no cell can move a terminal's cursor or start a formula in a spreadsheet; JSON is valid whatever the values;
times are UTC.
"""

from __future__ import annotations

import csv
import datetime
import decimal
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from json.encoder import encode_basestring
from math import isfinite
from typing import Any

__all__ = ["FORMS", "FRAMES", "framed", "printable"]

TABLE_ROWS = 1_000
CELL_WIDTH = 60
_BATCH = 2_000
_CONTROL = {
    **dict.fromkeys((*range(32), *range(127, 160), 8203, *range(8206, 8208), *range(8232, 8239), 8288, *range(8294, 8298), 1564, 65279)),
    10: "\\n", 13: "\\r", 9: " ",
}  # fmt: skip
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\uff1d", "\uff0b", "\uff0d", "\uff20")
Rows = Iterable[Sequence[Any]]


def printable(text: str) -> str:
    """A text for a terminal: line ends written out, other control and direction characters dropped.

    >>> printable("a\\x1b[31mb\\nc")
    'a[31mb\\\\nc'
    """
    return text.translate(_CONTROL)


def plain(value: Any) -> Any:
    """A cell as JSON has it.

    >>> plain(datetime.datetime(2027, 1, 15, 8)), plain(decimal.Decimal("3")), plain(float("nan")), plain(b"\\x01")
    ('2027-01-15T08:00:00.000000Z', 3, 'nan', '01')
    """
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, datetime.datetime):
        if value.tzinfo is not None:
            value = value.astimezone(datetime.UTC).replace(tzinfo=None)
        return value.isoformat(timespec="microseconds") + "Z"
    if isinstance(value, decimal.Decimal):
        return int(value) if value.is_finite() and value == value.to_integral_value() else plain(float(value))
    if isinstance(value, bytes | bytearray):
        return bytes(value).hex()
    if isinstance(value, dict):
        return {str(plain(k)): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(v) for v in value]
    return str(value)


_encode = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=plain, check_circular=False
).encode


def _json(value: Any) -> str:
    """JSON of a value; the quick way where nothing in it is special."""
    try:
        return _encode(value)
    except (ValueError, TypeError):  # an infinite number, or a key that is no text
        return _encode(plain(value))


def _column(cells: Sequence[Any]) -> Iterable[str]:
    """JSON of the cells of one column: what is of one plain type goes without a look at each cell."""
    kinds = set(map(type, cells))
    some = type(None) in kinds
    kinds.discard(type(None))
    quick: Callable[[Any], str] = _json
    if not kinds:
        return itertools.repeat("null", len(cells))
    if kinds == {str}:
        quick = encode_basestring
    elif kinds == {int}:
        quick = int.__repr__
    elif kinds == {float} and all(cell is None or isfinite(cell) for cell in cells):
        quick = float.__repr__
    elif kinds == {datetime.datetime} and all(cell is None or cell.tzinfo is None for cell in cells):
        quick = _time
    return ["null" if cell is None else quick(cell) for cell in cells] if some else map(quick, cells)


def _time(value: datetime.datetime) -> str:
    return f'"{value.isoformat(timespec="microseconds")}Z"'


def _blocks(names: Sequence[str], rows: Rows) -> Iterator[list[str]]:
    """Objects, some at a time. Of columns of one name the last one counts."""
    last = {name: place for place, name in enumerate(names)}
    line = "{" + ",".join(_encode(name).replace("%", "%%") + ":%s" for name in last) + "}"
    rows = iter(rows)
    while block := list(itertools.islice(rows, _BATCH)):
        columns = list(zip(*block, strict=True))
        yield list(map(line.__mod__, zip(*(_column(columns[place]) for place in last.values()), strict=True)))


def framed(form: str, blocks: Iterable[list[str]]) -> Iterator[str]:
    """Objects as JSON lines, or as one array.

    >>> list(framed("ndjson", [["{}", "{}"]])), list(framed("json", [["{}"], ["{}"]])), list(framed("json", []))
    (['{}\\n{}\\n'], ['[{}', ',\\n{}', ']\\n'], ['[]\\n'])
    """
    start, between, end = FRAMES[form]
    first = True
    for block in blocks:
        yield (
            (start if first else between if start else "") + between.join(block) + ("" if start else between)
        )
        first = False
    if start:
        yield f"{start if first else ''}{end}"


def as_ndjson(names: Sequence[str], rows: Rows) -> Iterator[str]:
    """One object a line."""
    return framed("ndjson", _blocks(names, rows))


def as_json(names: Sequence[str], rows: Rows) -> Iterator[str]:
    """One array of objects."""
    return framed("json", _blocks(names, rows))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    value = value if isinstance(value, str) else plain(value)
    return value if isinstance(value, str) else _json(value)


def _guarded(value: Any) -> str:
    """A CSV cell that a spreadsheet does not take for a formula.

    >>> _guarded("=1+1"), _guarded(-1), _guarded("a")
    ("'=1+1", '-1', 'a')
    """
    text = _cell(value)
    return f"'{text}" if isinstance(value, str) and text.startswith(_FORMULA) else text


def as_csv(names: Sequence[str], rows: Rows) -> Iterator[str]:
    """RFC 4180 with a header, lines end in a newline. Texts that begin like a formula get an apostrophe in front."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    lines = itertools.chain([names], rows)
    while batch := list(itertools.islice(lines, _BATCH)):
        writer.writerows([_guarded(value) for value in row] for row in batch)
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()


def as_table(names: Sequence[str], rows: Rows) -> Iterator[str]:
    """Aligned columns, the first rows only."""
    rows = iter(rows)
    shown = list(itertools.islice(rows, TABLE_ROWS))
    is_number = [
        all(isinstance(row[i], int | float | decimal.Decimal | None) for row in shown)
        for i in range(len(names))
    ]
    cells = [[_clip(_cell(value)) for value in row] for row in shown]
    heads = [_clip(name) for name in names]
    widths = [max(len(name), *(len(row[i]) for row in cells), 0) for i, name in enumerate(heads)]
    for line in [heads, ["-" * width for width in widths], *cells]:
        parts = [
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, is_number, strict=True)
        ]
        yield "  ".join(parts).rstrip() + "\n"
    more = next(rows, None) is not None
    yield f"({len(shown)} rows{'; there are more: LIMIT, --ndjson or --csv' if more else ''})\n"


def _clip(text: str) -> str:
    text = printable(text[: 4 * CELL_WIDTH])
    return text if len(text) <= CELL_WIDTH else text[: CELL_WIDTH - 3] + "..."


FRAMES = {"ndjson": ("", "\n", ""), "json": ("[", ",\n", "]\n")}
"""What stands before, between and behind the objects of a form; a form that begins with nothing ends each object."""
FORMS: dict[str, Callable[[Sequence[str], Rows], Iterator[str]]] = {
    "table": as_table, "json": as_json, "ndjson": as_ndjson, "csv": as_csv,
}  # fmt: skip
