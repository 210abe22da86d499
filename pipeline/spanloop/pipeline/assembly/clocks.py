"""Times are compared within one process; between two only as far as their clocks may differ.

Spans whose process is unknown are taken as one process's: then there is nothing better than their clocks.
"""

from __future__ import annotations

from spanloop.pipeline.dialects.operation import Operation

__all__ = ["SKEW_NS", "earlier", "one_clock", "within"]

SKEW_NS = 300_000_000_000
"""By so much the clocks of two processes may differ; spans further apart are not taken for simultaneous."""


def one_clock(one: Operation, two: Operation) -> bool:
    """Whether one clock stamped both."""
    return not one.resource or not two.resource or one.resource == two.resource


def within(outer: Operation, inner: Operation) -> bool:
    """Whether ``inner`` lies within the time of ``outer``; between two clocks: may lie, and is no longer."""
    if one_clock(outer, inner):
        return outer.start_ns <= inner.start_ns and inner.end_ns <= outer.end_ns
    fits = inner.end_ns - inner.start_ns <= outer.end_ns - outer.start_ns
    return fits and outer.start_ns - SKEW_NS <= inner.start_ns and inner.end_ns <= outer.end_ns + SKEW_NS


def earlier(one: Operation, two: Operation) -> bool:
    """Whether ``one`` surely began before ``two``."""
    return one.start_ns < two.start_ns - (0 if one_clock(one, two) else SKEW_NS)
