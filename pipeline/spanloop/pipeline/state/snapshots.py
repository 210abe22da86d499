"""Snapshots of a partition's state: a chain of files in a folder or a bucket, written every few seconds.

Place in the flow: workers of the Kafka runtime. The log is the truth: a snapshot only saves reading it from the start. Each file holds
the entries that changed since the one before and the offsets that the state then contains; a base holds all entries. A worker that
takes a partition over begins an *epoch*: its first file names the file it goes on from, so that whatever an owner that does
not know yet that it lost the partition still writes is nobody's continuation.

Invariants: a file is there whole or not at all (local: written beside, synced, renamed; S3: one put) and carries its digest; a
damaged or missing file ends the chain before it, never the state; any chain that is found is consistent, newer ones only
save more work.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
from pyarrow import fs

from spanloop.schemas.errors import ConfigError, TransientError

__all__ = ["Chain", "Snapshots"]

_NAME = re.compile(r"(\d{8})-(\d{8})-([0-9a-f]{8})\.snapshot\Z")
_BASE_MIN = 4 * 2**20
"""A new base is written once the changes since the last one are larger than it, and than this."""
_DIGEST = 32
_log = logging.getLogger("spanloop.snapshots")


class _File(msgspec.Struct, array_like=True):
    """Content of one file."""

    stage: str
    previous: str
    """Name of the file before; empty: this is a base."""
    offsets: dict[str, int]
    """Offsets that the state contains, by source; of own outputs, the last that were written."""
    writes: dict[str, bytes | None]


class Snapshots:
    """Where all chains are.

    Args:
        url: folder, or s3://bucket/prefix.
        endpoint: of an S3-compatible store, with scheme.
    """

    def __init__(self, url: str, endpoint: str = "") -> None:
        split = urlsplit(url)
        if split.scheme == "s3":
            where = urlsplit(endpoint)
            options = {"endpoint_override": where.netloc, "scheme": where.scheme} if endpoint else {}
            self.fs: fs.FileSystem = fs.S3FileSystem(**options)
            self.root = f"{split.netloc}{split.path}".rstrip("/")
            self._local = False
        elif split.scheme in ("", "file"):
            self.fs = fs.LocalFileSystem()
            self.root = str(Path(split.path or url).absolute())
            self._local = True
        else:
            raise ConfigError(f"process.snapshots = {url!r} is neither a folder nor s3://bucket/prefix")

    def open(self, stage: str) -> Chain:
        """The newest state of a stage, as the beginning of a new epoch."""
        return Chain(self, stage)

    def names(self, stage: str) -> list[str]:
        """Files of a stage, newest first."""
        try:
            infos = self.fs.get_file_info(fs.FileSelector(f"{self.root}/{stage}", allow_not_found=True))
        except OSError as exc:
            raise TransientError(f"snapshots below {self.root} cannot be listed: {exc}") from exc
        return sorted((i.base_name for i in infos if _NAME.match(i.base_name)), reverse=True)

    def read(self, stage: str, name: str) -> _File | None:
        """A file, None when it is missing or damaged (then it is put aside)."""
        path = f"{self.root}/{stage}/{name}"
        try:
            with self.fs.open_input_stream(path, compression=None) as stream:
                data = stream.read()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise TransientError(f"snapshot {path} cannot be read: {exc}") from exc
        try:
            return _decode(data, stage)
        except (ValueError, OSError, msgspec.DecodeError, pa.ArrowException) as exc:
            _log.warning("snapshot %s is damaged (%s): put aside, the chain before it is used", path, exc)
            with contextlib.suppress(OSError):
                self.fs.move(path, f"{self.root}/{stage}/damaged-{name}")
            return None

    def write(self, stage: str, name: str, content: _File) -> int:
        """Write a file durably; returns its size. Raises TransientError."""
        plain = msgspec.msgpack.encode(content)
        body = len(plain).to_bytes(8, "big") + pa.compress(plain, codec="zstd", asbytes=True)
        data = hashlib.blake2b(body, digest_size=_DIGEST).digest() + body
        path = f"{self.root}/{stage}/{name}"
        try:
            if self._local:
                _write_local(Path(path), data)
            else:
                with self.fs.open_output_stream(path) as stream:
                    stream.write(data)
        except OSError as exc:
            raise TransientError(
                f"snapshot {path} cannot be written: {exc}; free space or mend the store"
            ) from exc
        return len(data)

    def delete(self, stage: str, name: str) -> None:
        """Delete a file that nothing goes on from any more."""
        with contextlib.suppress(OSError):
            self.fs.delete_file(f"{self.root}/{stage}/{name}")


class Chain:
    """The state of one stage: entries in memory, changes on their way to the next file."""

    def __init__(self, snapshots: Snapshots, stage: str) -> None:
        self._snapshots = snapshots
        self.stage = stage
        self.entries: dict[str, bytes] = {}
        self.offsets: dict[str, int] = {}
        """Contained in ``entries``."""
        self.durable: dict[str, int] = {}
        """Contained in the last file: the group may commit up to these."""
        self._changed: dict[str, bytes | None] = {}
        self._previous = ""
        self._base_bytes = self._delta_bytes = 0
        self._last_base = ""
        names = snapshots.names(stage)
        self._epoch = (int(names[0][:8]) if names else 0) + 1
        self._sequence = 0
        self._load(names)

    def _load(self, names: list[str]) -> None:
        """Take the chain behind the newest file that leads back to a base."""
        for name in names:
            chain = self._chain(name)
            if chain is None:
                continue
            self._last_base = chain[-1][0]
            contents = [content for _, content in chain]
            for content in reversed(contents):
                for key, value in content.writes.items():
                    if value is None:
                        self.entries.pop(key, None)
                    else:
                        self.entries[key] = value
            self.offsets = dict(contents[0].offsets)
            self.durable = dict(self.offsets)
            self._previous = name
            self._delta_bytes = sum(len(v or b"") for c in contents[:-1] for v in c.writes.values())
            self._base_bytes = sum(len(v or b"") for v in contents[-1].writes.values())
            return

    def _chain(self, name: str) -> list[tuple[str, _File]] | None:
        chain: list[tuple[str, _File]] = []
        while True:
            content = self._snapshots.read(self.stage, name)
            if content is None:
                return None
            chain.append((name, content))
            if not content.previous:
                return chain
            name = content.previous

    def commit(self, writes: Mapping[str, bytes | None], offsets: Mapping[str, int]) -> None:
        """Take changes in; they are durable after the next ``flush``."""
        for key, value in writes.items():
            if value is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = value
        self._changed.update(writes)
        self.offsets.update(offsets)

    def is_newest(self) -> bool:
        """Whether no other owner has written since this chain was opened or flushed."""
        names = self._snapshots.names(self.stage)
        return not names or int(names[0][:8]) <= self._epoch

    @property
    def dirty(self) -> bool:
        """Whether there is something to flush."""
        return bool(self._changed) or self.offsets != self.durable

    def flush(self) -> None:
        """Write what changed. Raises TransientError; nothing is lost then, call it again."""
        if not self.dirty:
            return
        size = sum(len(value or b"") + len(key) for key, value in self._changed.items())
        base = not self._previous or self._delta_bytes + size > max(self._base_bytes, _BASE_MIN)
        name = f"{self._epoch:08d}-{self._sequence:08d}-{secrets.token_hex(4)}.snapshot"
        content = _File(
            self.stage,
            "" if base else self._previous,
            dict(self.offsets),
            {**self.entries} if base else self._changed,
        )
        self._snapshots.write(self.stage, name, content)
        if base:
            self._base_bytes = sum(len(key) + len(value) for key, value in self.entries.items())
            self._delta_bytes = 0
            self._forget_old(name)
        else:
            self._delta_bytes += size
        self._sequence += 1
        self._previous, self._changed, self.durable = name, {}, dict(self.offsets)

    def _forget_old(self, base: str) -> None:
        """Delete what is older than the base before this one: somebody may be reading that one."""
        for name in self._snapshots.names(self.stage):
            if name < self._last_base:
                self._snapshots.delete(self.stage, name)
        self._last_base = base


def _decode(data: bytes, stage: str) -> _File:
    digest, body = bytes(memoryview(data)[:_DIGEST]), bytes(memoryview(data)[_DIGEST:])
    if hashlib.blake2b(body, digest_size=_DIGEST).digest() != digest:
        raise ValueError("its digest does not fit")
    plain = pa.decompress(body[8:], int.from_bytes(body[:8], "big"), codec="zstd", asbytes=True)
    found = msgspec.msgpack.decode(plain, type=_File)
    if found.stage != stage:
        raise ValueError(f"it is of {found.stage}")
    return found


def _write_local(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
