"""What a statement needs: which views, macros and tables it names, and the files and tail of those tables.

Place in the flow: ``session`` asks, ``sandbox`` is told. Where everything a statement reads lies in sound archive files and
nothing is newer on the log, the manifests alone answer, without pyarrow; in every other case ``archive.load`` does, which also
repairs. Both give the same rows.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec

from spanloop.pipeline.archive.manifest import RANGES, Range, gaps, resolve
from spanloop.pipeline.archive.source import contradicts
from spanloop.pipeline.macros import MACROS
from spanloop.pipeline.ports import Log, topic_of
from spanloop.pipeline.tables import TABLES, TABLES_OF_TOPIC, arrow_name, sql_type
from spanloop.pipeline.views import VIEWS

__all__ = [
    "TABLES_VERSION",
    "Names",
    "Part",
    "names_in",
    "setup_of",
    "sound_parts",
    "sql_columns",
]

TABLES_VERSION = "2"
"""The same as ``archive.writer.TABLES_VERSION``, which cannot be imported without pyarrow; a test compares them."""
_UNDER = {
    "decisions": {"events", "samples", "credits", "calls", "agents"},
    "metrics": {"orchestrations", "agents", "calls", "events", "edges", "rewards"},
}
"""Views that others select from."""
_decoder = msgspec.json.Decoder(Range)


class Names(NamedTuple):
    """Names of a statement that mean something here."""

    views: tuple[str, ...]
    macros: tuple[str, ...]
    tables: tuple[str, ...]


class Part(NamedTuple):
    """Files of a table that have the same columns."""

    files: tuple[str, ...]
    has: tuple[str, ...]
    checksums: tuple[int, ...] = ()
    """crc32 of each file where the manifest says it, else -1."""


def names_in(sql: str) -> Names:
    """Views, macros and tables whose names occur in the text: only these are read.

    >>> names_in("SELECT count(*) FROM Agents").tables
    ('agents', 'orchestrations')
    """
    words = set(re.findall(r"[a-z_]+", sql.lower()))
    macros = tuple(name for name in MACROS if name in words)
    views = {name for name in VIEWS if name in words}
    views |= {view for name in macros for view in MACROS[name].views}
    for name, others in _UNDER.items():
        if name in views:
            views |= others
    tables = {table for name in views for table in VIEWS[name].tables}
    tables |= {table for name in macros for table in MACROS[name].tables}
    tables |= {name for name in TABLES if f"t_{name}" in words}
    return Names(tuple(name for name in VIEWS if name in views), macros, tuple(sorted(tables)))


def setup_of(names: Names, *, everything: bool) -> list[str]:
    """CREATE statements, in order; ``everything`` makes all views, for statements that list them."""
    views = tuple(VIEWS) if everything else names.views
    made = [f"CREATE TEMP VIEW {name} AS {VIEWS[name].sql}" for name in views]
    return made + [
        f"CREATE TEMP MACRO {name}({MACROS[name].parameters}) AS TABLE {MACROS[name].sql}"
        for name in names.macros
    ]


def functions_of(names: Names, *, everything: bool = False) -> list[str]:
    """Names of the functions to register."""
    views = VIEWS if everything else names.views
    wanted = [MACROS[name].function for name in names.macros] + [VIEWS[name].function for name in views]
    return [name for name in dict.fromkeys(wanted) if name]


def sql_columns(table: str) -> dict[str, str]:
    """Column -> DuckDB type."""
    return {column: sql_type(type_) for column, type_ in TABLES[table].columns.items()}


def sound_parts(root: str, log: Log | None, tables: Iterable[str]) -> dict[str, list[Part]] | None:
    """Files of tables from a local archive's manifests, when they are all that there is: every range is there and current,
    every file has its size, the log (if there is one) has nothing newer. None: ask ``archive.load``.
    """
    wanted = {name: TABLES[name].topic for name in tables}
    files: dict[tuple[str, tuple[str, ...]], list[tuple[str, int]]] = {}
    for topic in sorted(set(wanted.values())):
        live = _live(root, topic)
        if live is None or (log is not None and not _complete(log, topic, live)):
            return None
        names = [name for name, of in wanted.items() if of == topic]
        for item in (item for ranges in live.values() for item in ranges):
            if item.lost or (item.records and not _current(item)):
                return None
            for info in item.files:
                if info.kind in names:
                    path = f"{root}/{info.path}"
                    if _size(path) != info.bytes:
                        return None
                    files.setdefault((info.kind, tuple(item.schemas[info.kind])), []).append(
                        (path, info.crc32)
                    )
    found: dict[str, list[Part]] = {name: [] for name in wanted}
    for (name, has), own in files.items():
        found[name].append(Part(tuple(path for path, _ in own), has, tuple(crc for _, crc in own)))
    return found


def _live(root: str, topic: str) -> dict[str, list[Range]] | None:
    """Live ranges by source; None where a manifest is damaged or missing."""
    by_source: dict[str, list[Range]] = {}
    try:
        for partition in os.listdir(f"{root}/{RANGES}/{topic}"):
            folder = f"{RANGES}/{topic}/{partition}"
            for name in os.listdir(f"{root}/{folder}"):
                if not name.endswith(".json") or name.startswith("."):
                    continue
                with open(f"{root}/{folder}/{name}", "rb") as file:
                    item = _decoder.decode(file.read())
                if item.path != f"{folder}/{name}":
                    return None
                by_source.setdefault(item.source, []).append(item)
    except FileNotFoundError:
        return {} if not os.path.isdir(f"{root}/{RANGES}/{topic}") else None
    except (OSError, ValueError, msgspec.MsgspecError):
        return None
    live = {source: resolve(ranges)[0] for source, ranges in by_source.items()}
    return None if any(gaps(ranges) for ranges in live.values()) else live


def _complete(log: Log, topic: str, live: Mapping[str, list[Range]]) -> bool:
    """Whether the log has nothing that these ranges lack, and does not contradict them."""
    for source in {*log.sources(topic), *live}:
        ranges = live.get(source, [])
        if log.end(source) > (ranges[-1].last if ranges else -1) or (
            ranges and contradicts(log, source, ranges)
        ):
            return False
    return all(topic_of(source)[0] == topic for source in live)


def _current(item: Range) -> bool:
    """Whether its tables can be read as they are, by column name (``archive.repair.stale_tables``)."""
    if item.version != TABLES_VERSION:
        return False
    for name in TABLES_OF_TOPIC[item.topic]:
        known = item.schemas.get(name)
        columns = TABLES[name].columns
        if known is None or any(
            known.get(column, arrow_name(t)) != arrow_name(t) for column, t in columns.items()
        ):
            return False
    return True


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return -1


def lists_names(sql: str) -> bool:
    """Whether a statement asks which views there are."""
    words = set(re.findall(r"[a-z_]+", sql.lower()))
    return bool(
        words
        & {
            "show",
            "describe",
            "duckdb_views",
            "duckdb_columns",
            "information_schema",
            "sqlite_master",
            "pg_catalog",
        }
    )


def as_json(parts: Mapping[str, list[Part]]) -> dict[str, Any]:
    """Tables as the sandbox takes them."""
    return {
        name: {
            "columns": sql_columns(name),
            "parts": [{"files": part.files, "has": part.has} for part in own],
        }
        for name, own in parts.items()
    }
