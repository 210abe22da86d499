"""What each of those that worked side by side brought (METHODS 3.5): the selection of an estimator and its shares.

Exact Shapley values up to ``EXACT_MAX`` workers, with precedence where one spawned another, over roles first where roles group
them (Owen); sampled orders up to ``SAMPLED_MAX``; leave-one-out above, and by choice.

The variance of an exact share is that of the value model's members about it; of a sampled one its squared error bar. Where the
model is of one voice an exact share has none.
Invariants: shares sum to what the gap brought; who adds no feature gets exactly 0; which coalitions are asked for does not depend
on values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import factorial

import msgspec
import numpy as np
from numpy.typing import NDArray

from spanloop.pipeline.credit.anchors import VALUE_DIFFERENCE, Anchored, Choice
from spanloop.pipeline.credit.estimators.games import Shares
from spanloop.pipeline.credit.estimators.owen import owen, sample_owen
from spanloop.pipeline.credit.estimators.precedence import precedence_shapley, sample_spawn_tree
from spanloop.pipeline.credit.estimators.shapley import sample_shapley
from spanloop.pipeline.credit.leave_one_out import leave_one_out
from spanloop.pipeline.credit.progress import Bag, StepValues, features_of, variance_of
from spanloop.pipeline.credit.reconcile import reconcile
from spanloop.pipeline.credit.states import COUNT_MAX
from spanloop.schemas.canonical import MICRO, digest

__all__ = [
    "COALITIONS_ALL",
    "COALITIONS_MAX",
    "EXACT_MAX",
    "IDLE",
    "SAMPLED_MAX",
    "Amounts",
    "CoalitionValues",
    "Found",
    "Level",
    "Share",
    "Work",
    "settled",
    "split",
]

Floats = NDArray[np.float64]
Masks = NDArray[np.bool_]

EXACT_MAX = 8
"""Workers side by side whose coalitions are all valued."""
SAMPLED_MAX = 100
"""Workers side by side up to which orders are sampled."""
COALITIONS_MAX = 4096
"""Coalitions that are valued for one gap at most ..."""
COALITIONS_ALL = 65_536
"""... and for all gaps of an orchestration that are sampled: each gets its even part."""
COALITIONS_MIN = 1600
"""With fewer there are no two blocks of orders of a hundred: no error bars, no sampling."""

Amounts = dict[str, int]
Level = tuple[tuple[str, str], ...]
"""Steps (id, kind) that may have happened in any order."""


class Share(msgspec.Struct, frozen=True):
    """What one of several brought, before reconciliation."""

    raw: int
    variance: float
    estimator: str


class Work(msgspec.Struct, frozen=True, eq=False):
    """What one agent, or one tool call of the orchestrator's, did."""

    unit: str
    levels: tuple[Level, ...]
    """One after the other."""
    amounts: Amounts
    """Steps by kind."""
    calls: frozenset[str]
    role: str
    parent: str
    shape: tuple[object, ...]
    """All that its values depend on: kinds in their order, and role."""


class Found(msgspec.Struct, frozen=True, eq=False):
    """What a gap of these works after this state is always found to give, whoever did it."""

    active: tuple[bool, ...]
    shares: tuple[Share, ...] | None
    """Of those that add something; None: not by coalitions."""
    inside: tuple[tuple[Anchored, ...], ...]
    """Of each step of each work, as listed."""
    total: int = 0
    """What the gap brought."""


class CoalitionValues:
    """V of the state before a gap with the work of some of its workers in it."""

    def __init__(self, values: StepValues, base: Bag, room: Amounts, works: Sequence[Work]) -> None:
        self._values = values
        self._base = base
        place: dict[str, int] = {}
        self._steps: list[tuple[tuple[int, int], ...]] = []
        """Features that further steps of a kind add; of the kinds that can still add any."""
        for kind in dict.fromkeys(kind for work in works for kind in work.amounts):
            have = room.get(kind, 0)
            if have < COUNT_MAX:
                place[kind] = len(self._steps)
                self._steps.append(features_of(kind)[have:])
        self._amounts = [
            [(place[kind], n) for kind, n in work.amounts.items() if kind in place] for work in works
        ]
        self.active = [bool(amounts) for amounts in self._amounts]
        self._found: dict[tuple[int, ...], tuple[int, int]] = {}

    def at(self, chosen: Sequence[int]) -> tuple[int, int]:
        """(V, key) with the work of these workers in it."""
        return self._capped(self._row(chosen))

    def _row(self, chosen: Sequence[int]) -> tuple[int, ...]:
        row = [0] * len(self._steps)
        for i in chosen:
            for k, amount in self._amounts[i]:
                row[k] += amount
        return tuple([min(n, len(steps)) for n, steps in zip(row, self._steps, strict=True)])

    def _capped(self, row: tuple[int, ...]) -> tuple[int, int]:
        known = self._found.get(row)
        if known is None:
            key, added = self._base.key, []
            for n, steps in zip(row, self._steps, strict=True):
                for feature, number in steps[:n]:
                    added.append(feature)
                    key += number
            known = self._found[row] = (self._values.at(self._base, key, added), key)
        return known

    def left_out(self, players: Sequence[int]) -> Callable[[frozenset[int]], int]:
        """As a game of ``players`` that is asked for nobody, everybody, one alone and all but one; each costs what the one did."""
        everyone = frozenset(players)
        whole = [0] * len(self._steps)
        for i in players:
            for k, amount in self._amounts[i]:
                whole[k] += amount
        full = self._row(players)
        key_full = self._capped(full)[1]

        def value(chosen: frozenset[int]) -> int:
            if len(chosen) == 1:
                (player,) = chosen
                known = self._values.known(
                    self._base.key
                    + sum(n for k, amount in self._amounts[player] for _, n in self._steps[k][:amount])
                )
                return known if known is not None else self.at([player])[0]
            missing = everyone - chosen
            if len(missing) != 1:
                return self.at(sorted(chosen))[0]
            (player,) = missing
            changed: dict[int, int] = {}
            key = key_full
            for k, amount in self._amounts[player]:
                steps = self._steps[k]
                left = min(whole[k] - amount, len(steps))
                if left < full[k]:
                    changed[k] = left
                    for _, number in steps[left : full[k]]:
                        key -= number
            known = self._values.known(key)
            if known is not None:
                return known
            return self._capped(tuple([changed.get(k, n) for k, n in enumerate(full)]))[0]

        return value

    def batch(self, players: Sequence[int]) -> Callable[[Masks], Floats]:
        """As a game of ``players`` (indices of workers), micro-units."""
        amounts = np.zeros((len(players), len(self._steps)), dtype=np.int64)
        for row, player in enumerate(players):
            for k, amount in self._amounts[player]:
                amounts[row, k] = amount
        caps = np.array([len(steps) for steps in self._steps], dtype=np.int64)

        def game(masks: Masks, /) -> Floats:
            rows = np.minimum(masks.astype(np.int64) @ amounts, caps).astype(np.uint8)
            distinct, place = np.unique(rows, axis=0, return_inverse=True)
            found = np.array([self._capped(tuple(row))[0] for row in distinct.tolist()], dtype=np.float64)
            return found[place.reshape(-1)]

        return game

    def members(self, keys: Sequence[int]) -> Floats | None:
        """What each member says of states, units, shape (states, members); None: there is one voice, or one is not known."""
        found = [self._values.members(key) for key in keys]
        return None if any(item is None for item in found) else np.array(found)


def split(
    game: CoalitionValues, works: Sequence[Work], total: int, choice: Choice, budget: int
) -> tuple[dict[str, Anchored], list[Share] | None]:
    """Give ``total``, what a gap brought, to those that worked in it; and the shares before reconciliation, where they are of
    coalitions."""
    units = [work.unit for work in works]
    playing = [i for i, active in enumerate(game.active) if active]
    if (
        choice.agents == "leave_one_out"
        or len(playing) > SAMPLED_MAX
        or (len(playing) > EXACT_MAX and budget < COALITIONS_MIN)
    ):
        return _left_out(game, units, playing, total), None
    found = _played(game, works, playing, choice, budget)
    return settled(units, playing, found, total), found


def settled(
    units: Sequence[str], playing: Sequence[int], found: Sequence[Share], total: int
) -> dict[str, Anchored]:
    """Shares reconciled with what the gap brought; ties by id."""
    ids = [units[i] for i in playing]
    anchors = reconcile(total, [s.raw for s in found], [s.variance for s in found], ids) if playing else []
    shares = {
        unit: Anchored(anchor, 0.0, share.raw, share.variance, share.estimator)
        for unit, anchor, share in zip(ids, anchors, found, strict=True)
    }
    return {unit: shares.get(unit, IDLE) for unit in units}


IDLE = Anchored(0, 0.0, 0, 0.0, VALUE_DIFFERENCE)


def _left_out(
    game: CoalitionValues, units: Sequence[str], playing: Sequence[int], total: int
) -> dict[str, Anchored]:
    value = game.left_out(playing)
    place = {units[i]: i for i in playing}
    ids = list(place)
    estimates = leave_one_out(ids, lambda chosen: value(frozenset(map(place.__getitem__, chosen))))
    anchors = (
        reconcile(total, [estimates[u].raw for u in ids], [estimates[u].variance for u in ids], ids)
        if ids
        else []
    )
    shares = {
        unit: Anchored(anchor, 0.0, estimates[unit].raw, estimates[unit].variance, estimates[unit].estimator)
        for unit, anchor in zip(ids, anchors, strict=True)
    }
    return {unit: shares.get(unit, IDLE) for unit in units}


def _played(
    game: CoalitionValues, works: Sequence[Work], playing: Sequence[int], choice: Choice, budget: int
) -> list[Share]:
    """Shares of those that add something."""
    if not playing:
        return []
    if len(playing) == 1:
        (nothing, key), (alone, key_alone) = (game.at(chosen) for chosen in ((), playing))
        told = game.members([key, key_alone])
        spread = 0.0 if told is None else variance_of(told[1] - told[0])
        return [Share(alone - nothing, spread, VALUE_DIFFERENCE)]
    before, unions = _order(works, playing)
    if len(playing) <= EXACT_MAX:
        return _enumerated(game, playing, before, unions)
    seed = int(digest("orders", choice.seed, works[playing[0]].unit)[:15], 16)
    play = game.batch(playing)
    if before:
        shares = sample_spawn_tree(
            play, [min(before.get(i, {-1})) for i in range(len(playing))], evaluations=budget, seed=seed
        )
    elif unions:
        shares = sample_owen(play, unions, evaluations=budget, seed=seed, antithetic=True)
    else:
        shares = sample_shapley(play, len(playing), evaluations=budget, seed=seed, antithetic=True)
    return [
        Share(round(float(value)), (float(error) / MICRO) ** 2, shares.estimator)
        for value, error in zip(shares.values, shares.errors, strict=True)
    ]


def _order(works: Sequence[Work], playing: Sequence[int]) -> tuple[dict[int, set[int]], list[list[int]]]:
    """Who must come before whom among the players, as a forest of direct spawners; else the roles as unions, where there are
    several and one has several."""
    place = {works[i].unit: n for n, i in enumerate(playing)}
    parent = [place.get(works[i].parent, -1) for i in playing]
    before = {n: {p} for n, p in enumerate(parent) if p >= 0 and not _circles(n, parent)}
    if before:
        return before, []
    roles: dict[str, list[int]] = {}
    for n, i in enumerate(playing):
        roles.setdefault(works[i].role, []).append(n)
    return {}, list(roles.values()) if 1 < len(roles) < len(playing) else []


def _circles(player: int, parent: Sequence[int]) -> bool:
    at = player
    for _ in parent:
        at = parent[at]
        if at < 0:
            return False
    return True


def _enumerated(
    game: CoalitionValues,
    playing: Sequence[int],
    before: Mapping[int, set[int]],
    unions: Sequence[Sequence[int]],
) -> list[Share]:
    """Exact shares in all coalitions."""
    count = len(playing)
    asked = [game.at([playing[n] for n in range(count) if mask >> n & 1]) for mask in range(1 << count)]
    micro = np.array([value for value, _ in asked], dtype=np.float64)
    told = game.members([key for _, key in asked])
    if before:
        solve, name = _solve_precedence(count, before), "precedence_shapley/1"
    elif unions:
        solve, name = (lambda table: owen(table, unions)), "owen/1"
    else:
        solve, name = _solve_shapley(count), "shapley/1"
    shares = solve(micro)
    spread = np.zeros(count)
    if told is not None:
        spread = np.var([solve(told[:, k]) for k in range(told.shape[1])], axis=0, ddof=1)
        spread[spread < 1e-24] = 0.0
    return [
        Share(round(float(share)), float(variance), name)
        for share, variance in zip(shares, spread, strict=True)
    ]


@cache
def _solve_shapley(count: int) -> Callable[[Floats], Floats]:
    """Shapley values with integer weights, so that those of integer games are exact whatever the order of the players."""
    weights = np.array([factorial(k) * factorial(count - k - 1) for k in range(count)], dtype=np.float64)
    sizes = np.array([bin(mask).count("1") for mask in range(1 << (count - 1))])
    by_size = weights[sizes]
    whole = float(factorial(count))

    def solve(table: Floats) -> Floats:
        found = np.empty(count)
        for i in range(count):
            pairs = table.reshape(-1, 2, 1 << i)
            found[i] = float(by_size @ (pairs[:, 1] - pairs[:, 0]).ravel()) / whole
        return found

    return solve


def _solve_precedence(count: int, before: Mapping[int, set[int]]) -> Callable[[Floats], Floats]:
    bits = 1 << np.arange(count)

    def solve(table: Floats) -> Floats:
        found = precedence_shapley(lambda masks: table[masks @ bits], count, before)
        assert isinstance(found, Shares)  # noqa: S101  # 2^8 coalitions at most
        return found.values

    return solve
