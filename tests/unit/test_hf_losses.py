"""Decisions over the whole vocabulary: their loss against METHODS 4.2's numbers and a formula written out, their batching."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from spanloop.learner.arrays import collate
from spanloop.learner.batches import to_rollout
from spanloop.learner.losses import FullVocabulary, decision_log_probs, joined, policy_loss
from spanloop.learner.model import TensorBatch
from spanloop.learner.objectives.registry import OBJECTIVES
from spanloop.schemas.events import Sample, SamplesBuilt


def loss(theta_N: Any, prox_N: Any, behaviour_N: Any, advantage: float, **options: Any) -> Any:
    """``policy_loss`` of decisions that are all over a vocabulary of 10."""
    count = len(theta_N)
    arguments: dict[str, Any] = {"exploration": 0.0, "temperature": 0.0, **options}
    objective = msgspec.structs.replace(OBJECTIVES["decoupled_ppo"], cap=arguments.pop("cap", 1.3))
    entropy = torch.as_tensor(arguments.pop("entropy", [0.0] * count))
    return policy_loss(
        torch.as_tensor(theta_N)[:, None],
        open_NK=torch.ones(count, 1, dtype=torch.bool),
        prox_NK=torch.as_tensor(prox_N)[:, None],
        behaviour_N=torch.as_tensor(behaviour_N),
        chosen_N=torch.zeros(count, dtype=torch.int64),
        advantage_N=torch.full((count,), advantage),
        values_NK=torch.zeros(count, 1),
        valued_N=torch.zeros(count, dtype=torch.bool),
        weight_N=torch.full((count,), 1.0 / count),
        seq_N=torch.zeros(count, dtype=torch.int64),
        num=1,
        objective=objective,
        full=FullVocabulary(torch.ones(count, dtype=torch.bool), entropy, 10),
        **arguments,
    )


BEHAVIOUR, PROX, THETA = [-1.0, -0.5, -2.0], [-0.9, -0.7, -1.6], [-0.8, -0.65, -1.7]


@pytest.mark.parametrize(("advantage", "cap", "expected"), [
    (1.0, 1.3, 1.086133), (-1.0, 1.3, -1.086133), (1.0, 1e9, 1.143990), (-1.0, 1e9, -1.143990),
])  # fmt: skip
def test_decoupled_ppo_numbers_of_methods(advantage: float, cap: float, expected: float) -> None:
    terms = loss(THETA, PROX, BEHAVIOUR, advantage, cap=cap)
    assert float(terms.loss) == pytest.approx(-expected, abs=2e-6)
    assert terms.kl == pytest.approx(np.mean([np.exp(d) - d - 1 for d in (0.1, 0.05, -0.1)]), abs=1e-6)
    if cap > 1e8:
        assert terms.ess == pytest.approx(0.944575, abs=1e-5)


def test_entropy_bonus_and_exploration_floor() -> None:
    plain = loss(THETA, PROX, BEHAVIOUR, 1.0)
    warm = loss(THETA, PROX, BEHAVIOUR, 1.0, temperature=0.5, entropy=[1.0, 2.0, 0.6])
    assert float(warm.loss) == pytest.approx(float(plain.loss) - 0.5 * 1.2, abs=1e-6)
    assert warm.entropy == pytest.approx(1.2)
    floored = loss(THETA, PROX, BEHAVIOUR, 1.0, exploration=0.1)

    def mixed(values: list[float]) -> np.ndarray:
        return 0.9 * np.exp(values) + 0.1 / 10

    drift = np.minimum(mixed(PROX) / np.exp(BEHAVIOUR), 1.3)
    ratio = mixed(THETA) / mixed(PROX)
    expected = np.mean(drift * np.minimum(ratio, np.clip(ratio, 0.8, 1.2)))
    assert float(floored.loss) == pytest.approx(-expected, abs=1e-6)


def test_loss_and_gradient_from_logits_as_written_out() -> None:
    """Decisions with a menu and over the vocabulary in one batch, against plain double-precision formulas."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 7, generator=generator, dtype=torch.float64).requires_grad_()
    behaviour = torch.tensor([-1.5, -2.0, -0.7, -1.0], dtype=torch.float64)
    advantage = torch.tensor([1.0, -0.5, 2.0, -1.0], dtype=torch.float64)
    weight = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64)
    full = torch.tensor([True, False, True, False])
    menu = torch.tensor([[3, 0, 0], [1, 4, 6], [5, 0, 0], [2, 3, 0]])
    opened = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 0, 0], [1, 1, 0]], dtype=torch.bool)
    chosen = torch.tensor([0, 2, 0, 1])
    theta, entropy = decision_log_probs(logits, menu, opened, full)
    prox = theta.detach() - torch.tensor([[0.05], [0.3], [-0.4], [0.0]])
    terms = policy_loss(
        theta, open_NK=opened, prox_NK=prox, behaviour_N=behaviour, chosen_N=chosen, advantage_N=advantage,
        values_NK=torch.zeros(4, 3, dtype=torch.float64), valued_N=torch.zeros(4, dtype=torch.bool), weight_N=weight,
        seq_N=torch.arange(4), num=4, exploration=0.0, objective=OBJECTIVES["decoupled_ppo"], temperature=0.1,
        full=FullVocabulary(full, entropy, 7),
    )  # fmt: skip
    terms.loss.backward()

    again = logits.detach().clone().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for n, options in enumerate([list(range(7)), [1, 4, 6], list(range(7)), [2, 3]]):
        logp = again[n, options].log_softmax(0)
        token = int(menu[n, chosen[n]])
        new, old = logp[options.index(token)], float(prox[n, chosen[n]])
        ratio, drift = (new - old).exp(), min(2.0, float(np.exp(old - float(behaviour[n]))))
        surrogate = drift * torch.minimum(ratio * advantage[n], ratio.clamp(0.8, 1.2) * advantage[n])
        total = total - weight[n] * (surrogate + 0.1 * -(logp.exp() * logp).sum())
    total.backward()
    assert terms.loss.item() == pytest.approx(total.item(), abs=1e-12)
    assert torch.allclose(logits.grad, again.grad, atol=1e-12)  # type: ignore[arg-type]


def test_parts_of_a_minibatch_add_up() -> None:
    whole = loss(THETA, PROX, BEHAVIOUR, 1.0, temperature=0.5, entropy=[1.0, 2.0, 0.6])
    parts = []
    for part in (slice(0, 2), slice(2, 3)):
        terms = loss(
            THETA[part], PROX[part], BEHAVIOUR[part], 1.0, temperature=0.5, entropy=[1.0, 2.0, 0.6][part]
        )
        share = len(THETA[part]) / 3
        parts.append(
            type(terms)(terms.loss * share, terms.entropy, terms.clipped, terms.kl, terms.ess, share, terms.decisions, terms.drift)
        )  # fmt: skip
    got = joined(parts)
    assert float(got.loss) == pytest.approx(float(whole.loss), abs=1e-6)
    for name in ("entropy", "clipped", "kl", "ess"):
        assert getattr(got, name) == pytest.approx(getattr(whole, name), abs=1e-6)


# ---------------------------------------------------------------- from samples


def row(**changes: Any) -> Sample:
    made: dict[str, Any] = {
        "call_id": "c", "agent_id": "a", "role": "r", "policy_version": "policy@v1", "prompt_token_ids": (1, 2),
        "response_token_ids": (5, 6, 7), "logprobs": (-1.0, -0.5, 0.0), "advantages": (10, 20, 30),
        "accounts": ("t0", "t1", "t2"), **changes,
    }  # fmt: skip
    return Sample(**made)


def built(*rows: Sample) -> SamplesBuilt:
    return SamplesBuilt(
        orchestration_id="o", revision=1, group="g", harness="h", reward=0, baseline=0, value_model="", holdout=False, rows=rows
    )  # fmt: skip


def test_tokens_without_menus_are_decisions_of_the_whole_vocabulary() -> None:
    size = {"vocabulary_size": 10, "context": 16}
    assert to_rollout(built(row()), **size) == "no_menu"
    rollout = to_rollout(built(row()), **size, full_vocabulary=True)
    assert not isinstance(rollout, str)
    assert [(d.position, d.menu, d.behaviour) for d in rollout.calls[0].decisions] == [
        (1, (), -1.0), (2, (), -0.5), (3, (), 0.0),
    ]  # fmt: skip
    arrays = collate([rollout])
    assert arrays.full_N.all()
    assert arrays.menu_NK[:, 0].tolist() == [5, 6, 7]
    assert arrays.open_NK.tolist() == [[True]] * 3


def test_menus_that_were_cut_count_as_the_whole_vocabulary() -> None:
    """The gateway records the sampled token alone where the server did not list all options."""
    mixed = row(
        menu_ids=((5,), (6, 8), (7,)),
        menu_logprobs=((-1.0,), (float(np.log(0.6)), float(np.log(0.4))), (0.0,)),
    )
    rollout = to_rollout(built(mixed), vocabulary_size=10, context=16, full_vocabulary=True)
    assert not isinstance(rollout, str)
    assert [d.menu for d in rollout.calls[0].decisions] == [(), (6, 8)]
    assert rollout.forced == 1
    arrays = collate([rollout])
    assert arrays.full_N.tolist() == [True, False]
    assert arrays.menu_NK.tolist() == [[5, 0], [6, 8]]
    assert arrays.open_NK.tolist() == [[True, False], [True, True]]


def test_parts_hold_every_decision_once() -> None:
    rows = [row(prompt_token_ids=tuple([1] * n)) for n in (2, 9, 4, 4, 1)]
    rollout = to_rollout(built(*rows), vocabulary_size=10, context=16, full_vocabulary=True)
    assert not isinstance(rollout, str)
    batch = TensorBatch.of(collate([rollout]))
    for tokens, count in ((1, 5), (15, 3), (10_000, 1)):
        parts = list(batch.parts(tokens))
        assert len(parts) == count
        assert sorted(i for _, index in parts for i in index.tolist()) == list(range(15))
        for part, index in parts:
            assert part.ids_BT.shape[1] == int(part.lengths_B.max())
            assert torch.equal(part.weight_N, batch.weight_N[index])
            assert torch.equal(part.ids_BT[part.row_N, part.position_N + 1], part.menu_NK[:, 0])
