"""How far a file has been imported, so that a run that was cut short goes on where it stopped.

A checkpoint says: the first so many bytes of a file that began like this, with this hash, are in that log. It is believed only
when the file still has these bytes and the log still has the record that was appended last, so that a stale, foreign or damaged
checkpoint costs a repetition (which the log skips) and never a span. It is written after the append.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from spanloop.pipeline.formats.framing import Place
from spanloop.pipeline.formats.stream import Stream
from spanloop.pipeline.ports import Appended, Log, NewRecord, alone, source_of
from spanloop.schemas.canonical import digest
from spanloop.schemas.errors import SpanloopError

__all__ = ["HEAD", "Checkpoint", "Checkpoints", "Counts", "at_checkpoint", "checkpoint_of"]

HEAD = 4096
"""Bytes at the start of a file by which its checkpoint is found."""


class Counts(msgspec.Struct):
    """What became of the records of a file so far."""

    spans: int = 0
    events: int = 0
    duplicates: int = 0
    scores: int = 0
    rejected: int = 0


class Checkpoint(msgspec.Struct, frozen=True):
    """The first part of a file that is in the log."""

    size: int
    """Bytes, unpacked."""
    sha256: str
    place: Place
    counts: Counts
    topic: str = ""
    """Of the record that was appended last; empty: none of the file's records made one."""
    partition: int = 0
    offset: int = -1
    event_id: str = ""


class Checkpoints:
    """The checkpoints of one log.

    Args:
        folder: where they are kept.
        log: that the files go to.
        rules: all that decides which events a file becomes (tenant, redaction, limits).
    """

    def __init__(self, folder: Path, log: Log, *rules: str) -> None:
        self._folder = folder
        self._log = log
        self._rules = rules

    def key(self, head: bytes) -> str:
        """Name of the checkpoint of a file that begins like this."""
        return digest(*self._rules, head[:HEAD])

    def load(self, key: str) -> Checkpoint | None:
        """The checkpoint, if there is one and its log still has what it says."""
        try:
            data = (self._folder / f"{key}.json").read_bytes()
            found = msgspec.json.decode(data, type=Checkpoint)
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        return found if self._on_log(found) else None

    def save(self, key: str, checkpoint: Checkpoint) -> None:
        """Replace the checkpoint. A disk that refuses costs the checkpoint, not the import."""
        temporary = self._folder / f".{key}.{os.getpid()}"
        with contextlib.suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary.write_bytes(msgspec.json.encode(checkpoint))
            temporary.replace(self._folder / f"{key}.json")

    def _on_log(self, checkpoint: Checkpoint) -> bool:
        if not checkpoint.topic:
            return False
        source = source_of(checkpoint.topic, checkpoint.partition)
        parts = self._log.sources(checkpoint.topic)
        name = source if parts == (checkpoint.topic,) else alone(source)
        try:
            read = self._log.read([name], {source: checkpoint.offset - 1}, 1)
        except SpanloopError:
            return False
        return bool(read) and (read[0].offset, read[0].event_id) == (checkpoint.offset, checkpoint.event_id)


def at_checkpoint(stream: Stream, checkpoint: Checkpoint) -> bool:
    """Take the bytes that a checkpoint speaks of; False when they are others (the stream has to be opened anew)."""
    return stream.skip(checkpoint.size) and stream.sha256 == checkpoint.sha256


def checkpoint_of(
    stream_size: int, sha256: str, place: Place, counts: Counts, last: tuple[NewRecord, Appended] | None
) -> Checkpoint:
    """The checkpoint behind a group of records that was appended."""
    copy = msgspec.structs.replace(counts)
    if last is None:
        return Checkpoint(stream_size, sha256, place, copy)
    record, appended = last
    return Checkpoint(
        stream_size, sha256, place, copy, record.topic, appended.partition, appended.offset, record.event_id
    )
