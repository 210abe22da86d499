"""Values of foreign JSON as spans hold them: ids, times, attributes. Total where a value can be repaired, BadSpanError where
the span has no meaning without it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from spanloop.pipeline.otlp.decoded import FLAGS, BadSpanError, DecodedBatch, check_times
from spanloop.schemas.canonical import canonical_json, digest
from spanloop.schemas.ids import is_hex_id

__all__ = [
    "Read",
    "channel",
    "either",
    "flagged",
    "json_text",
    "parsed",
    "plain",
    "span_id",
    "time_ns",
    "trace_id",
    "words",
]

_DEPTH = 64
_SURROGATE = re.compile("[\ud800-\udfff]")
_ISO = re.compile(
    r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,](\d{1,9})\d*)?\s*(Z|z|UTC|[+-]\d\d:?\d\d(?::?\d\d)?)?\Z"
)
_NAME = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_UNITS = ((10**11, 10**9), (10**14, 10**6), (10**17, 10**3))
"""Numbers below the first are in a unit of so many ns: seconds, milliseconds, microseconds; larger ones are ns."""


class Read(DecodedBatch):
    """What one record of a file held."""

    feedback: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """Scores that came with it, as ``POST /v1/feedback`` takes them."""


def either(data: Mapping[str, Any], *keys: str) -> Any:
    """Value of the first of ``keys`` that is there and not null."""
    for key in keys:
        value = data.get(key)
        if value is not None:
            return value
    return None


def words(value: Any) -> str:
    """A text as it is, a number as text, anything else empty; lone surrogates replaced."""
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""


def trace_id(raw: Any, prefix: str = "") -> str:
    """32 hex digits of a trace's name: itself where it is hex (behind ``prefix``), else a digest. Raises BadSpanError."""
    return _id(raw, prefix, 32, "trace id")


def span_id(raw: Any, prefix: str = "") -> str:
    """16 hex digits of a span's name, as ``trace_id``; of a longer hex name the first 16."""
    return _id(raw, prefix, 16, "span id")


def _id(raw: Any, prefix: str, size: int, what: str) -> str:
    text = words(raw)
    if not text:
        raise BadSpanError(f"{what} is missing", "id")
    core = text.removeprefix(prefix).replace("-", "").lower()
    if is_hex_id(core, size):
        return core
    if prefix and len(core) > size and is_hex_id(core, len(core)) and core[:size].strip("0"):
        return core[:size]
    return digest(what, text)[:size]


def time_ns(raw: Any, what: str) -> int:
    """Nanoseconds since 1970 of an ISO 8601 text (UTC where it names no zone) or of a number in s, ms, us or ns; 0 for
    nothing. Raises BadSpanError.

    >>> time_ns("1970-01-01T00:00:01.000000002Z", "start"), time_ns(1_700_000_000_000, "start")
    (1000000002, 1700000000000000000)
    """
    if raw is None or raw == "":
        return 0
    try:
        found = _iso(raw) if isinstance(raw, str) else _number(raw)
    except (ValueError, OverflowError, TypeError) as exc:
        raise BadSpanError(f"{what} is {str(raw)[:40]!r}, expected a time", "time") from exc
    check_times(found, found)
    return found


def _iso(raw: str) -> int:
    found = _ISO.match(raw.strip())
    if found is None:
        return _number(float(raw) if "." in raw else int(raw[:40]))
    day, clock, fraction, zone = found.groups()
    zone = "+00:00" if zone in (None, "Z", "z", "UTC") else zone
    since = datetime.fromisoformat(f"{day}T{clock}{zone}") - _EPOCH
    return (since.days * 86_400 + since.seconds) * 10**9 + int((fraction or "0").ljust(9, "0"))


def _number(raw: Any) -> int:
    if isinstance(raw, bool) or not isinstance(raw, int | float):
        raise TypeError
    unit = next((unit for limit, unit in _UNITS if abs(raw) < limit), 1)
    return raw * unit if isinstance(raw, int) else round(raw * unit)


def channel(raw: Any, tool: str) -> str:
    """Name of a score's channel, at most 64 letters. "outcome" is the team's reward, which only a scorer of ours gives: a
    score that another tool calls so is that tool's.

    >>> channel("tone of voice", "phoenix"), channel("outcome", "phoenix")
    ('tone_of_voice', 'phoenix.outcome')
    """
    text = "".join(c if c in _NAME else "_" for c in words(raw))[:64] or "score"
    return f"{tool}.outcome" if text == "outcome" else text


def plain(value: Any, flags: list[str], where: str, depth: int = _DEPTH) -> Any:
    """A JSON value as a span's attribute holds it: no lone surrogates, no NaN, no integer beyond 64 bits. What was repaired
    is added to ``flags``. Raises BadSpanError for a value nested too deep."""
    kind = type(value)
    if kind is str:
        if value.isascii() or not _SURROGATE.search(value):
            return value
        flags.append(f"invalid_unicode:{where}")
        return _SURROGATE.sub("\ufffd", value)
    if value is None or kind is bool:
        return value
    if kind is int:
        if -(2**63) <= value < 2**63:
            return value
        flags.append(f"out_of_range:{where}")
        return str(value)
    if kind is float:
        if math.isfinite(value):
            return value
        flags.append(f"invalid_number:{where}")
        return {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}[repr(value)]
    if depth <= 0:
        raise BadSpanError(f"the value of {where[:80]!r} is nested too deep", "nesting")
    if kind is list:
        return [plain(item, flags, where, depth - 1) for item in value]
    if kind is dict:
        return {
            plain(str(key), flags, where, 1): plain(item, flags, where, depth - 1)
            for key, item in value.items()
        }
    return str(value)


def json_text(value: Any, flags: list[str], where: str) -> str:
    """A text as it is, anything else as JSON text."""
    clean = plain(value, flags, where)
    return clean if isinstance(clean, str) else canonical_json(clean).decode()


def flagged(attributes: dict[str, Any], flags: list[str]) -> dict[str, Any]:
    """``attributes`` with the repairs in them, where there were any."""
    attributes.pop(FLAGS, None)
    if flags:
        attributes[FLAGS] = sorted(set(flags))
    return attributes


def parsed(value: Any) -> Any:
    """A JSON text as the value it writes, anything else as it is."""
    if isinstance(value, str) and value[:1] in ("{", "["):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return value
    return value
