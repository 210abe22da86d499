"""Cooperative games: the value of every coalition of units, and what an estimator says about each unit's share.

A game is asked for many coalitions at once, as rows of booleans, so that replays and models can be batched; ``of_sets`` adapts
a function of sets. Conventions: players 0..n-1; in a table of all coalitions bit i of the index is player i; units of value are
the game's own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from spanloop.pipeline.credit.estimators.intervals import student_quantile
from spanloop.pipeline.credit.reconcile import reconcile
from spanloop.schemas.canonical import MICRO
from spanloop.schemas.errors import SchemaError

__all__ = [
    "MOST_EXACT",
    "Floats",
    "Game",
    "Masks",
    "Shares",
    "conserved",
    "of_sets",
    "table_of",
    "table_players",
]

Floats = NDArray[np.float64]
Masks = NDArray[np.bool_]

MOST_EXACT = 12
"""Players up to which all 2^n coalitions are valued."""


class Game(Protocol):
    """Values of coalitions. It may be noisy (a replay each time) where an estimator takes ``noisy``: then its result stays
    unbiased and its errors honest."""

    def __call__(self, masks: Masks, /) -> Floats:
        """Values, shape (m,), of the coalitions in ``masks``, bool, shape (m, n)."""
        ...


class Shares(msgspec.Struct, frozen=True, eq=False):
    """What each player was worth."""

    values: Floats
    """Shape (n,), units of value. They sum to v(all) - v(none)."""
    errors: Floats
    """Shape (n,), standard errors; 0 where the estimate is exact."""
    blocks: int
    """Independent blocks of orders behind the errors; 0: exact."""
    evaluations: int
    """Coalitions that the game was asked to value."""
    estimator: str

    def half_widths(self, level: float = 0.9) -> Floats:
        """Half-widths, shape (n,), of two-sided intervals of ``level``; infinite where one block says nothing."""
        if not self.blocks:
            return np.zeros_like(self.values)
        quantile = student_quantile(level, self.blocks - 1)
        return np.full_like(self.values, np.inf) if np.isinf(quantile) else self.errors * quantile


def of_sets(units: Sequence[str], value: Callable[[frozenset[str]], float]) -> Game:
    """The game of a function of sets of units; each set is asked for once.

    >>> of_sets(["a", "b"], lambda s: float(len(s)))(np.array([[True, False], [True, True]]))
    array([1., 2.])
    """
    known: dict[frozenset[str], float] = {}

    def game(masks: Masks, /) -> Floats:
        found = np.empty(len(masks))
        for row, mask in enumerate(masks):
            chosen = frozenset(units[int(i)] for i in np.flatnonzero(mask))
            if chosen not in known:
                known[chosen] = float(value(chosen))
            found[row] = known[chosen]
        return found

    return game


def table_of(game: Game, players: int) -> Floats:
    """Values of all coalitions, shape (2^n,). Raises SchemaError above ``MOST_EXACT`` players."""
    if not 0 <= players <= MOST_EXACT:
        raise SchemaError(
            f"{players} players have too many coalitions to value: at most {MOST_EXACT}, or sample"
        )
    indices = np.arange(1 << players)
    masks = (indices[:, None] >> np.arange(players)) & 1
    return np.asarray(game(masks.astype(np.bool_)), dtype=np.float64)


def table_players(table: Floats) -> int:
    """Number of players of a table of all coalitions. Raises SchemaError where its length is no power of two."""
    players = len(table).bit_length() - 1
    if len(table) != 1 << max(players, 0) or players > MOST_EXACT:
        raise SchemaError(
            f"a table of {len(table)} values is not one for each coalition of at most {MOST_EXACT}"
        )
    return players


def conserved(shares: Shares, total: int, ids: Sequence[str]) -> list[int]:
    """The shares as micro-credits that sum to ``total`` exactly: noisy ones take up the residual.

    Args:
        shares: Estimates in units of reward.
        total: Micro-credits to hand out.
        ids: Account ids, one a player, distinct; they break ties.

    Source: METHODS 3.4.
    """
    raw = [round(float(value) * MICRO) for value in shares.values]
    variances = [float(error) ** 2 for error in shares.errors]
    return reconcile(total, raw, variances, ids)
