"""R7: how well work was split among sub-agents: covered, without gaps, overlap or broken order.

What had to be done (``required``) and who was given what comes from a schema, a checklist or the declared items of a task. Labels
that a model made of free text are an estimate: name its version in the estimator and never treat them as ground truth.
Invariants: pure; the order of agents and items does not matter; a share of nothing is None, not zero.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from collections.abc import Set as AbstractSet
from itertools import combinations

import msgspec

__all__ = ["Split", "SplitTerms", "split_of", "split_reward"]


class Split(msgspec.Struct, frozen=True):
    """Shares in 0..1; None where there is nothing to take a share of."""

    coverage: float | None
    """Required items that somebody was given."""
    precision: float | None
    """Items given out that were required."""
    leakage: float | None
    """Items given out that were not."""
    redundancy: float | None
    """Assignments that repeat an item."""
    overlap: float | None
    """Mean Jaccard index of pairs of agents."""
    balance: float | None
    """Mean size of a share over the largest."""
    evenness: float | None
    """Entropy of the sizes over that of equal ones."""
    violations: float | None
    """Dependencies of which the later part began before the earlier one had returned."""
    f1: float | None
    """Harmonic mean of coverage and precision."""


class SplitTerms(msgspec.Struct, frozen=True):
    """Weights of the parts of ``split_reward``."""

    redundancy: float = 0.5
    violations: float = 0.5
    balance: float = 0.0


def split_of(
    required: AbstractSet[Hashable],
    parts: Sequence[AbstractSet[Hashable]],
    dependencies: Iterable[bool] = (),
) -> Split:
    """How a split did.

    Args:
        required: Atomic items that had to be done (rows of a schema, a checklist, gold sub-questions, files).
        parts: Items that each sub-agent was given.
        dependencies: For each declared dependency between two agents whether it was kept.

    Source: METHODS 2.2 [our definition: none was found published].

    >>> found = split_of(set(range(10)), [{0, 1, 2, 3}, {3, 4, 5}, {5, 6, 7, 12}])
    >>> [round(x, 6) for x in (found.coverage, found.precision, found.leakage, found.redundancy, found.overlap)]
    [0.8, 0.888889, 0.111111, 0.181818, 0.111111]
    >>> [round(x, 6) for x in (found.f1, found.balance, found.evenness)]
    [0.842105, 0.916667, 0.992215]
    """
    given = frozenset().union(*parts) if parts else frozenset()
    sizes = [len(part) for part in parts]
    total = sum(sizes)
    kept = list(dependencies)
    coverage = len(given & required) / len(required) if required else None
    precision = len(given & required) / len(given) if given else None
    return Split(
        coverage=coverage,
        precision=precision,
        leakage=None if precision is None else 1.0 - precision,
        redundancy=(total - len(given)) / total if total else None,
        overlap=_overlap(parts),
        balance=total / len(sizes) / max(sizes) if total else None,
        evenness=_evenness(sizes),
        violations=kept.count(False) / len(kept) if kept else None,
        f1=_harmonic(coverage, precision),
    )


def split_reward(split: Split, terms: SplitTerms | None = None) -> float | None:
    """F1 - a redundancy - b violations + k balance; None where nothing was required or given out.

    Source: METHODS 2.2.
    """
    if split.f1 is None:
        return None
    terms = terms or SplitTerms()
    return (
        split.f1
        - terms.redundancy * (split.redundancy or 0.0)
        - terms.violations * (split.violations or 0.0)
        + terms.balance * (split.balance or 0.0)
    )


def _harmonic(a: float | None, b: float | None) -> float | None:
    if a is None or b is None:
        return None
    return 2.0 * a * b / (a + b) if a + b else 0.0


def _overlap(parts: Sequence[AbstractSet[Hashable]]) -> float | None:
    pairs = [(a, b) for a, b in combinations(parts, 2) if a or b]
    if not pairs:
        return None
    return math.fsum(len(a & b) / len(a | b) for a, b in pairs) / len(pairs)


def _evenness(sizes: Sequence[int]) -> float | None:
    total = sum(sizes)
    if not total:
        return None
    if len(sizes) == 1:
        return 1.0
    shares = [size / total for size in sizes if size]
    return -math.fsum(share * math.log(share) for share in shares) / math.log(len(sizes))
