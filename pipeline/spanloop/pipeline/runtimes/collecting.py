"""Garbage collection of a process that holds much and makes few cycles.

The stages' state is many small objects that live long; the default thresholds walk them over and over (a tenth of the embedded
path, benchmarks/pipeline.py). What exists at start is frozen, young objects are looked at less often.
"""

from __future__ import annotations

import gc

__all__ = ["collect_rarely"]


def collect_rarely() -> None:
    """Call once at start, after the state was restored."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)
