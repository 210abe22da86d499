"""Spans of a log that states events and no spans: one for the log, one below it for each event; ``dialects/event_log`` reads
them. A log without times has an order: its events are a millisecond apart, from 1970 on."""

from __future__ import annotations

from typing import Any

from spanloop.pipeline.dialects.event_log import SCOPE
from spanloop.schemas.canonical import digest
from spanloop.schemas.spans import Span

__all__ = ["STEP_NS", "event_span", "log_span"]

STEP_NS = 1_000_000
"""Between two turns of a log that has an order and no times."""


def log_span(trace_id: str, name: str, start_ns: int, end_ns: int, attributes: dict[str, Any]) -> Span:
    """The span of the log itself."""
    return Span(
        trace_id=trace_id,
        span_id=_span_id(trace_id, "log"),
        name=name,
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=attributes,
        scope=SCOPE,
    )


def event_span(
    trace_id: str, key: str | int, name: str, *, start_ns: int, end_ns: int, attributes: dict[str, Any]
) -> Span:
    """The span of one event; ``key`` tells it from the log's others."""
    return Span(
        trace_id=trace_id,
        span_id=_span_id(trace_id, key),
        parent_span_id=_span_id(trace_id, "log"),
        name=name,
        start_ns=start_ns,
        end_ns=end_ns,
        attributes=attributes,
        scope=SCOPE,
    )


def _span_id(trace_id: str, key: str | int) -> str:
    return digest("event_span", trace_id, type(key).__name__, key)[:16]
