"""Holding a spool's folder against other processes."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from spanloop.schemas.errors import TransientError

__all__ = ["hold", "refused"]

HANDOVER_S = 5.0
"""The recorder of a gateway that was killed gets so long to write what it was handed and end."""
POLL_S = 0.02


def hold(folder: Path, owner: int) -> int:
    """The descriptor that holds a folder for the gateway with process id ``owner``. Where the gateway that holds it has ended, its
    recorder is about to. Raises BlockingIOError when it is held."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    held = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    deadline = time.monotonic() + HANDOVER_S
    try:
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline or _runs(os.pread(held, 32, 0)):
                    raise
                time.sleep(POLL_S)
        os.ftruncate(held, 0)
        os.pwrite(held, b"%d" % owner, 0)
    except OSError:
        os.close(held)
        raise
    return held


def _runs(owner: bytes) -> bool:
    """Whether a process runs; what is no process id may."""
    try:
        os.kill(int(owner), 0)
    except ProcessLookupError:
        return False
    except (ValueError, OverflowError, PermissionError):
        return True
    return True


def refused(path: Path, exc: OSError) -> TransientError:
    return TransientError(
        f"the spool {path} cannot be used: {exc.strerror or exc}; free space or set gateway.spool"
    )
