"""What states that repeat exactly came to: the log-only form of C3, as a part of the value model.

Where the same state was reached again and again (retries, n-best, a short menu), the mean outcome after it needs no model. C3 credits a
message with that mean less the policy's mean at its prefix; the ledger's value differences do the same once V of such states is the
mean. So a version of the value model may carry a table of them (``pipeline.value_table``), and a credit that names the version
names the other orchestrations that it was compared with.
Invariants: pure; a function of the remembered orchestrations, in any order; a state that is not in the table keeps the model's value.

Source: C3 2603.06859; METHODS 3.2 l.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from spanloop.pipeline.credit.states import State
from spanloop.schemas.canonical import MICRO, digest
from spanloop.schemas.errors import SchemaError

__all__ = ["LEAST", "PRIOR", "STATES_MAX", "Table", "lookup", "read_table", "table_of"]

LEAST = 4
"""Orchestrations that reached a state before its mean says anything."""
PRIOR = 2.0
"""The model's own value counts as so many orchestrations."""
STATES_MAX = 4096
"""States kept, those reached most often."""

Table = dict[str, tuple[int, int]]
"""By key of a state: orchestrations that reached it, and the sum of their rewards, micro-units."""


def key_of(state: Sequence[int]) -> str:
    """Key of a state: 16 hex digits."""
    return digest(*map(str, state))[:16]


def table_of(examples: Iterable[tuple[Iterable[State], int]]) -> Table:
    """Table of remembered orchestrations: the states that each went through, and its reward in micro-units.

    >>> table_of([(((1, 2),), 1_000_000)] * 3 + [(((1, 2), (3,)), 0)])[key_of((1, 2))]
    (4, 3000000)
    """
    found: dict[State, list[int]] = {}
    for states, reward in examples:
        for state in set(states):
            own = found.setdefault(state, [0, 0])
            own[0] += 1
            own[1] += reward
    often = [(count, key_of(state), total) for state, (count, total) in found.items() if count >= LEAST]
    often.sort(key=lambda item: (-item[0], item[1]))
    return {key: (count, total) for count, key, total in often[:STATES_MAX]}


def lookup(table: Mapping[str, tuple[int, int]], state: Sequence[int], value: float) -> float:
    """V of a state, units: the model's ``value``, drawn to the mean outcome where the state repeated."""
    count, total = table.get(key_of(state), (0, 0))
    return (total / MICRO + PRIOR * value) / (count + PRIOR)


def read_table(data: Mapping[str, Any]) -> Table:
    """The table that a version carries. Raises SchemaError: it is malformed."""
    try:
        return {str(key): (int(count), int(total)) for key, (count, total) in data.get("table", {}).items()}
    except (AttributeError, TypeError, ValueError) as exc:
        raise SchemaError(f"a value model's table of states: {exc}") from exc
