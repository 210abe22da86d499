"""Losses: METHODS 4.2's worked values, gradients against finite differences, closed options and weight zero."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from spanloop.learner.losses import (
    effective_sample_size,
    entropy,
    k3,
    menu_log_probs,
    policy_loss,
    soft_greedy_divergence,
    taken,
)
from spanloop.learner.objectives.registry import OBJECTIVES

B = torch.tensor([-1.0, -0.5, -2.0], dtype=torch.float64)
P = torch.tensor([-0.9, -0.7, -1.6], dtype=torch.float64)
T = torch.tensor([-0.8, -0.65, -1.7], dtype=torch.float64)
ONE = torch.ones(3, dtype=torch.float64)


def near(value: Tensor | float, expected: float) -> bool:
    return float(value) == pytest.approx(expected, abs=1e-6)


def test_divergence_and_effective_sample() -> None:
    assert [round(float(x), 6) for x in k3(P - B)] == [0.005171, 0.018731, 0.091825]
    assert near(k3(P - B).mean(), 0.038575)
    assert near(effective_sample_size((P - B).exp()), 2.833723)
    assert float(effective_sample_size(torch.zeros(3))) == 0.0


def test_menu_log_probs_are_the_served_mixture() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0, 9.0], [0.5, 0.0, 0.0, 0.0]], dtype=torch.float64)
    menu = torch.tensor([[0, 2, 0], [1, 2, 3]])
    opened = torch.tensor([[True, True, False], [True, True, True]])
    probs = menu_log_probs(logits, menu, opened, 0.1).exp()
    soft = torch.softmax(torch.tensor([1.0, 3.0], dtype=torch.float64), 0)
    assert torch.allclose(probs[0, :2], 0.9 * soft + 0.05)
    assert float(probs[0, 2]) == 0.0
    assert torch.allclose(probs[1], torch.full((3,), 1 / 3, dtype=torch.float64))
    assert torch.allclose(
        menu_log_probs(logits, menu, opened).exp().sum(1), torch.ones(2, dtype=torch.float64)
    )
    assert near(entropy(menu_log_probs(logits, menu, opened))[1], math.log(3))


def _problem() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    count, vocabulary, options = 12, 7, 4
    menu = torch.stack([torch.randperm(vocabulary, generator=g)[:options] for _ in range(count)])
    opened = torch.ones(count, options, dtype=torch.bool)
    opened[::3, 3] = False
    opened[1, 2:] = False
    prox_logits = torch.randn(count, vocabulary, generator=g, dtype=torch.float64)
    logits = prox_logits + 0.3 * torch.randn(count, vocabulary, generator=g, dtype=torch.float64)
    chosen = torch.tensor([i % 2 for i in range(count)])
    weight = torch.rand(count, generator=g, dtype=torch.float64)
    weight[4] = 0.0
    prox = menu_log_probs(prox_logits, menu, opened)
    return {
        "logits": logits, "menu": menu, "opened": opened, "prox": prox, "chosen": chosen, "weight": weight,
        "behaviour": taken(prox, chosen) + 0.2 * torch.randn(count, generator=g, dtype=torch.float64),
        "advantage": torch.randn(count, generator=g, dtype=torch.float64),
        "values": torch.randn(count, options, generator=g, dtype=torch.float64),
        "valued": torch.tensor([i % 3 == 0 for i in range(count)]),
    }  # fmt: skip


def _loss(problem: dict[str, Tensor], logits: Tensor, *, forward: bool = True) -> Tensor:
    return policy_loss(
        menu_log_probs(logits, problem["menu"], problem["opened"]),
        open_NK=problem["opened"],
        prox_NK=problem["prox"],
        behaviour_N=problem["behaviour"],
        chosen_N=problem["chosen"],
        advantage_N=problem["advantage"],
        values_NK=problem["values"],
        valued_N=problem["valued"],
        weight_N=problem["weight"],
        seq_N=torch.arange(len(problem["weight"])),
        num=len(problem["weight"]),
        exploration=0.05,
        objective=OBJECTIVES["decoupled_ppo"],
        temperature=0.3,
        forward=forward,
    ).loss


@pytest.mark.parametrize("forward", [True, False])
def test_gradient_equals_finite_differences(forward: bool) -> None:
    problem = _problem()
    logits = problem["logits"].clone().requires_grad_()
    _loss(problem, logits, forward=forward).backward()
    assert logits.grad is not None
    step = 1e-6
    for n in range(logits.shape[0]):
        for v in range(logits.shape[1]):
            up, down = problem["logits"].clone(), problem["logits"].clone()
            up[n, v] += step
            down[n, v] -= step
            numeric = float(_loss(problem, up, forward=forward) - _loss(problem, down, forward=forward)) / (
                2 * step
            )
            assert float(logits.grad[n, v]) == pytest.approx(numeric, abs=2e-8, rel=1e-5)


def test_closed_options_and_weightless_decisions_have_no_gradient() -> None:
    problem = _problem()
    logits = problem["logits"].clone().requires_grad_()
    _loss(problem, logits).backward()
    assert logits.grad is not None
    reachable = torch.zeros_like(logits, dtype=torch.bool)
    for n in range(logits.shape[0]):
        if float(problem["weight"][n]) > 0:
            reachable[n, problem["menu"][n][problem["opened"][n]]] = True
    assert bool((logits.grad[~reachable] == 0).all())
    assert bool((logits.grad[reachable] != 0).any())


def test_all_action_gradient_is_value_plus_entropy() -> None:
    """KL(pi || softmax(Q/T)) has the gradient of -(sum pi Q + T H) / T, and its minimum is the soft-greedy policy."""
    problem = _problem()
    menu, opened, values = problem["menu"], problem["opened"], problem["values"]

    def gradient(objective):
        logits = problem["logits"].clone().requires_grad_()
        objective(menu_log_probs(logits, menu, opened)).sum().backward()
        return logits.grad

    one = gradient(lambda logp: soft_greedy_divergence(logp, values, opened, 0.3, forward=False))
    two = gradient(lambda logp: -((logp.exp() * values).sum(1) + 0.3 * entropy(logp)) / 0.3)
    assert torch.allclose(one, two, atol=1e-9)
    best = torch.log_softmax((values / 0.3).masked_fill(~opened, -1e4), 1).masked_fill(~opened, -1e4)
    for forward in (True, False):
        assert float(soft_greedy_divergence(best, values, opened, 0.3, forward=forward).abs().max()) < 1e-12
        assert float(soft_greedy_divergence(problem["prox"], values, opened, 0.3, forward=forward).min()) > 0
