"""Parquet archive of the log: ranges of records and their columns by tenant and day. See ``raw`` for the layout.

``files`` (the medium) <- ``manifest`` <- ``raw`` (reading) <- ``writer`` <- ``repair``, ``compaction`` <- ``archiver``
(the process), ``load`` (what queries take).
"""

from __future__ import annotations

from spanloop.pipeline.archive.load import Archive, Loaded
from spanloop.pipeline.archive.raw import ArchiveStore, RawFile
from spanloop.pipeline.archive.writer import write_range

__all__ = ["Archive", "ArchiveStore", "Loaded", "RawFile", "write_range"]
