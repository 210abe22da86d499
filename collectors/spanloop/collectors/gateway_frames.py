"""Records as bytes of a file: magic, sequence number, length, crc32 of the two and the payload, payload. Pure.

Reading passes over damage: from the next magic on it goes on.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

__all__ = ["frame", "frames"]

MAGIC = b"\xf5SPL"
_HEAD = struct.Struct("<4sQII")
_NUMBERS = struct.Struct("<QI")
RECORD_BYTES_MAX = 64 * 2**20
"""A length above this is damage."""


def frame(sequence: int, payload: bytes) -> bytes:
    """Bytes of one record."""
    crc = zlib.crc32(payload, zlib.crc32(_NUMBERS.pack(sequence, len(payload))))
    return _HEAD.pack(MAGIC, sequence, len(payload), crc) + payload


def frames(data: bytes, *, last: bool = True) -> Iterator[tuple[int, bytes, int]]:
    """(sequence, payload, offset behind it) of the whole records in ``data``; damaged bytes are passed over.

    ``last``: there is nothing behind ``data``; otherwise a record that may go on behind it ends the reading.

    >>> list(frames(b"junk" + frame(7, b"a") + frame(8, b"b")[:-1]))
    [(7, b'a', 25)]
    """
    at, size = 0, len(data)
    while at < size:
        if data[at : at + 4] == MAGIC and size - at >= _HEAD.size:
            _, sequence, length, crc = _HEAD.unpack_from(data, at)
            end = at + _HEAD.size + length
            if end > size and length <= RECORD_BYTES_MAX and not last:
                return
            payload = data[at + _HEAD.size : end]
            if end <= size and zlib.crc32(payload, zlib.crc32(_NUMBERS.pack(sequence, length))) == crc:
                yield sequence, payload, end
                at = end
                continue
        elif not last and size - at < _HEAD.size:
            return
        found = data.find(MAGIC, at + 1)
        if found < 0:
            return
        at = found
