"""Values of events as cells of columns, and columns as Arrow arrays.

Place in the flow: what the builders of all topics share. Invariants: nothing that a client can send makes a column fail:
numbers beyond 64 bits, times that no calendar holds and texts that UTF-8 cannot hold become something that can be stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

from spanloop.pipeline.ports import LogRecord
from spanloop.schemas.canonical import MICRO

__all__ = [
    "INT_MAX",
    "Columns",
    "Decoded",
    "Owners",
    "array",
    "count",
    "int64",
    "json_text",
    "plain_text",
    "times",
    "units",
]

INT_MAX = 2**63 - 1
Columns = dict[str, Any]
"""Column name -> Python values, or an Arrow array."""
Decoded = Sequence[tuple[LogRecord, Any]]
"""Records with their events."""


def plain_text(value: Any) -> str | None:
    """A text as it is, anything else as JSON."""
    return value if value is None or isinstance(value, str) else json_text(value)


def json_text(value: Any) -> str:
    """JSON text of a value."""
    return msgspec.json.encode(value).decode()


def count(value: Any) -> int | None:
    """An integer that a column can hold; everything else is unknown."""
    return value if type(value) is int and -INT_MAX <= value <= INT_MAX else None


def times(ns: Iterable[int]) -> list[int | None]:
    """Nanoseconds to the microseconds of a timestamp; 0 and what no calendar holds are unknown."""
    return [n // 1000 if 0 < n <= INT_MAX else None for n in ns]


def int64(values: Iterable[int]) -> list[int]:
    """Clipped to 64 bits."""
    return [v if -INT_MAX <= v <= INT_MAX else (INT_MAX if v > 0 else -INT_MAX) for v in values]


def units(values: Iterable[int | None]) -> list[float | None]:
    """Micro-units to units."""
    return [None if v is None else v / MICRO for v in values]


def array(values: Any, type_: pa.DataType) -> pa.Array:
    """An Arrow array; texts that UTF-8 cannot hold (lone surrogates) are escaped instead of failing the query."""
    if isinstance(values, pa.Array):
        return values
    try:
        return pa.array(values, type=type_)
    except UnicodeEncodeError:
        return pa.array([_printable(v) for v in values], type=type_)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return [_printable(v) for v in value] if isinstance(value, list | tuple) else value


class Owners(NamedTuple):
    """Events whose parts become rows: a value of the event is made once and repeated for its rows.

    >>> Owners.of([2, 1]).spread(["a", "b"], pa.string()).to_pylist()
    ['a', 'a', 'b']
    """

    index: pa.Array
    """Row -> event."""

    @classmethod
    def of(cls, counts: Iterable[int]) -> Owners:
        """From the number of rows of each event."""
        numbers = np.fromiter(counts, np.int64)
        return cls(pa.array(np.repeat(np.arange(len(numbers)), numbers)))

    def spread(self, values: Any, type_: pa.DataType) -> pa.Array:
        """Values of the events, one for each row."""
        return array(values, type_).take(self.index)

    def columns(self, rows: Decoded, **more: tuple[Any, pa.DataType]) -> Columns:
        """Tenant, id, revision, partition and offset of each row's event, and ``more`` of its values."""
        of = {
            "tenant": ([e.tenant for _, e in rows], pa.string()),
            "orchestration_id": ([e.orchestration_id for _, e in rows], pa.string()),
            "revision": (int64(e.revision for _, e in rows), pa.int64()),
            "partition": ([r.partition for r, _ in rows], pa.int32()),
            "offset": ([r.offset for r, _ in rows], pa.int64()),
            **more,
        }
        return {name: self.spread(values, type_) for name, (values, type_) in of.items()}


def flat(parts: Iterable[Sequence[Any]]) -> Iterator[Any]:
    """Items of all parts, in order."""
    for part in parts:
        yield from part
