"""The behaviour distribution: what is reported is what is sampled."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanloop.learner.serving.sampling import MASKED_LOGPROB, behaviour, draw, log_behaviour

logits_of = st.lists(st.floats(-30, 30), min_size=1, max_size=12).map(np.array)


@given(logits_of, st.floats(0.05, 5), st.floats(0, 0.5))
@settings(max_examples=80)
def test_it_is_the_mixture_of_the_definition(logits, temperature, exploration):
    mu = behaviour(logits, temperature=temperature, exploration=exploration)
    weights = [math.exp((x - max(logits)) / temperature) for x in logits]
    for p, w in zip(mu, weights, strict=True):
        assert p == pytest.approx((1 - exploration) * w / sum(weights) + exploration / len(logits), rel=1e-9)
    assert mu.sum() == pytest.approx(1.0, abs=1e-12)
    assert mu.min() >= exploration / len(logits) * (1 - 1e-12)


def test_worked_values():
    assert behaviour(np.log([1.0, 3.0]), exploration=0.1).tolist() == pytest.approx([0.275, 0.725])
    assert behaviour(np.log([1.0, 3.0]), temperature=0.5).tolist() == pytest.approx([0.1, 0.9])
    assert behaviour(np.array([1.0, 2.0, 2.0]), temperature=0.0, exploration=0.3).tolist() == [0, 1, 0]
    assert behaviour(np.log([0.5, 0.3, 0.2]), top_p=0.8).tolist() == pytest.approx([0.625, 0.375, 0.0])
    assert behaviour(np.log([0.5, 0.3, 0.2]), top_p=0.4, exploration=0.3).tolist() == pytest.approx(
        [0.8, 0.1, 0.1]
    )


def test_logarithms_are_float32_and_zero_is_vllms_mark():
    logs = log_behaviour(np.array([0.3, 0.7, 0.0]))
    assert logs[:2] == [float(np.float32(math.log(0.3))), float(np.float32(math.log(0.7)))]
    assert logs[2] == MASKED_LOGPROB


@given(logits_of, st.floats(0, 1, exclude_max=True))
@settings(max_examples=80)
def test_a_draw_has_positive_probability(logits, u):
    mu = behaviour(logits, top_p=0.5)
    assert mu[draw(mu, u)] > 0


def test_draws_have_the_reported_frequencies():
    mu = behaviour(np.array([0.0, 1.0, -2.0]), exploration=0.1)
    rng = random.Random(5)
    counts = np.bincount([draw(mu, rng.random()) for _ in range(20_000)], minlength=3)
    assert np.all(np.abs(counts - 20_000 * mu) < 5 * np.sqrt(20_000 * mu * (1 - mu)))
