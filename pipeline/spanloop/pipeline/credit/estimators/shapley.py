"""Shapley values: the mean of what a player adds, over all orders in which the players could have joined.

``shapley`` takes every coalition and is exact; ``sample_shapley`` draws orders and says how far it may be off. Orders come in
blocks: one random order and its rotations by a quarter each, so that every player is seen early and late; where a pilot finds it
better, each order is followed by its reverse (it cancels what two-way interactions add, and doubles the noise of majority
votes). Blocks are independent and each is unbiased and efficient, so the spread between blocks gives the errors.
"""

from __future__ import annotations

from collections.abc import Callable
from math import factorial

import numpy as np
from numpy.typing import NDArray

from spanloop.pipeline.credit.estimators.games import Floats, Game, Shares, table_of, table_players
from spanloop.schemas.errors import SchemaError

__all__ = [
    "EVALUATIONS",
    "Orders",
    "banzhaf",
    "mobius",
    "sample_orders",
    "sample_shapley",
    "shapley",
    "shapley_of",
]

EVALUATIONS = 120_000
"""Coalitions that a sampled estimate may value unless told otherwise: max error about 0.02 of the range at 100 players."""

ROTATIONS = 4
PILOT = 0.1
"""Share of the evaluations that each design gets in the pilot."""
CHUNK = 1 << 22
"""Booleans handed to the game at once."""

Orders = NDArray[np.int64]
Draw = Callable[[np.random.Generator, int], Orders]
"""``count`` independent orders of the players, shape (count, n)."""


def shapley(table: Floats) -> Floats:
    """Exact Shapley values, shape (n,), of a game whose coalitions are all valued.

    Args:
        table: Values of the coalitions, shape (2^n,), bit i of the index is player i.

    Source: Shapley 1953; METHODS 3.2 f.

    >>> v = np.array([0, 0.1, 0.2, 0.6, 0, 0.3, 0.2, 1.0])
    >>> shapley(v).round(6)
    array([0.416667, 0.416667, 0.166667])
    """
    players = table_players(table)
    whole = factorial(players)
    weights = np.array([factorial(k) * factorial(players - k - 1) / whole for k in range(players)])
    return _weighted(table, players, weights)


def banzhaf(table: Floats) -> Floats:
    """Banzhaf values, shape (n,): every coalition counts the same. They do not sum to v(all); for comparison only.

    Source: METHODS 3.2 f.
    """
    players = table_players(table)
    return _weighted(table, players, np.full(players, 0.5 ** max(players - 1, 0)))


def _weighted(table: Floats, players: int, weights: Floats) -> Floats:
    """For each player the sum of its marginal contributions, weighted by the size of the coalition before it."""
    found = np.empty(players)
    if players:
        without = np.arange(1 << (players - 1))
        sizes = np.zeros(len(without), dtype=np.int64)
        for i in range(players - 1):
            sizes += (without >> i) & 1
        by_size = weights[sizes]
        for i in range(players):
            pairs = table.reshape(-1, 2, 1 << i)
            found[i] = by_size @ (pairs[:, 1] - pairs[:, 0]).ravel()
    return found


def mobius(table: Floats) -> Floats:
    """Synergies m(T), shape (2^n,): what the members of T bring together beyond all their subsets.

    Source: METHODS 3.2 f, m(T) = sum over L in T of (-1)^(|T|-|L|) v(L); a player's Shapley value is the sum of m(T) / |T|.
    """
    terms = np.array(table, dtype=np.float64)
    for i in range(table_players(table)):
        pairs = terms.reshape(-1, 2, 1 << i)
        pairs[:, 1] -= pairs[:, 0]
    return terms


def shapley_of(
    game: Game, players: int, *, exact_up_to: int = 8, evaluations: int = EVALUATIONS, seed: int = 0
) -> Shares:
    """Exact for a small number of players, sampled above it.

    Args:
        game: Values of coalitions.
        players: n.
        exact_up_to: Most players of the exact method, at most ``MOST_EXACT``.
        evaluations: Coalitions to value at most when sampling.
        seed: Of the sampled orders.
    """
    if players > exact_up_to:
        return sample_shapley(game, players, evaluations=evaluations, seed=seed)
    return Shares(shapley(table_of(game, players)), np.zeros(players), 0, 1 << players, "shapley/1")


def sample_shapley(
    game: Game,
    players: int,
    *,
    evaluations: int = EVALUATIONS,
    seed: int = 0,
    noisy: bool = False,
    antithetic: bool = False,
) -> Shares:
    """Shapley values from random orders.

    Args:
        game: Values of coalitions.
        players: n >= 1.
        evaluations: Coalitions to value at most; at least two blocks are drawn whatever it says.
        seed: The same seed gives the same result for the same game.
        noisy: The game gives another value each time (a replay): nothing is asked for once and used for all orders.
        antithetic: Each order is followed by its reverse, without a pilot: which coalitions are asked for then does not
            depend on their values.

    Source: METHODS 3.2 f; Castro et al. 2009; antithetic orders Mitchell et al. 2022.
    """

    def draw(rng: np.random.Generator, count: int) -> Orders:
        return rng.permuted(np.tile(np.arange(players), (count, 1)), axis=1)

    offsets = [players * k // ROTATIONS for k in range(min(ROTATIONS, players))]

    def block(orders: Orders) -> list[Orders]:
        turned = [np.roll(orders, offset, axis=1) for offset in offsets]
        return [*turned, *(order[:, ::-1] for order in turned)] if antithetic else turned

    return sample_orders(
        game, draw, block, players=players, evaluations=evaluations, seed=seed, noisy=noisy,
        estimator="shapley_sampled/1", **({"reverse": None} if antithetic else {}),
    )  # fmt: skip


def sample_orders(
    game: Game,
    draw: Draw,
    block: Callable[[Orders], list[Orders]],
    *,
    players: int,
    evaluations: int,
    seed: int,
    noisy: bool,
    estimator: str,
    reverse: Callable[[Orders], Orders] | None = lambda orders: orders[:, ::-1],
) -> Shares:
    """Mean marginal contributions over orders drawn in independent blocks.

    Args:
        game: Values of coalitions.
        draw: Independent orders, uniform over those that are allowed.
        block: From orders to the orders of their blocks, each uniform over those that are allowed.
        players: n >= 1.
        evaluations: Coalitions to value at most; at least two blocks are drawn whatever it says.
        seed: Of the draws.
        noisy: As in ``sample_shapley``; the shares then sum to a mean of v(all) - v(none).
        estimator: Name and version in the result.
        reverse: The antithetic partner of each order, equally distributed; None: there is none.
    """
    if players < 1:
        raise SchemaError("a game without players has nothing to share")
    rng = np.random.default_rng(seed)
    ends = (
        None if noisy else np.asarray(game(np.array([[False] * players, [True] * players])), dtype=np.float64)
    )
    spent = 0 if noisy else 2

    def design(both: bool) -> Callable[[Orders], list[Orders]]:
        def orders_of(orders: Orders) -> list[Orders]:
            plain = block(orders)
            return [*plain, *(reverse(o) for o in plain)] if both and reverse is not None else plain

        return orders_of

    size = len(block(draw(np.random.default_rng(0), 1))) * (players + 1 if noisy else max(players - 1, 1))
    both = False
    pilot = int(evaluations * PILOT) // (2 * size)
    if reverse is not None and pilot >= 4:
        spread = {}
        for trial in (False, True):
            count = pilot if trial else 2 * pilot
            found, _ = _blocks(game, design(trial)(draw(rng, count)), ends)
            spread[trial] = float((found.var(axis=0, ddof=1) / count).max())
            spent += pilot * 2 * size
        both = spread[True] < spread[False]
    size *= 2 if both else 1
    count = max(2, (evaluations - spent) // size)
    orders = design(both)(draw(rng, count))
    values, widths = _blocks(game, orders, ends)
    # What happens once in as many orders as were drawn may not have been seen: no error is smaller than its share. How large it
    # can be, a player's own contributions tell; those of all where its own were always the same.
    widths = np.where(widths > 0, widths, widths.max())
    errors = np.maximum(values.std(axis=0, ddof=1) / np.sqrt(count), widths / (count * len(orders)))
    return Shares(values.mean(axis=0), errors, count, spent + count * size, estimator)


def _blocks(game: Game, orders: list[Orders], ends: Floats | None) -> tuple[Floats, Floats]:
    """Mean marginal contributions, shape (count, n), over the orders of each block, and the range of each player's, shape (n,)."""
    total: Floats = np.zeros(orders[0].shape)
    low, high = np.full(orders[0].shape[1], np.inf), np.full(orders[0].shape[1], -np.inf)
    for one in orders:
        found = _marginals(game, one, ends)
        low, high = np.minimum(low, found.min(axis=0)), np.maximum(high, found.max(axis=0))
        total += found
    return total / len(orders), high - low


def _marginals(game: Game, orders: Orders, ends: Floats | None) -> Floats:
    """What each player adds in each order, shape (count, n).

    ``ends`` are v(none) and v(all), to which each row then sums; None: both are asked for again in each order.
    """
    count, players = orders.shape
    places = np.empty_like(orders)
    np.put_along_axis(places, orders, np.broadcast_to(np.arange(players), orders.shape), axis=1)
    values = np.empty((count, players + 1))
    asked = slice(0, players + 1)
    if ends is not None:
        values[:, 0], values[:, players] = ends
        asked = slice(1, players)
    lengths = np.arange(players + 1)[asked]
    step = max(1, CHUNK // (players * max(len(lengths), 1)))
    for at in range(0, count if len(lengths) else 0, step):
        part = places[at : at + step]
        masks = (part[:, None, :] < lengths[None, :, None]).reshape(-1, players)
        values[at : at + step, asked] = np.reshape(game(masks), (len(part), len(lengths)))
    found = np.empty((count, players))
    np.put_along_axis(found, orders, np.diff(values, axis=1), axis=1)
    return found
