"""Quantiles and bounds behind the error bars of sampled estimates."""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

from spanloop.schemas.errors import SchemaError

__all__ = ["bernstein_half_width", "hoeffding_samples", "normal_quantile", "student_quantile"]

_NORMAL_FROM = 400
"""Degrees of freedom from which Student's quantile is the normal one (to 0.003)."""


def normal_quantile(level: float) -> float:
    """Half-width, in standard errors, of a two-sided normal interval of ``level`` in (0, 1).

    >>> round(normal_quantile(0.95), 6)
    1.959964
    """
    if not 0.0 < level < 1.0:
        raise SchemaError(f"level {level!r} is not usable: it lies between 0 and 1, both excluded")
    return NormalDist().inv_cdf(0.5 + level / 2.0)


@lru_cache(maxsize=256)
def student_quantile(level: float, freedom: int) -> float:
    """Half-width, in standard errors, of a two-sided Student interval; infinite below one degree of freedom.

    Source: Abramowitz and Stegun 26.7.3-26.7.4 (finite sums), solved by bisection.

    >>> round(student_quantile(0.9, 3), 4), round(student_quantile(0.95, 10), 4)
    (2.3534, 2.2281)
    """
    normal = normal_quantile(level)
    if freedom < 1:
        return math.inf
    if freedom >= _NORMAL_FROM:
        return normal
    low, high = 0.0, math.pi / 2.0
    for _ in range(60):
        middle = (low + high) / 2.0
        if _within(middle, freedom) < level:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(freedom)


def _within(angle: float, freedom: int) -> float:
    """P(|t| < sqrt(freedom) tan(angle))."""
    cosine = math.cos(angle)
    term = cosine if freedom % 2 else 1.0
    total = 0.0
    for k in range(freedom % 2, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    if freedom % 2:
        return 2.0 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total


def hoeffding_samples(error: float, risk: float, *, width: float = 1.0, players: int = 1) -> int:
    """Independent orders after which no player's mean is off by more than ``error`` except with probability ``risk``.

    Args:
        error: Largest error, units of value, > 0.
        risk: Probability of a larger one, in (0, 1).
        width: Range of one marginal contribution, units of value.
        players: Players whose errors are bounded together.

    Source: METHODS 3.2 f, m >= width^2 ln(2n/risk) / (2 error^2).

    >>> hoeffding_samples(0.05, 0.05), hoeffding_samples(0.05, 0.05, players=5)
    (738, 1060)
    """
    return math.ceil(width * width * math.log(2 * players / risk) / (2 * error * error))


def bernstein_half_width(variance: float, width: float, samples: int, risk: float) -> float:
    """Empirical-Bernstein half-width of a mean: holds for any distribution on a range of ``width``.

    Source: METHODS 4.5 (Maurer and Pontil 2009, theorem 4).

    >>> round(bernstein_half_width(0.25, 1.0, 1000, 0.05), 6)
    0.051563
    """
    if samples < 2:
        return width
    spread = math.log(2.0 / risk)
    bound = math.sqrt(2.0 * variance * spread / samples) + 7.0 * width * spread / (3.0 * (samples - 1))
    return min(bound, width)
