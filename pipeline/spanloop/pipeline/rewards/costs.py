"""R7: returns that charge what an orchestration costs as it goes on.

Invariants: pure; units of reward.
"""

from __future__ import annotations

import math

__all__ = ["cost_aware_returns", "step_cost"]


def step_cost(step: int, *, factor: float = 1.0, budget: float) -> float:
    """C_t = F ln(1 + t / phi): later steps cost more.

    Args:
        step: t, from 1.
        factor: F: tokens or FLOPs of a step, in units of cost.
        budget: phi, steps, > 0.
    """
    return factor * math.log1p(step / budget)


def cost_aware_returns(
    outcome: float,
    steps: int,
    *,
    weight: float = 0.1,
    discount: float = 0.99,
    factor: float = 1.0,
    budget: float,
) -> list[float]:
    """R_1 .. R_T of an orchestrator's decisions: R_T = r - w C_T, R_t = gamma R_(t+1) - w C_t.

    Args:
        outcome: r of the orchestration.
        steps: T, at least 1.
        weight: lambda of the cost.
        discount: gamma.
        factor: F of a step.
        budget: phi, steps.

    Source: Puppeteer, arXiv 2505.19591; METHODS 2.4.

    >>> [round(r, 6) for r in cost_aware_returns(1, 4, budget=4)]
    [0.78574, 0.816216, 0.865417, 0.930685]
    """
    ahead = outcome - weight * step_cost(steps, factor=factor, budget=budget)
    found = [ahead]
    for step in range(steps - 1, 0, -1):
        ahead = discount * ahead - weight * step_cost(step, factor=factor, budget=budget)
        found.append(ahead)
    return found[::-1]
