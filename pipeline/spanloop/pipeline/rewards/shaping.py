"""Scaffolds that go away or change nothing: schedules of weights, and potentials.

A term that is paid beside the outcome bends what is optimal. It is either annealed by one of the schedules here, with the state that
it was paid under on the reward, or expressed as a potential, whose sum over an orchestration is fixed whatever the agents do.
Invariants: pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import msgspec

__all__ = ["Indicator", "Schedule", "advance", "potential_rewards", "weight_at"]


class Schedule(msgspec.Struct, frozen=True):
    """How a weight goes from ``start`` to 0."""

    start: float
    length: float
    """Progress after which nothing is paid."""
    shape: Literal["constant", "linear", "cosine"] = "linear"


def weight_at(schedule: Schedule, progress: float) -> float:
    """The weight after ``progress``: start max(0, 1 - k / N), or start (1 + cos(pi min(1, k / N))) / 2.

    Source: METHODS 2.1.

    >>> [round(weight_at(Schedule(.5, 1000, shape), k), 6) for shape in ("linear", "cosine") for k in (250, 500)]
    [0.375, 0.25, 0.426777, 0.25]
    """
    if schedule.shape == "constant":
        return schedule.start
    done = min(1.0, max(0.0, progress / schedule.length))
    if schedule.shape == "linear":
        return schedule.start * (1.0 - done)
    return schedule.start * 0.5 * (1.0 + math.cos(math.pi * done))


class Indicator(msgspec.Struct, frozen=True):
    """State of a schedule that advances only while what the scaffold was for holds: exponential means of a measured number."""

    progress: float = 0.0
    mean: float = 0.0
    slow: float = 0.0
    seen: int = 0


def advance(
    state: Indicator, value: float, *, tolerance: float, target: float, decay: float = 0.02
) -> Indicator:
    """One orchestration later. Progress grows by 1 where the indicator (spawn rate, finish rate, ...) is at its target and
    stable: mean at least ``target``, and the fast and the slow mean within ``tolerance``. Else it stands still, so that a
    scaffold is not taken away before what it holds up stands alone.

    Args:
        state: Before.
        value: The indicator of an orchestration.
        tolerance: Largest difference of the two means that is stable.
        target: What the mean has to reach.
        decay: Weight of a new value in the fast mean; a fifth of it in the slow one.

    Source: METHODS 2.1 (driven by an indicator, not by a step count; 1.2 names it as a gap).
    """
    rate = max(decay, 1.0 / (state.seen + 1))
    slow_rate = max(decay / 5.0, 1.0 / (state.seen + 1))
    mean = state.mean + rate * (value - state.mean)
    slow = state.slow + slow_rate * (value - state.slow)
    steady = mean >= target and abs(mean - slow) <= tolerance
    return Indicator(state.progress + steady, mean, slow, state.seen + 1)


def potential_rewards(potentials: Sequence[float], discount: float = 1.0) -> list[float]:
    """F = gamma Phi(G') - Phi(G) along an orchestration; sums to -Phi(first) for gamma 1, which is 0 where that is.

    Args:
        potentials: Phi of each prefix, first to last; the last, terminal one is taken as 0.
        discount: gamma.

    Source: Ng, Harada and Russell 1999; METHODS 2.7.

    >>> [round(f, 6) for f in potential_rewards([0, .3, .5, 0])]
    [0.3, 0.2, -0.5]
    """
    ended = [*potentials[:-1], 0.0]
    return [discount * after - before for before, after in pairwise(ended)]
