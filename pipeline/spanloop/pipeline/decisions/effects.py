"""Effects of told decisions by group and context, from sums that can be added to and taken from exactly.

The estimate is that of ``credit.estimators.aipw``: a cross-fitted outcome model (the mean of an option in its context, over the other
parts of the log, one made-up try at the option's mean in the group) corrected by inverse propensities; errors take an orchestration as
one. Here it is a function of sums of integers over orchestrations, so that a corrected reward or a retracted orchestration leaves
exactly what would be there had it never come.
Invariants: pure; statistics are a function of the multiset of contributions; addition and subtraction are exact inverses.
Source: METHODS 3.2 k, 4.6; Chernozhukov et al. 1608.00060.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from spanloop.pipeline.credit.estimators.aipw import CLIPPED_AT, FOLDS, LEAST_PROPENSITY
from spanloop.pipeline.credit.estimators.intervals import student_quantile
from spanloop.pipeline.decisions.told import OPTIONS_MAX, Told, context_of, group_of
from spanloop.schemas.canonical import MICRO, digest

__all__ = ["LEVEL", "OptionEffect", "Row", "Statistics", "fold_of", "rows_of"]

LEVEL = 0.9
"""Of intervals."""

Status = Literal["ok", "estimated_propensities", "unidentified"]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """What one orchestration contributes to one cell: integers only."""

    group: str
    context: str
    options: tuple[str, ...]
    """Sorted."""
    logged: bool
    """Its propensities were told."""
    decisions: int
    counts: tuple[int, ...]
    """How often each option was taken."""
    weights: tuple[int, ...]
    """Sum of 1 / propensity of each option over the decisions that took it, micro."""
    low: tuple[int, ...]
    """Decisions at which the option had less than LEAST_PROPENSITY."""


class OptionEffect(msgspec.Struct, frozen=True):
    """What taking an option is worth in a context."""

    option: str
    taken: int
    value: float | None
    """Expected reward had it always been taken; None: unidentified."""
    value_error: float | None
    effect: float | None
    """Against the mean of the other options that were ever taken."""
    error: float | None
    low: float | None
    high: float | None
    naive: float | None
    status: Status
    reason: str = ""


def fold_of(orchestration_id: str) -> int:
    """The part of the log that an orchestration is in."""
    return int(digest("fold", orchestration_id)[:8], 16) % FOLDS


def rows_of(told: Iterable[Told]) -> tuple[Row, ...]:
    """Contributions of an orchestration: one a (group, context, logged), sorted."""
    cells: dict[tuple[str, str, bool], list[Told]] = {}
    for item in told:
        options = item.decision.options
        if item.decision.chosen in options and 2 <= len(options) <= OPTIONS_MAX:
            key = (group_of(item), context_of(item), bool(item.decision.propensities))
            cells.setdefault(key, []).append(item)
    return tuple(_row(*key, items) for key, items in sorted(cells.items()))


def _row(group: str, context: str, logged: bool, items: Sequence[Told]) -> Row:
    options = tuple(sorted(items[0].decision.options))
    counts, weights, low = [0] * len(options), [0] * len(options), [0] * len(options)
    for item in items:
        chosen = options.index(item.decision.chosen)
        counts[chosen] += 1
        shares = dict(zip(item.decision.options, item.decision.propensities, strict=False))
        weights[chosen] += round(MICRO / max(shares.get(item.decision.chosen, 1.0), LEAST_PROPENSITY))
        for a, option in enumerate(options):
            low[a] += logged and shares[option] < LEAST_PROPENSITY
    return Row(group, context, options, logged, len(items), tuple(counts), tuple(weights), tuple(low))


class _Sums:
    """Integer sums over the orchestrations of one fold in one cell; k options."""

    def __init__(self, k: int) -> None:
        self.clusters = self.n = self.nn = 0
        self.count, self.reward, self.low = [0] * k, [0] * k, [0] * k
        self.w, self.rw = [0] * k, [0] * k
        self.nw, self.nrw = [0] * k, [0] * k
        self.ww = [[0] * k for _ in range(k)]
        self.rww = [[0] * k for _ in range(k)]
        self.rrww = [[0] * k for _ in range(k)]

    def add(self, row: Row, reward: int, sign: int) -> None:
        """``reward``: micro. Sums of w are micro, of rw micro squared."""
        n = row.decisions
        self.clusters += sign
        self.n += sign * n
        self.nn += sign * n * n
        for a, (count, w) in enumerate(zip(row.counts, row.weights, strict=True)):
            self.count[a] += sign * count
            self.reward[a] += sign * count * reward
            self.low[a] += sign * row.low[a]
            self.w[a] += sign * w
            self.rw[a] += sign * w * reward
            self.nw[a] += sign * n * w
            self.nrw[a] += sign * n * w * reward
            if not w:
                continue
            for b, other in enumerate(row.weights):
                if other:
                    self.ww[a][b] += sign * w * other
                    self.rww[a][b] += sign * w * other * reward
                    self.rrww[a][b] += sign * w * other * reward * reward

    def merged(self, others: Iterable[_Sums]) -> tuple[list[int], list[int]]:
        """Counts and summed rewards of the others together."""
        k = len(self.count)
        count, reward = [0] * k, [0] * k
        for other in others:
            for a in range(k):
                count[a] += other.count[a]
                reward[a] += other.reward[a]
        return count, reward


class _Cell:
    """One (group, context, logged)."""

    def __init__(self, options: tuple[str, ...]) -> None:
        self.options = options
        self.folds = [_Sums(len(options)) for _ in range(FOLDS)]

    @property
    def clusters(self) -> int:
        return sum(sums.clusters for sums in self.folds)

    def taken(self) -> list[int]:
        return [sum(sums.count[a] for sums in self.folds) for a in range(len(self.options))]


class _Moments(msgspec.Struct):
    """Sums of a contrast's terms over orchestrations."""

    n: int = 0
    clusters: int = 0
    total: float = 0.0
    squares: float = 0.0
    with_n: float = 0.0
    nn: float = 0.0

    def add(self, other: _Moments) -> None:
        self.n += other.n
        self.clusters += other.clusters
        self.total += other.total
        self.squares += other.squares
        self.with_n += other.with_n
        self.nn += other.nn

    def spread(self, mean: float) -> float:
        """Sum over orchestrations of (term - decisions x mean) squared."""
        return max(0.0, self.squares - 2.0 * mean * self.with_n + mean * mean * self.nn)


class Statistics:
    """All cells of a tenant."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, bool], dict[str, _Cell]] = {}
        self._members: dict[tuple[str, bool], int] = {}
        """Orchestrations of a group."""

    def add(self, orchestration_id: str, rows: Sequence[Row], reward: int, sign: int = 1) -> None:
        """Count an orchestration in (sign 1) or out (-1).

        Args:
            orchestration_id: decides the fold.
            rows: of ``rows_of``.
            reward: of the team, micro.
            sign: 1 or -1.
        """
        fold = fold_of(orchestration_id)
        for key in {(row.group, row.logged) for row in rows}:
            self._members[key] = self._members.get(key, 0) + sign
        for row in rows:
            key = (row.group, row.logged)
            cells = self._cells.setdefault(key, {})
            cell = cells.get(row.context)
            if cell is None:
                cell = cells[row.context] = _Cell(row.options)
            cell.folds[fold].add(row, reward, sign)
            if not cell.clusters:
                del cells[row.context]
                if not cells:
                    del self._cells[key]
        self._members = {key: count for key, count in self._members.items() if count}

    def groups(self) -> list[tuple[str, bool]]:
        """(group, propensities told), sorted."""
        return sorted(self._cells)

    def contexts(self, group: tuple[str, bool]) -> list[str]:
        """Contexts of a group, sorted."""
        return sorted(self._cells.get(group, ()))

    def effects(self, group: tuple[str, bool], context: str | None = None) -> tuple[OptionEffect, ...]:
        """What each option is worth in a context, or in the group's contexts as they came (None)."""
        every = self._cells[group]
        cells = {context: every[context]} if context is not None else dict(sorted(every.items()))
        options = next(iter(every.values())).options
        taken = [sum(cell.taken()[a] for cell in cells.values()) for a in range(len(options))]
        return tuple(self._effect(group, cells, options, taken, a) for a in range(len(options)))

    def _effect(
        self, group: tuple[str, bool], cells: dict[str, _Cell], options: tuple[str, ...], taken: list[int], a: int
    ) -> OptionEffect:  # fmt: skip
        others = [b for b in range(len(options)) if b != a and taken[b]]
        naive = _naive(cells, a, others) if taken[a] and others else None
        members = min(self._members[group], sum(cell.clusters for cell in cells.values()))
        refusal = self._refusal(cells, taken, a, others, logged=group[1], orchestrations=members)
        if refusal:
            return OptionEffect(
                options[a], taken[a], None, None, None, None, None, None, naive, "unidentified", refusal
            )
        alone = [0.0] * len(options)
        alone[a] = 1.0
        against = alone.copy()
        for b in others:
            against[b] = -1.0 / len(others)
        value, value_error, _ = self._contrast(group, cells, alone)
        effect, error, clusters = self._contrast(group, cells, against)
        half = student_quantile(LEVEL, clusters - 1) * error if clusters > 1 else float("inf")
        status: Status = "ok" if group[1] else "estimated_propensities"
        return OptionEffect(
            options[a],
            taken[a],
            value,
            value_error,
            effect,
            error,
            effect - half,
            effect + half,
            naive,
            status,
        )

    def _refusal(
        self,
        cells: dict[str, _Cell],
        taken: list[int],
        a: int,
        others: list[int],
        *,
        logged: bool,
        orchestrations: int,
    ) -> str:
        options = next(iter(cells.values())).options
        if not taken[a]:
            return f"{options[a]!r} was never taken here"
        if not others:
            return "no other option was ever taken here"
        if orchestrations < 2:
            return "one orchestration alone has no error"
        for b in (a, *others):
            low = sum(sums.low[b] for cell in cells.values() for sums in cell.folds)
            if low:
                return f"{options[b]!r} had a propensity under {LEAST_PROPENSITY:g} {low} times: no overlap"
        if not logged:
            for context, cell in cells.items():
                count = cell.taken()
                least = min(count[b] for b in (a, *others)) / max(1, sum(count))
                if least < LEAST_PROPENSITY:
                    return f"no overlap: an option has a share of {least:.2g} where {context}"
        return ""

    def _contrast(
        self, group: tuple[str, bool], cells: dict[str, _Cell], contrast: list[float]
    ) -> tuple[float, float, int]:
        """(mean, error, clusters) of sum_a contrast_a x (reward under a)."""
        parts: list[_Moments] = []
        for cell in cells.values():
            moments = _Moments()
            for fold, sums in enumerate(cell.folds):
                if sums.n:
                    predicted = self._outcomes(group, cell, fold)
                    moments.add(_terms(sums, contrast, predicted, self._inflate(group, cell, fold)))
            parts.append(moments)
        n = sum(part.n for part in parts)
        mean = sum(part.total for part in parts) / n
        spreads = [part.spread(mean) for part in parts]
        clusters = sum(part.clusters for part in parts)
        spread = sum(spreads)
        if len(cells) > 1 and clusters > self._members.get(group, 0):
            # An orchestration in several contexts: the sum of errors bounds the error of the sum.
            spread = sum(each**0.5 for each in spreads) ** 2
            clusters = self._members.get(group, 0)
        scale = clusters / (clusters - 1) if clusters > 1 else float("inf")
        return mean, (scale * spread) ** 0.5 / n, clusters

    def _outcomes(self, group: tuple[str, bool], cell: _Cell, fold: int) -> list[float]:
        """Mean reward of each option in the cell over the other folds, one made-up try at its mean over the group's contexts."""
        k = len(cell.options)
        everywhere = [
            sums for each in self._cells[group].values() for f, sums in enumerate(each.folds) if f != fold
        ]
        count, reward = cell.folds[0].merged(everywhere)
        if not sum(count):
            return [0.0] * k
        whole = sum(reward) / MICRO / sum(count)
        overall = [(reward[a] / MICRO + whole) / (count[a] + 1.0) for a in range(k)]
        own, own_reward = cell.folds[0].merged(sums for f, sums in enumerate(cell.folds) if f != fold)
        return [(own_reward[a] / MICRO + overall[a]) / (own[a] + 1.0) for a in range(k)]

    def _inflate(self, group: tuple[str, bool], cell: _Cell, fold: int) -> list[float]:
        """What a decision's weight is multiplied with: 1 where propensities were told, else 1 / the option's share elsewhere."""
        k = len(cell.options)
        if group[1]:
            return [1.0] * k
        count, _ = cell.folds[0].merged(sums for f, sums in enumerate(cell.folds) if f != fold)
        total = sum(count) + k
        return [1.0 / max((count[a] + 1.0) / total, CLIPPED_AT) for a in range(k)]


def _terms(sums: _Sums, contrast: list[float], predicted: list[float], inflate: list[float]) -> _Moments:
    """Moments of T = n x sum c q + sum c (w R - w q), over the orchestrations of one fold."""
    k = len(contrast)
    base = sum(c * q for c, q in zip(contrast, predicted, strict=True))
    scaled = [c * i / MICRO for c, i in zip(contrast, inflate, strict=True)]
    used = [a for a in range(k) if scaled[a]]
    linear = sum(scaled[a] * (sums.rw[a] / MICRO - predicted[a] * sums.w[a]) for a in used)
    linear_n = sum(scaled[a] * (sums.nrw[a] / MICRO - predicted[a] * sums.nw[a]) for a in used)
    quadratic = 0.0
    for a in used:
        for b in used:
            quadratic += scaled[a] * scaled[b] * (
                sums.rrww[a][b] / MICRO / MICRO
                - (predicted[a] + predicted[b]) * (sums.rww[a][b] / MICRO)
                + predicted[a] * predicted[b] * sums.ww[a][b]
            )  # fmt: skip
    return _Moments(
        n=sums.n,
        clusters=sums.clusters,
        total=sums.n * base + linear,
        squares=sums.nn * base * base + 2.0 * base * linear_n + quadratic,
        with_n=sums.nn * base + linear_n,
        nn=float(sums.nn),
    )


def _naive(cells: dict[str, _Cell], a: int, others: list[int]) -> float:
    """Difference of plain means."""

    def mean(b: int) -> float:
        count = sum(sums.count[b] for cell in cells.values() for sums in cell.folds)
        return sum(sums.reward[b] for cell in cells.values() for sums in cell.folds) / MICRO / max(1, count)

    return mean(a) - sum(mean(b) for b in others) / len(others)
