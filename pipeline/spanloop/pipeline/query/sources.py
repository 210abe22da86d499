"""Files of a statement's tables: straight from sound manifests, or through the archive's reader.

Place in the flow: ``session`` asks for the parts of the tables that a statement names. Tails are decoded and written as Parquet
to a scratch folder, files of a remote archive are fetched, since the process that reads them has neither log nor network.

Invariants: what comes back is all rows up to the log's end at the time of the call, whatever of it is archived. Damage is
worked around (``archive.load``); what cannot be read any more is named in ``lost``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spanloop.pipeline.archive.manifest import quoted
from spanloop.pipeline.ports import Log
from spanloop.pipeline.query.checked import unsound
from spanloop.pipeline.query.plan import Part, sound_parts
from spanloop.pipeline.tables import TABLES
from spanloop.schemas.errors import TransientError

if TYPE_CHECKING:
    import tempfile

    import pyarrow as pa

    from spanloop.pipeline.archive import Archive, ArchiveStore

__all__ = ["Sources"]

_ATTEMPTS = 3
Parts = dict[str, list[Part]]


class Sources:
    """Where one deployment's rows lie.

    Args:
        log: Of the deployment; None: only what is archived.
        archive: Its archive; a path stands for a folder.
        tenant: Leave out other tenants' files; None: all.
        segment_records: Records of a topic that a query leaves undecoded before it writes them to an embedded archive.
        cache: Where files of a remote archive are kept for the next query.
    """

    def __init__(
        self,
        log: Log | None,
        archive: Path | ArchiveStore,
        *,
        tenant: str | None,
        segment_records: int | None,
        cache: Path | None,
    ) -> None:
        self._log = log
        self._place = archive
        self._folder = None if tenant is None else f"/tenant={quoted(tenant)}/"
        self._segment_records = segment_records
        self._cache = cache
        self._archive: Archive | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._tails = 0
        self.unreadable = 0
        """Records of the last tables that could not be decoded."""
        self.lost: tuple[str, ...] = ()
        """What the last tables lack because it cannot be read any more."""

    def close(self) -> None:
        """Remove the scratch folder."""
        if self._scratch is not None:
            self._scratch.cleanup()

    def parts(self, tables: Iterable[str]) -> Parts:
        """Files of some tables, by the columns that they have. Raises TransientError: log or archive do not answer."""
        tables = tuple(tables)
        self.unreadable, self.lost = 0, ()
        root = self._local_root()
        parts: Parts | None = None
        if root is not None and self._archive is None:
            parts = sound_parts(root, self._log, tables)
        if parts is None:
            parts = self._loaded(tables)
        for _ in range(_ATTEMPTS):
            parts = {name: self._own(own) for name, own in parts.items()}
            files = [
                pair
                for own in parts.values()
                for part in own
                for pair in zip(part.files, part.checksums, strict=True)
            ]
            damaged = unsound(root or str(self._cache_folder()), files)
            if not damaged:
                return parts
            if root is None:
                for path in damaged:
                    Path(path).unlink(missing_ok=True)  # fetched again
            else:
                self._opened().discard(tables)
            parts = self._loaded(tables)
        raise TransientError("files of the archive change while they are read: run it again")

    def repaired(self, tables: Iterable[str], before: Parts) -> Parts | None:
        """After a statement over ``before`` failed: what to read instead, None where its files are sound."""
        tables = tuple(tables)
        self._opened().discard(tables)
        after = self._loaded(tables)

        def listed(parts: Parts) -> set[str]:
            return {f for own in parts.values() for part in own for f in part.files if not self._is_tail(f)}

        return after if listed(after) != listed(before) else None

    def _own(self, parts: Iterable[Part]) -> list[Part]:
        if self._folder is None:
            return list(parts)
        kept = []
        for part in parts:
            pairs = zip(part.files, part.checksums, strict=True)
            own = [(file, crc) for file, crc in pairs if self._folder in file or self._is_tail(file)]
            if own:
                kept.append(Part(tuple(file for file, _ in own), part.has, tuple(crc for _, crc in own)))
        return kept

    def _is_tail(self, file: str) -> bool:
        return self._scratch is not None and file.startswith(self._scratch.name)

    def _local_root(self) -> str | None:
        if isinstance(self._place, Path):
            return str(self._place.absolute())
        return self._place.files.root if self._place.files.local else None

    def _opened(self) -> Archive:
        if self._archive is None:
            from spanloop.pipeline.archive import Archive
            from spanloop.pipeline.clock import SystemClock
            from spanloop.pipeline.log.memory import MemoryLog

            sizes: dict[str, Any] = (
                {} if self._segment_records is None else {"segment_records": self._segment_records}
            )
            if self._log is None:
                sizes["fill"] = False
            self._archive = Archive(self._log or MemoryLog(SystemClock()), self._place, **sizes)
        return self._archive

    def _loaded(self, tables: tuple[str, ...]) -> Parts:
        """Through the archive's reader: tails decoded, damage worked around."""
        import pyarrow as pa

        archive = self._opened()
        for attempt in range(_ATTEMPTS):
            loaded = archive.load(tables)
            self.unreadable = sum({TABLES[n].topic: table.unreadable for n, table in loaded.items()}.values())
            self.lost = tuple(sorted({line for table in loaded.values() for line in table.lost}))
            checksums = self._checksums(tables)
            try:
                return {
                    name: [*self._archived(name, table.files, checksums), *self._tail(name, table.tail)]
                    for name, table in loaded.items()
                }
            except (OSError, pa.ArrowException) as exc:
                if attempt == _ATTEMPTS - 1:
                    raise TransientError(f"the archive cannot be read: {exc}") from exc
                archive.discard(tables)
        raise AssertionError

    def _checksums(self, tables: tuple[str, ...]) -> dict[str, int]:
        """crc32 by path as ``Archive.load`` gives it; empty where the archive does not answer now."""
        store = self._opened().store
        try:
            listing = store.listing(sorted({TABLES[name].topic for name in tables}))
        except OSError:
            return {}
        return {
            store.files.full(info.path): info.crc32
            for ranges in listing.live.values()
            for item in ranges
            for info in item.files
        }

    def _archived(self, name: str, files: tuple[str, ...], checksums: dict[str, int]) -> list[Part]:
        import pyarrow.parquet as pq

        if self._folder is not None:
            files = tuple(file for file in files if self._folder in file)
        by_columns: dict[tuple[str, ...], list[tuple[str, int]]] = {}
        for file, local in zip(files, self._fetched(files), strict=True):
            has = tuple(column for column in pq.read_schema(local).names if column in TABLES[name].columns)
            by_columns.setdefault(has, []).append((local, checksums.get(file, -1)))
        return [
            Part(tuple(f for f, _ in own), has, tuple(crc for _, crc in own))
            for has, own in by_columns.items()
        ]

    def _tail(self, name: str, tail: pa.Table) -> list[Part]:
        import pyarrow.parquet as pq

        if not tail.num_rows:
            return []
        if self._scratch is None:
            import tempfile

            self._scratch = tempfile.TemporaryDirectory(prefix="spanloop-query-")
        self._tails += 1
        path = os.path.join(self._scratch.name, f"{name}-{self._tails}.parquet")
        pq.write_table(tail, path, compression="none")
        return [Part((path,), tuple(tail.column_names), (-1,))]

    def _fetched(self, files: tuple[str, ...]) -> tuple[str, ...]:
        """The same files on this disk."""
        store = self._opened().store
        if store.files.local:
            return files
        from spanloop.pipeline.query.fetch import fetch

        return fetch(store, files, self._cache_folder())

    def _cache_folder(self) -> Path:
        import tempfile

        return self._cache or Path(tempfile.gettempdir()) / f"spanloop-cache-{os.getuid()}"
