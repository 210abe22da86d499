"""Identifiers: pure functions of content, never random."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from spanloop.schemas.canonical import digest

__all__ = [
    "gateway_span_id",
    "gateway_trace_id",
    "is_hex_id",
    "orchestration_id",
    "policy_name",
    "policy_number",
    "version_number",
]

_HEX = frozenset("0123456789abcdef")


def orchestration_id(tenant: str, trace_ids: Iterable[str]) -> str:
    """32 hex digits over tenant and the smallest trace id of the joined set."""
    return digest("orchestration_id", tenant, min(trace_ids))


def gateway_trace_id(response_id: str) -> str:
    """Trace id of the gateway's own span of a call that came without a trace context. It starts with ffffffff so
    that it is never the smallest of a joined set: the gateway does not name orchestrations that agents traced."""
    return "ffffffff" + digest("gateway_trace", response_id)[:24]


def gateway_span_id(response_id: str) -> str:
    """Span id of the gateway's span of a call: exporting it twice is one span."""
    return digest("gateway_span", response_id)[:16]


def is_hex_id(value: str, length: int) -> bool:
    """True for ``length`` lower-case hex digits that are not all zero."""
    return len(value) == length and _HEX.issuperset(value) and value.strip("0") != ""


def policy_name(policy: str, version: int) -> str:
    """Immutable serving name of a version.

    >>> policy_name("policy", 12)
    'policy@v12'
    """
    return f"{policy}@v{version}"


@lru_cache(maxsize=4_096)
def policy_number(name: str) -> int:
    """Version number of a serving name, -1 when it is none.

    >>> policy_number("policy@v12"), policy_number("gpt-5")
    (12, -1)
    """
    _, _, tail = name.partition("@v")
    return int(tail) if tail.isdigit() else -1


def version_number(name: str) -> int:
    """Number of a value model's version, 0 when it is none.

    >>> version_number("value@v12-0a1b2c3d"), version_number("none")
    (12, 0)
    """
    head = name.partition("@v")[2].partition("-")[0]
    return int(head) if head.isdigit() else 0
