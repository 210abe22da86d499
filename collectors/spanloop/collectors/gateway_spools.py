"""The spools of one deployment: each gateway process has a folder of its own, and takes over what ended processes left."""

from __future__ import annotations

import logging
from pathlib import Path

from spanloop.collectors.gateway_spool import Spool
from spanloop.collectors.gateway_spool_folder import refused
from spanloop.schemas.errors import TransientError
from spanloop.schemas.settings import Settings

__all__ = ["open_spools", "spool_folder"]

_log = logging.getLogger(__name__)

FOLDERS_MAX = 64
"""Gateways that may share one workspace; each holds a folder of its own."""


def spool_folder(settings: Settings) -> Path:
    """Folder of the spools and of the kept routing."""
    return Path(settings.gateway.spool) if settings.gateway.spool else settings.workspace / "spool"


def open_spools(
    root: Path, *, max_bytes: int, fsync_s: float, resume: Path | None = None, owner: int = 0
) -> list[Spool]:
    """A spool for this gateway, then those that ended ones left with records in them.

    Args:
        root: Folder of all.
        max_bytes: Of each.
        fsync_s: See ``Spool``.
        resume: The folder that an ended recorder of this gateway had.
        owner: The gateway's process.

    Raises:
        TransientError: the disk refuses, or no folder is free.
    """
    found: list[Spool] = []
    folders = [root / str(number) for number in range(FOLDERS_MAX)]
    if resume in folders:
        folders.remove(resume)
        folders.insert(0, resume)
    for folder in folders:
        if found and not any(folder.glob("*.seg")):
            continue
        try:
            spool = Spool(folder, max_bytes=max_bytes, fsync_s=fsync_s, resumed=folder == resume, owner=owner)
            found.append(spool)
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
