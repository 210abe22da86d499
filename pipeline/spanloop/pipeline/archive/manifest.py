"""Manifests: what a range of the log became. Only files that a live manifest names exist for readers.

Place in the flow: ``writer`` and ``compaction`` write one as their last act, ``raw`` reads them. A manifest is one JSON file
``_ranges/TOPIC/PARTITION/FIRST-LAST.json``.

Invariants: ``first`` is the offset after the range before, so ranges touch even where the log skips offsets. Of manifests that
overlap only the one that begins first is live, and of those that begin together the longest: a merged range takes over from
its parts the moment its manifest is there, and two writers at once cannot double a row.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Sequence
from functools import lru_cache
from urllib.parse import quote

import msgspec

from spanloop.pipeline.ports import source_of

__all__ = [
    "RANGES",
    "RAW",
    "FileInfo",
    "Lost",
    "Range",
    "data_path",
    "date_of",
    "quoted",
    "resolve",
    "tenant_of",
]

RANGES = "_ranges"
RAW = "raw"
"""Kind of the files that hold the records themselves; other kinds are names of tables, or ``INDEX``."""
FORMAT = 1


class FileInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One data file. ``path`` is relative to the archive's root."""

    path: str
    kind: str
    rows: int
    bytes: int
    footer: str
    """sha256 of the Parquet footer (of everything where the file is no Parquet)."""
    tenant: str = ""
    date: str = ""
    """UTC day of its records' ``appended_ns``, YYYY-MM-DD."""
    crc32: int = -1
    """Of the whole file, for readers that check no pages; -1: not known."""


class Lost(msgspec.Struct, frozen=True, omit_defaults=True):
    """Rows that were there and cannot be rebuilt."""

    kind: str
    reason: str
    rows: int = 0
    path: str = ""


class Range(msgspec.Struct, frozen=True, omit_defaults=True):
    """A range of one partition and its files."""

    topic: str
    partition: int
    first: int
    last: int
    records: int
    written_ns: int
    first_offset: int = -1
    """Offset of its first record; ``first`` may lie before it."""
    last_offset: int = -1
    """Offset of its last record, at most ``last``."""
    first_event_id: str = ""
    last_event_id: str = ""
    value_bytes: int = 0
    """Sum of its records' values, uncompressed."""
    unreadable: int = 0
    """Records that gave no rows."""
    version: str = ""
    """``views.TABLES`` version, see ``writer.TABLES_VERSION``."""
    schemas: dict[str, dict[str, str]] = {}
    """Table -> column -> Arrow type, of every table that was built, with rows or not."""
    files: tuple[FileInfo, ...] = ()
    lost: tuple[Lost, ...] = ()
    replaces: tuple[str, ...] = ()
    """Names of the manifests that a merged range stands for."""
    retired: tuple[str, ...] = ()
    """Files that a repair took out; readers may still use them for the grace period."""
    format: int = FORMAT

    @property
    def source(self) -> str:
        """The partition that it is a range of."""
        return source_of(self.topic, self.partition)

    @property
    def name(self) -> str:
        """File name of the manifest without its ending."""
        return f"{self.first}-{self.last}"

    @property
    def path(self) -> str:
        """Where the manifest lies."""
        return f"{RANGES}/{self.topic}/{self.partition}/{self.name}.json"

    @property
    def dates(self) -> set[str]:
        """UTC days that its records were appended on."""
        return {file.date for file in self.files if file.date}

    @property
    def bytes(self) -> int:
        """Size of its files."""
        return sum(file.bytes for file in self.files)


def resolve(ranges: Iterable[Range]) -> tuple[list[Range], list[Range]]:
    """Live ranges of one partition in order, and those that a live one covers.

    >>> a, b = (Range("spans", 0, f, l, 1, 0) for f, l in ((0, 4), (5, 9)))
    >>> [r.name for r in resolve([b, a])[0]]
    ['0-4', '5-9']
    >>> [r.name for r in resolve([a, b, Range("spans", 0, 0, 9, 2, 0)])[0]]
    ['0-9']
    """
    live: list[Range] = []
    covered: list[Range] = []
    end = -1
    for item in sorted(ranges, key=lambda r: (r.first, -r.last)):
        if item.first > end:
            live.append(item)
            end = item.last
        else:
            covered.append(item)
    return live, covered


def gaps(live: Sequence[Range]) -> list[tuple[int, int]]:
    """Offsets between live ranges that no range has: (first, last), both inclusive."""
    found, end = [], -1
    for item in live:
        if item.first > end + 1:
            found.append((end + 1, item.first - 1))
        end = item.last
    return found


def tenant_of(key: str) -> str:
    """Tenant of a record's key.

    >>> tenant_of("acme/0af7"), tenant_of("acme")
    ('acme', 'acme')
    """
    return key.partition("/")[0]


def date_of(appended_ns: int) -> str:
    """UTC day of a time.

    >>> date_of(1_800_000_000_000_000_000)
    '2027-01-15'
    """
    return _day(appended_ns // 86_400_000_000_000)


@lru_cache(maxsize=64)
def _day(number: int) -> str:
    return (dt.date(1970, 1, 1) + dt.timedelta(days=number)).isoformat()


def quoted(tenant: str) -> str:
    """A tenant as part of a path.

    >>> quoted("a/b c"), unquote(quoted("ä"))
    ('a%2Fb%20c', 'ä')
    """
    return quote(tenant, safe="") or "%"


def data_path(kind: str, topic: str, tenant: str, date: str, name: str) -> str:
    """Where a data file lies, relative to the root."""
    folder = f"{RAW}/topic={topic}" if kind == RAW else f"tables/{kind}"
    return f"{folder}/tenant={quoted(tenant)}/date={date}/{name}.parquet"
