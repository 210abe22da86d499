"""Numbers of a gateway that outlive it: a mapped file, so that counting is a memory write and kill -9 loses none.

Two processes have it open: the gateway writes ``begun``, ``put`` and ``refused``, its recorder the others. Power loss may lose them;
then a restart counts only what the segments of the spool show.
"""

from __future__ import annotations

import logging
import mmap
import os
import struct
from pathlib import Path

__all__ = ["Counters"]

_log = logging.getLogger(__name__)

MAGIC = b"SPLCNT01"
_FIELDS = ("begun", "put", "unspooled", "sequence", "segment", "refused")
_SIZE = 64
_NUMBER = struct.Struct("<Q")


class Counters:
    """``begun``: calls sent to an upstream; ``put``: of them, finished; ``refused``: of them, lost before they were handed over;
    ``unspooled``: of them, lost before they were written; ``sequence``: records ever written; ``segment``: number of the newest
    segment."""

    def __init__(self, path: Path) -> None:
        self._map: mmap.mmap | None = None
        self._values: dict[str, int] = dict.fromkeys(_FIELDS, 0)
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            old = os.pread(fd, _SIZE, 0)
            if old[:8] != MAGIC or len(old) != _SIZE:
                if old:
                    _log.warning(
                        "%s is damaged: what an earlier process lost before writing is unknown", path
                    )
                os.pwrite(fd, MAGIC.ljust(_SIZE, b"\0"), 0)
                os.ftruncate(fd, _SIZE)
            self._map = mmap.mmap(fd, _SIZE)
        finally:
            os.close(fd)

    def _get(self, name: str) -> int:
        if self._map is not None:
            self._values[name] = _NUMBER.unpack_from(self._map, 8 * (1 + _FIELDS.index(name)))[0]
        return self._values[name]

    def _set(self, name: str, value: int) -> None:
        self._values[name] = value
        if self._map is not None:
            _NUMBER.pack_into(self._map, 8 * (1 + _FIELDS.index(name)), value)

    @property
    def begun(self) -> int:
        """Calls sent to an upstream."""
        return self._get("begun")

    @begun.setter
    def begun(self, value: int) -> None:
        self._set("begun", value)

    @property
    def put(self) -> int:
        """Finished calls."""
        return self._get("put")

    @put.setter
    def put(self, value: int) -> None:
        self._set("put", value)

    @property
    def unspooled(self) -> int:
        """Finished calls that were lost before they were written."""
        return self._get("unspooled")

    @unspooled.setter
    def unspooled(self, value: int) -> None:
        self._set("unspooled", value)

    @property
    def sequence(self) -> int:
        """Sequence number of the next record."""
        return self._get("sequence")

    @sequence.setter
    def sequence(self, value: int) -> None:
        self._set("sequence", value)

    @property
    def segment(self) -> int:
        """Number of the newest segment."""
        return self._get("segment")

    @segment.setter
    def segment(self, value: int) -> None:
        self._set("segment", value)

    @property
    def refused(self) -> int:
        """Finished calls that were lost before they were handed over."""
        return self._get("refused")

    @refused.setter
    def refused(self, value: int) -> None:
        self._set("refused", value)

    def restart(self, sequence: int) -> None:
        """Nothing is under way: all that was begun is written or was counted."""
        self.begun = self.put = self.sequence = sequence
        self.unspooled = self.refused = 0

    def again(self, path: Path) -> Counters:
        """The same numbers in another file."""
        found = Counters(path)
        for name in _FIELDS:
            found._set(name, self._get(name))
        return found

    def close(self) -> None:
        """Release the file; the values stay readable."""
        if self._map is not None:
            for name in _FIELDS:
                self._get(name)
            self._map.close()
            self._map = None
