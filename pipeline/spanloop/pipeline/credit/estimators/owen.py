"""Owen values: Shapley over unions (roles) and, inside each, over its members (agents), conserving both levels.

Orders keep the members of a union together. A union's total is its Shapley value in the quotient game, in which whole roles
join. Source: Owen 1977; METHODS 3.2 f.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import factorial

import numpy as np

from spanloop.pipeline.credit.estimators.games import Floats, Game, Shares, table_players
from spanloop.pipeline.credit.estimators.shapley import EVALUATIONS, Orders, sample_orders, shapley
from spanloop.schemas.errors import SchemaError

__all__ = ["owen", "quotient", "sample_owen"]


def owen(table: Floats, unions: Sequence[Sequence[int]]) -> Floats:
    """Exact Owen values, shape (n,).

    Args:
        table: Values of the coalitions, shape (2^n,), bit i of the index is player i.
        unions: The players of each union; each player is in exactly one.

    >>> v = np.array([0, 0.1, 0.2, 0.6, 0, 0.3, 0.2, 1.0])
    >>> owen(v, [[0], [1, 2]]).round(6)
    array([0.45, 0.4 , 0.15])
    """
    players = table_players(table)
    _check(unions, players)
    found = np.zeros(players)
    for k, members in enumerate(unions):
        others = [_bits(union) for j, union in enumerate(unions) if j != k]
        around, sizes = _subsets(others)
        count = len(unions)
        weights = np.array([factorial(s) * factorial(count - s - 1) / factorial(count) for s in range(count)])
        inside, _ = _subsets([1 << player for player in members])
        # Shapley is linear: the member's value is that of the game averaged over which unions came before.
        found[list(members)] = shapley(weights[sizes] @ table[around[:, None] | inside[None, :]])
    return found


def quotient(table: Floats, unions: Sequence[Sequence[int]]) -> Floats:
    """The game of the unions, shape (2^number of unions,): values of coalitions of whole unions."""
    _check(unions, table_players(table))
    return table[_subsets([_bits(union) for union in unions])[0]]


def sample_owen(
    game: Game,
    unions: Sequence[Sequence[int]],
    *,
    evaluations: int = EVALUATIONS,
    seed: int = 0,
    noisy: bool = False,
    antithetic: bool = False,
) -> Shares:
    """Owen values from random orders that keep unions together.

    Args:
        game: Values of coalitions.
        unions: The players of each union; each of the players 0..n-1 is in exactly one.
        evaluations: Coalitions to value at most; at least two blocks are drawn whatever it says.
        seed: Of the orders.
        noisy: As in ``sample_shapley``.
        antithetic: As in ``sample_shapley``.
    """
    players = sum(len(union) for union in unions)
    _check(unions, players)
    union_of = np.empty(players, dtype=np.int64)
    for k, union in enumerate(unions):
        union_of[list(union)] = k

    def draw(rng: np.random.Generator, count: int) -> Orders:
        rank = rng.permuted(np.tile(np.arange(len(unions)), (count, 1)), axis=1)
        return np.argsort(rank[:, union_of] + rng.random((count, players)), axis=1)

    def block(orders: Orders) -> list[Orders]:
        return [orders, orders[:, ::-1]] if antithetic else [orders]

    return sample_orders(
        game, draw, block, players=players, evaluations=evaluations, seed=seed, noisy=noisy,
        estimator="owen_sampled/1", **({"reverse": None} if antithetic else {}),
    )  # fmt: skip


def _bits(union: Sequence[int]) -> int:
    return sum(1 << player for player in union)


def _subsets(parts: Sequence[int]) -> tuple[Orders, Orders]:
    """Unions of all subsets of ``parts`` (bit sets), the k-th bit of the index being part k, and their sizes."""
    sets = np.zeros(1, dtype=np.int64)
    sizes = np.zeros(1, dtype=np.int64)
    for part in parts:
        sets = np.concatenate([sets, sets | part])
        sizes = np.concatenate([sizes, sizes + 1])
    return sets, sizes


def _check(unions: Sequence[Sequence[int]], players: int) -> None:
    if sorted(player for union in unions for player in union) != list(range(players)) or not all(unions):
        raise SchemaError(f"unions {unions!r} do not hold each of the {players} players once")
