"""Objectives against frozen values of verl, METHODS 4.2's worked values, and gradients by finite differences."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import torch
from torch import Tensor

from spanloop.learner.arrays import collate, summed
from spanloop.learner.batches import Call, Decision, Rollout
from spanloop.learner.losses import k3
from spanloop.learner.model import TensorBatch
from spanloop.learner.objectives.means import MEANS, token_weights
from spanloop.learner.objectives.ratios import accepted, weights
from spanloop.learner.objectives.registry import OBJECTIVES, Objective, token_losses
from spanloop.learner.objectives.surrogates import Clip, Surrogate, Tokens, cispo, gspo, ppo, reinforce
from spanloop.learner.policy import PolicyConfig, PolicyNet
from spanloop.learner.update import Hyper, Updater, hyper_of
from spanloop.schemas.settings import Learner, load_settings

REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "golden" / "objectives" / "reference.json").read_text()
)
MASK = torch.tensor(REFERENCE["inputs"]["mask"], dtype=torch.bool)
NUM, WIDTH = MASK.shape
SEQ = torch.arange(NUM)[:, None].expand(NUM, WIDTH)[MASK]
VERL: dict[str, Surrogate] = {"vanilla": ppo, "gspo": gspo, "cispo": cispo}
CLIPS = {"symmetric": (0.2, 0.2), "clip_higher": (0.2, 0.28), "tight": (0.05, 0.05)}


def flat(name: str) -> Tensor:
    return torch.tensor(REFERENCE["inputs"][name], dtype=torch.float64)[MASK]


def padded(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[MASK]


def check(name: str, loss_N: Tensor, theta: Tensor, mean: str) -> None:
    loss = (token_weights(SEQ, NUM, mean, horizon=WIDTH) * loss_N).sum()
    (gradient,) = torch.autograd.grad(loss, theta)
    torch.testing.assert_close(loss.item(), REFERENCE[name]["loss"], atol=1e-7, rtol=1e-7)
    torch.testing.assert_close(gradient, padded(REFERENCE[name]["gradient"]), atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("anchor", ["prox", "behaviour"])
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("name", VERL)
def test_surrogates_and_means_are_verls(name: str, clip: str, anchor: str, mean: str) -> None:
    theta = flat("theta").requires_grad_()
    low, high = CLIPS[clip]
    dual = 3.0 if name == "vanilla" else 0.0
    loss_N = VERL[name](Tokens(theta, flat(anchor), flat("advantage"), SEQ, NUM), Clip(low, high, dual))
    check(f"{name}/{mean}/{clip}/{anchor}", loss_N, theta, mean)


@pytest.mark.parametrize("mean", MEANS)
def test_corrected_objectives_are_verls(mean: str) -> None:
    for name, objective in (
        ("decoupled_tis", Objective(ppo, cap=1.3, clip=Clip(dual=3.0))),
        ("reinforce_tis", Objective(reinforce, cap=1.3)),
    ):
        theta = flat("theta").requires_grad_()
        check(f"{name}/{mean}", run(objective, theta), theta, mean)


def run(objective: Objective, theta: Tensor) -> Tensor:
    tokens = Tokens(theta, flat("prox"), flat("advantage"), SEQ, NUM)
    return token_losses(objective, tokens, flat("behaviour"))


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_correction_weights_are_verls(level: str) -> None:
    tis = weights(flat("prox"), flat("behaviour"), SEQ, NUM, kind="tis", level=level, cap=1.3)
    mis = weights(flat("prox"), flat("behaviour"), SEQ, NUM, kind="mis", floor=0.7, level=level, cap=1.3)
    torch.testing.assert_close(tis, padded(REFERENCE[f"correction/{level}/1.3"]))
    torch.testing.assert_close(mis, padded(REFERENCE[f"correction/{level}/0.7_1.3"]))


@pytest.mark.parametrize(
    ("name", "kind", "lower", "upper"),
    [
        ("token_k3/0.1", "token_k3", 0.0, 0.1),
        ("seq_mean_k3/0.08", "k3", 0.0, 0.08),
        ("seq_mean_k1/0.9_1.1", "geometric", 1 / 1.1, 1 / 0.9),
    ],
)
def test_rejection_is_verls(name: str, kind: str, lower: float, upper: float) -> None:
    kept = accepted(flat("prox"), flat("behaviour"), SEQ, NUM, kind=kind, lower=lower, upper=upper)
    expected = padded(REFERENCE[f"rejection/{name}"]).bool()
    assert kept.tolist() == expected.tolist()
    assert 0 < int(kept.sum()) < len(kept)


def test_k3_is_verls() -> None:
    torch.testing.assert_close(k3(flat("prox") - flat("theta")), padded(REFERENCE["kl/k3"]))


B = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64)
P = torch.tensor([-0.9, -0.7, -1.6], dtype=torch.float64)
T = torch.tensor([-0.8, -0.65, -1.7], dtype=torch.float64)
ONE = torch.ones(3, dtype=torch.float64)
ALL = torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("name", "plus", "minus"),
    [
        ("ppo", 1.020426, -1.020426),
        ("decoupled_ppo", 1.086133, -1.086133),
        ("mis", 0.694037, -0.694037),
        ("bypass_ppo", 1.086903, -1.143990),
        ("gspo", 1.0004, -1.123745),
    ],
)
def test_worked_values(name: str, plus: float, minus: float) -> None:
    """METHODS 4.2 (cap 1.3; losses are minus the objective)."""
    objective = msgspec.structs.replace(OBJECTIVES[name], cap=1.3)
    for sign, expected in ((1.0, plus), (-1.0, minus)):
        loss = token_losses(objective, Tokens(T, P, sign * ONE, ALL, 1), B).mean()
        assert float(loss) == pytest.approx(-expected, abs=1e-6)


def test_worked_values_of_cispo_and_the_sequence() -> None:
    objective = OBJECTIVES["cispo"]
    got = token_losses(objective, Tokens(T, P, ONE, ALL, 1), B)
    assert float(got.mean()) == pytest.approx(1.237527, abs=1e-6)
    whole = weights(T, B, ALL, 1, kind="tis", cap=5.0, level="sequence")
    assert float(whole[0]) == pytest.approx(1.419068, abs=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_by_finite_differences(name: str) -> None:
    """GSPO and CISPO stop a gradient on purpose: theirs is compared with the weight they say they use."""
    objective = OBJECTIVES[name]
    theta = flat("theta").requires_grad_()
    (gradient,) = torch.autograd.grad(run(objective, theta).sum(), theta)
    if objective.surrogate in (gspo, cispo):
        old = flat("behaviour")
        log_ratio = (theta - old).detach()
        if objective.surrogate is gspo:
            sums = torch.zeros(NUM, dtype=torch.float64).index_add(0, SEQ, log_ratio)
            counts = torch.zeros(NUM, dtype=torch.float64).index_add(0, SEQ, torch.ones_like(log_ratio))
            ratio = (sums / counts)[SEQ].exp()
            clipped = ratio.clamp(1 - objective.clip.low, 1 + objective.clip.high)
            advantage = flat("advantage")
            active = ratio * advantage <= clipped * advantage
            expected = torch.where(active, -advantage * ratio, torch.zeros_like(ratio))
        else:
            clipped = log_ratio.exp().clamp(1 - objective.clip.low, 1 + objective.clip.high)
            expected = -clipped * flat("advantage")
        torch.testing.assert_close(gradient, expected)
        return
    step = 1e-6
    base = flat("theta")
    for i in range(0, len(base), 5):
        ends = []
        for sign in (1, -1):
            moved = base.clone()
            moved[i] += sign * step
            ends.append(float(run(objective, moved).sum()))
        assert float(gradient[i]) == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_nothing_is_infinite(name: str) -> None:
    theta = torch.tensor([-1e4, 0.0, -50.0], dtype=torch.float64, requires_grad=True)
    behaviour = torch.tensor([0.0, -1e4, -50.0], dtype=torch.float64)
    for sign in (1.0, -1.0):
        loss = token_losses(
            OBJECTIVES[name], Tokens(theta, theta.detach(), sign * ONE, ALL, 1), behaviour
        ).sum()
        (gradient,) = torch.autograd.grad(loss, theta)
        assert bool(torch.isfinite(loss))
        assert bool(torch.isfinite(gradient).all())


@pytest.mark.parametrize("mean", MEANS)
def test_means_count_sequences_or_tokens(mean: str) -> None:
    weight = token_weights(SEQ, NUM, mean, horizon=WIDTH)
    if mean.endswith("mean"):
        assert float(weight.sum()) == pytest.approx(1.0)
    if mean == "seq-mean-token-mean":
        sums = torch.zeros(NUM, dtype=torch.float64).index_add(0, SEQ, weight)
        assert sums.tolist() == pytest.approx([1 / NUM] * NUM)


@pytest.mark.parametrize("mean", MEANS)
def test_the_learners_batches_weigh_as_the_means_say(mean: str) -> None:
    """What trains is ``arrays``' weights: those of verl's means, with a model call as the sequence."""
    calls = tuple(
        Call((1, *[2] * count), tuple(Decision(at, MENU, 0, -1.0, 0.0) for at in range(count)))
        for count in (5, 1, 3)
    )
    arrays = summed(collate([Rollout("o", 1, "g", 0.0, 0.0, (0,), calls)], weighting=mean), mean, 7)
    expected = token_weights(torch.from_numpy(arrays.row_N), len(calls), mean, horizon=7)
    assert arrays.weight_N.tolist() == pytest.approx(expected.tolist(), rel=1e-6)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="token-mean"):
        token_weights(SEQ, NUM, "mean")
    with pytest.raises(ValueError, match="horizon"):
        token_weights(SEQ, NUM, "seq-mean-token-sum-norm")


def test_settings_name_every_objective_and_mean() -> None:
    fields = Learner.model_fields
    assert set(get_args(fields["objective"].annotation)) == set(OBJECTIVES)
    assert set(get_args(fields["weighting"].annotation)) == {"", "decision", "rollout", *MEANS}


def test_an_objective_brings_its_numbers_and_settings_overrule_them() -> None:
    def hyper(**learner: Any) -> Hyper:
        return hyper_of(load_settings(flags={"learner": learner}))

    assert hyper(objective="dapo").named().clip == Clip(0.2, 0.28, 0.0)
    assert hyper(objective="dapo", clip=0.1).named().clip == Clip(0.1, 0.1, 0.0)
    assert hyper(objective="ppo").named().clip.dual == 3.0
    assert hyper(objective="sequence_tis").named().cap == 5.0
    assert hyper(objective="sequence_tis", ratio_cap=3.0).named().cap == 3.0
    assert hyper(objective="dr_grpo").horizon == 64
    assert hyper(objective="grpo").weighting == "seq-mean-token-mean"
    assert hyper(objective="grpo", weighting="rollout").weighting == "rollout"
    assert hyper().named() == msgspec.structs.replace(OBJECTIVES["decoupled_ppo"])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_every_objective_learns(name: str) -> None:
    """A bandit over words: what pays becomes likely, from samples of an older policy."""
    updater = Updater(
        PolicyNet.initial(PolicyConfig(vocabulary_size=8, context=8, width=16, layers=1, heads=2), 0)
    )
    hyper = msgspec.structs.replace(
        hyper_of(load_settings(flags={"learner": {"objective": name}})),
        learning_rate=3e-3, epochs=2, entropy_start=0.0, entropy_end=0.0, exploration=0.0, horizon=1,
    )  # fmt: skip
    for batch in range(1, 13):
        updater.train(_bandit(updater, seed=batch), hyper, batch)
    assert _chance(updater) > 0.5, _chance(updater)


MENU = (2, 3, 4)


def _probabilities(updater: Updater) -> list[float]:
    call = Call((1, 2), (Decision(0, MENU, 0, 0.0, 0.0),))
    batch = TensorBatch.of(collate([Rollout("o", 1, "g", 0.0, 0.0, (0,), (call,))]))
    with torch.no_grad():
        return updater.net.decide(batch)[0][0].exp().tolist()


def _chance(updater: Updater) -> float:
    return _probabilities(updater)[1]


def _bandit(updater: Updater, seed: int) -> list[Rollout]:
    """32 rollouts that took options as the policy does now; the second pays."""
    chances = torch.tensor(_probabilities(updater), dtype=torch.float64)
    taken = torch.multinomial(
        chances, 32, replacement=True, generator=torch.Generator().manual_seed(seed)
    ).tolist()
    mean = sum(choice == 1 for choice in taken) / len(taken)
    made = []
    for number, choice in enumerate(taken):
        decision = Decision(0, MENU, choice, math.log(float(chances[choice])), float(choice == 1) - mean)
        call = Call((1, MENU[choice]), (decision,))
        made.append(Rollout(f"o{number}", 1, "g", float(choice == 1), mean, (0,), (call,)))
    return made
