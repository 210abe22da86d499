"""A small regression tree over binned features: the regression of learned stopping.

Features are cut at quantiles once, a missing value is a bin of its own below all others (missing is not zero). A split must take more
off the weighted squared error than noise would, so that what does not matter is not split on.
Invariants: pure and deterministic; a tree is plain lists, and ``from_dict(to_dict())`` predicts the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanloop.schemas.errors import SchemaError

__all__ = ["Binning", "Tree", "fit_tree"]

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]

BINS = 48
"""Cuts of one feature at most."""
DEPTH = 8
NODES_MAX = 255
LEAST_ROWS = 20.0
"""Effective rows of a leaf."""
_INDICES = ("feature", "upto", "left", "right")
EVIDENCE = 3.0
"""A split's gain in units of the noise variance, at least."""


class Binning:
    """Cuts of each feature, at quantiles of what training saw.

    Args:
        cuts: for each feature its cuts, ascending.
    """

    def __init__(self, cuts: list[Floats]) -> None:
        self.cuts = cuts

    @staticmethod
    def of(features: Floats) -> Binning:
        """Cuts halfway between neighbouring quantiles of ``features``, shape (rows, F); NaN: missing."""
        cuts: list[Floats] = []
        for column in features.T:
            known = np.unique(column[~np.isnan(column)])
            if len(known) > BINS:
                known = np.unique(np.quantile(column[~np.isnan(column)], np.linspace(0.0, 1.0, BINS)))
            cuts.append((known[1:] + known[:-1]) / 2.0)
        return Binning(cuts)

    def codes(self, features: Floats) -> Codes:
        """Bin of each value, 0: missing; shape (rows, F)."""
        found = np.zeros(features.shape, dtype=np.int64)
        for f, cuts in enumerate(self.cuts):
            column = features[:, f]
            found[:, f] = np.where(np.isnan(column), 0, np.searchsorted(cuts, column, side="left") + 1)
        return found


class Tree:
    """Nodes in lists: feature (-1: a leaf), bin up to which a row goes left, children, value."""

    def __init__(
        self, feature: list[int], upto: list[int], left: list[int], right: list[int], value: list[float]
    ) -> None:
        self.feature, self.upto, self.left, self.right, self.value = feature, upto, left, right, value

    def predict(self, codes: Codes) -> Floats:
        """Value of each row, shape (rows,)."""
        place = np.zeros(len(codes), dtype=np.int64)
        feature, upto = np.array(self.feature), np.array(self.upto)
        left, right = np.array(self.left), np.array(self.right)
        rows = np.arange(len(codes))
        for _ in range(DEPTH):
            inner = feature[place] >= 0
            if not inner.any():
                break
            goes_left = codes[rows, np.maximum(feature[place], 0)] <= upto[place]
            place = np.where(inner, np.where(goes_left, left[place], right[place]), place)
        return np.array(self.value)[place]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists."""
        return {name: list(getattr(self, name)) for name in ("feature", "upto", "left", "right", "value")}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Tree:
        """The tree of ``to_dict``; raises SchemaError when it is none."""
        try:
            feature, upto, left, right = ([int(x) for x in data[name]] for name in _INDICES)
            value = [float(x) for x in data["value"]]
        except (KeyError, TypeError, ValueError) as exc:
            raise SchemaError(f"not a regression tree: {exc}") from exc
        count = len(value)
        if not count or {len(each) for each in (feature, upto, left, right)} != {count}:
            raise SchemaError("a regression tree's lists are not of one length")
        if any(
            not at < child < count
            for side in (left, right)
            for at, child in enumerate(side)
            if feature[at] >= 0
        ):
            raise SchemaError("a regression tree's children do not come after it")
        return Tree(feature, upto, left, right, value)


def fit_tree(codes: Codes, target: Floats, weight: Floats, *, evidence: float = EVIDENCE) -> Tree:
    """Least squares by greedy splits, breadth first.

    Args:
        codes: Shape (rows, F), of a ``Binning``.
        target: Shape (rows,).
        weight: Shape (rows,), >= 0.
        evidence: Least gain of a split, in noise variances.
    """
    tree = Tree([-1], [0], [0], [0], [_mean(target, weight)])
    waiting = [(0, np.flatnonzero(weight > 0.0), 0)]
    while waiting:
        at, rows, depth = waiting.pop(0)
        if depth >= DEPTH - 1 or len(tree.value) + 2 > NODES_MAX:
            continue
        found = _best_split(codes[rows], target[rows], weight[rows], evidence)
        if found is None:
            continue
        feature, upto = found
        goes_left = codes[rows, feature] <= upto
        tree.feature[at], tree.upto[at] = feature, upto
        for side, mine in ((tree.left, rows[goes_left]), (tree.right, rows[~goes_left])):
            side[at] = len(tree.value)
            waiting.append((len(tree.value), mine, depth + 1))
            tree.feature.append(-1)
            for each in (tree.upto, tree.left, tree.right):
                each.append(0)
            tree.value.append(_mean(target[mine], weight[mine]))
    return tree


def _mean(target: Floats, weight: Floats) -> float:
    total = float(weight.sum())
    return float(weight @ target) / total if total > 0.0 else 0.0


def _best_split(codes: Codes, target: Floats, weight: Floats, evidence: float) -> tuple[int, int] | None:
    total = float(weight.sum())
    squares = float(weight @ weight)
    if total <= 0.0 or total * total < 2.0 * LEAST_ROWS * squares:
        return None
    centred = target - _mean(target, weight)
    noise = float((weight * weight) @ (centred * centred)) / total
    least = LEAST_ROWS * squares / total
    best, chosen = evidence * noise, None
    for f in range(codes.shape[1]):
        column = codes[:, f]
        size = int(column.max()) + 1
        if size < 2:
            continue
        weights = np.bincount(column, weights=weight, minlength=size).cumsum()[:-1]
        sums = np.bincount(column, weights=weight * centred, minlength=size).cumsum()[:-1]
        others = total - weights
        fits = (weights >= least) & (others >= least)
        if not fits.any():
            continue
        gains = np.where(
            fits, sums * sums / np.maximum(weights, 1e-300) + sums * sums / np.maximum(others, 1e-300), 0.0
        )
        place = int(np.argmax(gains))
        if gains[place] > best:
            best, chosen = float(gains[place]), (f, place)
    return chosen
