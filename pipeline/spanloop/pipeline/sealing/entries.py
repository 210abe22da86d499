"""How a sealed entry of a state looks; pure, so that reducers may ask."""

from __future__ import annotations

__all__ = ["ENTRY", "sealed_by"]

ENTRY = b"\xc1"
"""First byte of a sealed entry: no msgpack value begins with it."""


def sealed_by(entry: bytes) -> str:
    """The trace whose key closes a sealed entry.

    >>> sealed_by(ENTRY + b"ab12/...")
    'ab12'
    """
    return entry[1:].partition(b"/")[0].decode("ascii", "replace")
