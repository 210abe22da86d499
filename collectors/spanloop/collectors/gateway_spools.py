"""The spools of one deployment: each gateway process has a folder of its own, and takes over what ended processes left."""

from __future__ import annotations

import logging
from pathlib import Path

from spanloop.collectors.gateway_spool import Spool
from spanloop.collectors.gateway_spool_folder import refused
from spanloop.schemas.errors import TransientError

__all__ = ["open_spools"]

_log = logging.getLogger(__name__)

FOLDERS_MAX = 64
"""Gateways that may share one workspace; each holds a folder of its own."""


def open_spools(root: Path, *, max_bytes: int, fsync_s: float) -> list[Spool]:
    """A spool for this process, then those that ended processes left with records in them. Raises TransientError when the disk
    refuses."""
    found: list[Spool] = []
    for number in range(FOLDERS_MAX):
        folder = root / str(number)
        if found and not any(folder.glob("*.seg")):
            continue
        try:
            found.append(Spool(folder, max_bytes=max_bytes, fsync_s=fsync_s))
        except BlockingIOError:
            continue
        except OSError as exc:
            if found:
                _log.warning("the spool %s is passed over: %s", folder, exc)
                continue
            raise refused(folder, exc) from exc
    if not found:
        raise TransientError(f"all {FOLDERS_MAX} spools below {root} are held by other processes")
    return found
