"""Laws of the credit estimators: equal to brute force on small games, the axioms, exact retraction, determinism."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from spanloop.pipeline.credit.estimators.c3 import Drawn, leave_one_out_advantages, message_credits
from spanloop.pipeline.credit.estimators.closed_forms import airport, smallest, synergies, weighted_vote
from spanloop.pipeline.credit.estimators.gae import counterfactual, gae, redistribute
from spanloop.pipeline.credit.estimators.games import Shares, conserved, of_sets, table_of
from spanloop.pipeline.credit.estimators.groups import GroupStats, agent_wise, group_stats, grpo, rloo
from spanloop.pipeline.credit.estimators.owen import owen, quotient, sample_owen
from spanloop.pipeline.credit.estimators.precedence import (
    precedence_shapley,
    precedence_shapley_of,
    sample_spawn_tree,
)
from spanloop.pipeline.credit.estimators.shapley import mobius, sample_shapley, shapley, shapley_of

EXACT = 1e-9
reals = st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 6))


@st.composite
def tables(draw: st.DrawFn, least: int = 1, most: int = 7) -> np.ndarray:
    players = draw(st.integers(least, most))
    return np.array(draw(st.lists(reals, min_size=1 << players, max_size=1 << players)))


def players_of(table: np.ndarray) -> int:
    return len(table).bit_length() - 1


def game_of(table: np.ndarray):
    def game(masks):
        return table[masks @ (1 << np.arange(masks.shape[1]))]

    return game


def mean_over_orders(table: np.ndarray, allowed) -> list[float]:
    """Naive reference: walk through every order of the players that ``allowed`` lets through."""
    players = players_of(table)
    total = [0.0] * players
    count = 0
    for order in itertools.permutations(range(players)):
        if not allowed(order):
            continue
        count += 1
        coalition = 0
        for player in order:
            grown = coalition | 1 << player
            total[player] += float(table[grown]) - float(table[coalition])
            coalition = grown
    return [t / count for t in total]


@st.composite
def partitions(draw: st.DrawFn, players: int) -> list[list[int]]:
    union_of = draw(st.lists(st.integers(0, players - 1), min_size=players, max_size=players))
    unions = [[i for i in range(players) if union_of[i] == k] for k in range(players)]
    return [union for union in unions if union]


@st.composite
def partial_orders(draw: st.DrawFn, players: int) -> dict[int, set[int]]:
    rank = draw(st.permutations(range(players)))
    pairs = [(a, b) for a in range(players) for b in range(players) if rank[a] < rank[b]]
    chosen = draw(st.lists(st.sampled_from(pairs), max_size=8)) if pairs else []
    before: dict[int, set[int]] = {}
    for first, second in chosen:
        before.setdefault(second, set()).add(first)
    return before


@settings(max_examples=30, deadline=None)
@given(tables(most=6))
def test_shapley_is_the_mean_over_all_orders(table):
    assert shapley(table) == pytest.approx(mean_over_orders(table, lambda order: True), abs=EXACT)


@settings(max_examples=3, deadline=None)
@given(tables(least=7, most=7))
def test_shapley_of_seven_is_the_mean_over_all_orders(table):
    assert shapley(table) == pytest.approx(mean_over_orders(table, lambda order: True), abs=EXACT)


@settings(max_examples=30, deadline=None)
@given(st.data(), tables(most=6))
def test_owen_is_the_mean_over_orders_that_keep_unions_together(data, table):
    unions = data.draw(partitions(players_of(table)))

    def together(order):
        runs = [next(k for k, union in enumerate(unions) if i in union) for i in order]
        return len([k for k, _ in itertools.groupby(runs)]) == len(unions)

    found = owen(table, unions)
    assert found == pytest.approx(mean_over_orders(table, together), abs=EXACT)
    assert [found[u].sum() for u in unions] == pytest.approx(
        list(shapley(quotient(table, unions))), abs=EXACT
    )


@settings(max_examples=30, deadline=None)
@given(st.data(), tables(most=6))
def test_precedence_is_the_mean_over_linear_extensions(data, table):
    before = data.draw(partial_orders(players_of(table)))

    def allowed(order):
        return all(order.index(a) < order.index(b) for b, above in before.items() for a in above)

    found = precedence_shapley(game_of(table), players_of(table), before)
    assert found is not None
    assert found.values == pytest.approx(mean_over_orders(table, allowed), abs=EXACT)


@settings(max_examples=40, deadline=None)
@given(tables())
def test_efficiency(table):
    everything = table[-1] - table[0]
    n = players_of(table)
    for values in (
        shapley(table),
        owen(table, [[i] for i in range(n)]),
        owen(table, [list(range(n))]),
        sample_shapley(game_of(table), n, evaluations=50).values,
        sample_owen(game_of(table), [list(range(n))], evaluations=50).values,
        sample_spawn_tree(game_of(table), [-1, *range(n - 1)], evaluations=50).values,
    ):
        assert values.sum() == pytest.approx(everything, abs=EXACT)


@settings(deadline=None)
@given(st.data(), tables(least=2))
def test_symmetry(data, table):
    """Renaming the players renames their values; two that the game does not tell apart get the same."""
    n = players_of(table)
    renamed = data.draw(st.permutations(range(n)))
    indices = np.arange(1 << n)
    moved = sum(((indices >> i) & 1) << renamed[i] for i in range(n))
    swapped = np.empty_like(table)
    swapped[moved] = table
    assert shapley(swapped)[list(renamed)] == pytest.approx(list(shapley(table)), abs=EXACT)
    first, second = (indices & 1), (indices >> 1) & 1
    alike = (table + table[(indices & ~3) | first << 1 | second]) / 2
    found = shapley(alike)
    assert found[0] == pytest.approx(found[1], abs=EXACT)


@settings(max_examples=40, deadline=None)
@given(tables(least=1, most=6), reals)
def test_a_dummy_gets_what_it_always_adds(table, own):
    with_dummy = np.concatenate([table, table + own])
    n = players_of(table)
    assert shapley(with_dummy) == pytest.approx([*shapley(table), own], abs=EXACT)
    assert sample_shapley(game_of(with_dummy), n + 1, evaluations=60).values[n] == pytest.approx(
        own, abs=EXACT
    )
    found = precedence_shapley(game_of(with_dummy), n + 1, {0: {n}})
    assert found is not None
    assert found.values[n] == pytest.approx(own, abs=EXACT)


@settings(deadline=None)
@given(tables(least=3, most=3), tables(least=3, most=3), reals)
def test_linearity(one, other, factor):
    def owen_of(table):
        return owen(table, [[0, 2], [1]])

    def precedence_of(table):
        found = precedence_shapley(game_of(table), 3, {2: {0}})
        assert found is not None
        return found.values

    for values in (shapley, owen_of, precedence_of):
        assert values(one + factor * other) == pytest.approx(values(one) + factor * values(other), abs=1e-8)


@settings(deadline=None)
@given(tables())
def test_shapley_shares_each_synergy_evenly(table):
    terms = mobius(table)
    n = players_of(table)
    members = [[i for i in range(n) if index >> i & 1] for index in range(1 << n)]
    found = synergies(n, [(members[k], terms[k]) for k in range(1, 1 << n)])
    assert found == pytest.approx(list(shapley(table)), abs=1e-8)


@settings(deadline=None)
@given(st.lists(reals, min_size=1, max_size=7))
def test_airport_games_are_their_shapley_values(costs):
    n = len(costs)
    names = [str(i) for i in range(n)]
    for form, choose in ((airport, max), (smallest, min)):
        game = of_sets(names, lambda s, choose=choose: choose((costs[int(i)] for i in s), default=0.0))
        assert form(costs) == pytest.approx(list(shapley(table_of(game, n))), abs=EXACT)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 40))
def test_votes_are_their_shapley_values(weights, quota):
    n = len(weights)
    game = of_sets([str(i) for i in range(n)], lambda s: float(sum(weights[int(i)] for i in s) >= quota))
    assert weighted_vote(weights, quota) == pytest.approx(list(shapley(table_of(game, n))), abs=EXACT)


@settings(max_examples=40, deadline=None)
@given(tables(least=2, most=5), st.integers(0, 5))
def test_sampling_is_deterministic_and_close(table, seed):
    n = players_of(table)
    first = sample_shapley(game_of(table), n, evaluations=4000, seed=seed)
    again = sample_shapley(game_of(table), n, evaluations=4000, seed=seed)
    assert first.values.tolist() == again.values.tolist()
    assert first.errors.tolist() == again.errors.tolist()
    assert first.evaluations <= 4000 + 8 * n
    assert (abs(first.values - shapley(table)) <= 6 * first.errors + EXACT).all()


@settings(max_examples=40, deadline=None)
@given(st.data(), st.integers(2, 5))
def test_spawn_trees_are_sampled_uniformly(data, n):
    """Every linear extension is as likely as any other: counted over many draws, by a game that gives its order away."""
    parents = [-1, *(data.draw(st.integers(-1, i - 1)) for i in range(1, n))]
    table = np.array(data.draw(st.lists(reals, min_size=1 << n, max_size=1 << n)))
    exact = precedence_shapley(game_of(table), n, {i: {p} for i, p in enumerate(parents) if p >= 0})
    assert exact is not None
    sampled = sample_spawn_tree(game_of(table), parents, evaluations=6000)
    assert (abs(sampled.values - exact.values) <= 6 * sampled.errors + EXACT).all()


def test_an_order_with_too_many_coalitions_falls_back_on_two_extensions():
    """Forty players in a ladder of crosses: neither countable nor a tree."""
    n = 40
    before = {i: {i - 20, (i - 19) % 20} for i in range(20, 40)}
    found = precedence_shapley_of(lambda masks: masks.sum(axis=1) * 0.5, n, before)
    assert found.estimator == "two_extensions/1"
    assert found.values == pytest.approx([0.5] * n)
    assert np.isinf(found.half_widths()).all()
    tree = precedence_shapley_of(lambda masks: masks.sum(axis=1) * 0.5, n, {i: {0} for i in range(1, n)})
    assert tree.estimator == "precedence_sampled/1"


@settings(deadline=None)
@given(tables(), st.integers(-3_000_000, 3_000_000))
def test_conserved_shares_sum_in_integers(table, total):
    n = players_of(table)
    ids = [f"agent:{i}" for i in range(n)]
    assert sum(conserved(shapley_of(game_of(table), n), total, ids)) == total
    noisy = Shares(shapley(table), np.arange(n) / 10, 5, 0, "x/1")
    assert sum(conserved(noisy, total, ids)) == total


micro = st.integers(-2_000_000, 2_000_000)


@settings(deadline=None)
@given(
    st.lists(micro, min_size=1, max_size=8), st.lists(micro, max_size=4), st.randoms(use_true_random=False)
)
def test_groups_retract_exactly(kept, retracted, order):
    stats = GroupStats()
    for reward in kept + retracted:
        stats = stats.add(reward)
    order.shuffle(retracted)
    for reward in retracted:
        stats = stats.retract(reward)
    assert stats == group_stats(kept)


@settings(deadline=None)
@given(st.lists(micro, min_size=1, max_size=8))
def test_group_advantages_sum_to_nothing_or_say_why(rewards):
    group = group_stats(rewards)
    for found in ([grpo(r, group) for r in rewards], [rloo(r, group) for r in rewards]):
        assert sum(a.value for a in found) == pytest.approx(0.0, abs=1e-9)
        expected = "singleton" if len(rewards) < 2 else "ok" if len(set(rewards)) > 1 else "no_variance"
        assert {a.status for a in found} == {expected}
        if expected != "ok":
            assert {a.value for a in found} == {0.0}


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("abc"), micro), min_size=1, max_size=12))
def test_agent_wise_is_each_agents_own_group(calls):
    found = agent_wise(calls)
    for agent in {a for a, _ in calls}:
        own = [reward for a, reward in calls if a == agent]
        assert [x for x, (a, _) in zip(found, calls, strict=True) if a == agent] == [
            grpo(reward, group_stats(own)) for reward in own
        ]


@settings(deadline=None)
@given(st.lists(reals, min_size=1, max_size=8), st.data())
def test_turns_telescope(values, data):
    rewards = data.draw(st.lists(reals, min_size=len(values), max_size=len(values)))
    ahead = [sum(rewards[t:]) - values[t] for t in range(len(values))]
    assert gae(rewards, values, smoothing=1.0) == pytest.approx(ahead, abs=1e-8)
    assert sum(redistribute(values)) == pytest.approx(values[-1] - values[0], abs=1e-8)


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(0.01, 1), reals), min_size=1, max_size=6))
def test_counterfactuals_average_to_nothing(menu):
    whole = sum(p for p, _ in menu)
    propensities, values = [p / whole for p, _ in menu], [q for _, q in menu]
    mean = sum(p * counterfactual(a, propensities, values) for a, p in enumerate(propensities))
    assert mean == pytest.approx(0.0, abs=1e-8)


@settings(deadline=None)
@given(st.lists(st.tuples(reals, st.integers(1, 20)), min_size=2, max_size=6))
def test_message_leave_one_out_is_its_definition(drawn):
    for j, found in enumerate(leave_one_out_advantages(drawn)):
        others = [(mean, n) for k, (mean, n) in enumerate(drawn) if k != j]
        baseline = sum(n * mean for mean, n in others) / sum(n for _, n in others)
        assert found == pytest.approx(drawn[j][0] - baseline, abs=1e-8)


samples = st.lists(
    st.tuples(st.sampled_from("abcd"), st.lists(reals, min_size=1, max_size=4).map(tuple)),
    min_size=1,
    max_size=10,
)


@settings(deadline=None)
@given(samples, st.randoms(use_true_random=False))
def test_message_credits_average_to_nothing_and_ignore_order(drawn, order):
    items = [Drawn(message, outcomes) for message, outcomes in drawn]
    found = message_credits(items)
    if len(found) < 2:
        assert {(c.value, c.status) for c in found.values()} == {(0.0, "no_alternative")}
    mean = sum(found[message].value for message, _ in drawn) / len(drawn)
    assert mean == pytest.approx(0.0, abs=1e-8)
    order.shuffle(items)
    again = message_credits(items)
    for message, credit in found.items():
        assert again[message].value == pytest.approx(credit.value, abs=1e-9)
        assert again[message].error == pytest.approx(credit.error, abs=1e-6)


@settings(deadline=None)
@given(samples)
def test_an_alternative_that_we_put_there_says_nothing_about_how_often_it_is_written(drawn):
    assume("e" not in {m for m, _ in drawn})
    items = [Drawn(message, outcomes) for message, outcomes in drawn]
    found = message_credits(items)
    with_ours = message_credits([*items, Drawn("e", (1.0, 2.0), chosen=True)])
    for message, credit in found.items():
        assert with_ours[message].value == pytest.approx(credit.value, abs=1e-8)
