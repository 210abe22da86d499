"""Logged decision points of many orchestrations as arrays: what learned stopping learns from.

A *path* is one orchestration: its decision points in order, each with what the decider could see (features), how good the draft at hand
was (quality, if somebody graded it), what had been spent (cost) and how likely the behaviour was to stop there. The last point is where
it stopped by choice, or where something else ended it (a horizon, a budget).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = ["Path", "Paths", "Point"]

Floats = NDArray[np.float64]
LEAST_SHARE = 0.02
"""Estimated propensities are not taken for smaller than this (METHODS 4.6)."""


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One stop/continue decision."""

    features: tuple[tuple[str, float], ...]
    """What the decider could see, (name, number) sorted by name; absent: missing."""
    cost: float
    """Spent up to here, units of reward."""
    quality: float | None
    """Of the draft at this point, units of reward; None: nobody graded it."""
    propensity: float | None
    """With which the behaviour stopped here; None: not logged."""
    stopped: bool
    """By choice."""


class Path(msgspec.Struct, frozen=True, array_like=True):
    """The decision points of one orchestration, in order."""

    id: str
    points: tuple[Point, ...]


class Paths:
    """Paths in a row. Legend: N paths, R points (rows), F features."""

    def __init__(self, paths: Sequence[Path], names: Sequence[str] | None = None) -> None:
        kept = [path for path in paths if path.points]
        points = [point for path in kept for point in path.points]
        if names is None:
            names = sorted({name for point in points for name, _ in point.features})
        place = {name: f for f, name in enumerate(names)}
        self.names = tuple(names)
        self.ids = [path.id for path in kept]
        sizes = np.array([len(path.points) for path in kept], dtype=np.int64)
        ends = np.cumsum(sizes)
        self.first = ends - sizes
        """Row of each path's first point, shape (N,)."""
        self.last = ends - 1
        self.owner = np.repeat(np.arange(len(kept)), sizes)
        self.features = np.full((len(points), len(self.names)), np.nan)
        for r, point in enumerate(points):
            for name, value in point.features:
                f = place.get(name)
                if f is not None:
                    self.features[r, f] = value
        self.cost = np.array([point.cost for point in points], dtype=np.float64)
        self.quality = np.array([np.nan if p.quality is None else p.quality for p in points], np.float64)
        self.propensity = np.array(
            [np.nan if p.propensity is None else p.propensity for p in points], np.float64
        )
        self.stopped = np.array([point.stopped for point in points], dtype=bool)
        self.is_last = np.zeros(len(points), dtype=bool)
        self.is_last[self.last] = True

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def has_propensities(self) -> bool:
        """Whether the stop propensity of every point was logged."""
        return not bool(np.isnan(self.propensity).any())

    @property
    def has_drafts(self) -> bool:
        """Whether the draft of some point before the last was graded."""
        return bool((~np.isnan(self.quality) & ~self.is_last).any())

    def of(self, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Rows of the paths that a mask of shape (N,) chooses."""
        return chosen[self.owner]
