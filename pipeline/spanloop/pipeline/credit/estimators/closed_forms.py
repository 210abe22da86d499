"""Games whose Shapley values need no enumeration, for any number of players.

Source: METHODS 2.1 (airport), 2.3 (votes), 3.2 f; Littlechild and Owen 1973 (airport), Shapley and Shubik 1954 (votes).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from spanloop.pipeline.credit.estimators.games import Floats
from spanloop.schemas.errors import SchemaError

__all__ = ["airport", "exchangeable", "smallest", "synergies", "weighted_vote"]


def airport(costs: Sequence[float]) -> Floats:
    """Shapley values, shape (n,), of v(S) = max of the costs in S, v(none) = 0: who the critical path is due to.

    Args:
        costs: One a player, any sign.

    >>> airport([4, 5, 9]).round(6)
    array([1.333333, 1.833333, 5.833333])
    """
    given = np.asarray(costs, dtype=np.float64)
    if not len(given):
        return np.zeros(0)
    order = np.argsort(given, kind="stable")
    steps = np.diff(given[order], prepend=0.0)
    found = np.empty(len(given))
    found[order] = np.cumsum(steps / np.arange(len(given), 0, -1))
    return found


def smallest(values: Sequence[float]) -> Floats:
    """Shapley values, shape (n,), of v(S) = min of the values in S, v(none) = 0.

    >>> smallest([1, 1]).tolist()
    [0.5, 0.5]
    """
    return -airport([-value for value in values])


def synergies(players: int, terms: Iterable[tuple[Sequence[int], float]]) -> Floats:
    """Shapley values, shape (n,), of v(S) = sum of the terms whose members are all in S: each term is shared evenly.

    Args:
        players: n.
        terms: Members (distinct, not none) and the term's value; members of one only is an additive game.

    >>> synergies(3, [((0,), 0.2), ((1,), 0.1), ((0, 1), 0.4), ((1, 2), -0.2), ((0, 1, 2), 0.3)]).round(6) + 0.0
    array([0.5, 0.3, 0. ])
    """
    found = np.zeros(players)
    for members, value in terms:
        found[list(members)] += value / len(members)
    return found


def exchangeable(players: int, total: float) -> Floats:
    """Shapley values, shape (n,), of a game in which only the number of players counts: even shares of v(all)."""
    return np.full(players, total / max(players, 1))


def weighted_vote(weights: Sequence[int], quota: int) -> Floats:
    """Shapley-Shubik indices, shape (n,): the chance to be the vote that first reaches ``quota``.

    Args:
        weights: Integer votes >= 0.
        quota: Votes needed, > 0; where all together miss it everyone gets 0.

    Exact in O(n^2 quota) steps of floating point: coalitions are counted by size and weight as shares of all orders.

    >>> weighted_vote([3, 2, 1], 4).round(6)
    array([0.666667, 0.166667, 0.166667])
    """
    if quota <= 0 or any(weight < 0 for weight in weights):
        raise SchemaError(
            f"a vote with quota {quota} and weights {list(weights)} is not usable: quota > 0, weights >= 0"
        )
    players = len(weights)
    found = np.zeros(players)
    if sum(weights) < quota:
        return found
    for i, own in enumerate(weights):
        # chance[k, w]: the share of coalitions of size k of the others that weigh w; each size is equally likely before i.
        chance = np.zeros((players, quota))
        chance[0, 0] = 1.0
        seen = 0
        for j, weight in enumerate(weights):
            if j == i:
                continue
            seen += 1
            sizes = np.arange(1, seen + 1)[:, None] / seen
            grown = np.zeros_like(chance)
            grown[:seen] = chance[:seen] * (1.0 - np.arange(seen)[:, None] / seen)
            if weight < quota:
                grown[1 : seen + 1, weight:] += chance[:seen, : quota - weight] * sizes
            chance = grown
        found[i] = chance[:, max(0, quota - own) :].sum() / players if own else 0.0
    return found
