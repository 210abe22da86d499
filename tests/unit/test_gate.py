"""Gate: METHODS 4.5's worked values; the paired estimate on policies whose values are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from learner_world import CONFIG, EXPLORATION, World, settings

from spanloop.learner.evaluation import Evaluation
from spanloop.learner.gate import (
    balance_weights,
    doubly_robust,
    effective_sample_size,
    empirical_bernstein,
    ips,
    judge,
    snips,
)
from spanloop.learner.policy import PolicyNet

W, R = [2, 0.5, 1, 0.25, 1.5], [1, 0, 1, 0, 1]
Q, V = [0.8, 0.2, 0.6, 0.3, 0.7], [0.7, 0.3, 0.6, 0.4, 0.6]


def test_worked_values() -> None:
    assert ips(W, R).value == pytest.approx(0.9)
    assert ips(W, R).error == pytest.approx(0.4, abs=1e-6)
    assert snips(W, R).value == pytest.approx(0.857143, abs=1e-6)
    assert snips(W, R).error == pytest.approx(0.117038, abs=1e-6)
    assert effective_sample_size(W) == pytest.approx(3.644628, abs=1e-6)
    assert doubly_robust(W, R, Q, V).value == pytest.approx(0.735)
    assert doubly_robust(W, R, Q, V).error == pytest.approx(0.194551, abs=1e-6)
    assert doubly_robust(W, R, Q, V, normalise=True).value == pytest.approx(0.724762, abs=1e-6)
    assert empirical_bernstein(1000, 0.25, 1, 0.05) == pytest.approx(0.051563, abs=1e-6)
    one = balance_weights(np.log([0.5]), np.log([[0.2, 0.6]]), np.array([0.7, 0.3]))
    assert one[0] == pytest.approx(1.5625)


def bandit(new: list[float], seed: int, count: int = 400) -> tuple[np.ndarray, ...]:
    """Two loggers over three arms with values 0, .5, 1: log-probabilities as ``judge`` takes them."""
    rng = np.random.default_rng(seed)
    loggers = np.array([[1 / 3, 1 / 3, 1 / 3], [0.6, 0.2, 0.2]])
    which = rng.integers(0, 2, count)
    arm = np.array([rng.choice(3, p=loggers[k]) for k in which])
    gains = arm / 2 + rng.normal(0, 0.2, count) - 0.5
    return np.log(np.array(new))[arm], np.log(loggers[0])[arm], np.log(loggers.T)[arm], which, gains


def run(new: list[float], seed: int, margin: float = 0.0):
    candidate, champion, loggers, which, gains = bandit(new, seed)
    return judge(candidate, champion, loggers, which, gains, confidence=0.9, margin=margin, min_ess=0.1)


def test_a_better_policy_passes_and_the_estimate_is_right() -> None:
    verdicts = [run([0.1, 0.2, 0.7], seed) for seed in range(20)]
    assert all(v.passed for v in verdicts)
    assert np.mean([v.estimate for v in verdicts]) == pytest.approx(0.3, abs=0.02)


def test_a_worse_policy_fails() -> None:
    assert not any(run([0.6, 0.3, 0.1], seed).passed for seed in range(20))


def test_bound_covers() -> None:
    """One-sided 90 % bound on a true difference of 0.1: above it in at most about a tenth of the runs."""
    wrong = sum(run([0.25, 0.3, 0.45], seed).lower > 0.1 for seed in range(300))
    assert wrong <= 45


def test_equal_policies_pass_exactly() -> None:
    candidate, champion, loggers, which, gains = bandit([1 / 3] * 3, 0)
    verdict = judge(candidate, champion, loggers, which, gains, confidence=0.9, margin=0.0, min_ess=0.1)
    assert (verdict.estimate, verdict.lower, verdict.passed) == (0.0, 0.0, True)


def test_refusals_say_why() -> None:
    candidate, champion, loggers, which, gains = bandit([0.1, 0.2, 0.7], 0)
    few = judge(
        candidate[:9], champion[:9], loggers[:9], which[:9], gains[:9], confidence=0.9, margin=0, min_ess=0.1
    )
    assert (few.passed, few.reason) == (False, "9 held-out orchestrations, 30 needed")
    lonely = candidate.copy()
    lonely[0] += 12.0
    assert (
        "overlap"
        in judge(lonely, champion, loggers, which, gains, confidence=0.9, margin=0, min_ess=0.1).reason
    )
    heavy = judge(lonely, champion, loggers, which, gains, confidence=0.9, margin=0, min_ess=0.0)
    assert "weighs" in heavy.reason
    worse = run([0.6, 0.3, 0.1], 0)
    assert "below" in worse.reason
    assert run([0.35, 0.33, 0.32], 0, margin=0.5).passed
    broken = judge(
        candidate, champion, loggers, which, gains * math.nan, confidence=0.9, margin=0, min_ess=0.1
    )
    assert (broken.passed, broken.reason) == (False, "the estimate is not finite")


def test_evaluation_scores_held_out_orchestrations(tmp_path) -> None:
    nets = {0: PolicyNet.initial(CONFIG, 0), 1: PolicyNet.initial(CONFIG, 1), 2: PolicyNet.initial(CONFIG, 2)}
    with_cue = nets[2]
    with_cue.load_state_dict(nets[0].state_dict())
    section = settings(tmp_path).learner
    made = Evaluation(
        section, exploration=EXPLORATION, floor=lambda version: EXPLORATION, load=nets.__getitem__, vocabulary_size=CONFIG.vocabulary_size,
        context=CONFIG.context,
    )  # fmt: skip
    world = World()
    for number in range(80):
        made.add(world.play(nets[number % 2], number % 2, holdout=True), number)
        made.add(world.play(nets[0], 0, holdout=False), number)
    same = made.gate(2, 0, lambda v: 2 - v)
    assert (same.n, same.estimate, same.passed) == (80, 0.0, True)
    mislogged = Evaluation(
        section,
        exploration=0.5,
        floor=lambda version: 0.5,
        load=nets.__getitem__,
        vocabulary_size=CONFIG.vocabulary_size,
        context=CONFIG.context,
    )
    with_bias = nets[1]
    with_bias.head.bias.data[8] += 3.0
    for number in range(40):
        mislogged.add(world.play(with_bias, 1, holdout=True), number)
    assert "needed" in mislogged.gate(2, 0, lambda v: 2 - v).reason
