"""METHODS 5: closed forms of the worlds, and learned stopping on logs small enough to know the answer."""

from __future__ import annotations

import sys
from pathlib import Path as FilePath

import numpy as np
import pytest

from spanloop.pipeline.decisions.paths import Path, Paths, Point
from spanloop.pipeline.decisions.stopping import StoppingModel, fit_stopping, rule_value
from spanloop.pipeline.decisions.trees import Binning, Tree, fit_tree
from spanloop.schemas.errors import SchemaError

sys.path.insert(0, str(FilePath(__file__).resolve().parents[2] / "benchmarks"))
from stopping_worlds import (
    Draws,
    Geometric,
    Voting,
    finite_no_recall,
    finite_recall,
    play_log,
    reservation,
    vote_rule,
)


def test_geometric_success():
    assert Geometric(0.2, 0.05).endless() == pytest.approx(0.75, abs=1e-6)
    assert Geometric(0.2, 0.2).endless() == Geometric(0.2, 0.3).optimum() == 0.0
    assert Geometric(0.2, 0.05, 400).optimum() == pytest.approx(0.75, abs=1e-6)


def test_draws_with_and_without_recall():
    assert [(round(reservation(c), 6), round(1 / (1 - reservation(c)), 6)) for c in (0.02, 0.005)] == [
        (0.8, 5.0),
        (0.9, 10.0),
    ]
    told = {1: 0.48, 2: 0.629333, 5: 0.756309, 10: 0.792191, 50: 0.799999}
    for horizon, value in told.items():
        assert finite_recall(0.02, horizon) == pytest.approx(value, abs=1.5e-6)
    for horizon, value in {2: 0.5952, 5: 0.722146, 200: 0.8}.items():
        assert finite_no_recall(0.02, horizon) == pytest.approx(value, abs=1e-6)


def test_voting():
    told = {1: 0.68, 2: 0.775862, 3: 0.798919, 4: 0.780419}
    assert [round(vote_rule(0.7, k, 0.02)[2], 6) for k in told] == list(told.values())
    assert vote_rule(0.7, 2, 0.05)[2] == pytest.approx(0.672414, abs=1e-6)
    assert Voting(0.7, 0.02, 400).optimum() == pytest.approx(0.798919, abs=1e-6)
    assert Voting(0.7, 0.05, 400).optimum() == pytest.approx(0.672414, abs=1e-6)


def two_nodes(*, recall: bool) -> list[Path]:
    """A draft of 0.5; one round more costs 0.1 and makes one of 0 or 1, as often."""
    paths = []
    for i in range(80):
        drawn = float(i % 2)
        second = max(0.5, drawn) if recall else drawn
        points = (
            Point((("round", 0.0),), 0.0, 0.5, 0.0, False),
            Point((("round", 1.0),), 0.1, second, None, False),
        )
        paths.append(Path(f"{i:03d}", points))
    return paths


@pytest.mark.parametrize(("recall", "going_on"), [(False, 0.4), (True, 0.65)])
def test_two_nodes(recall, going_on):
    paths = two_nodes(recall=recall)
    model, value = fit_stopping(paths)
    verdict = model.verdict({"round": 0.0})
    assert verdict.margin == pytest.approx(0.5 - going_on, abs=1e-6)
    assert verdict.stop is not recall
    assert value.ipcw.value == pytest.approx(max(0.5, going_on), abs=1e-6)
    clairvoyant = np.mean([max(0.5, path.points[1].quality - 0.1) for path in two_nodes(recall=False)])
    assert clairvoyant == pytest.approx(0.7, abs=1e-6)
    assert value.ipcw.value < clairvoyant
    rows = np.array([point.features[0][1] == 1.0 for path in paths for point in path.points])
    assert rule_value(paths, rows).ipcw.value == pytest.approx(going_on, abs=1e-6)


def test_going_on_twice_against_a_fifth_weighs_1_5625():
    points = tuple(Point((("round", float(k)),), 0.0, 1.0, 0.2, False) for k in range(4))
    paths = [Path("a", points), Path("b", (Point((), 0.0, 0.0, 0.2, True),))]
    stop = np.array([False, False, True, True, False])
    found = rule_value(paths, stop)
    assert found.ipcw.value == pytest.approx(1.5625 / 2, abs=1e-6)
    assert found.normalised.value == pytest.approx(1.0, abs=1e-6)


def logged(
    world, count: int, mu: float, *, seed: int = 1, drafts: bool = True, told: bool = True
) -> list[Path]:
    paths = []
    for i, (rounds, chose) in enumerate(play_log(world, np.random.default_rng(seed), count, mu)):
        last = len(rounds) - 1
        points = (
            Point(
                tuple(sorted(r.state.items())), r.cost, r.quality if drafts or k == last else None,
                mu if told else None, chose and k == last,
            )
            for k, r in enumerate(rounds)
        )  # fmt: skip
        paths.append(Path(f"{i:06d}", tuple(points)))
    return paths


def played(world, model: StoppingModel, count: int = 8000) -> float:
    """Mean utility of the rule on fresh orchestrations."""
    rng = np.random.default_rng(10_000)
    plays = [world.play(rng) for _ in range(count)]
    rows = [[r.state.get(name, np.nan) for name in model.names] for rounds in plays for r in rounds]
    stop = model.stops(np.array(rows)).reshape(count, -1)
    stop[:, -1] = True
    first = stop.argmax(axis=1)
    return float(np.mean([plays[i][k].quality - plays[i][k].cost for i, k in enumerate(first)]))


@pytest.mark.parametrize("told", [True, False])
def test_voting_is_learned_from_a_log_that_stops_at_random(told):
    world = Voting(0.7, 0.02)
    model, value = fit_stopping(logged(world, 3000, 0.1, told=told))
    assert played(world, model) >= 0.97 * 0.7989
    assert abs(value.doubly_robust.value - world.optimum()) <= 3.5 * value.doubly_robust.error
    assert value.doubly_robust.error < value.ipcw.error
    assert bool(model.notes) is not told


def test_without_drafts_only_the_last_is_graded_and_it_is_said():
    world = Draws(0.02, 8)
    model, _ = fit_stopping(logged(world, 3000, 0.25, drafts=False))
    assert any("only the last draft" in note for note in model.notes)
    assert played(world, model) >= 0.95 * world.optimum()


def test_a_log_that_never_goes_on_where_it_stops_says_so():
    points = (Point((("round", 0.0),), 0.0, 0.0, 0.0, False), Point((("round", 1.0),), 0.1, 1.0, 1.0, True))
    model, _ = fit_stopping([Path(f"{i:03d}", points) for i in range(50)])
    assert any("nothing is known of what lies behind" in note for note in model.notes)


def test_the_model_survives_its_json_and_the_order_of_the_paths():
    paths = logged(Draws(0.05, 5), 400, 0.1)
    model, value = fit_stopping(paths)
    again, same = fit_stopping(paths[::-1])
    assert again.to_dict() == model.to_dict()
    assert same == value
    read = StoppingModel.from_dict(model.to_dict())
    features = Paths(paths, model.names).features
    assert (read.stops(features) == model.stops(features)).all()
    assert read.verdict({"round": 1.0}) == model.verdict({"round": 1.0})


@pytest.mark.parametrize(
    "broken", [{"kind": "x"}, {"names": 1}, {"cuts": []}, {"margin": {"feature": [0]}}, {"notes": None}]
)
def test_what_is_no_model_is_refused(broken):
    model, _ = fit_stopping(two_nodes(recall=True))
    with pytest.raises(SchemaError):
        StoppingModel.from_dict(model.to_dict() | broken)


def test_too_few_paths_give_no_model():
    assert fit_stopping(two_nodes(recall=True)[:10]) is None
    assert fit_stopping([]) is None


def test_a_tree_finds_a_step_and_leaves_noise_alone():
    rng = np.random.default_rng(0)
    features = np.stack([rng.random(2000), rng.random(2000)], axis=1)
    features[:100, 1] = np.nan
    target = (features[:, 0] > 0.5) + 0.1 * rng.standard_normal(2000)
    binning = Binning.of(features)
    tree = fit_tree(binning.codes(features), target, np.ones(2000), evidence=15.0)
    assert set(tree.feature) == {0, -1}
    assert abs(tree.predict(binning.codes(np.array([[0.1, np.nan], [0.9, 3.0]]))) - [0, 1]).max() < 0.1
    assert Tree.from_dict(tree.to_dict()).to_dict() == tree.to_dict()
