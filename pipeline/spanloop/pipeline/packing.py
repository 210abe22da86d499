"""State entries made smaller: what a stage holds is long JSON, of which the same is said again and again.

Zstandard (by way of pyarrow, which every process with stages has for its tables) takes a third of deflate's time and leaves less.
Entries of before are deflate streams and are read as well; so is what was packed where pyarrow is missing.
Invariants: ``unpacked(packed(data)) == data``; the first byte tells which of the two it is.
"""

from __future__ import annotations

import struct
import zlib
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow

__all__ = ["packed", "unpacked"]

_ZSTANDARD = b"\x01"
"""Before the length and the frame; no deflate stream begins so."""
_LENGTH = struct.Struct(">I")
_HEAD_BYTES = len(_ZSTANDARD) + _LENGTH.size
_LENGTH_MAX = 2**32 - 1


@cache
def _codec() -> pyarrow.Codec | None:
    try:
        import pyarrow
    except ImportError:
        return None
    return pyarrow.Codec("zstd", compression_level=1)


def packed(data: bytes) -> bytes:
    """``data`` made smaller.

    >>> unpacked(packed(b"{}" * 100)) == b"{}" * 100
    True
    """
    codec = _codec()
    if codec is None or len(data) > _LENGTH_MAX:
        return zlib.compress(data, 1)
    return _ZSTANDARD + _LENGTH.pack(len(data)) + codec.compress(data, asbytes=True)


def unpacked(data: bytes) -> bytes:
    """What ``packed`` was given. Raises OSError, zlib.error or ImportError where it cannot be had."""
    if data[:1] != _ZSTANDARD:
        return zlib.decompress(data)
    import pyarrow

    (length,) = _LENGTH.unpack_from(data, len(_ZSTANDARD))
    return pyarrow.decompress(memoryview(data)[_HEAD_BYTES:], length, codec="zstd", asbytes=True)
