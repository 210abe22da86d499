"""Canary: METHODS 4.5's half-width; error rate and power of the sequential test in a seeded simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from spanloop.learner.canary import Arm, CanaryTest, normal_mixture, one_sided_mixture, tuned_rho2
from spanloop.schemas.canonical import micro


def test_worked_value() -> None:
    assert normal_mixture(0.5, 1000, 0.05, 0.01) == pytest.approx(0.048032, abs=1e-6)
    assert one_sided_mixture(0.5, 1000, 0.05, 0.01) < normal_mixture(0.5, 1000, 0.05, 0.01)
    widths = {n: one_sided_mixture(0.5, 200, 0.05, tuned_rho2(n, 0.05)) for n in (20, 200, 2000)}
    assert min(widths, key=lambda n: widths[n]) == 200


def test_arm_is_exact_and_order_free() -> None:
    one, other = Arm(), Arm()
    rows = [("a", 1, 100), ("b", 1, 300), ("a", 2, 500), ("c", 1, -700)]
    for row in rows:
        one.add(*row)
    for row in reversed(rows):
        other.add(*row)
    one.add("a", 1, 10**6)
    assert (one.count, one.mean, one.variance) == (other.count, other.mean, other.variance)
    assert one.mean == pytest.approx((500 + 300 - 700) / 3 / 1e6)
    assert one.variance == pytest.approx(np.var([5e-4, 3e-4, -7e-4], ddof=1))
    for name in "abc":
        one.discard(name)
    assert (one.count, one.mean, one.variance) == (0, 0.0, 0.0)


def fresh(**changes: float) -> CanaryTest:
    options = {"confidence": 0.95, "minimum": 50, "maximum": 300, "max_s": 600.0, **changes}
    return CanaryTest(
        confidence=options["confidence"], minimum=int(options["minimum"]), maximum=int(options["maximum"]),
        max_s=options["max_s"],
    )  # fmt: skip


def test_champion_arm_opens_with_the_candidates_first_result() -> None:
    test = fresh()
    test.add("early", 1, 5, candidate=False)
    test.add("x", 1, 5, candidate=True)
    test.add("y", 1, 5, candidate=False)
    assert (test.candidate.count, test.champion.count) == (1, 1)
    test.add("y", 2, 5, candidate=True)
    assert (test.candidate.count, test.champion.count) == (2, 0)


def test_limits_end_it_as_inconclusive() -> None:
    test = fresh(maximum=10)
    assert test.verdict(0).verdict == ""
    assert test.verdict(600.0).verdict == "inconclusive"
    for i in range(10):
        test.add(str(i), 1, 0, candidate=True)
    assert test.verdict(0).verdict == "inconclusive"
    assert math.isinf(test.verdict(0).upper)


def test_constant_rewards_do_not_divide_by_zero() -> None:
    test = fresh()
    for i in range(60):
        test.add(f"c{i}", 1, 500_000, candidate=True)
        test.add(f"o{i}", 1, 400_000, candidate=False)
    assert test.verdict(0).verdict == "promote"


def simulate(difference: float, seed: int, *, share: float = 0.5, deviation: float = 0.33) -> tuple[str, int]:
    """Verdict and orchestrations used when the candidate's mean is ``difference`` higher; a look after each ten."""
    rng = np.random.default_rng(seed)
    test = fresh()
    for look in range(1, 10_000):
        for place in range(10):
            candidate = bool(rng.random() < share)
            high = rng.random() < 0.5 + difference / (2 * deviation) * candidate
            test.add(f"{look}/{place}", 1, micro(deviation if high else -deviation), candidate=candidate)
        verdict = test.verdict(0).verdict
        if verdict:
            return verdict, look * 10
    raise AssertionError("no verdict")


@pytest.mark.parametrize(
    ("difference", "verdict", "at_least", "within"),
    [(0.2, "promote", 0.98, 250), (0.12, "promote", 0.9, 400), (-0.15, "reject", 0.95, 300)],
)
def test_power(difference: float, verdict: str, at_least: float, within: int) -> None:
    """Rewards of standard deviation .33: a few hundred orchestrations are enough for differences worth having."""
    results = [simulate(difference, seed) for seed in range(100)]
    right = sum(v == verdict for v, _ in results) / len(results)
    used = float(np.median([n for _, n in results]))
    print(f"difference {difference:+}: {verdict} {right:.0%}, median {used:.0f} orchestrations")
    assert right >= at_least
    assert used <= within


def test_false_promotions() -> None:
    """Equal arms, looked at after every ten orchestrations: wrong in at most 5 % on either side."""
    results = [simulate(0.0, 1000 + seed)[0] for seed in range(200)]
    print("equal arms:", {v: results.count(v) for v in sorted(set(results))})
    assert results.count("promote") <= 10
    assert results.count("reject") <= 10


def test_the_control_variate_does_not_depend_on_the_policy() -> None:
    """Two versions meet the same starts; the bad one closes at once, which its own baseline foresees. The canary must see it."""
    from types import SimpleNamespace

    from spanloop.learner.evaluation import Evaluation
    from spanloop.schemas.events import CanaryStarted, Sample, SamplesBuilt
    from spanloop.schemas.settings import Learner

    made = Evaluation(
        Learner(canary_min=20),
        exploration=0.0,
        floor=lambda v: 0.0,
        load=lambda v: SimpleNamespace(),
        vocabulary_size=9,
        context=8,
    )
    canary = CanaryStarted(canary=0, version=2, against=1, share=0.3, from_offset=-1)
    made.watch(canary)
    for number in range(200):
        bad = number % 2 == 0
        row = Sample(f"c{number}", "a", "r", f"policy@v{2 if bad else 1}", (1,), (2,), (-0.1,), (0,), ("t",),
                     menu_values=((0, 400_000),))  # fmt: skip
        reward = 0 if bad else 350_000 + 100_000 * (-1) ** (number // 2)
        made.add(
            SamplesBuilt(orchestration_id=f"o{number}", revision=1, group="g", harness="h", reward=reward,
                         baseline=0 if bad else 350_000, value_model="v", holdout=False, rows=(row,)), number,
        )  # fmt: skip
    verdict = made.canary_verdict(1.0)
    assert verdict is not None
    assert verdict.verdict == "reject"
