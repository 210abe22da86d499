"""Parquet archive of the log: ranges of records and their columns by tenant and day. See ``raw`` for the layout.

``files`` (the medium) <- ``manifest`` <- ``raw`` (reading) <- ``writer`` <- ``repair``, ``compaction`` <- ``archiver``
(the process), ``load`` (what queries take). Names are imported when they are used, since a query that needs only manifests
must not pay for pyarrow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spanloop.pipeline.archive.load import Archive, Loaded
    from spanloop.pipeline.archive.raw import ArchiveStore, RawFile
    from spanloop.pipeline.archive.writer import write_range

__all__ = ["Archive", "ArchiveStore", "Loaded", "RawFile", "write_range"]

_HOMES = {
    "Archive": "load",
    "Loaded": "load",
    "ArchiveStore": "raw",
    "RawFile": "raw",
    "write_range": "writer",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
