"""Files that are there after a power cut: written, flushed to disk, and their folder too.

Place: artifacts (``policy``) and checkpoints (``checkpoint``) are made of these and a rename.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

__all__ = ["sync_folder", "write_durably", "write_folder"]


def write_durably(path: Path, data: bytes) -> None:
    """Write a file and wait until the disk has it."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Wait until the disk has the folder's entries (after a rename)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Make a folder of files that is there whole or not at all, in the order given. It must not be there yet."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    building = folder.parent / f".building-{folder.name}-{secrets.token_hex(4)}"
    building.mkdir()
    try:
        for name, data in files.items():
            write_durably(building / name, data)
        sync_folder(building)
        building.rename(folder)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    sync_folder(folder.parent)
