"""What a replay shows: three numbers a process, and nothing that Beam says of itself when imported.

Each worker keeps its numbers in a small file of its own, the driver sums them: no shared memory, nothing to inherit.
"""

from __future__ import annotations

import logging
import os
import struct
from pathlib import Path

__all__ = ["advance", "attach", "quiet_beam", "total"]

_FORMAT = struct.Struct("<3q")
_file = -1
_numbers = [0, 0, 0]


def attach(folder: Path | None) -> None:
    """Count in this folder from now on; None: nowhere."""
    global _file  # noqa: PLW0603 - one for each process
    if _file >= 0:
        os.close(_file)
        _file = -1
    if folder is not None:
        _numbers[:] = [0, 0, 0]
        folder.mkdir(parents=True, exist_ok=True)
        _file = os.open(folder / str(os.getpid()), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.pwrite(_file, _FORMAT.pack(0, 0, 0), 0)


def advance(steps: int, spans: int = 0, orchestrations: int = 0) -> None:
    """So much more is done. What a step is depends on the pass: a record, or a span."""
    if _file >= 0:
        for i, count in enumerate((steps, spans, orchestrations)):
            _numbers[i] += count
        os.pwrite(_file, _FORMAT.pack(*_numbers), 0)


def total(folder: Path) -> tuple[int, int, int]:
    """Steps, spans and orchestrations that all processes have counted there."""
    sums = [0, 0, 0]
    for path in folder.iterdir() if folder.is_dir() else ():
        data = path.read_bytes()
        if len(data) == _FORMAT.size:
            sums = [a + b for a, b in zip(sums, _FORMAT.unpack(data), strict=True)]
    return sums[0], sums[1], sums[2]


def quiet_beam() -> None:
    """Call before Beam is imported: it warns of a Google library that nothing here needs."""
    logging.getLogger().addFilter(_no_apitools)


def _no_apitools(record: logging.LogRecord) -> bool:
    return "apitools not found" not in str(record.msg)
