"""R8: the composites of published systems, as pure functions of their channels.

A deployment's own composite is declared (``declared``); these are for those who come from one of the systems and want its numbers.
Invariants: pure; units of reward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["length_penalty", "matpo", "sharp_planner", "sharp_worker", "wideseek_weights"]


def matpo(accuracy: float, format_share: float) -> float:
    """0.9 accuracy + 0.1 tool format. Source: MATPO's repository; METHODS 2.5.

    >>> round(matpo(1, .8), 6)
    0.98
    """
    return 0.9 * accuracy + 0.1 * format_share


def length_penalty(length: float, limit: float, longest: float, price: float) -> float:
    """clip((length - limit) / (longest - limit), 0, 1) price. Source: WideSeek-R1's code; METHODS 2.5.

    >>> length_penalty(150, 100, 200, 0.4)
    0.2
    """
    return min(1.0, max(0.0, (length - limit) / (longest - limit))) * price


def wideseek_weights(agents: Sequence[Sequence[int]], group: int = 1) -> list[float]:
    """Loss weight of each token of an agent: 1/G 1/N(agents) 1/sum_t |o_t|, so that no agent counts more for writing more.

    Args:
        agents: Tokens of each turn of each agent of one rollout.
        group: G, rollouts of the group.

    Source: WideSeek-R1's code (RLinf); METHODS 2.5.

    >>> [round(w, 6) for w in wideseek_weights([(100, 50), (200, 200, 100), (30,)])]
    [0.002222, 0.000667, 0.011111]
    """
    return [1.0 / group / len(agents) / total if (total := sum(turns)) else 0.0 for turns in agents]


def sharp_worker(outcome: float, marginal: float, validities: Sequence[float]) -> float:
    """0.9 R + 0.9 marginal + 0.1 mean validity of its tool calls (0 without any).

    Source: SHARP, arXiv 2602.08335 (weights from a digest); METHODS 2.5. Its marginal is leave-one-out, not Shapley: over all
    workers it does not sum to what the team got.

    >>> round(sharp_worker(1, 1, [.75]), 6), round(sharp_worker(1, 0, [1]), 6)
    (1.875, 1.0)
    """
    tools = math.fsum(validities) / len(validities) if validities else 0.0
    return 0.9 * outcome + 0.9 * marginal + 0.1 * tools


def sharp_planner(
    outcome: float, marginals: Sequence[float], *, weight: float = 1.0, tool: float = 0.0
) -> float:
    """0.9 R + 0.9 weight mean(max(marginal, 0)) + 0.1 tool. Source: SHARP; METHODS 2.5.

    >>> round(sharp_planner(1, [1, 0]), 6)
    1.35
    """
    gained = math.fsum(max(0.0, m) for m in marginals) / len(marginals) if marginals else 0.0
    return 0.9 * outcome + 0.9 * weight * gained + 0.1 * tool
