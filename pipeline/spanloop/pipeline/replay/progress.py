"""What a replay shows: three numbers that all of its workers count up, and nothing that Beam says of itself when imported."""

from __future__ import annotations

import logging
from typing import Any

__all__ = ["advance", "attach", "quiet_beam"]

_counters: Any = None


def attach(counters: Any) -> None:
    """Count here from now on: a ``multiprocessing.Array`` of (steps, spans, orchestrations), or None."""
    global _counters  # noqa: PLW0603 - one for each process
    _counters = counters


def advance(steps: int, spans: int = 0, orchestrations: int = 0) -> None:
    """So much more is done. What a step is depends on the pass: a record, or a span."""
    if _counters is not None:
        with _counters.get_lock():
            _counters[0] += steps
            _counters[1] += spans
            _counters[2] += orchestrations


def quiet_beam() -> None:
    """Call before Beam is imported: it warns of a Google library that nothing here needs."""
    logging.getLogger().addFilter(_no_apitools)


def _no_apitools(record: logging.LogRecord) -> bool:
    return "apitools not found" not in str(record.msg)
