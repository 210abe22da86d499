"""Worked values of the credit estimators (METHODS 2, 3, 6), computed independently of the project's code."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spanloop.pipeline.credit.estimators.aipw import doubly_robust
from spanloop.pipeline.credit.estimators.c3 import Drawn, leave_one_out_advantages, message_credits
from spanloop.pipeline.credit.estimators.closed_forms import airport, exchangeable, synergies, weighted_vote
from spanloop.pipeline.credit.estimators.gae import (
    counterfactual,
    gae,
    information_gain,
    redistribute,
    temporal_differences,
)
from spanloop.pipeline.credit.estimators.games import of_sets, table_of
from spanloop.pipeline.credit.estimators.groups import agent_wise, group_stats, grpo, inflation, rloo
from spanloop.pipeline.credit.estimators.hindsight import anchor_advantages, hindsight_credit
from spanloop.pipeline.credit.estimators.intervals import bernstein_half_width, hoeffding_samples
from spanloop.pipeline.credit.estimators.owen import owen, quotient
from spanloop.pipeline.credit.estimators.precedence import precedence_shapley
from spanloop.pipeline.credit.estimators.shapley import banzhaf, mobius, shapley

CLOSE = 1e-6
MICRO = 1_000_000
THREE = {"": 0, "0": 0.1, "1": 0.2, "2": 0.0, "01": 0.6, "02": 0.3, "12": 0.2, "012": 1.0}
SYNERGY = {"0": 0.2, "1": 0.1, "01": 0.4, "12": -0.2, "012": 0.3}


def three():
    return of_sets("012", lambda s: THREE["".join(sorted(s))])


def close(found, expected):
    assert list(found) == pytest.approx(list(expected), abs=CLOSE)


def test_shapley_banzhaf_and_synergies_of_three():
    table = table_of(three(), 3)
    close(shapley(table), (5 / 12, 5 / 12, 1 / 6))
    close(banzhaf(table), (0.4, 0.4, 0.15))
    # index bits: 1 = {0}, 2 = {1}, 3 = {0, 1}, 4 = {2}, 5 = {0, 2}, 6 = {1, 2}, 7 = all
    close(mobius(table), (0, 0.1, 0.2, 0.3, 0.0, 0.2, 0.0, 0.2))


def test_owen_of_one_and_a_pair():
    table = table_of(three(), 3)
    found = owen(table, [[0], [1, 2]])
    close(found, (0.45, 0.40, 0.15))
    close((found[0], found[1] + found[2]), (0.45, 0.55))
    close(shapley(quotient(table, [[0], [1, 2]])), (0.45, 0.55))


def test_precedence_of_a_root_with_two_children():
    found = precedence_shapley(three(), 3, {1: {0}, 2: {0}})
    assert found is not None
    close(found.values, (0.1, 0.6, 0.3))


def test_closed_forms():
    close(airport([4, 5, 9]), (1.333333, 1.833333, 5.833333))
    close(weighted_vote([3, 2, 1], 4), (2 / 3, 1 / 6, 1 / 6))
    close(exchangeable(4, 1.0), (0.25,) * 4)
    close(synergies(3, [((0,), 0.3), ((1,), -0.1)]), (0.3, -0.1, 0.0))


def test_synergy_graph_with_a_null_player():
    terms = [(tuple(map(int, members)), value) for members, value in SYNERGY.items()]
    close(synergies(3, terms), (0.5, 0.3, 0.0))
    game = of_sets("012", lambda s: sum(v for members, v in SYNERGY.items() if set(members) <= s))
    table = table_of(game, 3)
    assert table[-1] == pytest.approx(0.8)
    close(shapley(table), (0.5, 0.3, 0.0))
    present = of_sets("012", lambda s: sum(v for m, v in SYNERGY.items() if set(m) <= s & {"0", "2"}))
    close(shapley(table_of(present, 3)), (0.2, 0.0, 0.0))


def test_orders_needed():
    assert hoeffding_samples(0.05, 0.05) == 738
    assert hoeffding_samples(0.05, 0.05, players=5) == 1060
    assert hoeffding_samples(0.05, 0.05, players=5, width=2.0) == 4239
    assert bernstein_half_width(0.25, 1.0, 1000, 0.05) == pytest.approx(0.051563, abs=CLOSE)


def test_group_advantages():
    group = group_stats([MICRO, 0, 0, MICRO])
    rewards = [MICRO, 0, 0, MICRO]
    close((grpo(r, group, sample=False).value for r in rewards), (1, -1, -1, 1))
    close((grpo(r, group).value for r in rewards), (0.866025, -0.866025, -0.866025, 0.866025))
    close((rloo(r, group).value for r in rewards), (0.666667, -0.666667, -0.666667, 0.666667))


def test_agent_wise_advantages():
    calls = [("planner", MICRO), ("planner", 0), ("planner", MICRO)]
    calls += [("worker", MICRO)] * 3 + [("worker", 0)]
    found = [a.value for a in agent_wise(calls)]
    close(found, (0.57735, -1.154701, 0.57735, 0.5, 0.5, 0.5, -1.5))
    worker, tries = group_stats([MICRO, MICRO, MICRO, 0]), group_stats([MICRO, 0, MICRO])
    assert (worker.mean, worker.deviation()) == (0.75, 0.5)
    close((grpo(r, tries).value for r in (MICRO, 0)), (0.57735, -1.154701))
    assert inflation(worker, tries) == pytest.approx(0.875, abs=CLOSE)


def test_anchor_states():
    found = anchor_advantages([[("s0", 0), ("s1", 1)], [("s0", 0), ("s2", 0), ("s1", 0)]], 0.9)
    close(found[0], (0.45, 0.5))
    close(found[1], (-0.45, 0.0, -0.5))


def test_message_leave_one_out():
    close(leave_one_out_advantages([(0.75, 4), (0.25, 4), (0.5, 4)]), (0.375, -0.375, 0.0))
    close(leave_one_out_advantages([(0.75, 4), (0.25, 4), (0.5, 2)]), (0.416667, -0.416667, 0.0))
    assert leave_one_out_advantages([(0.75, 4)]) == [0.0]


def test_counterfactual():
    propensities, q = [0.5, 0.3, 0.2], [0.2, 0.6, 1.0]
    found = [counterfactual(a, propensities, q) for a in range(3)]
    assert q[2] - found[2] == pytest.approx(0.48, abs=CLOSE)
    assert found[2] == pytest.approx(0.52, abs=CLOSE)
    assert math.fsum(p * a for p, a in zip(propensities, found, strict=True)) == pytest.approx(0, abs=1e-12)


def test_turns():
    close(temporal_differences([0, 0, 1], [0.4, 0.5, 0.8]), (0.1, 0.3, 0.2))
    close(gae([0, 0, 1], [0.4, 0.5, 0.8], smoothing=0.95), (0.5655, 0.49, 0.2))
    assert gae([0, 0, 1], [0.4, 0.5, 0.8], smoothing=1.0)[0] == pytest.approx(0.6)
    close(redistribute([0.4, 0.5, 0.3, 0.8, 1.0]), (0.1, -0.2, 0.5, 0.2))
    close(information_gain([0.2, 0.35, 0.35, 0.8]), (0.559616, 0.0, 0.826679))
    assert sum(information_gain([0.2, 0.35, 0.35, 0.8])) == pytest.approx(1.386294, abs=CLOSE)


def test_hindsight():
    assert hindsight_credit(0.5, [(0.8, 1.0)] * 8 + [(0.2, 0.0)] * 2) == pytest.approx(0.3, abs=CLOSE)


def test_doubly_robust_mean():
    weights, rewards = np.array([2, 0.5, 1, 0.25, 1.5]), np.array([1.0, 0, 1, 0, 1])
    predicted, baseline = np.array([0.8, 0.2, 0.6, 0.3, 0.7]), np.array([0.7, 0.3, 0.6, 0.4, 0.6])
    found = doubly_robust(baseline, weights, rewards, predicted)
    assert found.value == pytest.approx(0.735, abs=CLOSE)
    assert found.error == pytest.approx(0.194551, abs=CLOSE)
    nothing = np.zeros(5)
    assert doubly_robust(nothing, weights, rewards, nothing).value == pytest.approx(0.9, abs=CLOSE)
    assert doubly_robust(nothing, weights, rewards, nothing).error == pytest.approx(0.4, abs=CLOSE)


@pytest.mark.parametrize(("k", "good", "bad"), [(0, 0.056, -0.504), (1, 0.14, -0.56), (2, 0.30, -0.70)])
def test_message_relay_at_its_exact_frequencies(k: int, good: float, bad: float):
    """Chances of corruption .1, .2, .3: outcomes after a good message in their exact share, after a bad one never."""
    chances = [0.1, 0.2, 0.3]
    after = math.prod(1 - e for e in chances[k + 1 :])
    outcomes = (1.0,) * round(1000 * after) + (0.0,) * round(1000 * (1 - after))
    drawn = [Drawn("good", outcomes)] * round(10 * (1 - chances[k]))
    drawn += [Drawn("bad", (0.0,) * 1000)] * round(10 * chances[k])
    found = message_credits(drawn)
    close((found["good"].value, found["bad"].value), (good, bad))
