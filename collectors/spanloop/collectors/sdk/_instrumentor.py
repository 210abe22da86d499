"""instrument() and uninstrument() by OpenTelemetry's contract, and the entry point that ``opentelemetry-instrument`` finds."""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

from opentelemetry.instrumentation.instrumentor import BaseInstrumentor
from opentelemetry.trace import TracerProvider

from spanloop.collectors.sdk._failures import failed
from spanloop.collectors.sdk._provider import provider_of_host
from spanloop.collectors.sdk._runtime import Runtime, activate, wants_content
from spanloop.schemas.sdk_attributes import SCOPE

__all__ = ["SpanloopInstrumentor", "instrument", "uninstrument"]

VERSION = "1"
"""Of the attributes that the spans carry."""


class SpanloopInstrumentor(BaseInstrumentor):
    """Lets the SDK's blocks record. A second ``instrument()`` only warns; ``uninstrument()`` makes every block inert again."""

    def instrumentation_dependencies(self) -> Collection[str]:
        """Nothing but itself."""
        return ()

    def _instrument(self, **kwargs: Any) -> None:
        """Take ``tracer_provider`` (default: the host's, else one from the environment), ``capture_content``, ``hash_key``."""
        try:
            provider: TracerProvider = kwargs.get("tracer_provider") or provider_of_host()
            asked = kwargs.get("capture_content")
            key = kwargs.get("hash_key") or os.environ.get("SPANLOOP_CONTENT__HMAC_KEY", "")
            activate(
                Runtime(
                    provider.get_tracer(SCOPE, VERSION),
                    capture_content=wants_content() if asked is None else bool(asked),
                    hash_key=key.encode() if isinstance(key, str) else bytes(key),
                )
            )
        except Exception as exc:
            failed("instrument()", exc)

    def _uninstrument(self, **kwargs: Any) -> None:
        activate(None)


def instrument(
    *,
    tracer_provider: TracerProvider | None = None,
    capture_content: bool | None = None,
    hash_key: str = "",
) -> None:
    """Record from now on.

    Args:
        tracer_provider: default: the host's; where it has none, one from the OTEL_ variables, exporting OTLP.
        capture_content: texts of tasks, tools and messages on spans. Default: OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT.
        hash_key: secret of harness fingerprints, so that nobody can confirm a guessed prompt. Default: SPANLOOP_CONTENT__HMAC_KEY.
    """
    SpanloopInstrumentor().instrument(
        tracer_provider=tracer_provider, capture_content=capture_content, hash_key=hash_key
    )


def uninstrument() -> None:
    """Stop recording; blocks that are open still end."""
    SpanloopInstrumentor().uninstrument()
