"""The registry of dialects: the first that recognises a span reads it, those it names in ``ALSO`` fill the gaps.

Order matters where one dialect extends another: the special one stands first. What nobody recognises is read by the
words in its name, flagged, and else becomes an operation of kind ``unknown``: it keeps its place in the tree and says nothing.
"""

from __future__ import annotations

from typing import Protocol

from spanloop.pipeline.dialects import (
    adk,
    agent_framework,
    autogen,
    claude_code,
    codex,
    event_log,
    gateway,
    genai,
    genai_logs,
    langfuse,
    logfire,
    mlflow,
    openai_agents_native,
    openinference,
    otel_openai_agents,
    pydantic_ai,
    spanloop_sdk,
    strands,
    traceloop,
    unknown,
    vercel,
)
from spanloop.pipeline.dialects.fields import base_fields
from spanloop.pipeline.dialects.merge import filled
from spanloop.pipeline.dialects.operation import Operation
from spanloop.schemas.spans import LOG, Span

__all__ = ["DIALECTS", "LOG_DIALECTS", "TRUSTED_SOURCES", "Dialect", "operation_of"]


class Dialect(Protocol):
    """A module of this folder. ``ALSO``, a tuple of names, may list the dialects that others write on its spans."""

    @property
    def NAME(self) -> str: ...

    def matches(self, span: Span) -> bool:
        """Whether the span is written in this dialect; cheap, never raises."""
        ...

    def read(self, span: Span) -> Operation:
        """The span as an operation. Never raises for a span's content: what cannot be read becomes a flag."""
        ...


DIALECTS: tuple[Dialect, ...] = (
    spanloop_sdk,
    claude_code,
    openai_agents_native,
    pydantic_ai,
    openinference,
    logfire,
    traceloop,
    otel_openai_agents,
    adk,
    strands,
    autogen,
    agent_framework,
    langfuse,
    mlflow,
    vercel,
    genai,
)
"""Dialects that anybody may speak, in order."""
LOG_DIALECTS: tuple[Dialect, ...] = (claude_code, codex, genai_logs)
"""Those of log records. What none of them knows is a note on the span in which it was logged."""
TRUSTED_SOURCES = frozenset({"gateway", "import"})
"""Sources whose gateway spans and event logs are believed. An agent that sends spans under the gateway's name over OTLP
is read as plain GenAI: it cannot claim which policy version answered, or with which tokens."""

_READERS = tuple(
    (d.matches, d.read, tuple((o.matches, o.read) for o in DIALECTS if o.NAME in getattr(d, "ALSO", ())))
    for d in DIALECTS
)
"""Of each dialect how it recognises and reads a span, and the same of those that fill its gaps."""


def operation_of(span: Span, source: str = "otlp") -> Operation:
    """The operation of a span that arrived from ``source`` (SpansReceived.source)."""
    if source in TRUSTED_SOURCES:
        if gateway.matches(span):
            return gateway.read(span)
        if event_log.matches(span):
            return event_log.read(span)
    if span.kind == LOG:
        known = next((dialect for dialect in LOG_DIALECTS if dialect.matches(span)), None)
        return known.read(span) if known else Operation(**base_fields(span), kind="note", event="other")
    for matches, read, fillers in _READERS:
        if matches(span):
            operation = read(span)
            for fills, read_gaps in fillers:
                if fills(span):
                    operation = filled(operation, read_gaps(span))
            return operation
    return unknown.read(span)
