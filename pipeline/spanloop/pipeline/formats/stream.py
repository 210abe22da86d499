"""A stream of bytes that can be looked at before it is taken, with what was taken counted and hashed."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import re
import zipfile
import zlib
from typing import BinaryIO

__all__ = ["DAMAGE", "Stream"]

_CHUNK = 1 << 18
_CHUNK_MAX = 1 << 23
_QUIET = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
"""JSON without a bracket outside of texts."""
_SCALAR_ENDS = re.compile(rb"[,\]}\n]")
_BLANKS = b" \t\r\n"
DAMAGE = (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, zipfile.BadZipFile, UnicodeError)
"""What unpacking a damaged file raises, beside OSError."""


class Stream:
    """Bytes of one file, unpacked.

    Args:
        raw: where they come from.
        packing: how they are packed there, for messages; empty: not at all.
    """

    def __init__(self, raw: BinaryIO, packing: str = "") -> None:
        self._raw = raw
        self._packing = packing
        self._buffer = bytearray()
        self._at = 0
        self._ended = False
        self._hash = hashlib.sha256()
        self.taken = 0
        """Bytes taken so far."""
        self.damage = ""
        """Why the rest of a packed file cannot be unpacked."""

    @property
    def sha256(self) -> str:
        """Hash of the bytes taken so far."""
        return self._hash.copy().hexdigest()

    def head(self, size: int) -> bytes:
        """Up to ``size`` bytes ahead."""
        while len(self._buffer) - self._at < size and self._more():
            pass
        return bytes(self._buffer[self._at : self._at + size])

    def take(self, size: int) -> bytes:
        """The next ``size`` bytes, fewer at the end."""
        part = self.head(size)
        self._advance(len(part))
        return part

    def skip(self, size: int) -> bool:
        """Take ``size`` bytes without keeping them; False when there are fewer."""
        while size > 0:
            part = self.take(min(size, _CHUNK))
            if not part:
                return False
            size -= len(part)
        return True

    def line_length(self, limit: int) -> int:
        """Bytes up to and with the next line feed (or the end of the stream); -1: longer than ``limit``."""
        searched = self._at
        while True:
            found = self._buffer.find(b"\n", searched)
            if found >= 0:
                size = found + 1 - self._at
                return size if size <= limit else -1
            size = len(self._buffer) - self._at
            if size > limit:
                return -1
            if not self._more():
                return size
            searched = self._at + size

    def skip_line(self) -> None:
        """Take the rest of the line."""
        while (size := self.line_length(_CHUNK)) < 0:
            self._advance(len(self._buffer) - self._at)
        self._advance(size)

    def skip_blank(self, also: bytes = b"") -> int:
        """Take white space (and bytes of ``also``); the next byte, or -1 at the end."""
        blanks = _BLANKS + also
        while True:
            while self._at < len(self._buffer):
                byte = self._buffer[self._at]
                if byte not in blanks:
                    return byte
                self._advance(1)
            if not self._more():
                return -1

    def value_length(self, limit: int, depth: int = 0) -> int:
        """Length of the JSON value ahead, told by its brackets; a scalar goes up to the next comma, bracket or blank.
        -1: the stream ends before it does; -2: longer than ``limit``. ``depth``: brackets that are open already."""
        at = self._at
        while depth == 0 and at < len(self._buffer) and self._buffer[at] in _BLANKS:
            at += 1
        while True:
            if at < len(self._buffer):
                quiet = _QUIET.match(self._buffer, at)
                ahead = quiet.end() if quiet is not None else at
                del quiet  # a match locks the buffer
                if depth == 0 and ahead > at:
                    return self._scalar(at, limit)
                at = ahead
            if at < len(self._buffer) and (byte := self._buffer[at]) != 0x22:
                at += 1
                depth += 1 if byte in b"[{" else -1
                if depth <= 0:
                    return at - self._at if at - self._at <= limit else -2
                continue
            if len(self._buffer) - self._at > limit:
                return -2
            kept = at - self._at
            if not self._more():
                return -1
            at = self._at + kept

    def _scalar(self, at: int, limit: int) -> int:
        while True:
            found = _SCALAR_ENDS.search(self._buffer, at)
            if found is not None:
                return found.start() - self._at
            if len(self._buffer) - self._at > limit:
                return -2
            kept = len(self._buffer) - self._at
            if not self._more():
                return kept
            at = self._at + kept

    def _advance(self, size: int) -> None:
        self._hash.update(memoryview(self._buffer)[self._at : self._at + size])
        self._at += size
        self.taken += size

    def _more(self) -> bool:
        """Read on; False at the end. Reads more at once while one record is long, so that it is not searched too often."""
        if self._ended:
            return False
        if self._at:
            del self._buffer[: self._at]
            self._at = 0
        try:
            part = self._raw.read(min(max(_CHUNK, len(self._buffer)), _CHUNK_MAX))
        except DAMAGE as exc:
            part = b""
            self.damage = f"the {self._packing or 'packed'} stream is damaged: {exc or type(exc).__name__}"
        self._ended = not part
        self._buffer += part
        return not self._ended
