"""What the dialects of coding agents (Claude Code, Codex) share: values written as texts, records that end what they
report, and who decided on a tool call."""

from __future__ import annotations

from typing import Any

from spanloop.pipeline.dialects.fields import first, text
from spanloop.schemas.spans import Span

__all__ = ["begun_ns", "failed", "label", "user_decided"]

_MAX_MS = 7 * 86_400_000.0
"""A week; a longer duration is no duration."""
_TRUE = frozenset({"true", "1", "yes"})
_FALSE = frozenset({"false", "0", "no"})


def label(attributes: dict[str, Any], *keys: str) -> str:
    """Text of the first of ``keys``; what the sender or we redacted is none."""
    found = first(attributes, *keys)
    value = text(found)
    return "" if value in ("<REDACTED>", "[REDACTED]") else value


def begun_ns(record: Span) -> int:
    """When that began which ``record`` reports at its end, ns."""
    try:
        duration_ms = float(first(record.attributes, "duration_ms", "duration") or 0)
    except (TypeError, ValueError, OverflowError):
        return record.start_ns
    if not 0 < duration_ms <= _MAX_MS:
        return record.start_ns
    return max(record.start_ns - round(duration_ms * 1e6), 1)


def failed(span: Span) -> bool:
    """Whether a record or span says that it failed, in its status or as ``success`` of any type."""
    success = span.attributes.get("success")
    told = str(success).lower() if isinstance(success, bool | str | int) else ""
    if told in _TRUE:
        return False
    return told in _FALSE or span.status == "error"


def user_decided(attributes: dict[str, Any]) -> bool:
    """Whether a person decided on the tool call, by the source that is named.

    >>> user_decided({"source": "user_permanent"}), user_decided({"source": "config"}), user_decided({})
    (True, False, False)
    """
    source = label(attributes, "source", "decision_source").lower()
    return source.startswith("user")
