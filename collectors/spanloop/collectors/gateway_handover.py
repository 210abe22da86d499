"""Messages between a gateway and its recorder, on a socket pair. Pure.

The gateway sends ``Start``, then each finished call, in order; an empty message: that was all, end in peace. The recorder sends
``Status`` whenever it has changed. A message is its length, four bytes, and MessagePack.
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = ["MESSAGE_BYTES_MAX", "Messages", "Start", "Status", "packed"]

MESSAGE_BYTES_MAX = 256 * 2**20
"""A longer one is no message: a call has a request of 32 MiB and an answer of 64 at most."""


class Start(msgspec.Struct, frozen=True):
    """What the recorder works with."""

    settings: dict[str, Any]
    """As JSON, secrets in the clear."""
    owner: int
    """The gateway's process."""
    resume: str = ""
    """Folder of the spool that an ended recorder of this gateway had."""


class Status(msgspec.Struct, frozen=True, array_like=True):
    """How the recorder stands. The counts are since its start."""

    folder: str
    """Of the spool; empty: calls wait in memory."""
    next: int
    """Calls before this number are settled. With a spool, the sequence number of the next record."""
    restored: int
    """Times that the spool's folder was made again."""
    waiting: int
    """Calls that are settled and not on the log."""
    spool_bytes: int
    recorded: int
    failed_appends: int
    failed_writes: int
    log_fails: bool
    lost: dict[str, int]


def packed(message: bytes) -> bytes:
    """Bytes of a message.

    >>> packed(b"ab")
    b'\\x02\\x00\\x00\\x00ab'
    """
    return len(message).to_bytes(4, "little") + message


class Messages:
    """Bytes in any pieces to whole messages.

    >>> messages = Messages(); messages.feed(packed(b"a") + packed(b"")[:1]), messages.feed(packed(b"")[1:])
    ([b'a'], [b''])
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Messages that are complete with these bytes. Raises ValueError for what cannot be one."""
        buffer = self._buffer
        buffer += data
        found: list[bytes] = []
        at = 0
        while len(buffer) - at >= 4:
            size = int.from_bytes(buffer[at : at + 4], "little")
            if size > MESSAGE_BYTES_MAX:
                raise ValueError(f"a message of {size} bytes, expected {MESSAGE_BYTES_MAX} at most")
            if len(buffer) - at - 4 < size:
                break
            found.append(bytes(buffer[at + 4 : at + 4 + size]))
            at += 4 + size
        del buffer[:at]
        return found
