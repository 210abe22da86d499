"""Effects from integer sums against the estimator over the rows themselves."""

from __future__ import annotations

import random

import numpy as np
import pytest

from spanloop.pipeline.credit.estimators.aipw import doubly_robust
from spanloop.pipeline.decisions.effects import Row, Statistics, fold_of, rows_of
from spanloop.pipeline.decisions.told import Told
from spanloop.schemas.canonical import MICRO
from spanloop.schemas.orchestration import Decision, OrchestrationEvent


def told(chosen: str, options: tuple[str, ...], propensities: tuple[float, ...], context: float) -> Told:
    decision = Decision("spawn", chosen, options, propensities, True, (("hard", context),))
    event = OrchestrationEvent("e", "spawn", "desk", 1, 1.0, "said", ("s",), agent_id="a", decision=decision)
    return Told(event, decision, "desk", 0, 0, None, 0.0)


def confounded(
    count: int, seed: int, *, logged: bool = True, tasks: int = 1
) -> list[tuple[str, tuple[Row, ...], int]]:
    """G3: difficulty moves both the spawn and the outcome; ``tasks`` decisions an orchestration."""
    rng = random.Random(seed)
    out = []
    for i in range(count):
        rows, rewards = [], []
        for _ in range(tasks):
            hard = rng.random() < 0.5
            e = 0.9 if hard else 0.2
            spawn = rng.random() < e
            rewards.append(rng.random() < ((0.5 if spawn else 0.2) if hard else (0.9 if spawn else 0.85)))
            shares = (e, 1 - e) if logged else ()
            rows.append(told("spawn" if spawn else "alone", ("spawn", "alone"), shares, float(hard)))
        out.append((f"o{i}", rows_of(rows), round(MICRO * sum(rewards) / tasks)))
    return out


def by_rows(log, options: tuple[str, ...], action: int) -> tuple[float, float]:
    """(effect, error) of an option against the mean of the others by the estimator on single decisions, logged propensities."""
    k = len(options)
    decisions = []
    for oid, rows, reward in log:
        for row in rows:
            for a in range(k):
                share = row.counts[a] and MICRO * row.counts[a] / row.weights[a]
                decisions += [(oid, row.context, a, share, reward / MICRO)] * row.counts[a]
    sums: dict = {}
    for oid, context, a, _, reward in decisions:
        n, s = sums.get((fold_of(oid), context, a), (0, 0.0))
        sums[fold_of(oid), context, a] = (n + 1, s + reward)

    def q(fold: int, context: str, a: int) -> float:
        rest = [(key, value) for key, value in sums.items() if key[0] != fold]
        whole = sum(v[1] for _, v in rest) / sum(v[0] for _, v in rest)
        mine = [v for key, v in rest if key[2] == a]
        overall = (sum(v[1] for v in mine) + whole) / (sum(v[0] for v in mine) + 1)
        own = [v for key, v in rest if key[1] == context and key[2] == a]
        return (sum(v[1] for v in own) + overall) / (sum(v[0] for v in own) + 1)

    contrast = [1.0 if a == action else -1.0 / (k - 1) for a in range(k)]
    base, weights, rewards, predicted, clusters = [], [], [], [], []
    for oid, context, a, share, reward in decisions:
        expected = [q(fold_of(oid), context, b) for b in range(k)]
        base.append(sum(c * e for c, e in zip(contrast, expected, strict=True)))
        weights.append(contrast[a] / share)
        rewards.append(reward)
        predicted.append(expected[a])
        clusters.append(oid)
    mean = doubly_robust(np.array(base), np.array(weights), np.array(rewards), np.array(predicted), clusters)
    return mean.value, mean.error


def test_one_decision_an_orchestration_equals_the_estimator_on_rows():
    log = confounded(400, 1)
    statistics = Statistics()
    for oid, rows, reward in log:
        statistics.add(oid, rows, reward)
    (group,) = statistics.groups()
    assert len(statistics.contexts(group)) == 2
    for a, found in enumerate(statistics.effects(group)):
        value, error = by_rows(log, ("alone", "spawn"), a)
        assert found.effect == pytest.approx(value, abs=1e-6)
        assert found.error == pytest.approx(error, abs=1e-6)
        assert found.status == "ok"
        assert found.low < found.effect < found.high


def test_decisions_of_one_orchestration_are_one_cluster():
    log = [(oid, rows, reward) for oid, rows, reward in confounded(300, 2, tasks=3)]
    same = [(oid, rows[:1], reward) for oid, rows, reward in log]
    statistics = Statistics()
    for oid, rows, reward in same:
        statistics.add(oid, rows, reward)
    (group,) = statistics.groups()
    (easy, *_) = statistics.contexts(group)
    only = [item for item in same if item[1][0].context == easy]
    alone = Statistics()
    for item in only:
        alone.add(*item)
    value, error = by_rows(only, ("alone", "spawn"), 1)
    found = alone.effects(group, easy)[1]
    assert (found.effect, found.error) == (pytest.approx(value, abs=1e-6), pytest.approx(error, abs=1e-6))


def test_confounding_is_undone_and_the_naive_answer_is_beside_it():
    statistics = Statistics()
    for oid, rows, reward in confounded(20_000, 3):
        statistics.add(oid, rows, reward)
    (group,) = statistics.groups()
    spawn = statistics.effects(group)[1]
    assert spawn.effect == pytest.approx(0.175, abs=3 * spawn.error)
    assert spawn.error < 0.01
    assert spawn.naive == pytest.approx(-0.205051, abs=0.02)
    strata = {c: statistics.effects(group, c)[1] for c in statistics.contexts(group)}
    for context, truth in (("hard=0", 0.05), ("hard=1", 0.3)):
        (found,) = [e for c, e in strata.items() if context in c]
        assert found.effect == pytest.approx(truth, abs=3.5 * found.error)


def test_estimated_propensities_say_so():
    statistics = Statistics()
    for oid, rows, reward in confounded(20_000, 4, logged=False):
        statistics.add(oid, rows, reward)
    (group,) = statistics.groups()
    spawn = statistics.effects(group)[1]
    assert spawn.status == "estimated_propensities"
    assert spawn.effect == pytest.approx(0.175, abs=3.5 * spawn.error)


def test_no_overlap_is_unidentified():
    for options, shares in ((("a", "b"), (0.995, 0.005)), (("a", "b"), (1.0, 0.0))):
        statistics = Statistics()
        for i in range(50):
            statistics.add(f"o{i}", rows_of([told("a", options, shares, 0.0)]), 0)
        statistics.add("x", rows_of([told("b", options, (0.5, 0.5), 0.0)]), MICRO)
        (group,) = statistics.groups()
        for found in statistics.effects(group):
            assert (found.status, found.effect, found.value) == ("unidentified", None, None)
            assert "no overlap" in found.reason
            assert found.naive is not None
    statistics = Statistics()
    for i in range(50):
        statistics.add(f"o{i}", rows_of([told("a", ("a", "b"), (0.5, 0.5), 0.0)]), 0)
    first, second = statistics.effects(statistics.groups()[0])
    assert "no other option" in first.reason
    assert "never taken" in second.reason


def test_menus_that_cannot_be_compared_give_no_row():
    assert rows_of([told("z", ("a", "b"), (), 0.0)]) == ()
    assert rows_of([told("a", ("a",), (1.0,), 0.0)]) == ()
    assert rows_of([told("0", tuple(map(str, range(13))), (), 0.0)]) == ()
