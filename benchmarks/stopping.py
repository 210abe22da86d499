"""Learned stopping against worlds whose optimum is known (METHODS 5.3, 6 G5).

    python benchmarks/stopping.py [ORCHESTRATIONS]

Each setting is played ORCHESTRATIONS times (default 4000) under a behaviour that stops at random. What it writes are SDK spans and grades
of drafts; they go through dialect, assembly, rewards and the decision learner, as in a deployment. The rule that was published is then
played on 20,000 fresh orchestrations. Written to benchmarks/results/stopping.json.
Expected: realised value >= 0.98 of the optimum and |V^ - V*| <= 3 se in every setting; an imitator of hindsight labels scores < 0.75 on
S3 (q .7, c .02) where the rule scores >= 0.98 x 0.7989. Rivals (one step ahead; a hazard policy by gradient) are scored beside it.
"""

from __future__ import annotations

import sys
import time
from functools import lru_cache

import numpy as np
from _harness import write
from stopping_worlds import Draws, Geometric, Round, Voting, World, grades_of, play_log, spans_of

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.decisions.learner import (
    DecisionLearner,
    DecisionModel,
    lesson_of,
    path_of,
)
from spanloop.pipeline.decisions.learner import (
    grades_of as grades_in,
)
from spanloop.pipeline.decisions.paths import Path, Paths
from spanloop.pipeline.decisions.stopping import StoppingModel
from spanloop.pipeline.decisions.told import Prices
from spanloop.pipeline.decisions.trees import Binning, fit_tree
from spanloop.pipeline.rewards.compose import RewardTerms, compose
from spanloop.schemas.events import FeedbackReceived
from spanloop.schemas.sdk_attributes import SCOPE
from spanloop.schemas.spans import Span

FRESH = 20_000
SETTINGS: list[tuple[str, World, float]] = [
    ("S1 p .2 c .05", Geometric(0.2, 0.05), 0.1),
    ("S1 p .5 c .1", Geometric(0.5, 0.1), 0.1),
    ("S1 p .1 c .02 horizon 40", Geometric(0.1, 0.02, 40), 0.05),
    ("S1 p .04 c .05: never start", Geometric(0.04, 0.05), 0.1),
    ("S2 c .02 recall", Draws(0.02), 0.1),
    ("S2 c .005 recall horizon 30", Draws(0.005, 30), 0.05),
    ("S2 c .02 recall horizon 5", Draws(0.02, 5), 0.1),
    ("S2 c .02 recall horizon 2", Draws(0.02, 2), 0.1),
    ("S2 c .02 no recall horizon 5", Draws(0.02, 5, recall=False), 0.1),
    ("S2 c .02 no recall horizon 10", Draws(0.02, 10, recall=False), 0.1),
    ("S2 c .05 no recall horizon 10", Draws(0.05, 10, recall=False), 0.1),
    ("S3 q .7 c .02", Voting(0.7, 0.02), 0.05),
    ("S3 q .7 c .05", Voting(0.7, 0.05), 0.1),
    ("S3 q .6 c .01", Voting(0.6, 0.01), 0.05),
    ("S3 q .8 c .02", Voting(0.8, 0.02), 0.1),
    ("S3 q .9 c .01", Voting(0.9, 0.01), 0.1),
    ("S3 q .7 c .02 horizon 6", Voting(0.7, 0.02, 6), 0.1),
]
CENSORED = [(horizon, mu) for horizon in (2, 4, 8, 16) for mu in (0.1,)] + [(30, 0.2), (30, 0.35)]

Logged = list[tuple[list[Round], bool]]


def learn(log: Logged, mu: float | None, *, drafts: bool = True) -> tuple[DecisionModel, list[Path]]:
    """Spans and grades of a log through dialect, assembly and rewards to a published version, and the paths it was learned from."""
    learner = DecisionLearner()
    for number, (rounds, chose) in enumerate(log):
        spans = [Span(**raw, scope=SCOPE) for raw in spans_of(number, rounds, chose, mu)]
        (content,) = assemble_spans(spans, "default", "otlp")
        feedback = [
            FeedbackReceived(
                feedback_id=f"{trace}/{span}", target_kind="span", target_id=span, trace_id=trace, value=value, name="draft"
            )
            for trace, span, value in (grades_of(number, rounds) if drafts else [])
        ]  # fmt: skip
        trace, _, outcome = grades_of(number, rounds)[-1]
        feedback.append(
            FeedbackReceived(feedback_id=trace, target_kind="trace", target_id=trace, value=outcome)
        )
        composite = compose(content, feedback, complete=True, terms=RewardTerms())
        learner.observe(content.orchestration_id, lesson_of(content, Prices()))
        learner.reward(content.orchestration_id, composite.team, grades_in(composite.rewards))
    paths = [path for name, lesson in learner.lessons.items() for path in path_of(name, lesson)]
    return DecisionModel.read("d", "v", len(log), learner.parameters()), paths


@lru_cache(maxsize=2)
def fresh_plays(world: World, seed: int = 99) -> list[list[Round]]:
    rng = np.random.default_rng(seed)
    return [world.play(rng) for _ in range(FRESH)]


def realised(plays: list[list[Round]], stop: np.ndarray) -> tuple[float, float]:
    """Mean utility, and its error, of stopping where ``stop`` first says so; shape (plays, points)."""
    stop = stop.copy()
    stop[:, -1] = True
    found = [plays[i][k].quality - plays[i][k].cost for i, k in enumerate(stop.argmax(axis=1))]
    return float(np.mean(found)), float(np.std(found)) / len(found) ** 0.5


def rows_of(plays: list[list[Round]], names: tuple[str, ...]) -> np.ndarray:
    return np.array([[each.state.get(name, 0.0) for name in names] for rounds in plays for each in rounds])


def score(world: World, rule: StoppingModel) -> tuple[float, float]:
    plays = fresh_plays(world)
    return realised(plays, rule.stops(rows_of(plays, rule.names)).reshape(FRESH, -1))


def one_step_ahead(world: World, paths: list[Path]) -> float:
    """A rival: stop where the next round alone does not pay (METHODS 5.1 C)."""
    data = Paths(sorted(paths, key=lambda path: path.id))
    binning = Binning.of(data.features)
    utility = data.quality - data.cost
    gain = np.where(data.is_last, 0.0, np.append(utility[1:], 0.0) - utility)
    tree = fit_tree(binning.codes(data.features), gain, np.where(data.is_last, 0.0, 1.0))
    plays = fresh_plays(world)
    stop = tree.predict(binning.codes(rows_of(plays, data.names))) <= 0.0
    return realised(plays, stop.reshape(FRESH, -1))[0]


def hindsight(world: World, paths: list[Path]) -> float:
    """The trap: imitate labels "a later point was better", which know the future (METHODS 5.3)."""
    data = Paths(sorted(paths, key=lambda path: path.id))
    utility = data.quality - data.cost
    later = np.zeros(len(utility))
    for first, last in zip(data.first, data.last, strict=True):
        best = first + int(np.argmax(utility[first : last + 1]))
        later[first:best] = 1.0
    binning = Binning.of(data.features)
    tree = fit_tree(binning.codes(data.features), later, np.ones(len(later)))
    plays = fresh_plays(world)
    stop = tree.predict(binning.codes(rows_of(plays, data.names))) <= 0.5
    return realised(plays, stop.reshape(FRESH, -1))[0]


def hazard(world: World, paths: list[Path], steps: int = 100) -> float:
    """A rival: a logistic stop probability by gradient ascent on the weighted value (METHODS 5.1 B)."""
    data = Paths(sorted(paths, key=lambda path: path.id))
    varies = np.nanstd(data.features, axis=0) > 0
    centre, scale = np.nanmean(data.features, axis=0)[varies], np.nanstd(data.features, axis=0)[varies]

    def basis(features: np.ndarray) -> np.ndarray:
        z = (np.nan_to_num(features[:, varies]) - centre) / scale
        return np.concatenate([np.ones((len(z), 1)), z, z * z], axis=1)

    size = int((data.last - data.first).max()) + 1
    column = np.arange(len(data.owner)) - data.first[data.owner]
    inputs = np.zeros((len(data), size, 1 + 2 * int(varies.sum())))
    inputs[data.owner, column] = basis(data.features)
    worth = np.zeros((len(data), size))
    goes_on = np.where(
        data.is_last, 0.0, -np.log1p(-np.where(data.is_last, 0.0, np.nan_to_num(data.propensity)))
    )
    total = np.concatenate([[0.0], np.cumsum(goes_on)])[:-1]
    worth[data.owner, column] = (data.quality - data.cost) * np.exp(total - total[data.first][data.owner])
    forced = np.zeros((len(data), size), dtype=bool)
    forced[data.owner, column] = data.is_last & ~data.stopped

    def value(weights: np.ndarray) -> float:
        chance = np.where(forced, 1.0, 1 / (1 + np.exp(-np.clip(inputs @ weights, -30, 30))))
        before = np.cumprod(np.concatenate([np.ones((len(data), 1)), 1 - chance[:, :-1]], axis=1), axis=1)
        return float((before * chance * worth).sum() / len(data))

    weights, mean, square = np.zeros(inputs.shape[2]), 0.0, 0.0
    for step in range(1, steps + 1):
        gradient = np.array([
            (value(weights + 1e-3 * e) - value(weights - 1e-3 * e)) / 2e-3 for e in np.eye(len(weights))
        ])  # fmt: skip
        mean, square = 0.9 * mean + 0.1 * gradient, 0.99 * square + 0.01 * gradient**2
        weights = weights + 0.1 * (mean / (1 - 0.9**step)) / (np.sqrt(square / (1 - 0.99**step)) + 1e-8)
    plays = fresh_plays(world)
    stop = basis(rows_of(plays, data.names)) @ weights > 0
    return realised(plays, stop.reshape(FRESH, -1))[0]


def clairvoyant(world: World) -> float:
    return float(np.mean([max(r.quality - r.cost for r in rounds) for rounds in fresh_plays(world)]))


def setting(name: str, world: World, mu: float, count: int, *, rivals: bool) -> dict:
    log = play_log(world, np.random.default_rng(3), count, mu)
    start = time.process_time()
    model, paths = learn(log, mu)
    spent = time.process_time() - start
    assert model.stopping is not None
    assert model.stopping_value is not None
    best, told = world.optimum(), model.stopping_value
    got, error = score(world, model.stopping)
    figures = {
        "optimum": round(best, 6),
        "realised": round(got, 4),
        "realised_se": round(error, 4),
        "ratio": round(got / best, 4) if best else None,
        "estimate_dr": round(told.doubly_robust.value, 4),
        "estimate_se": round(told.doubly_robust.error, 4),
        "z": round((told.doubly_robust.value - best) / max(told.doubly_robust.error, 1e-9), 2),
        "estimate_ipcw": round(told.ipcw.value, 4),
        "ipcw_se": round(told.ipcw.error, 4),
        "estimate_sn": round(told.normalised.value, 4),
        "behaviour": round(told.behaviour.value, 4),
        "cpu_s": round(spent, 1),
    }
    if rivals:
        figures["one_step_ahead"] = round(one_step_ahead(world, paths), 4)
        figures["hazard"] = round(hazard(world, paths), 4)
        figures["hindsight_labels"] = round(hindsight(world, paths), 4)
    print(name, figures, flush=True)
    return figures


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 4000
    settings = {name: setting(name, world, mu, count, rivals=True) for name, world, mu in SETTINGS}
    censored = {}
    for horizon, mu in CENSORED:
        world = Voting(0.7, 0.02, horizon)
        figures = setting(f"horizon {horizon} mu {mu}", world, mu, count, rivals=False)
        # Against what could be had without any horizon: a log that is cut early costs, but breaks nothing.
        figures["share_of_endless"] = round(figures["realised"] / 0.798919, 4)
        censored[f"S3 q .7 c .02 horizon {horizon} mu {mu}"] = figures
    world = Voting(0.7, 0.02)
    without, _ = learn(play_log(world, np.random.default_rng(3), count, 0.1), 0.1, drafts=False)
    untold, _ = learn(play_log(world, np.random.default_rng(3), count, 0.1), None)
    assert without.stopping is not None
    assert untold.stopping is not None
    good = [
        f
        for f in settings.values()
        if (f["ratio"] is None and f["realised"] >= -1e-9) or (f["ratio"] or 0) >= 0.98
    ]
    trap = settings["S3 q .7 c .02"]
    write("stopping", f"python benchmarks/stopping.py {count}", {
        "orchestrations": count,
        "settings": settings,
        "settings_at_98_percent": f"{len(good)} of {len(settings)}",
        "estimates_within_3_se": f"{sum(abs(f['z']) <= 3 for f in settings.values())} of {len(settings)}",
        "trap": {
            "rule": trap["realised"], "needed": round(0.98 * 0.798919, 4), "hindsight_labels": trap["hindsight_labels"],
            "clairvoyant": round(clairvoyant(world), 4),
        },
        "censored": censored,
        "only_last_draft_graded": {"realised": round(score(world, without.stopping)[0], 4), "notes": without.stopping.notes},
        "propensities_estimated": {"realised": round(score(world, untold.stopping)[0], 4), "notes": untold.stopping.notes},
    })  # fmt: skip


if __name__ == "__main__":
    main()
