"""R7: what an aggregation kept, spoiled and made up, and how it compares with the best way to combine what it was given.

Invariants: pure; shares of nothing are None; facts are whatever the caller can compare: checked claims, rows, hashes of sentences.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from collections.abc import Set as AbstractSet
from itertools import product

import msgspec

__all__ = ["Aggregation", "aggregation_gain", "aggregation_of", "copy_ratio", "vote_accuracy", "vote_weights"]

VOTERS_MAX = 20
"""Votes are enumerated: 2^20 patterns are a second."""


class Aggregation(msgspec.Struct, frozen=True):
    """Shares in 0..1; None where there is nothing to take a share of."""

    retention: float | None
    """True facts of the returns that are in the output."""
    contamination: float | None
    """Facts of the output that are wrong ones of the returns."""
    invention: float | None
    """Facts of the output that no return had."""


def aggregation_of(
    output: AbstractSet[Hashable], right: AbstractSet[Hashable], wrong: AbstractSet[Hashable]
) -> Aggregation:
    """What an aggregation made of its inputs.

    Args:
        output: Facts of the aggregate.
        right: True facts of all returns.
        wrong: False facts of all returns.

    Source: METHODS 2.3.

    >>> aggregation_of({1, 2, 9, 7}, {1, 2, 3, 4}, {9})
    Aggregation(retention=0.5, contamination=0.25, invention=0.25)
    """
    return Aggregation(
        retention=len(output & right) / len(right) if right else None,
        contamination=len(output & wrong) / len(output) if output else None,
        invention=len(output - right - wrong) / len(output) if output else None,
    )


def copy_ratio(
    output: Sequence[Hashable], returns: Sequence[Sequence[Hashable]], size: int = 5
) -> float | None:
    """Share of the output's n-grams that stand verbatim in a return (aggregation leakage).

    Args:
        output: Words or token ids of the aggregate.
        returns: The same of what it was given.
        size: n.

    Source: METHODS 2.3, 1.7.

    >>> copy_ratio("abcdexyz", ["zzabcdezz"], size=5)
    0.25
    """
    grams = [tuple(output[i : i + size]) for i in range(len(output) - size + 1)]
    if not grams:
        return None
    known = {tuple(text[i : i + size]) for text in returns for i in range(len(text) - size + 1)}
    return sum(gram in known for gram in grams) / len(grams)


def aggregation_gain(quality: float, inputs: Sequence[float]) -> float | None:
    """q(output) - max q(return): what combining brought over the best input alone.

    Source: METHODS 2.3.
    """
    return quality - max(inputs) if inputs else None


def vote_weights(accuracies: Sequence[float]) -> list[float]:
    """Weights of the best combiner of independent binary votes: ln(p / (1 - p)).

    Args:
        accuracies: Probability that each voter is right, inside (0, 1).

    Source: Nitzan and Paroush 1982; METHODS 2.3.

    >>> [round(w, 6) for w in vote_weights([.9, .6, .6])]
    [2.197225, 0.405465, 0.405465]
    """
    return [math.log(p / (1.0 - p)) for p in accuracies]


def vote_accuracy(accuracies: Sequence[float], weights: Sequence[float]) -> float:
    """Probability that a weighted vote is right; a tie is right half of the time.

    Args:
        accuracies: Of independent voters, at most ``VOTERS_MAX``.
        weights: One a voter.

    >>> round(vote_accuracy([.9, .6, .6], vote_weights([.9, .6, .6])), 6)
    0.9
    >>> round(vote_accuracy([.9, .6, .6], [1, 1, 1]), 6)
    0.792
    """
    if len(accuracies) > VOTERS_MAX:
        raise ValueError(f"{len(accuracies)} voters: 2^n patterns are enumerated, at most {VOTERS_MAX}")
    total: list[float] = []
    for pattern in product((1, -1), repeat=len(accuracies)):
        chance = math.prod(p if right > 0 else 1.0 - p for p, right in zip(accuracies, pattern, strict=True))
        side = math.fsum(w * right for w, right in zip(weights, pattern, strict=True))
        total.append(chance * (1.0 if side > 1e-12 else 0.5 if side >= -1e-12 else 0.0))
    return math.fsum(total)
