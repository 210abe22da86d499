"""Credit estimators on known worlds: how large errors are, whether error bars cover, what is refused and why."""

from __future__ import annotations

import time

import numpy as np
import pytest

from spanloop.pipeline.credit.estimators.aipw import Decisions, effect, policy_value
from spanloop.pipeline.credit.estimators.c3 import Drawn, log_credits, message_credits
from spanloop.pipeline.credit.estimators.closed_forms import airport, weighted_vote
from spanloop.pipeline.credit.estimators.gae import gae, information_gain
from spanloop.pipeline.credit.estimators.games import Shares, of_sets, table_of
from spanloop.pipeline.credit.estimators.groups import Advantage, group_stats, grpo, rloo
from spanloop.pipeline.credit.estimators.intervals import normal_quantile, student_quantile
from spanloop.pipeline.credit.estimators.owen import owen, sample_owen
from spanloop.pipeline.credit.estimators.precedence import precedence_shapley, sample_spawn_tree
from spanloop.pipeline.credit.estimators.shapley import sample_shapley, shapley, shapley_of
from spanloop.schemas.errors import SchemaError

TRIALS = 300


def covered(hits: int, trials: int) -> bool:
    """Whether 90 % intervals that hit this often cover between 85 and 95 %."""
    return 0.85 <= hits / trials <= 0.95


def random_table(rng: np.random.Generator, n: int) -> np.ndarray:
    return rng.normal(size=1 << n)


def game_of(table: np.ndarray):
    return lambda masks: table[masks @ (1 << np.arange(masks.shape[1]))]


@pytest.mark.parametrize(
    ("level", "freedom", "expected"),
    [(0.9, 1, 6.313752), (0.95, 2, 4.302653), (0.9, 9, 1.833113), (0.99, 4, 4.604095), (0.95, 30, 2.042272)],
)
def test_student_quantiles(level: float, freedom: int, expected: float):
    assert student_quantile(level, freedom) == pytest.approx(expected, abs=1e-5)


def test_student_becomes_normal_and_says_nothing_of_one_sample():
    assert student_quantile(0.9, 10_000) == normal_quantile(0.9) == pytest.approx(1.644854, abs=1e-6)
    assert student_quantile(0.9, 399) == pytest.approx(normal_quantile(0.9), abs=0.004)
    assert student_quantile(0.9, 0) == float("inf")
    with pytest.raises(SchemaError):
        normal_quantile(1.0)


class TestSampled:
    @pytest.mark.parametrize("kind", ["shapley", "owen", "tree"])
    def test_error_bars_cover(self, kind: str):
        n, hits = 6, 0
        for trial in range(TRIALS):
            rng = np.random.default_rng(trial)
            table = random_table(rng, n)
            game = game_of(table)
            if kind == "shapley":
                exact, found = shapley(table), sample_shapley(game, n, evaluations=1500, seed=trial)
            elif kind == "owen":
                unions = [[0, 1], [2], [3, 4, 5]]
                exact, found = owen(table, unions), sample_owen(game, unions, evaluations=1500, seed=trial)
            else:
                tree = precedence_shapley(game, n, {1: {0}, 2: {0}, 3: {1}, 5: {4}})
                assert tree is not None
                exact = tree.values
                found = sample_spawn_tree(game, [-1, 0, 0, 1, -1, 4], evaluations=1500, seed=trial)
            hits += int((abs(found.values - exact) <= found.half_widths(0.9)).sum())
        assert covered(hits, TRIALS * n), hits / (TRIALS * n)

    def test_error_bars_cover_when_each_replay_is_noisy(self):
        n, hits = 4, 0
        for trial in range(TRIALS):
            rng = np.random.default_rng(trial)
            table = random_table(rng, n)

            def replay(masks, rng=rng, table=table):
                return game_of(table)(masks) + rng.normal(size=len(masks))

            found = sample_shapley(replay, n, evaluations=1500, seed=trial, noisy=True)
            hits += int((abs(found.values - shapley(table)) <= found.half_widths(0.9)).sum())
        assert covered(hits, TRIALS * n), hits / (TRIALS * n)

    @pytest.mark.parametrize("kind", ["largest", "majority", "dictators", "synergies"])
    def test_a_hundred_players(self, kind: str):
        """At most 3 % of the range off for any player, in less than two seconds of one core."""
        n, rng = 100, np.random.default_rng(3)
        if kind == "largest":
            sizes = rng.exponential(size=n)
            game, truth, reach = (
                (lambda m: np.where(m, sizes, 0.0).max(axis=1)),
                airport(sizes.tolist()),
                sizes.max(),
            )
        elif kind == "synergies":
            pairs = rng.integers(n, size=(200, 2))
            values = rng.normal(size=200)
            truth = np.zeros(n)
            np.add.at(truth, pairs[:, 0], values / 2)
            np.add.at(truth, pairs[:, 1], values / 2)
            game = lambda m: (m[:, pairs[:, 0]] & m[:, pairs[:, 1]]) @ values  # noqa: E731
            some = game(rng.random((2000, n)) < rng.random((2000, 1)))
            reach = some.max() - some.min()
        else:
            weights = np.ones(n, dtype=int)
            weights[: 3 if kind == "dictators" else 0] = 40
            quota = int(weights.sum()) // 2 + 1
            game, truth, reach = (
                (lambda m: (m @ weights >= quota).astype(float)),
                weighted_vote(weights.tolist(), quota),
                1.0,
            )
        began = time.process_time()
        found = sample_shapley(game, n, seed=1)
        assert time.process_time() - began < 2.0
        assert abs(found.values - truth).max() <= 0.03 * reach
        assert (abs(found.values - truth) <= 5 * found.errors + 1e-9).all()
        assert found.values.sum() == pytest.approx(truth.sum(), abs=1e-9)

    def test_small_games_are_exact_and_large_ones_say_how_far_off(self):
        table = random_table(np.random.default_rng(0), 6)
        exact = shapley_of(game_of(table), 6)
        assert (exact.estimator, exact.blocks, exact.half_widths().tolist()) == ("shapley/1", 0, [0.0] * 6)
        sampled = shapley_of(game_of(table), 6, exact_up_to=5, evaluations=500)
        assert sampled.estimator == "shapley_sampled/1"
        assert (sampled.errors > 0).all()
        assert np.isinf(Shares(np.ones(2), np.zeros(2), 1, 2, "x/1").half_widths()).all()

    def test_one_player_has_everything(self):
        assert sample_shapley(lambda m: m[:, 0] * 3.0, 1).values.tolist() == [3.0]

    def test_refusals(self):
        with pytest.raises(SchemaError, match="too many coalitions"):
            table_of(of_sets(["a"] * 13, lambda s: 0.0), 13)
        with pytest.raises(SchemaError, match="not one for each coalition"):
            shapley(np.zeros(3))
        with pytest.raises(SchemaError, match="each of the 3 players once"):
            owen(np.zeros(8), [[0], [1]])
        with pytest.raises(SchemaError, match="cycle"):
            precedence_shapley(lambda m: m.sum(axis=1) * 1.0, 2, {0: {1}, 1: {0}})
        with pytest.raises(SchemaError, match="cycle"):
            sample_spawn_tree(lambda m: m.sum(axis=1) * 1.0, [1, 0])
        with pytest.raises(SchemaError, match="nothing to share"):
            sample_shapley(lambda m: m.sum(axis=1) * 1.0, 0)
        with pytest.raises(SchemaError, match="quota"):
            weighted_vote([1, 2], 0)


def test_groups_that_say_nothing_say_so():
    assert grpo(700_000, group_stats([700_000])) == Advantage(0.0, "singleton")
    assert rloo(1_000_000, group_stats([1_000_000] * 4)) == Advantage(0.0, "no_variance")
    large = group_stats([10**15 + 1, 10**15])  # floats of sums of squares would cancel to nothing
    assert grpo(10**15 + 1, large).status == "ok"


def test_turns_of_different_lengths_are_refused():
    with pytest.raises(SchemaError, match="2 rewards and 1 values"):
        gae([0.0, 1.0], [0.5])
    with pytest.raises(SchemaError, match="each lies in"):
        information_gain([0.0, 0.5])


class TestEffects:
    """METHODS 6, G3: a difficulty that moves the decision to spawn and the outcome."""

    truth = 0.175

    def log(self, seed: int, n: int = 1500, *, deterministic: bool = False):
        rng = np.random.default_rng(seed)
        hard = rng.random(n) < 0.5
        chance = np.where(hard, 0.9, 0.2)
        if deterministic:
            chance = hard * 1.0
        spawned = (rng.random(n) < chance).astype(np.int64)
        success = np.array([[0.85, 0.9], [0.2, 0.5]])[hard.astype(int), spawned]
        rewards = (rng.random(n) < success).astype(float)
        return spawned, rewards, np.stack([1 - chance, chance], axis=1), hard.tolist()

    @pytest.mark.parametrize("mode", ["logged", "estimated", "hidden"])
    def test_intervals_cover_where_the_naive_difference_is_wrong(self, mode: str):
        hits, naive = 0, []
        for seed in range(TRIALS):
            chosen, rewards, propensities, contexts = self.log(seed)
            found = effect(
                Decisions(
                    chosen, rewards, None if mode == "estimated" else propensities, () if mode == "hidden" else contexts
                ),
                1, 0, seed=seed,
            )  # fmt: skip
            assert found.status == ("estimated_propensities" if mode == "estimated" else "ok")
            assert found.low is not None
            assert found.high is not None
            hits += found.low <= self.truth <= found.high
            naive.append(found.naive)
        assert covered(hits, TRIALS), hits / TRIALS
        assert np.mean(naive) == pytest.approx(-0.205, abs=0.01)

    def test_nothing_known_of_why_widens_to_what_holds_anyway(self):
        chosen, rewards, _, _ = self.log(0)
        found = effect(Decisions(chosen, rewards), 1, 0)
        assert found.bounds is not None
        assert found.low == pytest.approx(found.bounds[0])
        assert found.high == pytest.approx(found.bounds[1])
        assert found.bounds[0] <= self.truth <= found.bounds[1]
        assert "without any assumption" in found.reason

    @pytest.mark.parametrize("logged", [True, False])
    def test_no_overlap_is_unidentified(self, logged: bool):
        chosen, rewards, propensities, contexts = self.log(0, deterministic=True)
        found = effect(Decisions(chosen, rewards, propensities if logged else None, contexts), 1, 0)
        assert (found.status, found.value, found.low, found.high) == ("unidentified", None, None, None)
        assert "propensity 0" in found.reason
        assert found.naive is not None

    def test_an_action_that_was_never_taken_is_unidentified(self):
        found = effect(Decisions(np.zeros(5, dtype=np.int64), np.ones(5), np.full((5, 2), 0.5)), 1, 0)
        assert (found.status, found.naive, found.reason) == ("unidentified", None, "action 1 was never taken")
        nobody = effect(Decisions(np.zeros(0, dtype=np.int64), np.zeros(0)), 1, 0)
        assert nobody.status == "unidentified"

    def test_decisions_of_one_task_count_as_one(self):
        chosen, rewards, propensities, contexts = self.log(1, 200)
        many = Decisions(
            np.tile(chosen, 5), np.tile(rewards, 5), np.tile(propensities, (5, 1)), contexts * 5,
            clusters=list(range(200)) * 5,
        )  # fmt: skip
        once = effect(Decisions(chosen, rewards, propensities, contexts), 1, 0)
        repeated = effect(many, 1, 0)
        assert once.error is not None
        assert repeated.error == pytest.approx(once.error, rel=0.1)
        apart = effect(Decisions(many.chosen, many.rewards, many.propensities, many.contexts), 1, 0)
        assert apart.error is not None
        assert apart.error < 0.6 * once.error

    def test_a_policys_value(self):
        """Spawning only on hard tasks: (.85 + .5) / 2; intervals cover it."""
        hits = 0
        for seed in range(TRIALS):
            chosen, rewards, propensities, contexts = self.log(seed)
            target = np.array([[0.0, 1.0] if hard else [1.0, 0.0] for hard in contexts])
            found = policy_value(Decisions(chosen, rewards, propensities, contexts), target, seed=seed)
            assert found.low is not None
            assert found.high is not None
            hits += found.low <= 0.675 <= found.high
        assert covered(hits, TRIALS), hits / TRIALS

    def test_bad_logs_are_refused(self):
        one = np.zeros(1, dtype=np.int64)
        for log, message in (
            (Decisions(one, np.zeros(2)), "one of each a decision"),
            (Decisions(one, np.array([np.nan])), "finite"),
            (Decisions(one + 5, np.zeros(1)), "outside a menu"),
            (Decisions(one, np.zeros(1), np.ones((1, 3))), "shape"),
        ):
            with pytest.raises(SchemaError, match=message):
                effect(log, 1, 0)


class TestMessages:
    def test_a_message_alone_has_no_credit_and_says_so(self):
        (found,) = message_credits([Drawn("a", (1.0, 0.0))]).values()
        assert (found.value, found.status, found.half_width()) == (0.0, "no_alternative", float("inf"))
        assert message_credits([]) == {}

    def test_logged_propensities_take_the_place_of_frequencies(self):
        found = message_credits([Drawn("a", (1.0, 1.0)), Drawn("b", (0.0,))], {"a": 0.25, "b": 0.75})
        assert (found["a"].value, found["b"].value) == (0.75, -0.25)

    def test_intervals_cover_in_logs_where_prefixes_repeat(self):
        """Good nine times in ten, then right in .56 of all cases; bad: never."""
        hits = 0
        for seed in range(TRIALS):
            rng = np.random.default_rng(seed)
            good = rng.random(300) < 0.9
            right = good & (rng.random(300) < 0.56)
            log = [("p", "good" if g else "bad", float(r)) for g, r in zip(good, right, strict=True)]
            found = log_credits(log)
            hits += abs(found["p", "good"].value - 0.056) <= found["p", "good"].half_width(0.9)
            hits += abs(found["p", "bad"].value + 0.504) <= found["p", "bad"].half_width(0.9)
        assert covered(hits, 2 * TRIALS), hits / (2 * TRIALS)
