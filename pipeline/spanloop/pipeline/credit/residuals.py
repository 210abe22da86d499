"""Whether what the estimates leave over looks like noise: the standardised residual of each level of the ledger.

At an account whose children all have estimates and some variance, z = (credit - sum of raw) / sqrt(sum of variances). Honest
variances and unbiased estimates give a mean of 0. What falls to the environment has to be 0 on average as well, else the value
model promises too much or too little. Accounts of one orchestration are not independent, so each counts by its mean.
Source: METHODS 3.4, bias and validity.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from spanloop.pipeline.credit.anchors import ENVIRONMENT
from spanloop.schemas.canonical import MICRO
from spanloop.schemas.events import CreditAssigned, CreditNode

__all__ = ["Level", "alarm", "levels_of"]

LEAST = 30
"""Orchestrations below which nothing is said."""
FAR = 4.0
"""Standard errors from 0 at which a mean is an alarm: with a look a day about one false one in forty years."""


class Level(msgspec.Struct, frozen=True):
    """One level's residuals."""

    name: str
    """Unit of the account that is split; environment: what falls to chance, units of reward."""
    orchestrations: int
    mean: float
    deviation: float
    """Between orchestrations."""

    @property
    def distance(self) -> float:
        """Mean in standard errors."""
        if self.deviation <= 0.0:
            return 0.0 if not self.mean else math.copysign(math.inf, self.mean)
        return self.mean / (self.deviation / math.sqrt(self.orchestrations))


def levels_of(ledgers: Iterable[CreditAssigned]) -> list[Level]:
    """Residuals by level; ledgers from before the first value model are left out."""
    found: dict[str, list[float]] = {}
    for ledger in ledgers:
        if ledger.value_model == "none" or not ledger.nodes:
            continue
        own: dict[str, list[float]] = {}
        below: dict[str, list[CreditNode]] = {}
        for node in ledger.nodes:
            below.setdefault(node.parent, []).append(node)
            if node.id == ENVIRONMENT:
                own.setdefault(ENVIRONMENT, []).append(node.credit / MICRO)
        for node in ledger.nodes:
            children = below.get(node.id, ())
            raws = [child.raw for child in children if child.raw is not None]
            spread = math.fsum(child.variance for child in children)
            if len(raws) == len(children) > 1 and spread > 0.0:
                own.setdefault(node.unit, []).append((node.credit - sum(raws)) / MICRO / math.sqrt(spread))
        for name, values in own.items():
            found.setdefault(name, []).append(math.fsum(values) / len(values))
    return [_level(name, values) for name, values in sorted(found.items())]


def _level(name: str, values: list[float]) -> Level:
    mean = math.fsum(values) / len(values)
    spread = math.fsum((value - mean) ** 2 for value in values) / max(len(values) - 1, 1)
    return Level(name, len(values), mean, math.sqrt(spread))


def alarm(level: Level) -> str:
    """What is wrong with a level, in a sentence; empty: nothing, or too little to tell."""
    if level.orchestrations < LEAST or abs(level.distance) < FAR:
        return ""
    if level.name == ENVIRONMENT:
        which = "little" if level.mean > 0 else "much"
        return (
            f"the value model promises too {which}: chance gets {level.mean:+.4f} on average over"
            f" {level.orchestrations} orchestrations ({abs(level.distance):.1f} standard errors from 0)"
        )
    return (
        f"estimates below {level.name} accounts are biased or their variances too small: mean z {level.mean:+.2f} over"
        f" {level.orchestrations} orchestrations ({abs(level.distance):.1f} standard errors from 0)"
    )
