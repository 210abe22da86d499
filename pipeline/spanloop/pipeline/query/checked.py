"""Which files of the archive were compared with their checksums since they last changed.

Place in the flow: ``sources`` lets DuckDB, which reads no checksums, see only files that are as they were written: of bits flipped
in the pages of a file two in five change an answer without a word. A gigabyte takes about a second, once: a ledger
beside the archive keeps size, time and inode of what was found sound. ``spanloop archive verify --deep`` looks at everything
again, whatever the ledger says.

Invariants: a file that changed in size, time or inode is compared again, and any file after ``TRUST_S``. The ledger is a cache:
it may be deleted, and a place where it cannot be written only makes queries slower.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
import zlib
from collections.abc import Iterable
from typing import Any

__all__ = ["LEDGER", "TRUST_S", "unsound"]

LEDGER = "_checked.json"
"""In the archive's root."""
TRUST_S = 7 * 86_400.0
_THREADS = 2
_BLOCK = 4 * 2**20


def unsound(root: str, files: Iterable[tuple[str, int]]) -> list[str]:
    """Those of the files (path, crc32) that are not what was written; files whose checksum is not known (-1) are believed.

    Args:
        root: Of the archive; keeps the ledger.
        files: Paths on this disk.
    """
    ledger = _read(root)
    now = time.time()
    todo: list[tuple[str, int, list[Any]]] = []
    for path, crc in files:
        try:
            state = os.stat(path)
        except OSError:
            return [path]
        mark = [state.st_size, state.st_mtime_ns, state.st_ino]
        known = ledger.get(path)
        if crc >= 0 and (known is None or known[:3] != mark or not 0 <= now - known[3] < TRUST_S):
            todo.append((path, crc, mark))
    if not todo:
        return []
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_THREADS) as pool:
        sound = list(pool.map(lambda item: _crc(item[0]) == item[1], todo))
    for (path, _, mark), is_sound in zip(todo, sound, strict=True):
        if is_sound:
            ledger[path] = [*mark, now]
    _write(root, {path: mark for path, mark in ledger.items() if now - mark[3] < TRUST_S})
    return [path for (path, _, _), is_sound in zip(todo, sound, strict=True) if not is_sound]


def _crc(path: str) -> int:
    crc = 0
    try:
        with open(path, "rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                crc = zlib.crc32(block, crc)
    except OSError:
        return -1
    return crc


def _read(root: str) -> dict[str, list[Any]]:
    try:
        with open(f"{root}/{LEDGER}", "rb") as file:
            found = json.load(file)
        return {
            path: mark
            for path, mark in found.items()
            if len(mark) == 4 and all(isinstance(v, int | float) for v in mark)
        }
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write(root: str, ledger: dict[str, list[Any]]) -> None:
    temporary = f"{root}/.{LEDGER}.{os.getpid()}.tmp"
    with contextlib.suppress(OSError):
        with open(temporary, "w") as file:
            json.dump(ledger, file)
        os.replace(temporary, f"{root}/{LEDGER}")
