"""Whether the SDK records, and into which tracer. Without ``instrument()`` every block is inert."""

from __future__ import annotations

import os

from opentelemetry.trace import Tracer

__all__ = ["Runtime", "activate", "active", "wants_content"]

_CONTENT = "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT"


class Runtime:
    """What ``instrument()`` sets up.

    Args:
        tracer: spans are made with it.
        capture_content: put texts of tasks, tools and messages on spans.
        hash_key: key of harness fingerprints.
    """

    __slots__ = ("capture_content", "hash_key", "tracer")

    def __init__(self, tracer: Tracer, *, capture_content: bool, hash_key: bytes) -> None:
        self.tracer, self.capture_content, self.hash_key = tracer, capture_content, hash_key


_active: Runtime | None = None


def active() -> Runtime | None:
    """The runtime while instrumented, else None."""
    return _active


def activate(runtime: Runtime | None) -> None:
    """Record with ``runtime`` from now on; None: no longer."""
    global _active  # noqa: PLW0603
    _active = runtime


def wants_content() -> bool:
    """Whether the environment asks for message content, by OpenTelemetry's variable."""
    return os.environ.get(_CONTENT, "").strip().lower() in ("true", "1", "span_only", "span_and_event")
