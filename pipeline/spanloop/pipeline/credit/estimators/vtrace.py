"""V-trace: value targets and advantages of turns that an older policy took.

Invariants: with ratios of 1 and caps of at least 1 the targets are those of GAE with lambda 1, r + gamma V, and nothing is biased.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from spanloop.schemas.errors import SchemaError

__all__ = ["Targets", "vtrace"]


class Targets(NamedTuple):
    """Of each turn, units of reward."""

    values: list[float]
    """v_t: what V should have been."""
    advantages: list[float]
    """rho_t (r_t + gamma v_(t+1) - V_t), for the policy gradient."""


def vtrace(
    rewards: Sequence[float],
    values: Sequence[float],
    ratios: Sequence[float],
    *,
    gamma: float = 1.0,
    ratio_max: float = 1.0,
    trace_max: float = 1.0,
) -> Targets:
    """Off-policy targets; V after the last turn is 0.

    Args:
        rewards: Of each turn, units of reward.
        values: V before each turn, as many.
        ratios: pi / mu of each turn's decision, >= 0, as many.
        gamma: Discount a turn.
        ratio_max: Cap of the ratio in the difference and the advantage: which policy's value it converges to.
        trace_max: Cap of the ratio that carries later differences back: how fast.

    Raises:
        SchemaError: the three are not equally long, or a ratio is negative.

    Source: Espeholt et al. 1802.01561 (IMPALA), equation 1; METHODS 4.4.

    >>> found = vtrace([0, 0, 1], [.5, .6, .4], [2, .5, 1.5])
    >>> [round(v, 6) for v in found.values], [round(a, 6) for a in found.advantages]
    ([0.8, 0.8, 1.0], [0.3, 0.2, 0.6])
    """
    if not len(rewards) == len(values) == len(ratios):
        raise SchemaError(
            f"{len(rewards)} rewards, {len(values)} values and {len(ratios)} ratios: one of each a turn is expected"
        )
    if any(not ratio >= 0.0 for ratio in ratios):
        raise SchemaError(f"ratios {list(ratios)!r} are not usable: pi / mu is never negative")
    carried = 0.0  # v_(t+1) - V_(t+1)
    following = 0.0  # V_(t+1)
    targets: list[float] = []
    advantages: list[float] = []
    for reward, value, ratio in zip(reversed(rewards), reversed(values), reversed(ratios), strict=True):
        rho, trace = min(ratio_max, ratio), min(trace_max, ratio)
        advantages.append(rho * (reward + gamma * (following + carried) - value))
        carried = rho * (reward + gamma * following - value) + gamma * trace * carried
        following = value
        targets.append(value + carried)
    return Targets(targets[::-1], advantages[::-1])
