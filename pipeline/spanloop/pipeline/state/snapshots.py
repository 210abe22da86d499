"""Snapshots of a partition's state: a chain of files in a folder or a bucket, written every few seconds.

Place in the flow: workers of the Kafka runtime. The log is the truth: a snapshot only saves reading it from the start. Each file holds
the entries that changed since the one before and the offsets that the state then contains; a base holds all entries. A worker that
takes a partition over begins an *epoch* with an empty file that names the file it goes on from, so that whatever an owner that
does not know yet that it lost the partition still writes is nobody's continuation.

Invariants: a file is there whole or not at all (local: written beside, synced, renamed; S3: one put) and carries its digest; a
damaged or missing file ends the chain before it, never the state; any chain that is found is consistent, newer ones only
save more work. An owner deletes nothing once there is a newer epoch.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import secrets
from collections.abc import Mapping

import msgspec
import pyarrow as pa

from spanloop.pipeline.archive.files import Files, open_files
from spanloop.schemas.errors import ConfigError, TransientError

__all__ = ["Chain", "Snapshots"]

_NAME = re.compile(r"(\d{8})-(\d{8})-([0-9a-f]{8})\.snapshot\Z")
BASE_MIN = 4 * 2**20
"""A new base is written once the changes since the last one are larger than it, and than this ..."""
CHAIN_MAX = 64
"""... or once the chain has so many files."""
_LOADS = 5
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

    @property
    def size(self) -> int:
        """About how many bytes there are in it."""
        return _size(self.writes)


def _size(entries: Mapping[str, bytes | None]) -> int:
    return sum(len(key) + len(value or b"") for key, value in entries.items())


class Snapshots:
    """Where all chains are.

    Args:
        url: folder, or s3://bucket/prefix.
        endpoint: of an S3-compatible store, with scheme.
        files: the medium itself, for tests.
    """

    def __init__(self, url: str, endpoint: str = "", *, files: Files | None = None) -> None:
        try:
            self.files = files or open_files(url, endpoint)
        except ConfigError as exc:
            raise ConfigError(
                f"process.snapshots = {url!r} is neither a folder nor s3://bucket/prefix"
            ) from exc

    def open(self, stage: str) -> Chain:
        """The newest state of a stage, as the beginning of a new epoch. Raises TransientError."""
        return Chain(self, stage)

    def names(self, stage: str) -> list[str]:
        """Files of a stage, newest first."""
        try:
            found = [entry.path.rpartition("/")[2] for entry in self.files.list(stage)]
        except OSError as exc:
            raise TransientError(f"snapshots below {self.files.uri(stage)} cannot be listed: {exc}") from exc
        return sorted(filter(_NAME.match, found), reverse=True)

    def read(self, stage: str, name: str) -> _File | None:
        """A file, None when it is damaged (then it is put aside). Raises FileNotFoundError, TransientError."""
        path = f"{stage}/{name}"
        try:
            data = self.files.read(path)
        except FileNotFoundError:
            raise
        except OSError as exc:
            raise TransientError(f"snapshot {self.files.uri(path)} cannot be read: {exc}") from exc
        try:
            return _decode(data, stage)
        except (ValueError, OSError, msgspec.DecodeError, msgspec.ValidationError, pa.ArrowException) as exc:
            _log.warning(
                "snapshot %s is damaged (%s): put aside, the chain before it is used",
                self.files.uri(path),
                exc,
            )
            with contextlib.suppress(OSError):
                self.files.move(path, f"{stage}/damaged-{name}")
            return None

    def write(self, stage: str, name: str, content: _File) -> None:
        """Write a file durably. Raises TransientError."""
        path = f"{stage}/{name}"
        try:
            self.files.write(path, _encode(content))
        except OSError as exc:
            raise TransientError(
                f"snapshot {self.files.uri(path)} cannot be written: {exc}; free space or mend the store"
            ) from exc

    def delete(self, stage: str, name: str) -> None:
        """Delete a file that nothing goes on from any more."""
        with contextlib.suppress(OSError):
            self.files.delete(f"{stage}/{name}")


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
        self._length = 0
        """Files in the chain behind ``_previous``."""
        self._base_bytes = self._delta_bytes = 0
        self._last_base = ""
        self._epoch = 1
        self._sequence = 0
        self._load()
        self._write({}, base=not self._previous or not self._is_listed())

    # ------------------------------------------------------------ loading

    def _load(self) -> None:
        """Take the chain behind the newest file that leads back to a base."""
        for attempt in range(_LOADS):
            names = self._snapshots.names(self.stage)
            self._epoch = (int(names[0][:8]) if names else 0) + 1
            known: dict[str, _File | None] = {}
            try:
                for name in names:
                    chain = self._chain(name, known)
                    if chain is not None:
                        self._take(name, chain)
                        return
            except FileNotFoundError:  # its owner tidied up in between
                if attempt + 1 < _LOADS:
                    continue
                self._load_any(names, known)
            return

    def _load_any(self, names: list[str], known: dict[str, _File | None]) -> None:
        """Files are missing for good: take the newest chain that is whole."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                chain = self._chain(name, known)
                if chain is not None:
                    self._take(name, chain)
                    return

    def _chain(self, name: str, known: dict[str, _File | None]) -> list[tuple[str, _File]] | None:
        """Files from ``name`` back to its base; None where one is damaged."""
        chain: list[tuple[str, _File]] = []
        while True:
            if name not in known:
                known[name] = self._snapshots.read(self.stage, name)
            content = known[name]
            if content is None:
                return None
            chain.append((name, content))
            if not content.previous:
                return chain
            name = content.previous

    def _take(self, name: str, chain: list[tuple[str, _File]]) -> None:
        for _, content in reversed(chain):
            _apply(self.entries, content.writes)
        self.offsets = dict(chain[0][1].offsets)
        self.durable = dict(self.offsets)
        self._previous, self._last_base, self._length = name, chain[-1][0], len(chain)
        self._base_bytes = chain[-1][1].size
        self._delta_bytes = sum(content.size for _, content in chain[:-1])

    # ------------------------------------------------------------ changing

    def commit(self, writes: Mapping[str, bytes | None], offsets: Mapping[str, int]) -> None:
        """Take changes in; they are durable after the next ``flush``."""
        _apply(self.entries, writes)
        self._changed.update(writes)
        self.offsets.update(offsets)

    @property
    def dirty(self) -> bool:
        """Whether there is something to flush."""
        return bool(self._changed) or self.offsets != self.durable

    def is_newest(self) -> bool:
        """Whether no other owner has taken the partition over since this chain was opened."""
        names = self._snapshots.names(self.stage)
        return not names or int(names[0][:8]) <= self._epoch

    def flush(self) -> None:
        """Write what changed. Raises TransientError; nothing is lost then, call it again."""
        if self.dirty:
            grown = self._delta_bytes + _size(self._changed) > max(self._base_bytes, BASE_MIN)
            self._write(self._changed, base=grown or self._length >= CHAIN_MAX)

    def _write(self, changed: Mapping[str, bytes | None], *, base: bool) -> None:
        name = f"{self._epoch:08d}-{self._sequence:08d}-{secrets.token_hex(4)}.snapshot"
        writes: dict[str, bytes | None] = {**self.entries} if base else {**changed}
        previous = "" if base else self._previous
        content = _File(self.stage, previous, dict(self.offsets), writes)
        self._snapshots.write(self.stage, name, content)
        self._sequence += 1
        self._previous, self._changed, self.durable = name, {}, dict(self.offsets)
        if base:
            self._base_bytes, self._delta_bytes, self._length = content.size, 0, 1
            self._forget_old(name)
        else:
            self._delta_bytes += content.size
            self._length += 1

    def _is_listed(self) -> bool:
        """Whether what was loaded is still there: its owner may have tidied it away since."""
        return {self._previous, self._last_base} <= set(self._snapshots.names(self.stage))

    def _forget_old(self, base: str) -> None:
        """Delete what is older than the base before this one (somebody may be reading that one), unless the partition has a
        new owner, whose chain may go back to any of our files."""
        try:
            names = self._snapshots.names(self.stage)
        except TransientError:  # another time
            return
        if int(names[0][:8] if names else 0) <= self._epoch:
            for name in names:
                if name < self._last_base:
                    self._snapshots.delete(self.stage, name)
        self._last_base = base


def _apply(entries: dict[str, bytes], writes: Mapping[str, bytes | None]) -> None:
    for key, value in writes.items():
        if value is None:
            entries.pop(key, None)
        else:
            entries[key] = value


def _encode(content: _File) -> bytes:
    plain = msgspec.msgpack.encode(content)
    body = len(plain).to_bytes(8, "big") + pa.compress(plain, codec="zstd", asbytes=True)
    return hashlib.blake2b(body, digest_size=_DIGEST).digest() + body


def _decode(data: bytes, stage: str) -> _File:
    digest, body = data[:_DIGEST], memoryview(data)[_DIGEST:]
    if hashlib.blake2b(body, digest_size=_DIGEST).digest() != digest:
        raise ValueError("its digest does not fit")
    plain = pa.decompress(body[8:], int.from_bytes(body[:8], "big"), codec="zstd", asbytes=True)
    found = msgspec.msgpack.decode(plain, type=_File)
    if found.stage != stage:
        raise ValueError(f"it is of {found.stage}")
    return found
