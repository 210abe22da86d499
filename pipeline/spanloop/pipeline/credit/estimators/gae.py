"""Turn-level estimates from values of prefixes: GAE, redistribution (RUDDER, IGPO), COMA.

All telescope or average to nothing by construction; the ledger's own value differences are GAE with lambda 1 over partial orders.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from spanloop.schemas.errors import SchemaError

__all__ = ["counterfactual", "gae", "information_gain", "redistribute", "temporal_differences"]


def temporal_differences(
    rewards: Sequence[float], values: Sequence[float], gamma: float = 1.0
) -> list[float]:
    """delta_t = r_t + gamma V_(t+1) - V_t; V after the last turn is 0.

    Args:
        rewards: Of each turn, units of reward.
        values: V before each turn, as many.
        gamma: Discount a turn.
    """
    if len(rewards) != len(values):
        raise SchemaError(f"{len(rewards)} rewards and {len(values)} values: one of each a turn is expected")
    after = [*values[1:], 0.0]
    return [r + gamma * later - now for r, now, later in zip(rewards, values, after, strict=False)]


def gae(
    rewards: Sequence[float], values: Sequence[float], *, gamma: float = 1.0, smoothing: float = 0.95
) -> list[float]:
    """Generalised advantage of each turn, units of reward.

    Args:
        rewards: Of each turn, units of reward.
        values: V before each turn, as many.
        gamma: Discount a turn.
        smoothing: lambda; 0: delta alone (biased by V), 1: return less V (unbiased, noisy).

    Source: Schulman et al. 1506.02438, equation 16, at turns.

    >>> [round(a, 6) for a in gae([0, 0, 1], [0.4, 0.5, 0.8])]
    [0.5655, 0.49, 0.2]
    """
    ahead = 0.0
    found: list[float] = []
    for delta in reversed(temporal_differences(rewards, values, gamma)):
        ahead = delta + gamma * smoothing * ahead
        found.append(ahead)
    return found[::-1]


def redistribute(values: Sequence[float]) -> list[float]:
    """What each turn changed in the expected outcome; sums to the last value less the first.

    Args:
        values: V before the first turn and after each turn; the last is the outcome itself.

    Source: RUDDER 1806.07857; METHODS 3.2 g.

    >>> [round(c, 6) for c in redistribute([0.4, 0.5, 0.3, 0.8, 1.0])]
    [0.1, -0.2, 0.5, 0.2]
    """
    return [later - now for now, later in pairwise(values)]


def information_gain(chances: Sequence[float]) -> list[float]:
    """What each turn changed in the log of the chance of success, nats; sums to the log of last over first.

    Args:
        chances: Before the first turn and after each, in (0, 1].

    Source: IGPO; METHODS 3.2 g.

    >>> [round(c, 6) for c in information_gain([0.2, 0.35, 0.35, 0.8])]
    [0.559616, 0.0, 0.826679]
    """
    if not all(0.0 < chance <= 1.0 for chance in chances):
        raise SchemaError(f"chances {list(chances)!r} are not usable: each lies in (0, 1]")
    return redistribute([math.log(chance) for chance in chances])


def counterfactual(chosen: int, propensities: Sequence[float], values: Sequence[float]) -> float:
    """Q of the chosen action less the policy's mean over the menu, units of reward; 0 on average under the policy.

    Args:
        chosen: Index of the action.
        propensities: Of each action on the menu, sum 1.
        values: Q of each.

    Source: COMA 1705.08926, equation 4; the ledger does this with logged menus (``estimates``).

    >>> round(counterfactual(2, [0.5, 0.3, 0.2], [0.2, 0.6, 1.0]), 6)
    0.52
    """
    return values[chosen] - math.fsum(p * q for p, q in zip(propensities, values, strict=True))
