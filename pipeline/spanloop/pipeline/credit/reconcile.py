"""Minimum-variance reconciliation in integers: a fixed total is split so that the parts sum to it exactly.

Place in the flow: ``ledger.settle`` calls ``reconcile`` at every node, from the team down to the tokens.
Invariants: parts sum to the total; the result does not depend on the order of the children, only on their ids;
a child with estimate 0 and variance 0 gets exactly 0 as long as a sibling has an estimate or a variance.
"""

from __future__ import annotations

from collections.abc import Sequence

from spanloop.schemas.errors import SchemaError

__all__ = ["largest_remainder", "reconcile"]


def largest_remainder(total: int, weights: Sequence[float | int], ids: Sequence[str]) -> list[int]:
    """Integer shares of ``total`` in proportion to ``weights`` >= 0 (not all zero), ties by id.

    Args:
        total: Micro-units to hand out, of any sign (a negative total is the mirror image of its positive).
        weights: One finite weight >= 0 a share.
        ids: One id a share, distinct; they break ties.

    Source: METHODS 3.4, integer ledger.

    >>> largest_remainder(1_000_000, [1, 1, 1], ["a", "b", "c"])
    [333334, 333333, 333333]
    >>> largest_remainder(530_001, [3, 2, 2], ["a", "b", "c"])
    [227143, 151429, 151429]
    """
    if total < 0:
        return [-share for share in largest_remainder(-total, weights, ids)]
    if total == 0:
        return [0] * len(weights)
    first = weights[0] if weights else 0
    if first > 0 and list(weights).count(first) == len(weights):
        each, over = divmod(total, len(weights))
        shares = [each] * len(weights)
        for index in sorted(range(len(weights)), key=ids.__getitem__)[:over]:
            shares[index] += 1
        return shares
    ratios = [weight.as_integer_ratio() for weight in weights]
    unit = max(denominator for _, denominator in ratios)  # powers of two: exact
    exact = [numerator * (unit // denominator) for numerator, denominator in ratios]
    scale = sum(exact)
    if scale <= 0 or min(exact) < 0:
        raise SchemaError(f"weights {list(weights)!r} are not usable: at least one above zero, none below")
    parts = [divmod(total * weight, scale) for weight in exact]
    shares = [share for share, _ in parts]
    over = total - sum(shares)
    for index in sorted(range(len(ids)), key=lambda i: (-parts[i][1], ids[i]))[:over]:
        shares[index] += 1
    return shares


def reconcile(
    total: int, raw: Sequence[int | None], variances: Sequence[float], ids: Sequence[str]
) -> list[int]:
    """Conserved credit of the children of an account that holds ``total``.

    c_i = raw_i + sigma_i^2 / sum_j sigma_j^2 * (total - sum_j raw_j): noisy children take up the residual, exact
    ones keep their estimate. Where no child has a variance, those with an estimate other than 0 share it evenly, else all.

    Args:
        total: The parent's credit, micro-units.
        raw: Estimates of the children, micro-units; None is unknown and counts as 0.
        variances: sigma^2 of each estimate, >= 0; only their ratios matter.
        ids: Account ids, distinct; they break ties of rounding.

    Source: METHODS 3.4 (MinT with a diagonal covariance).

    >>> reconcile(1_000_000, [500_000, 300_000, -100_000], [0.01, 0.04, 0.05], ["a", "b", "c"])
    [530000, 420000, 50000]
    """
    if not ids:
        if total:
            raise SchemaError(f"an account that holds {total} has no children to give it to")
        return []
    if len(ids) == 1:
        return [total]
    known = [value or 0 for value in raw]
    residual = total - sum(known)
    if residual == 0:
        return known
    weights: Sequence[float | int] = variances
    if max(variances) <= 0:
        weights = [1 if value else 0 for value in known] if any(known) else [1] * len(known)
    shares = largest_remainder(residual, weights, ids)
    return [value + share for value, share in zip(known, shares, strict=True)]
