"""Files as streams: plain, packed (gzip, bzip2, xz), the members of a zip archive, and standard input.

Invariants: an archive's directory is read once for all of its members, so that many small members cost no more than one large
file; members are unpacked as they are read and never kept.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from spanloop.pipeline.formats.stream import Stream
from spanloop.schemas.errors import ConfigError

__all__ = ["STDIN", "Opener", "Source", "UnreadableError", "found_files", "opened", "sources"]

STDIN = "-"
_PACKED: tuple[tuple[bytes, str, Callable[[Any], Any]], ...] = (
    (b"\x1f\x8b", "gzip", gzip.open),
    (b"BZh", "bzip2", bz2.open),
    (b"\xfd7zXZ\x00", "xz", lzma.open),
)
_ZIP = b"PK\x03\x04"
_SKIPPED = ("__MACOSX/", ".DS_Store")


class UnreadableError(ConfigError):
    """A file, or a member of an archive, that is there and cannot be unpacked: encrypted, damaged, no longer there."""


class Source(msgspec.Struct, frozen=True):
    """One stream to read: a file, or a member of an archive."""

    path: Path
    member: str = ""
    named: bool = True
    """The user named this file; False: it lay in a folder or archive, where files of no known format are passed over."""
    problem: str = ""
    """Why it cannot be opened; it costs its folder nothing else."""
    packed: int = -1
    """Packed bytes of a member, as the archive's directory has it; -1: a file of its own."""

    @property
    def name(self) -> str:
        """For messages: never the folder."""
        return f"{self.path.name}:{self.member}" if self.member else self.path.name

    @property
    def repeatable(self) -> bool:
        """Whether it can be read twice."""
        return str(self.path) != STDIN and self.path.is_file()

    @property
    def size(self) -> int:
        """Bytes to get through, packed as they are; 0: not known."""
        if self.member:
            return max(self.packed, 0)
        return self.path.stat().st_size if self.repeatable else 0


def found_files(paths: list[Path]) -> list[Source]:
    """Sources of ``paths`` in order, folders searched by name. Raises ConfigError for what does not exist."""
    found: list[Source] = []
    for path in paths:
        if str(path) == STDIN:
            found.append(Source(path))
        elif path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and not _hidden(p, path))
            if not inside:
                raise ConfigError(f"no file in {path}")
            found += [s for p in inside for s in _inside(p)]
        elif path.exists():
            found += sources(path)
        else:
            raise ConfigError(f"there is no {path}")
    return found


def _inside(path: Path) -> list[Source]:
    try:
        return sources(path, named=False)
    except ConfigError as exc:
        return [Source(path, problem=exc.message)]


def _hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)


def sources(path: Path, *, named: bool = True) -> list[Source]:
    """The file itself, or the members of a zip archive. Raises ConfigError where it cannot be opened."""
    if str(path) == STDIN or path.is_fifo():
        return [Source(path, named=named)]
    try:
        with path.open("rb") as handle:
            if handle.read(4) != _ZIP:
                return [Source(path, named=named)]
        with zipfile.ZipFile(path) as archive:
            sizes = {i.filename: i.compress_size for i in archive.infolist() if not i.is_dir()}
    except zipfile.BadZipFile as exc:
        raise ConfigError(f"{path} is a damaged zip archive: {exc}") from exc
    except OSError as exc:
        raise ConfigError(f"cannot read {path}: {exc.strerror or exc}") from exc
    members = sorted((n, size) for n, size in sizes.items() if not n.startswith(_SKIPPED))
    return [Source(path, n, named=False, packed=size) for n, size in members]


class Opener:
    """Opens sources one after another; keeps the archive that the last member was in."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._archive: zipfile.ZipFile | None = None

    def __enter__(self) -> Opener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the archive, if there is one."""
        if self._archive is not None:
            self._archive.close()
        self._path = self._archive = None

    @contextmanager
    def opened(self, source: Source) -> Iterator[tuple[Stream, Callable[[], int]]]:
        """(stream of the unpacked bytes, how many of them were read so far). Raises ConfigError."""
        if source.problem:
            raise ConfigError(source.problem)
        try:
            if str(source.path) == STDIN:
                if sys.stdin is None:
                    raise ConfigError("standard input is closed")
                plain = cast(BinaryIO, sys.stdin.buffer)
                yield _stream(_Peekable(plain)), lambda: 0
            elif source.member:
                with self._archive_of(source.path).open(source.member) as member:
                    yield _stream(member, "zip"), member.tell
            else:
                with source.path.open("rb") as plain:
                    if plain.seekable():
                        yield _stream(plain), plain.tell
                    else:
                        yield _stream(_Peekable(plain)), lambda: 0
        except (RuntimeError, NotImplementedError) as exc:  # zipfile: encrypted, or a method it does not know
            raise UnreadableError(f"cannot read {source.name}: {exc}") from exc
        except (zipfile.BadZipFile, KeyError) as exc:
            raise UnreadableError(f"cannot read {source.name}: the archive is damaged: {exc}") from exc
        except OSError as exc:
            raise UnreadableError(f"cannot read {source.path}: {exc.strerror or exc}") from exc

    def _archive_of(self, path: Path) -> zipfile.ZipFile:
        if self._archive is None or self._path != path:
            self.close()
            self._path, self._archive = path, zipfile.ZipFile(path)
        return self._archive


@contextmanager
def opened(source: Source) -> Iterator[tuple[Stream, Callable[[], int]]]:
    """One source; for the members of an archive in turn, see ``Opener``. Raises ConfigError."""
    with Opener() as opener, opener.opened(source) as found:
        yield found


def _stream(plain: Any, packing: str = "") -> Stream:
    head = plain.read(6)
    plain.seek(0)
    for magic, name, unpack in _PACKED:
        if head.startswith(magic):
            return Stream(unpack(plain), name)
    return Stream(plain, packing)


class _Peekable:
    """A pipe whose first bytes may be read twice."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._head = b""
        self._again = False

    def read(self, size: int = -1) -> bytes:
        if self._again and self._head:
            part = self._head if size < 0 else self._head[:size]
            self._head = self._head[len(part) :]
            if size >= 0:
                return part
            return part + self._raw.read()
        part = self._raw.read(size)
        if not self._again:
            self._head += part
        return part

    def seek(self, where: int) -> None:
        """Back to the start, once, before anything else was read."""
        self._again = True

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return False

    closed = False

    def close(self) -> None:
        """The pipe is not ours."""
