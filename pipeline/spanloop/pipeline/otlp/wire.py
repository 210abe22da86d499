"""Protobuf wire format, just enough to take a request apart into its spans when the parser refuses the whole.

upb refuses a message with one value nested too deep or one text that is not UTF-8; the lengths around each span are
still sound, so that the others can be saved.
"""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["WireError", "fields", "varint"]


class WireError(ValueError):
    """Bytes that are no protobuf message."""


def varint(data: memoryview, at: int) -> tuple[int, int]:
    """(value, next position) of the varint at ``at``; raises WireError."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise WireError(f"a varint does not end at byte {at}")
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7


def fields(data: memoryview) -> Iterator[tuple[int, memoryview]]:
    """(field number, bytes) of each length-delimited field; others are stepped over. Raises WireError."""
    at = 0
    while at < len(data):
        tag, at = varint(data, at)
        number, kind = tag >> 3, tag & 7
        if number == 0:
            raise WireError(f"field number 0 at byte {at}")
        if kind == 2:
            size, at = varint(data, at)
            if size > len(data) - at:
                raise WireError(f"field {number} needs {size} bytes, {len(data) - at} are left")
            yield number, data[at : at + size]
            at += size
        elif kind == 0:
            _, at = varint(data, at)
        elif kind in (1, 5):
            at += 8 if kind == 1 else 4
            if at > len(data):
                raise WireError(f"field {number} is cut")
        else:
            raise WireError(f"field {number} has wire type {kind}")
