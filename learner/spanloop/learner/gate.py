"""The offline gate: is a candidate at least as good as the champion, on logged orchestrations nobody trained on?

Place: ``promotion`` asks it for the newest candidate; only what passes gets a canary. Pure functions.

How: an orchestration was acted by one *logger* version; its probability under a version is the product over its decisions
of the served (exploration-floored) probabilities. Over several loggers the balance heuristic weighs an orchestration by
``pi / sum_k (n_k / n) mu_k``, which stays bounded where any logger covers it. Candidate and champion are estimated
on the *same* orchestrations, each with its own self-normalised weights, and the value of the start as control variate,
so what the two have in common cancels. The bound is on the mean of the paired influence values, one for each
orchestration (the cluster), never for spans or tokens.

Limits, on purpose: where no logger went, nothing is known. A candidate that differs only there passes here with a
difference of zero; that is what the canary is for.

Legend of suffixes: N orchestrations, K loggers. Rewards in units.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import msgspec
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ORCHESTRATIONS_MIN",
    "WEIGHT_CAP",
    "Estimate",
    "GateVerdict",
    "balance_weights",
    "doubly_robust",
    "effective_sample_size",
    "empirical_bernstein",
    "evaluate",
    "ips",
    "judge",
    "snips",
]

Floats = NDArray[np.float64]

ORCHESTRATIONS_MIN = 30
"""Held-out orchestrations below which no bound is stated (the normal approximation would be a pretence)."""
WEIGHT_CAP = 50.0
"""A larger single weight means that one orchestration decides: no verdict."""


class Estimate(msgspec.Struct, frozen=True):
    """A point estimate with its standard error."""

    value: float
    error: float


def _floats(values: Sequence[float] | Floats) -> Floats:
    return np.asarray(values, np.float64)


def ips(weights_N: Sequence[float] | Floats, rewards_N: Sequence[float] | Floats) -> Estimate:
    """mean(w R).

    >>> round(ips([2, .5, 1, .25, 1.5], [1, 0, 1, 0, 1]).value, 6)
    0.9

    Source: METHODS 4.5.
    """
    terms = _floats(weights_N) * _floats(rewards_N)
    return Estimate(float(terms.mean()), float(terms.std(ddof=1) / math.sqrt(len(terms))))


def snips(weights_N: Sequence[float] | Floats, rewards_N: Sequence[float] | Floats) -> Estimate:
    """sum(w R) / sum(w); variance by the delta method.

    >>> round(snips([2, .5, 1, .25, 1.5], [1, 0, 1, 0, 1]).value, 6)
    0.857143

    Source: METHODS 4.5 (Swaminathan and Joachims 2015).
    """
    w, r = _floats(weights_N), _floats(rewards_N)
    value = float((w * r).sum() / w.sum())
    return Estimate(value, float(np.sqrt((w**2 * (r - value) ** 2).sum()) / w.sum()))


def doubly_robust(
    weights_N: Sequence[float] | Floats,
    rewards_N: Sequence[float] | Floats,
    taken_N: Sequence[float] | Floats,
    expected_N: Sequence[float] | Floats,
    *,
    normalise: bool = False,
) -> Estimate:
    """mean(V + w (R - q)), with q the model's value of what was done and V of what the policy would do.

    Args:
        weights_N: pi / mu.
        rewards_N: Rewards.
        taken_N: q.
        expected_N: V.
        normalise: Divide the weights by their mean (SN-DR).

    Source: METHODS 4.5 (Dudik et al. 2011).
    """
    w, r, q, v = map(_floats, (weights_N, rewards_N, taken_N, expected_N))
    if normalise:
        w = w / w.mean()
    terms = v + w * (r - q)
    return Estimate(float(terms.mean()), float(terms.std(ddof=1) / math.sqrt(len(terms))))


def effective_sample_size(weights_N: Sequence[float] | Floats) -> float:
    """(sum w)^2 / sum w^2.

    >>> round(effective_sample_size([2, .5, 1, .25, 1.5]), 6)
    3.644628
    """
    w = _floats(weights_N)
    square = float((w**2).sum())
    return float(w.sum()) ** 2 / square if square > 0 else 0.0


def empirical_bernstein(count: int, variance: float, span: float, delta: float) -> float:
    """Half-width sqrt(2 V ln(2/delta) / n) + 7 M ln(2/delta) / (3 (n - 1)) for values in a range of width M.

    >>> round(empirical_bernstein(1000, .25, 1, .05), 6)
    0.051563

    Source: METHODS 4.5 (Maurer and Pontil 2009, theorem 4).
    """
    log_term = math.log(2.0 / delta)
    return math.sqrt(2.0 * variance * log_term / count) + 7.0 * span * log_term / (3.0 * (count - 1))


def balance_weights(target_N: Floats, loggers_NK: Floats, shares_K: Floats) -> Floats:
    """pi / sum_k share_k mu_k from log-probabilities of whole orchestrations.

    >>> w = balance_weights(np.log([.5]), np.log([[.2, .6]]), np.array([.7, .3]))
    >>> round(float(w[0]), 4)
    1.5625

    Args:
        target_N: log pi of each orchestration.
        loggers_NK: log mu_k of each orchestration under every logger.
        shares_K: n_k / n.

    Source: METHODS 4.5 (balance heuristic, Veach and Guibas 1995).
    """
    with np.errstate(divide="ignore"):
        terms_NK = loggers_NK + np.log(shares_K)[None, :]
    top_N = terms_NK.max(axis=1)
    mixture_N = top_N + np.log(np.exp(terms_NK - top_N[:, None]).sum(axis=1))
    return np.exp(np.clip(target_N - mixture_N, -700.0, 700.0))


class GateVerdict(msgspec.Struct, frozen=True):
    """Result of an evaluation, in units of reward."""

    estimate: float
    lower: float
    error: float
    ess: float
    """Of the candidate's weights, in orchestrations."""
    max_weight: float
    n: int
    passed: bool
    reason: str
    """Empty when passed."""


def evaluate(
    candidate_N: Floats, champion_N: Floats, loggers_NK: Floats, logger_N: NDArray[np.int64], gains_N: Floats
) -> tuple[float, float, float, float]:
    """Paired difference candidate - champion: (estimate, standard error, ESS of the candidate, largest weight).

    Args:
        candidate_N: log-probability of each orchestration under the candidate.
        champion_N: The same under the champion.
        loggers_NK: The same under every logger.
        logger_N: Index of the logger that acted it.
        gains_N: Reward minus the value of the start (known before the first decision).
    """
    shares_K = np.bincount(logger_N, minlength=loggers_NK.shape[1]) / len(logger_N)
    w_new, w_old = (balance_weights(t, loggers_NK, shares_K) for t in (candidate_N, champion_N))
    new, old = snips(w_new, gains_N).value, snips(w_old, gains_N).value
    influence_N = w_new * (gains_N - new) / w_new.mean() - w_old * (gains_N - old) / w_old.mean()
    error = float(influence_N.std(ddof=1) / math.sqrt(len(gains_N)))
    return new - old, error, effective_sample_size(w_new), float(max(w_new.max(), w_old.max()))


def judge(
    candidate_N: Floats,
    champion_N: Floats,
    loggers_NK: Floats,
    logger_N: NDArray[np.int64],
    gains_N: Floats,
    *,
    confidence: float,
    margin: float,
    min_ess: float,
    cap: float = WEIGHT_CAP,
) -> GateVerdict:
    """Pass iff the one-sided lower bound is not below -margin, ESS/n >= ``min_ess`` and no weight is above ``cap``.

    Arguments as in ``evaluate``; ``confidence`` is of the one-sided normal bound, ``margin`` in units of reward.
    """
    count = len(gains_N)
    if count < ORCHESTRATIONS_MIN:
        reason = f"{count} held-out orchestrations, {ORCHESTRATIONS_MIN} needed"
        return GateVerdict(0.0, 0.0, 0.0, 0.0, 0.0, count, passed=False, reason=reason)
    estimate, error, ess, largest = evaluate(candidate_N, champion_N, loggers_NK, logger_N, gains_N)
    lower = estimate - NormalDist().inv_cdf(confidence) * error
    reason = ""
    if not all(map(math.isfinite, (estimate, error, ess, largest))):
        estimate = lower = error = ess = largest = 0.0
        reason = "the estimate is not finite"
    elif ess < min_ess * count:
        reason = f"effective sample {ess:.1f} of {count} is below {min_ess:.0%}: too little overlap"
    elif largest > cap:
        reason = f"one orchestration weighs {largest:.1f}, more than {cap:.0f}"
    elif round(lower * 1e6) < -round(margin * 1e6):
        reason = f"lower bound {lower:+.4f} is below {-margin:+.4f}"
    return GateVerdict(estimate, lower, error, ess, largest, count, passed=not reason, reason=reason)
