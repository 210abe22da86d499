"""Two log-only estimators that are not offered by name: neither wins ``benchmarks/credit_plugins.py`` (METHODS 3.1 d, j).

Return-conditional hindsight credit (HCA 1912.02503) and anchor-state grouping (GiGPO 2505.10978).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

__all__ = ["anchor_advantages", "hindsight_credit"]


def hindsight_credit(propensity: float, outcomes: Sequence[tuple[float, float]]) -> float:
    """Advantage of an action: the mean of (1 - propensity / hindsight propensity) times the outcome.

    Args:
        propensity: pi(a | s).
        outcomes: For each outcome seen after the action (h(a | s, outcome) > 0, outcome in units of reward).

    >>> round(hindsight_credit(0.5, [(0.8, 1.0)] * 4 + [(0.2, 0.0)]), 6)
    0.3
    """
    return sum((1.0 - propensity / hindsight) * z for hindsight, z in outcomes) / len(outcomes)


def anchor_advantages(tries: Sequence[Sequence[tuple[Hashable, float]]], gamma: float) -> list[list[float]]:
    """For each step of each try its return-to-go less the mean of all steps taken at the same anchor state.

    Args:
        tries: Of one task; each a sequence of (anchor state, reward of the step).
        gamma: Discount a step.

    A state that occurs once gives 0. Source: GiGPO equation 7 in its "mean_norm" form.

    >>> [[round(a, 6) for a in t] for t in anchor_advantages([[("s0", 0), ("s1", 1)], [("s0", 0), ("s2", 0), ("s1", 0)]], 0.9)]
    [[0.45, 0.5], [-0.45, 0.0, -0.5]]
    """
    returns: list[list[float]] = []
    at_state: dict[Hashable, list[float]] = {}
    for steps in tries:
        ahead = 0.0
        own: list[float] = []
        for state, reward in reversed(steps):
            ahead = reward + gamma * ahead
            own.append(ahead)
            at_state.setdefault(state, []).append(ahead)
        returns.append(own[::-1])
    means = {state: sum(found) / len(found) for state, found in at_state.items()}
    return [
        [ahead - means[state] for (state, _), ahead in zip(steps, own, strict=True)]
        for steps, own in zip(tries, returns, strict=True)
    ]
