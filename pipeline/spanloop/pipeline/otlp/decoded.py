"""What both OTLP decoders give, and the small rules they share, so that JSON and protobuf cannot differ.

Invariants: a span is decoded or rejected on its own, never with its neighbours; ids are lower-case hex; no float is
NaN or infinite; no text holds a lone surrogate; what was repaired is listed in the span's ``spanloop.flags``.
"""

from __future__ import annotations

import base64
import binascii
import math
from typing import Any, NamedTuple

import msgspec

from spanloop.schemas.spans import Span

__all__ = [
    "FLAGS",
    "MAX_NESTING",
    "MAX_TIME_NS",
    "BadSpanError",
    "DecodedBatch",
    "Origin",
    "Rejected",
    "bytes_value",
    "check_times",
    "float_value",
    "from_base64",
    "hex_id",
    "with_flags",
]

FLAGS = "spanloop.flags"
"""Attribute that lists repairs as "what:where": invalid_unicode, invalid_number, out_of_range, invalid_link, ..."""
MAX_NESTING = 64
"""Levels of lists and maps in one attribute value; protobuf's own parser stops at about 45."""
MAX_TIME_NS = 2**63 - 1
"""Latest time that every reader behind us (SQL, Arrow) can hold: the year 2262."""

_ZEROS = (bytes(8), bytes(16))
_NON_FINITE = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}


class BadSpanError(ValueError):
    """One span cannot be decoded; the text is the reason given to its sender."""

    def __init__(self, reason: str, kind: str = "type") -> None:
        super().__init__(reason)
        self.kind = kind


class Rejected(msgspec.Struct, frozen=True):
    """A span that was refused, as bytes of its own wire form."""

    reason: str
    """For its sender: it may quote the span."""
    data: bytes
    kind: str = "type"
    """For counters and dead letters, never a quotation: id, time, type, nesting, protobuf, request or limit."""


class DecodedBatch(msgspec.Struct):
    """The spans of one request and those that were refused, in the order of the request."""

    spans: list[Span]
    rejected: list[Rejected]
    ignored: int = 0
    """Log records that say nothing of agents."""


class Origin(NamedTuple):
    """What the spans of one scope share."""

    resource: dict[str, Any]
    scope: str
    version: str


def hex_id(raw: bytes, size: int, what: str) -> str:
    """Lower-case hex of an id of ``size`` bytes that is not all zero; raises BadSpanError."""
    if len(raw) != size:
        state = "is missing" if not raw else f"has {len(raw)} bytes"
        raise BadSpanError(f"{what} {state}, expected {size} bytes ({2 * size} hex digits)", "id")
    if raw in _ZEROS:
        raise BadSpanError(f"{what} is all zero", "id")
    return raw.hex()


def check_times(start_ns: int, end_ns: int) -> None:
    """Raise BadSpanError for a time that does not fit 63 bits. Order is not checked: raw times are kept."""
    if not (0 <= start_ns <= MAX_TIME_NS and 0 <= end_ns <= MAX_TIME_NS):
        raise BadSpanError(
            f"a time is out of range (start {start_ns}, end {end_ns}); expected nanoseconds since 1970 below 2^63",
            "time",
        )


def float_value(value: float, flags: list[str], where: str) -> float | str:
    """A finite float as it is; a non-finite one as the text "NaN", "Infinity" or "-Infinity", flagged."""
    if math.isfinite(value):
        return value
    flags.append(f"invalid_number:{where}")
    return _NON_FINITE[repr(value)]


def bytes_value(raw: bytes) -> dict[str, str]:
    """The JSON form of a bytes attribute."""
    return {"$bytes": base64.b64encode(raw).decode("ascii")}


def from_base64(text: str, what: str) -> bytes:
    """Bytes of standard or URL-safe base64, padding optional; raises BadSpanError."""
    plain = text.replace("-", "+").replace("_", "/").rstrip("=")
    try:
        return base64.b64decode(plain + "=" * (-len(plain) % 4), validate=True)
    except (binascii.Error, ValueError) as exc:
        raise BadSpanError(f"{what} is not base64: {exc}") from exc


def with_flags(attributes: dict[str, Any], flags: list[str]) -> dict[str, Any]:
    """``attributes`` with ``flags`` in them; the flags of a sender are overwritten, they are ours to give."""
    attributes[FLAGS] = sorted(set(flags))
    return attributes
