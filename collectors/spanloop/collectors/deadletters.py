"""Events for what was refused, so that nothing is dropped without a trace. The bytes are kept only where the
deployment keeps content; the reason then may quote them, else it is one of a few fixed words."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping

from spanloop.pipeline.otlp.decoded import Rejected
from spanloop.schemas.events import DeadLettered

__all__ = ["MAX_DATA_BYTES", "dead_letter"]

MAX_DATA_BYTES = 64 * 1024
"""More of a refused span is not kept: size and hash remain."""


def dead_letter(
    rejected: Rejected,
    *,
    tenant: str,
    source: str,
    keep_content: bool,
    place: Mapping[str, object] | None = None,
) -> DeadLettered:
    """The event for one refused span, with the ``place`` that it came from. Refusing the same bytes again is the same event."""
    data = rejected.data[:MAX_DATA_BYTES] if keep_content else b""
    return DeadLettered(
        tenant=tenant,
        source=source,
        reason=f"bad span: {rejected.kind}",
        sha256=hashlib.sha256(rejected.data).hexdigest(),
        size=len(rejected.data),
        data=base64.b64encode(data).decode("ascii"),
        details={**(place or {}), **({"reason": rejected.reason[:1024]} if keep_content else {})},
    )
