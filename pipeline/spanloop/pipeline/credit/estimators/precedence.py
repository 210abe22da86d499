"""Shapley values where some players cannot be without others: an agent not without the one that spawned it.

The mean of what a player adds over the linear extensions of the precedence order (Faigle-Kern). Exact by counting, over the
coalitions that may exist (closed under "must come before"); sampled for spawn trees of any size, whose linear extensions can be
drawn uniformly. Another order with too many coalitions is answered from two extensions (``orders.average_differences``),
without error bars. Efficiency and the dummy axiom hold; symmetry holds for players that the order does not tell apart.
Source: Faigle and Kern 1992; METHODS 3.2 f.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import numpy as np

from spanloop.pipeline.credit.estimators.games import Floats, Game, Shares
from spanloop.pipeline.credit.estimators.shapley import EVALUATIONS, Orders, sample_orders
from spanloop.pipeline.credit.orders import linear_extensions
from spanloop.schemas.errors import SchemaError

__all__ = ["MOST_COALITIONS", "precedence_shapley", "precedence_shapley_of", "sample_spawn_tree"]

MOST_COALITIONS = 1 << 14
"""Coalitions up to which the exact method counts."""

Before = Mapping[int, AbstractSet[int]]
"""For each player those that must come before it; absent: none."""


def precedence_shapley(game: Game, players: int, before: Before) -> Shares | None:
    """Exact values; None where more than ``MOST_COALITIONS`` coalitions may exist.

    Args:
        game: Values of coalitions; only coalitions that may exist are asked for.
        players: n.
        before: Who must come before whom. Raises SchemaError where that is a cycle.
    """
    need = _needs(players, before)
    arrivals: dict[int, int] = {0: 1}  # orders in which a coalition can have come together
    levels = [[0]]
    for _ in range(players):
        grown: dict[int, int] = {}
        for coalition in levels[-1]:
            for player in range(players):
                bit = 1 << player
                if not coalition & bit and need[player] & coalition == need[player]:
                    grown[coalition | bit] = grown.get(coalition | bit, 0) + arrivals[coalition]
        arrivals |= grown
        levels.append(sorted(grown))
        if len(arrivals) > MOST_COALITIONS:
            return None
    if players and not levels[-1]:
        raise SchemaError("the order of the players has a cycle: nobody on it could come first")
    coalitions = sorted(arrivals)
    index = {coalition: k for k, coalition in enumerate(coalitions)}
    masks = np.array(
        [[coalition >> i & 1 for i in range(players)] for coalition in coalitions], dtype=np.bool_
    )
    values = np.asarray(game(masks.reshape(len(coalitions), players)), dtype=np.float64)
    everyone = (1 << players) - 1
    whole = arrivals[everyone]
    departures = {everyone: 1}
    found = np.zeros(players)
    for level in reversed(levels[:-1]):
        for coalition in level:
            ways = 0
            for player in range(players):
                bit = 1 << player
                after = coalition | bit
                if coalition & bit or need[player] & coalition != need[player]:
                    continue
                ways += departures[after]
                share = arrivals[coalition] * departures[after] / whole  # integers: a correctly rounded ratio
                found[player] += share * (values[index[after]] - values[index[coalition]])
            departures[coalition] = ways
    return Shares(found, np.zeros(players), 0, len(coalitions), "precedence_shapley/1")


def sample_spawn_tree(
    game: Game, parents: Sequence[int], *, evaluations: int = EVALUATIONS, seed: int = 0, noisy: bool = False
) -> Shares:
    """Values under a spawn tree (or forest) from random linear extensions, uniform over all of them.

    Args:
        game: Values of coalitions.
        parents: For each player its spawner, -1 for none. Raises SchemaError where that is a cycle.
        evaluations: Coalitions to value at most; at least two blocks are drawn whatever it says.
        seed: Of the orders.
        noisy: As in ``sample_shapley``.

    A uniform order of all players, in which each subtree then gives its first place to its root and the rest to its
    branches as they lay, is a uniform linear extension (hook lengths).
    """
    players = len(parents)
    depths = _depths(parents)
    by_depth = sorted(range(players), key=lambda i: (depths[i], i))
    children: list[list[int]] = [[] for _ in parents]
    for child, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(child)
    below: list[list[int]] = [[] for _ in parents]  # subtree without its root
    for player in reversed(by_depth):
        below[player] = [d for child in children[player] for d in (child, *below[child])]

    def draw(rng: np.random.Generator, count: int) -> Orders:
        times = rng.random((count, players))
        for player in by_depth:
            if not below[player]:
                continue
            mine = np.array([player, *below[player]])
            held = times[:, mine]
            first = held.argmin(axis=1)
            rows = np.arange(count)
            # The root takes the first place; whoever held it takes the root's.
            earliest = held[rows, first].copy()
            held[rows, first] = held[:, 0]
            held[:, 0] = earliest
            times[:, mine] = held
        return np.argsort(times, axis=1)

    return sample_orders(
        game, draw, lambda orders: [orders], players=players, evaluations=evaluations, seed=seed, noisy=noisy,
        estimator="precedence_sampled/1", reverse=None,
    )  # fmt: skip


def precedence_shapley_of(
    game: Game, players: int, before: Before, *, evaluations: int = EVALUATIONS, seed: int = 0
) -> Shares:
    """Exact where few coalitions may exist, sampled for spawn trees, else the mean of two extensions.

    The last one's errors are infinite: two extensions that were not drawn say nothing about the others.
    """
    exact = precedence_shapley(game, players, before)
    if exact is not None:
        return exact
    direct = _direct(players, before)
    if all(len(above) <= 1 for above in direct):
        parents = [min(above, default=-1) for above in direct]
        return sample_spawn_tree(game, parents, evaluations=evaluations, seed=seed)
    names = [f"{i:09d}" for i in range(players)]
    orders = linear_extensions(
        names, {names[i]: {names[j] for j in before.get(i, ())} for i in range(players)}
    )
    found = np.zeros(players)
    for order in orders:
        line = [int(name) for name in order]
        masks = np.zeros((players + 1, players), dtype=np.bool_)
        for k, player in enumerate(line):
            masks[k + 1 :, player] = True
        found[line] += np.diff(np.asarray(game(masks), dtype=np.float64)) / len(orders)
    errors: Floats = np.full(players, np.inf)
    return Shares(found, errors, 1, len(orders) * (players + 1), "two_extensions/1")


def _needs(players: int, before: Before) -> list[int]:
    need = [0] * players
    for player, above in before.items():
        for other in above:
            if not (0 <= player < players and 0 <= other < players):
                raise SchemaError(f"player {player} after {other}: there are {players} players, from 0")
            need[player] |= 1 << other
    return need


def _direct(players: int, before: Before) -> list[set[int]]:
    """For each player the predecessors that no other predecessor already has to follow."""
    above: dict[int, set[int]] = {}

    def all_above(player: int) -> set[int]:
        open_ = [player]
        found: set[int] = set()
        while open_:
            for other in before.get(open_.pop(), ()):
                if other not in found:
                    found.add(other)
                    open_.append(other)
        return found

    for player in range(players):
        above[player] = all_above(player)
        if player in above[player]:
            raise SchemaError("the order of the players has a cycle: nobody on it could come first")
    return [
        {other for other in above[player] if not any(other in above[third] for third in above[player])}
        for player in range(players)
    ]


def _depths(parents: Sequence[int]) -> list[int]:
    depths: list[int] = []
    for start in range(len(parents)):
        depth, at = 0, parents[start]
        while at >= 0:
            depth += 1
            if depth > len(parents) or at >= len(parents):
                raise SchemaError("the spawn tree has a cycle or a parent that is no player")
            at = parents[at]
        depths.append(depth)
    return depths
