"""Files that are there after a power cut: written, flushed to disk, and their folder too.

Place: artifacts (``policy``) and checkpoints (``checkpoint``) are made of these and a rename.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["sync_folder", "write_durably"]


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
