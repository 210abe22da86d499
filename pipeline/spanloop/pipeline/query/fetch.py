"""Files of a remote archive on this disk, where a process without network can read them.

Archive files never change under one name, so what was fetched once is used again; the folder holds ``CACHE_BYTES`` at most,
the longest unused go first.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spanloop.pipeline.archive import ArchiveStore
from spanloop.schemas.errors import TransientError

__all__ = ["CACHE_BYTES", "fetch"]

CACHE_BYTES = 8 * 2**30
_THREADS = 8
_BLOCK = 8 * 2**20


def fetch(
    store: ArchiveStore,
    files: Sequence[str],
    cache: Path,
    *,
    on_file: Callable[[int, int], None] = lambda _done, _all: None,
) -> tuple[str, ...]:
    """Paths on this disk of files of the store, in the same order.

    Raises:
        TransientError: the store or the disk refused.
    """
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    targets = [cache / file for file in files]
    missing = [(file, target) for file, target in zip(files, targets, strict=True) if not target.exists()]
    _make_room(cache, keep={str(target) for target in targets})
    done = 0
    try:
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(lambda pair: _copy(store, *pair), missing):
                done += 1
                on_file(done, len(missing))
    except OSError as exc:
        raise TransientError(f"cannot fetch files of the archive to {cache}: {exc}") from exc
    for target in targets:
        with contextlib.suppress(OSError):
            os.utime(target)
    return tuple(map(str, targets))


def _copy(store: ArchiveStore, file: str, target: Path) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with store.filesystem.open_input_stream(file) as source, temporary.open("wb") as out:
            while block := source.read(_BLOCK):
                out.write(block)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _make_room(cache: Path, keep: set[str]) -> None:
    found = []
    for folder, _, names in os.walk(cache):
        for name in names:
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):
                status = os.stat(path)
                found.append((status.st_mtime, status.st_size, path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found):
        if total <= CACHE_BYTES:
            return
        if path not in keep:
            with contextlib.suppress(OSError):
                os.unlink(path)
                total -= size
