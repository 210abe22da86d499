"""Worked values of rewards and credit, computed independently of the project's code."""

from __future__ import annotations

import pytest

from spanloop.pipeline.credit.leave_one_out import leave_one_out
from spanloop.pipeline.credit.orders import average_differences, linear_extensions
from spanloop.pipeline.credit.reconcile import largest_remainder, reconcile
from spanloop.pipeline.rewards.orchestration import (
    Stage,
    critical_steps,
    makespan,
    parallel_share,
    parl_reward,
    work_and_span,
)

KIMI = [Stage(1), Stage(1, (5, 9, 4)), Stage(2, (3, 3)), Stage(1)]


def table(values: dict[str, float]):
    return lambda done: round(values["".join(sorted(done))] * 1_000_000)


def test_critical_steps_and_parallelism():
    critical, total = critical_steps(KIMI)
    assert (critical, total) == (17, 29)
    assert total / critical == pytest.approx(1.705882, abs=1e-6)
    assert parallel_share(critical, total) == pytest.approx(0.413793, abs=1e-6)


def test_parl_reward():
    assert parl_reward(1.0, 1 - 15 / 29, 4 / 5, (0.25, 0.25)) == pytest.approx(1.320690, abs=1e-6)


def test_dag_form():
    spans = {"orch": (0, 1), "A": (1, 6), "B": (1, 4), "C": (3, 9), "agg": (9, 10)}
    weights = {name: end - start for name, (start, end) in spans.items()}
    after = {"A": {"orch"}, "B": {"orch"}, "C": {"orch"}, "agg": {"A", "B", "C"}}
    work, span = work_and_span(weights, after)
    assert work == 16
    assert makespan(list(spans.values())) == 10
    assert work / makespan(list(spans.values())) == pytest.approx(1.6)
    assert span == 1 + 6 + 1


def test_reconcile():
    ids = ["a", "b", "c"]
    got = reconcile(1_000_000, [500_000, 300_000, -100_000], [0.01, 0.04, 0.05], ids)
    assert got == [530_000, 420_000, 50_000]


def test_largest_remainder():
    assert largest_remainder(1_000_000, [1, 1, 1], ["a", "b", "c"]) == [333_334, 333_333, 333_333]
    assert largest_remainder(530_001, [3, 2, 2], ["a", "b", "c"]) == [227_143, 151_429, 151_429]


def test_linear_extensions_of_redundant_and_of_joint_branches():
    redundant = table({"": 0.2, "a": 0.9, "b": 0.9, "ab": 1.0})
    assert average_differences(["a", "b"], {}, redundant) == {"a": 400_000, "b": 400_000}
    joint = table({"": 0.2, "a": 0.2, "b": 0.2, "ab": 1.0})
    assert average_differences(["a", "b"], {}, joint) == {"a": 400_000, "b": 400_000}


def test_linear_extensions_respect_precedence():
    """0 before 1 and 2: Faigle-Kern values (.1, .6, .3); with two free steps the two orders are all orders."""
    game = table({"": 0, "0": 0.1, "1": 0.2, "2": 0.0, "01": 0.6, "02": 0.3, "12": 0.2, "012": 1.0})
    before = {"1": {"0"}, "2": {"0"}}
    assert linear_extensions(["0", "1", "2"], before) == (["0", "1", "2"], ["0", "2", "1"])
    assert average_differences(["0", "1", "2"], before, game) == {"0": 100_000, "1": 600_000, "2": 300_000}


def test_leave_one_out_of_two_games():
    game = table({"": 0, "0": 0.1, "1": 0.2, "2": 0.0, "01": 0.6, "02": 0.3, "12": 0.2, "012": 1.0})
    found = leave_one_out(["0", "1", "2"], game)
    assert [found[u].raw for u in "012"] == [800_000, 700_000, 400_000]
    terms = {"0": 0.2, "1": 0.1, "01": 0.4, "12": -0.2, "012": 0.3}
    synergy = leave_one_out(
        ["0", "1", "2"],
        lambda s: round(1e6 * sum(v for t, v in terms.items() if set(t) <= set(s))),
    )
    assert [synergy[u].raw for u in "012"] == [900_000, 600_000, 100_000]


@pytest.mark.parametrize(
    "values", [{"": 0.2, "a": 0.9, "b": 0.9, "ab": 1.0}, {"": 0.2, "a": 0.2, "b": 0.2, "ab": 1.0}]
)
def test_reconciled_leave_one_out_of_two_is_shapley(values: dict[str, float]):
    """Leave-one-out alone says (.1, .1) or (.8, .8); with its interaction as variance both come to (.4, .4)."""
    found = leave_one_out(["a", "b"], table(values))
    shares = reconcile(800_000, [found[u].raw for u in "ab"], [found[u].variance for u in "ab"], ["a", "b"])
    assert shares == [400_000, 400_000]
