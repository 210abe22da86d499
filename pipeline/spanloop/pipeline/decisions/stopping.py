"""Learned stopping (O5): at which decision points to stop, from logs, with what that is worth.

Fitted policy improvement in the manner of Longstaff and Schwartz. The margin of a point is what stopping there brings beyond going on:
m(G_k) = U_k - E[Z_{k+1} | G_k]. Beginning with the rule that stops at the very next point, each round takes the *realised* value of
going on under the present rule (never its regression), regresses the difference on what the decider could see, and stops where it is
not negative. Behaviour that stopped earlier than the rule is censoring: what followed is weighted by the inverse of the chance to have
gone on that far (IPCW). A label "this was the best point in hindsight" is never made: it knows the future.
Values are estimated on paths that the rule was not fitted on (two halves, each judged by the other's rule).
Invariants: pure, deterministic; a function of the set of paths (they are taken in the order of their ids).
Source: Longstaff and Schwartz 2001; METHODS 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from spanloop.pipeline.credit.estimators.aipw import LEAST_PROPENSITY, Mean
from spanloop.pipeline.decisions.paths import LEAST_SHARE, Path, Paths
from spanloop.pipeline.decisions.trees import Binning, Tree, fit_tree
from spanloop.schemas.canonical import digest
from spanloop.schemas.errors import SchemaError

__all__ = ["StoppingModel", "StoppingValue", "Verdict", "fit_stopping", "rule_value"]

Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]

KIND = "stopping_tree/1"
ROUNDS = 16
"""Of policy improvement at most."""
SETTLED = 1e-3
"""Share of points whose verdict may still change in the last round."""
WEIGHT_MAX = 50.0
"""Of one path in a regression; in values nothing is capped."""
LEAST_PATHS = 30
_NO_DRAFTS = "only the last draft of each orchestration was graded: earlier ones are predicted"
_NO_PROPENSITIES = "stop propensities were not logged, they are estimated"
_NO_OVERLAP = "the log never goes on where the behaviour stops: nothing is known of what lies behind"


class Verdict(msgspec.Struct, frozen=True):
    """What a model says of one decision point."""

    margin: float
    """Of stopping over going on, units of reward: >= 0 says stop. The credit of a stop; of a continue it is its negative."""
    value: float
    """Expected quality of the end less what is still to be spent, under the model's rule."""
    stop: bool


class StoppingValue(msgspec.Struct, frozen=True):
    """What a stopping rule is worth, units of reward, with errors; paths are independent."""

    ipcw: Mean
    normalised: Mean
    """Weights divided by their sum: less noise, a small bias."""
    doubly_robust: Mean
    behaviour: Mean
    """Of what was done."""
    effective: float
    """Effective number of uncensored paths."""
    stops: float
    """Mean number of points before the rule stops, over uncensored paths."""
    notes: tuple[str, ...] = ()


class StoppingModel:
    """A stopping rule: a margin and a value for what a decider can see.

    Args:
        names: of the features.
        binning: their cuts.
        margin: m, units of reward.
        value: of following the rule from here on, what was spent so far not counted.
        quality: of the draft at hand, for points whose draft nobody graded.
        notes: what the answer rests on.
    """

    def __init__(
        self, names: Sequence[str], binning: Binning, *, margin: Tree, value: Tree, quality: Tree, notes: tuple[str, ...] = ()
    ) -> None:  # fmt: skip
        self.names = tuple(names)
        self.binning = binning
        self.margin, self.value, self.quality = margin, value, quality
        self.notes = notes

    def verdict(self, features: Mapping[str, float]) -> Verdict:
        """Of one decision point."""
        row = np.array([[features.get(name, np.nan) for name in self.names]], dtype=np.float64)
        codes = self.binning.codes(row.reshape(1, len(self.names)))
        margin = float(self.margin.predict(codes)[0])
        return Verdict(margin, float(self.value.predict(codes)[0]), margin >= 0.0)

    def stops(self, features: Floats) -> Mask:
        """Whether to stop, for rows of ``names``."""
        return self.margin.predict(self.binning.codes(features)) >= 0.0

    def to_dict(self) -> dict[str, Any]:
        """JSON; ``from_dict`` of it gives the same verdicts bit for bit."""
        return {
            "kind": KIND,
            "names": list(self.names),
            "cuts": [cuts.tolist() for cuts in self.binning.cuts],
            "margin": self.margin.to_dict(),
            "value": self.value.to_dict(),
            "quality": self.quality.to_dict(),
            "notes": list(self.notes),
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> StoppingModel:
        """The model of ``to_dict``; raises SchemaError when it is none."""
        if data.get("kind") != KIND:
            raise SchemaError(f"stopping model of kind {data.get('kind')!r}; this build knows {KIND!r}")
        try:
            names = [str(name) for name in data["names"]]
            cuts = [np.array([float(x) for x in column], dtype=np.float64) for column in data["cuts"]]
            notes = tuple(str(note) for note in data["notes"])
            trees = {part: Tree.from_dict(data[part]) for part in ("margin", "value", "quality")}
        except (KeyError, TypeError, ValueError) as exc:
            raise SchemaError(f"not a stopping model: {exc}") from exc
        if len(cuts) != len(names) or any(max(tree.feature) >= len(names) for tree in trees.values()):
            raise SchemaError(f"a stopping model of {len(names)} features has {len(cuts)} lists of cuts")
        return StoppingModel(names, Binning(cuts), **trees, notes=notes)


class _Log:
    """Paths with what the regressions need, propensities and missing qualities filled in."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.binning = Binning.of(paths.features)
        self.codes = self.binning.codes(paths.features)
        self.half = np.array([int(digest("half", name)[:8], 16) % 2 == 0 for name in paths.ids], dtype=bool)
        everyone = np.ones(len(paths.owner), dtype=bool)
        graded = ~np.isnan(paths.quality)
        self.graders = [
            self._regression(paths.quality, graded & rows)
            for rows in (everyone, paths.of(self.half), paths.of(~self.half))
        ]
        own = np.where(
            paths.of(self.half),
            self.graders[2].predict(self.codes),
            self.graders[1].predict(self.codes),
        )
        self.utility = np.where(graded, paths.quality, own) - paths.cost
        """U of each point; a quality that nobody graded is predicted by the other half."""
        self.propensity = self._propensities()
        goes_on = np.where(
            paths.is_last, 0.0, -np.log1p(-np.minimum(self.propensity, 1.0 - LEAST_PROPENSITY))
        )
        total = np.concatenate([[0.0], np.cumsum(goes_on)])
        self.log_weight = total[:-1] - total[paths.first][paths.owner]
        """Log of the product of 1 / (1 - mu) over the points of the path before this one."""
        self.ends_by_itself = paths.is_last & ~paths.stopped

    def _regression(self, target: Floats, rows: Mask) -> Tree:
        return fit_tree(self.codes, np.where(rows, target, 0.0), rows.astype(np.float64))

    def _propensities(self) -> Floats:
        """Logged, or estimated by the other half."""
        paths = self.paths
        known = ~np.isnan(paths.propensity)
        if known.all():
            return paths.propensity
        chose = np.where(self.ends_by_choice(), 1.0, 0.0)
        free = ~(paths.is_last & ~paths.stopped)
        mine = paths.of(self.half)
        first, second = (self._regression(chose, free & rows) for rows in (mine, ~mine))
        guess = np.where(mine, second.predict(self.codes), first.predict(self.codes))
        return np.where(known, paths.propensity, np.clip(guess, LEAST_SHARE, 1.0 - LEAST_SHARE))

    def ends_by_choice(self) -> Mask:
        """Points at which the behaviour stopped by choice."""
        return self.paths.is_last & self.paths.stopped

    def reached(self, stop: Mask) -> NDArray[np.int64]:
        """For each row the first row from it on at which the rule or the path ends."""
        count = len(stop)
        ends = np.where(stop | self.paths.is_last, np.arange(count), count)
        return np.minimum.accumulate(ends[::-1])[::-1]

    def going_on(self, stop: Mask) -> tuple[Floats, Floats]:
        """Realised utility of going on at each row and then following the rule, and its weight; 0 where it was not seen."""
        rows = np.arange(len(stop))
        after = np.minimum(rows + 1, len(stop) - 1)
        end = self.reached(stop)[after]
        seen = ~self.paths.is_last & (stop[end] | self.ends_by_itself[end])
        weight = np.where(seen, np.exp(self.log_weight[end] - self.log_weight), 0.0)
        return np.where(seen, self.utility[end], 0.0), weight


def _improve(log: _Log, rows: Mask) -> tuple[Tree, Mask]:
    """The margin's tree, fitted on ``rows``, and its verdict on every row: of all rules on the way the one whose value less its
    error is best on ``rows``. Where little is seen behind the behaviour's stops, rounds can swing; this keeps what is supported."""
    stop = np.ones(len(rows), dtype=bool)
    margin = best = Tree([-1], [0], [0], [0], [0.0])
    most, chosen = _supported(log, stop, rows), stop
    for _ in range(ROUNDS):
        value, weight = log.going_on(stop)
        used = np.where(rows, np.minimum(weight, WEIGHT_MAX), 0.0)
        margin = fit_tree(log.codes, log.utility - value, used)
        verdict = margin.predict(log.codes) >= 0.0
        changed = float((verdict != stop)[rows].mean()) if rows.any() else 0.0
        stop = verdict
        supported = _supported(log, stop, rows)
        if supported >= most:
            most, best, chosen = supported, margin, stop
        if changed <= SETTLED:
            break
    return best, chosen


def _supported(log: _Log, stop: Mask, rows: Mask) -> float:
    """Self-normalised value of a rule on the paths of ``rows``, less its error; -inf where no such path is seen to its end."""
    paths = log.paths
    end = log.reached(stop)[paths.first]
    seen = (stop[end] | log.ends_by_itself[end]) & rows[paths.first]
    weight = np.where(seen, np.exp(log.log_weight[end]), 0.0)
    total = float(weight.sum())
    if total <= 0.0:
        return float("-inf")
    value = float(weight @ log.utility[end]) / total
    return value - float(np.sqrt(np.square(weight * (log.utility[end] - value)).sum())) / total


def _to_go(log: _Log, stop: Mask, rows: Mask) -> Tree:
    """Value of following the rule, without what was spent before."""
    value, weight = log.going_on(stop)
    ends = stop | log.ends_by_itself
    found = np.where(ends, log.utility, value) + log.paths.cost
    used = np.where(rows, np.where(ends, 1.0, np.minimum(weight, WEIGHT_MAX)), 0.0)
    return fit_tree(log.codes, found, used)


def fit_stopping(paths: Sequence[Path]) -> tuple[StoppingModel, StoppingValue] | None:
    """A stopping rule from logged paths, and what it is worth; None: too few of them.

    Args:
        paths: in any order.
    """
    data = Paths(sorted(paths, key=lambda path: path.id))
    if len(data) < LEAST_PATHS or data.is_last.all():
        return None
    log = _Log(data)
    notes = _notes(log)
    everyone = np.ones(len(data.owner), dtype=bool)
    mine = data.of(log.half)
    stop, value = np.empty(len(everyone), dtype=bool), np.empty(len(everyone))
    for fitted, judged in ((mine, ~mine), (~mine, mine)):
        rule = _improve(log, fitted)[1]
        stop[judged] = rule[judged]
        value[judged] = _to_go(log, rule, fitted).predict(log.codes)[judged]
    margin, whole = _improve(log, everyone)
    model = StoppingModel(
        data.names, log.binning, margin=margin, value=_to_go(log, whole, everyone), quality=log.graders[0], notes=notes
    )  # fmt: skip
    return model, _value(log, stop, value, notes)


def rule_value(paths: Sequence[Path], stop: Sequence[Mask] | Mask) -> StoppingValue:
    """What a rule that is given would be worth, from the log of another behaviour.

    Args:
        paths: in order.
        stop: whether the rule stops, one a point, in the same order.
    """
    data = Paths(paths)
    log = _Log(data)
    said = np.asarray(stop, dtype=bool)
    value = np.empty(len(said))
    mine = data.of(log.half)
    for fitted, judged in ((mine, ~mine), (~mine, mine)):
        value[judged] = _to_go(log, said, fitted).predict(log.codes)[judged]
    return _value(log, said, value, _notes(log))


def _value(log: _Log, stop: Mask, to_go: Floats, notes: tuple[str, ...]) -> StoppingValue:
    paths = log.paths
    end = log.reached(stop)[paths.first]
    seen = stop[end] | log.ends_by_itself[end]
    weight = np.where(seen, np.exp(log.log_weight[end]), 0.0)
    utility = log.utility[end]
    total = float(weight.sum())
    share = float(weight @ utility) / total if total > 0.0 else float("nan")
    count = len(paths)
    spread = (
        float(np.sqrt(np.square(weight * (utility - share)).sum())) / total if total > 0.0 else float("nan")
    )
    model = to_go - paths.cost
    # Where the rule goes on, the chance to have been stopped by the behaviour is made up for by what was expected there: terms of
    # mean zero, C(x_k) (w_k - 1{went on} w_{k+1}) (augmented inverse weighting of monotone censoring).
    passed = (np.arange(len(stop)) < end[paths.owner]) | (
        (np.arange(len(stop)) == end[paths.owner]) & ~(stop | log.ends_by_itself)
    )
    weights = np.exp(log.log_weight)
    after = np.minimum(np.arange(len(stop)) + 1, len(stop) - 1)
    went_on = np.where(paths.is_last, 0.0, np.exp(log.log_weight[after]))
    made_up = np.where(passed, (weights - went_on) * model, 0.0)
    robust = weight * utility + np.bincount(paths.owner, weights=made_up, minlength=count)
    squares = float(weight @ weight)
    return StoppingValue(
        ipcw=_mean(weight * utility),
        normalised=Mean(share, spread, count),
        doubly_robust=_mean(robust),
        behaviour=_mean(log.utility[paths.last]),
        effective=total * total / squares if squares > 0.0 else 0.0,
        stops=float(weight @ (end - paths.first)) / total if total > 0.0 else float("nan"),
        notes=notes,
    )


def _mean(terms: Floats) -> Mean:
    count = len(terms)
    error = float(terms.std(ddof=1)) / count**0.5 if count > 1 else float("inf")
    return Mean(float(terms.mean()), error, count)


def _notes(log: _Log) -> tuple[str, ...]:
    paths = log.paths
    notes: list[str] = []
    if not paths.has_drafts:
        notes.append(_NO_DRAFTS)
    if not paths.has_propensities:
        notes.append(_NO_PROPENSITIES)
    elif bool((paths.propensity[log.ends_by_choice()] > 1.0 - LEAST_PROPENSITY).all()) and bool(
        (paths.propensity[~paths.is_last] < LEAST_PROPENSITY).all()
    ):
        notes.append(_NO_OVERLAP)
    return tuple(notes)
