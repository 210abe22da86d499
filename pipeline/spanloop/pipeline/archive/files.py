"""Files of an archive on a local disk or in an S3-compatible store: whole files appear at once or not at all.

Place in the flow: the only code of the archive that touches a file system; tests inject faults here. Paths are relative to
the archive's root, with forward slashes.

Invariants: ``write`` is atomic and durable when it returns (local: temporary name, fsync, rename, fsync of the folders; S3:
one upload). A temporary name starts with a dot and ends in ``.tmp``; no listing shows it. Everything that a medium refuses
leaves here as OSError.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from spanloop.schemas.errors import ConfigError

__all__ = ["Entry", "Files", "LocalFiles", "ObjectFiles", "open_files"]


class Entry(NamedTuple):
    """One file as listed."""

    path: str
    size: int
    mtime_ns: int


class Files(ABC):
    """What both media share; ``root`` is a path of ``filesystem``."""

    local = False
    """Whether a lock keeps other writers of the archive out."""

    def __init__(self, filesystem: fs.FileSystem, root: str) -> None:
        self.filesystem = filesystem
        self.root = root.rstrip("/")

    def full(self, path: str) -> str:
        """The path that ``filesystem`` opens."""
        return f"{self.root}/{path}" if path else self.root

    def uri(self, path: str) -> str:
        """For people."""
        return self.full(path)

    def read(self, path: str) -> bytes:
        """The whole file. Raises FileNotFoundError."""
        with self.filesystem.open_input_file(self.full(path)) as file:
            return file.read()

    def read_end(self, path: str, size: int) -> bytes:
        """The last ``size`` bytes (less where the file is shorter)."""
        with self.filesystem.open_input_file(self.full(path)) as file:
            total = file.size()
            take = min(size, total)
            return file.read_at(take, total - take)

    def open(self, path: str) -> pa.NativeFile:
        """For Parquet readers; random access."""
        return self.filesystem.open_input_file(self.full(path))

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """Size of each file in bytes, None where there is none."""
        found = self.filesystem.get_file_info([self.full(path) for path in paths]) if paths else []
        return [info.size if info.type == fs.FileType.File else None for info in found]

    def list(self, folder: str) -> list[Entry]:
        """All files below a folder, by path; none where the folder is missing."""
        selector = fs.FileSelector(self.full(folder), recursive=True, allow_not_found=True)
        start = len(self.root) + 1
        entries = [
            Entry(info.path[start:], info.size, info.mtime_ns or 0)
            for info in self.filesystem.get_file_info(selector)
            if info.type == fs.FileType.File and not _is_temporary(info.base_name)
        ]
        return sorted(entries)

    @abstractmethod
    def write(self, path: str, data: bytes | pa.Buffer) -> None:
        """Make or replace a file in one step."""

    def delete(self, path: str) -> None:
        """Remove a file; a missing one is no error."""
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.delete_file(self.full(path))

    @abstractmethod
    def move(self, source: str, target: str) -> None:
        """Move a file aside."""

    def sweep(self) -> int:
        """Remove temporaries that a killed writer left: how many there were. Only for the one writer."""
        return 0

    @contextlib.contextmanager
    def writer(self) -> Iterator[bool]:
        """The right to write, where the medium has locks: yields False when another process holds it."""
        yield True


class LocalFiles(Files):
    """A folder on a local disk.

    Args:
        root: Made when first written to.
    """

    local = True

    def __init__(self, root: Path) -> None:
        self._root = root.absolute()
        super().__init__(fs.LocalFileSystem(), str(self._root))

    def write(self, path: str, data: bytes | pa.Buffer) -> None:
        """Temporary, fsync, rename, fsync of the folder and of folders made for it."""
        target = self._root / path
        made = self._make_folder(target.parent)
        temporary = target.with_name(f".{target.name}.{os.getpid()}.{uuid.uuid4().hex[:6]}.tmp")
        try:
            with temporary.open("wb", buffering=0) as file:
                view = memoryview(data).cast("B")
                while view:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())
            temporary.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        for folder in (target.parent, *made):
            _fsync_folder(folder)

    def move(self, source: str, target: str) -> None:
        """Rename, made durable."""
        self._make_folder((self._root / target).parent)
        (self._root / source).replace(self._root / target)
        _fsync_folder((self._root / target).parent)
        _fsync_folder((self._root / source).parent)

    def sizes(self, paths: Sequence[str]) -> list[int | None]:
        """By stat: about 2 us a file."""
        found: list[int | None] = []
        for path in paths:
            try:
                found.append(os.stat(f"{self.root}/{path}").st_size)
            except FileNotFoundError:
                found.append(None)
        return found

    def read(self, path: str) -> bytes:
        """The whole file."""
        return (self._root / path).read_bytes()

    def sweep(self) -> int:
        """Remove every temporary below the root."""
        swept = 0
        for folder, _, names in os.walk(self._root):
            for name in filter(_is_temporary, names):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(os.path.join(folder, name))
                    swept += 1
        return swept

    @contextlib.contextmanager
    def writer(self) -> Iterator[bool]:
        """An advisory lock on ``_writer.lock``, freed by the kernel when its holder dies."""
        self._make_folder(self._root)
        handle = os.open(self._root / "_writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
            else:
                yield True
        finally:
            os.close(handle)

    @staticmethod
    def _make_folder(folder: Path) -> list[Path]:
        """Make a folder; returns the parents that got a new entry."""
        missing = []
        while not folder.is_dir():
            missing.append(folder)
            folder = folder.parent
        for new in reversed(missing):
            new.mkdir(mode=0o700, exist_ok=True)
        return [new.parent for new in missing]


class ObjectFiles(Files):
    """A prefix of a bucket. An upload becomes visible when it is complete, hence no temporary names.

    Args:
        url: s3://bucket/prefix.
        endpoint: Of a compatible store, with scheme; empty: AWS.
    """

    def __init__(self, url: str, endpoint: str = "") -> None:
        parts = urlsplit(url)
        where: dict[str, Any] = {}
        if endpoint:
            scheme, _, host = endpoint.rpartition("://")
            where = {"scheme": scheme or "https", "endpoint_override": host}
        if endpoint and not os.environ.get("AWS_REGION") and not os.environ.get("AWS_DEFAULT_REGION"):
            where["region"] = "us-east-1"
        filesystem = fs.S3FileSystem(
            allow_delayed_open=True, background_writes=False, connect_timeout=5, request_timeout=30, **where
        )
        super().__init__(filesystem, f"{parts.netloc}{parts.path}")

    def uri(self, path: str) -> str:
        """With the scheme."""
        return f"s3://{self.full(path)}"

    def write(self, path: str, data: bytes | pa.Buffer) -> None:
        """One upload."""
        with self.filesystem.open_output_stream(self.full(path)) as stream:
            stream.write(data)

    def move(self, source: str, target: str) -> None:
        """Copy, then delete."""
        self.filesystem.copy_file(self.full(source), self.full(target))
        self.delete(source)


def open_files(url: str, endpoint: str = "") -> Files:
    """The medium that a URL names.

    Raises:
        ConfigError: a scheme other than s3, or a bucket is missing.
    """
    scheme, separator, rest = url.partition("://")
    if not separator:
        return LocalFiles(Path(url))
    if scheme == "file":
        return LocalFiles(Path(rest))
    if scheme != "s3" or not rest.partition("/")[0]:
        raise ConfigError(f"archive.url = {url!r}: expected a folder or s3://bucket/prefix")
    return ObjectFiles(url, endpoint)


def _is_temporary(name: str) -> bool:
    return name.startswith(".") and name.endswith(".tmp")


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
