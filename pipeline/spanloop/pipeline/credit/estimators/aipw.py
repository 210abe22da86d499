"""Effects of logged decisions, doubly robust: what it brought to spawn, delegate or stop, with an interval or a refusal.

Each decision was drawn from a menu with a known chance (its propensity). The estimate combines a model of the outcome with the
inverse of the propensities: it is right where either is. Where a propensity is under ``LEAST_PROPENSITY``, or an arm was never
taken, the log cannot tell and the answer is ``unidentified``. Propensities that were not logged are estimated from the contexts and
the answer says so: then nothing hidden may have moved both the decision and the outcome, and ``bounds`` are what holds without
that assumption. Intervals treat decisions of one cluster (task, user) as one.
Source: Robins et al. 1994; cross-fitting Chernozhukov et al. 1608.00060; METHODS 3.2 k, 4.5, 4.6.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from spanloop.pipeline.credit.estimators.games import Floats
from spanloop.pipeline.credit.estimators.intervals import student_quantile
from spanloop.schemas.errors import SchemaError

__all__ = ["LEAST_PROPENSITY", "Decisions", "Effect", "Mean", "doubly_robust", "effect", "policy_value"]

LEAST_PROPENSITY = 0.01
CLIPPED_AT = 0.02
"""Estimated propensities are not taken for smaller than this."""
FOLDS = 5
"""Parts of the log; a decision's outcome is predicted from the other parts."""

Indices = NDArray[np.int64]


class Decisions(msgspec.Struct, frozen=True, eq=False):
    """A log of n decisions with the same menu of k actions."""

    chosen: Indices
    """Shape (n,), index of the action that was taken."""
    rewards: Floats
    """Shape (n,), units of reward."""
    propensities: Floats | None = None
    """Shape (n, k), chances that the behaviour gave the actions; None: not logged, k from ``actions``."""
    contexts: Sequence[Hashable] = ()
    """What the decision could depend on, one a decision; empty: all the same."""
    clusters: Sequence[Hashable] = ()
    """Task or user of each decision; empty: all different."""
    actions: int = 2
    """k."""


class Mean(msgspec.Struct, frozen=True):
    """A mean with its error."""

    value: float
    error: float
    """Standard error, clusters taken as one."""
    clusters: int

    def half_width(self, level: float) -> float:
        """Half-width of a two-sided Student interval of ``level``."""
        return student_quantile(level, self.clusters - 1) * self.error if self.clusters > 1 else np.inf


class Effect(msgspec.Struct, frozen=True):
    """What taking one action instead of another (or following a policy) brings on average, units of reward."""

    status: Literal["ok", "estimated_propensities", "unidentified"]
    value: float | None
    """None: unidentified."""
    error: float | None
    low: float | None
    high: float | None
    level: float
    """Of the interval (low, high)."""
    naive: float | None
    """Difference of the plain means of the arms (of a policy: the plain mean), which confounding biases."""
    bounds: tuple[float, float] | None
    """What the effect lies between without any assumption on why decisions were taken, up to noise, for rewards within
    the range given; None for a policy's value."""
    samples: int
    least_propensity: float
    reason: str = ""
    """Of a refusal or of a wider interval."""


def doubly_robust(
    baseline: Floats, weights: Floats, rewards: Floats, predicted: Floats, clusters: Sequence[Hashable] = ()
) -> Mean:
    """Mean of baseline + weight x (reward - predicted) and its error.

    Args:
        baseline: Shape (n,), the model's answer.
        weights: Shape (n,), importance ratio of what was done.
        rewards: Shape (n,).
        predicted: Shape (n,), the model's expectation of what was done.
        clusters: One a row; empty: all different.

    >>> w, r = np.array([2, 0.5, 1, 0.25, 1.5]), np.array([1.0, 0, 1, 0, 1])
    >>> m = doubly_robust(np.array([0.7, 0.3, 0.6, 0.4, 0.6]), w, r, np.array([0.8, 0.2, 0.6, 0.3, 0.7]))
    >>> round(m.value, 6), round(m.error, 6)
    (0.735, 0.194551)
    """
    terms = baseline + weights * (rewards - predicted)
    value = float(terms.mean())
    centred = terms - value
    if len(clusters):
        groups = _codes(clusters)
        centred = np.bincount(groups, weights=centred)
    count = len(centred)
    scale = count / (count - 1) if count > 1 else np.inf
    return Mean(value, float(np.sqrt(scale * (centred @ centred)) / len(terms)), count)


def effect(
    log: Decisions, action: int, instead_of: int, *, level: float = 0.9, reward_range: tuple[float, float] = (0.0, 1.0),
    seed: int = 0,
) -> Effect:  # fmt: skip
    """Mean effect of ``action`` instead of ``instead_of`` over the contexts of the log.

    Args:
        log: Decisions.
        action: Index on the menu.
        instead_of: Index on the menu.
        level: Of the interval, in (0, 1).
        reward_range: Least and greatest reward, for ``bounds``.
        seed: Of the folds.
    """
    _check(log)
    n = len(log.chosen)
    taken, other = log.chosen == action, log.chosen == instead_of
    naive = (
        float(log.rewards[taken].mean() - log.rewards[other].mean()) if taken.any() and other.any() else None
    )
    with_, without = (_no_assumption(log.rewards, arm, reward_range) for arm in (taken, other))
    bounds = (with_[0] - without[1], with_[1] - without[0])
    target = np.zeros((n, log.actions))
    target[:, action] += 1.0
    target[:, instead_of] -= 1.0
    needed = [action, instead_of]
    for arm, what in ((taken, action), (other, instead_of)):
        if not arm.any():
            return _refusal(
                log, 0.0, f"action {what} was never taken", naive=naive, level=level, bounds=bounds
            )
    return _estimate(log, target, needed, naive=naive, level=level, seed=seed, bounds=bounds)


def policy_value(log: Decisions, target: Floats, *, level: float = 0.9, seed: int = 0) -> Effect:
    """Mean reward that a policy would have got in the contexts of the log.

    Args:
        log: Decisions.
        target: Shape (n, k), the policy's chances of the actions.
        level: Of the interval, in (0, 1).
        seed: Of the folds.
    """
    _check(log)
    needed = [a for a in range(log.actions) if target[:, a].any()]
    naive = float(log.rewards.mean()) if len(log.rewards) else None
    return _estimate(log, target, needed, naive=naive, level=level, seed=seed, bounds=None)


def _estimate(
    log: Decisions, target: Floats, needed: list[int], *, naive: float | None, level: float, seed: int,
    bounds: tuple[float, float] | None,
) -> Effect:  # fmt: skip
    n = len(log.chosen)
    codes = _codes(log.contexts) if len(log.contexts) else np.zeros(n, dtype=np.int64)
    folds = _folds(log, n, seed)
    if log.propensities is None:
        least = float(_frequencies(codes, log.chosen, log.actions)[:, needed].min()) if n else 0.0
        propensities = np.maximum(_cross_fitted_shares(codes, log.chosen, log.actions, folds), CLIPPED_AT)
    else:
        propensities = log.propensities
        mattering = propensities[:, needed][target[:, needed] != 0.0]
        least = float(mattering.min()) if mattering.size else 0.0
    if least < LEAST_PROPENSITY:
        reason = f"an action that matters had propensity {least:.3g}, at least {LEAST_PROPENSITY} is needed"
        return _refusal(log, least, reason, naive=naive, level=level, bounds=bounds)
    q = _cross_fitted_outcomes(codes, log, folds)
    rows = np.arange(n)
    mean = doubly_robust(
        (target * q).sum(axis=1),
        target[rows, log.chosen] / np.maximum(propensities[rows, log.chosen], LEAST_PROPENSITY),
        log.rewards,
        q[rows, log.chosen],
        log.clusters,
    )
    half = mean.half_width(level)
    low, high, reason = mean.value - half, mean.value + half, ""
    if log.propensities is None and not len(log.contexts) and bounds is not None:
        low, high = min(low, bounds[0]), max(high, bounds[1])
        reason = "neither propensities nor contexts: the interval is what holds without any assumption"
    return Effect(
        "ok" if log.propensities is not None else "estimated_propensities",
        mean.value, mean.error, low, high, level, naive, bounds, n, least, reason,
    )  # fmt: skip


def _refusal(
    log: Decisions, least: float, reason: str, *, naive: float | None, level: float,
    bounds: tuple[float, float] | None,
) -> Effect:  # fmt: skip
    return Effect(
        "unidentified", None, None, None, None, level, naive, bounds, len(log.chosen), least, reason
    )


def _no_assumption(
    rewards: Floats, arm: NDArray[np.bool_], limits: tuple[float, float]
) -> tuple[float, float]:
    """Least and greatest mean reward had everyone been in the arm (Manski 1990)."""
    n = max(len(rewards), 1)
    seen, missing = float(rewards[arm].sum()) / n, 1.0 - float(arm.sum()) / n
    return seen + missing * limits[0], seen + missing * limits[1]


def _codes(names: Sequence[Hashable]) -> Indices:
    """0, 1, ... for each distinct name, by first occurrence."""
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(name, len(known)) for name in names], dtype=np.int64)


def _folds(log: Decisions, n: int, seed: int) -> Indices:
    """A part of the log for each decision; a cluster is in one part."""
    groups = _codes(log.clusters) if len(log.clusters) else np.arange(n)
    count = int(groups.max()) + 1 if n else 0
    parts = np.random.default_rng(seed).permutation(np.arange(count) % FOLDS)
    return parts[groups]


def _frequencies(codes: Indices, chosen: Indices, actions: int) -> Floats:
    """Share of each action in each context, shape (contexts, k)."""
    counts = np.zeros((int(codes.max()) + 1, actions))
    np.add.at(counts, (codes, chosen), 1.0)
    return counts / counts.sum(axis=1, keepdims=True)


def _cross_fitted_shares(codes: Indices, chosen: Indices, actions: int, folds: Indices) -> Floats:
    """Estimated propensities, shape (n, k): shares in the context over the other parts, one made-up try of each action."""
    found = np.empty((len(chosen), actions))
    for fold in np.unique(folds):
        rest, own = folds != fold, folds == fold
        counts = np.ones((int(codes.max()) + 1, actions))
        np.add.at(counts, (codes[rest], chosen[rest]), 1.0)
        found[own] = (counts / counts.sum(axis=1, keepdims=True))[codes[own]]
    return found


def _cross_fitted_outcomes(codes: Indices, log: Decisions, folds: Indices) -> Floats:
    """Predicted reward of each action, shape (n, k): means over the other parts, context by context, one made-up try at
    the action's mean over all contexts."""
    found = np.empty((len(log.chosen), log.actions))
    contexts = int(codes.max()) + 1
    for fold in np.unique(folds):
        rest, own = folds != fold, folds == fold
        if not rest.any():
            found[own] = 0.0
            continue
        sums, counts = np.zeros((contexts, log.actions)), np.zeros((contexts, log.actions))
        np.add.at(sums, (codes[rest], log.chosen[rest]), log.rewards[rest])
        np.add.at(counts, (codes[rest], log.chosen[rest]), 1.0)
        whole = sums.sum() / counts.sum()
        overall = (sums.sum(axis=0) + whole) / (counts.sum(axis=0) + 1.0)
        found[own] = ((sums + overall) / (counts + 1.0))[codes[own]]
    return found


def _check(log: Decisions) -> None:
    n = len(log.chosen)
    sizes = {
        "rewards": len(log.rewards),
        "contexts": len(log.contexts) or n,
        "clusters": len(log.clusters) or n,
    }
    if log.propensities is not None:
        sizes["propensities"] = len(log.propensities)
        if log.propensities.shape != (n, log.actions):
            raise SchemaError(
                f"propensities have shape {log.propensities.shape}, expected {(n, log.actions)}"
            )
    wrong = {name: size for name, size in sizes.items() if size != n}
    if wrong:
        raise SchemaError(f"{n} decisions, but {wrong}: one of each a decision is expected")
    if not np.isfinite(log.rewards).all():
        raise SchemaError("a reward is no finite number; leave out decisions whose outcome is missing")
    if n and (log.chosen.min() < 0 or log.chosen.max() >= log.actions):
        raise SchemaError(f"an action index lies outside a menu of {log.actions}")
