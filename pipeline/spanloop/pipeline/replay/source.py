"""What a replay reads: pieces of the archive by offset, so that files merged meanwhile do not matter, and their records.

Place in the flow: the driver plans pieces once and keeps the plan; every pass reads pieces through ``records``.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from spanloop.pipeline.archive.manifest import RAW
from spanloop.pipeline.archive.raw import ArchiveStore
from spanloop.pipeline.replay.reading import Position
from spanloop.schemas.errors import TerminalError, TransientError

__all__ = ["Chunk", "plan_chunks", "records"]

_COLUMNS = ["offset", "key", "value", "appended_ns"]
_BATCH = 1_000


class Chunk(msgspec.Struct, frozen=True):
    """Offsets ``first``..``last`` of one partition, as the files of the archive that held them when it was planned."""

    topic: str
    partition: int
    first: int
    last: int
    rows: int
    bytes: int
    """Of the values, uncompressed; about, where only some days are wanted."""
    paths: tuple[str, ...]
    since: str = ""
    until: str = ""

    @property
    def name(self) -> str:
        """Names what is made of it."""
        return f"{self.topic}-{self.partition}-{self.first}-{self.last}"


def plan_chunks(
    store: ArchiveStore,
    topic: str,
    *,
    since: dt.date | None = None,
    until: dt.date | None = None,
    chunk_bytes: int = 64 * 2**20,
) -> list[Chunk]:
    """Pieces of about ``chunk_bytes`` (a range of the archive is never split), by partition and offset.

    Args:
        store: The archive.
        topic: What to read.
        since, until: UTC days of the append, both inclusive.
        chunk_bytes: Uncompressed size of the values.
    """
    first_day = since.isoformat() if since else ""
    last_day = until.isoformat() if until else "9999-12-31"
    chunks: list[Chunk] = []
    for item in store.ranges(topic):
        raw = [file for file in item.files if file.kind == RAW]
        files = [file for file in raw if first_day <= file.date <= last_day]
        if not files:
            continue
        rows = sum(file.rows for file in files)
        size = item.value_bytes * rows // max(1, sum(file.rows for file in raw))
        paths = tuple(store.files.full(file.path) for file in files)
        last = chunks[-1] if chunks else None
        if (
            last is not None
            and last.partition == item.partition
            and last.bytes + size <= chunk_bytes
            and last.last + 1 == item.first
        ):
            chunks[-1] = Chunk(
                topic, item.partition, last.first, item.last, last.rows + rows, last.bytes + size,
                (*last.paths, *paths), first_day, last_day,
            )  # fmt: skip
        else:
            chunks.append(
                Chunk(topic, item.partition, item.first, item.last, rows, size, paths, first_day, last_day)
            )
    return chunks


def records(store: ArchiveStore, chunk: Chunk) -> Iterator[tuple[Position, bytes]]:
    """Records of a chunk, file by file, each in offset order.

    Raises:
        TransientError: a file is gone: it was merged; take ``refreshed(store, chunk)``.
        TerminalError: a file cannot be read.
    """
    for path in chunk.paths:
        try:
            with pq.ParquetFile(
                store.filesystem.open_input_file(path), page_checksum_verification=True
            ) as file:
                for rows in file.iter_batches(_BATCH, columns=_COLUMNS):
                    columns = [rows.column(name).to_pylist() for name in _COLUMNS]
                    for offset, key, value, appended_ns in zip(*columns, strict=True):
                        if chunk.first <= offset <= chunk.last:
                            at = Position(chunk.topic, chunk.partition, offset, appended_ns, key)
                            yield at, value
        except FileNotFoundError as exc:
            raise TransientError(f"{path} is gone: merged meanwhile, or removed") from exc
        except (OSError, pa.ArrowException) as exc:
            raise TerminalError(
                f"{path} cannot be read: {str(exc).splitlines()[0]}; `spanloop archive verify --deep` sets damaged files "
                "aside and makes them again, then run the same command: it goes on where it stopped"
            ) from exc


def refreshed(store: ArchiveStore, chunk: Chunk) -> Chunk:
    """The chunk with the files that hold its offsets now."""
    paths = [
        store.files.full(file.path)
        for item in store.ranges(chunk.topic)
        if item.partition == chunk.partition and item.first <= chunk.last and chunk.first <= item.last
        for file in item.files
        if file.kind == RAW and chunk.since <= file.date <= (chunk.until or "9999-12-31")
    ]
    return msgspec.structs.replace(chunk, paths=tuple(paths))
