"""Holding a spool's folder against other processes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from spanloop.schemas.errors import TransientError

__all__ = ["hold", "refused"]


def hold(folder: Path) -> int:
    """The descriptor that holds a folder."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held


def refused(path: Path, exc: OSError) -> TransientError:
    return TransientError(
        f"the spool {path} cannot be used: {exc.strerror or exc}; free space or set gateway.spool"
    )
