"""Leave-one-out: what a unit's work was worth, as the value with it minus the value without it.

Place in the flow: splits what happened between two turns of the orchestrator over the agents and tools that worked there.
Leave-one-out estimates do not sum to the total (redundant units get too little, joint ones too much), so each comes with a
variance that says how far it can be trusted: the squared gap to "add one in". The reconciliation then gives the residual to the
units that interact. Two units get exactly their Shapley values; a unit without effect gets exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from spanloop.schemas.canonical import MICRO

__all__ = ["Estimate", "leave_one_out"]

UNKNOWN_VARIANCE = 1.0
"""sigma^2 of an estimate that we do not have, squared units of reward: as large as the outcome's own range."""


class Estimate(msgspec.Struct, frozen=True):
    """A raw estimate before reconciliation."""

    raw: int | None
    """Micro-units; None: unknown."""
    variance: float
    """Squared units of reward."""
    estimator: str


def leave_one_out(units: Sequence[str], value: Callable[[frozenset[str]], int | None]) -> dict[str, Estimate]:
    """Leave-one-out of each unit with its interaction as variance.

    Args:
        units: The units that worked side by side.
        value: Value (micro-units) of the state with the work of a subset of the units in it; None where that state cannot
            be valued. For one unit only the empty and the full set are asked.

    Source: METHODS 3.1 (e), 3.4.

    >>> v = {"": 0, "a": 200_000, "b": 100_000, "ab": 700_000}
    >>> {u: e.raw for u, e in leave_one_out(["a", "b"], lambda s: v["".join(sorted(s))]).items()}
    {'a': 600000, 'b': 500000}
    """
    everyone = frozenset(units)
    whole, nothing = value(everyone), value(frozenset())
    found: dict[str, Estimate] = {}
    for unit in units:
        without, alone = value(everyone - {unit}), value(frozenset((unit,)))
        if whole is None or without is None:
            found[unit] = Estimate(None, UNKNOWN_VARIANCE, "unidentified/1")
            continue
        raw = whole - without
        if alone is None or nothing is None:
            found[unit] = Estimate(raw, UNKNOWN_VARIANCE, "leave_one_out/1")
            continue
        interaction = (alone - nothing - raw) / MICRO
        found[unit] = Estimate(raw, interaction * interaction, "leave_one_out/1")
    return found
