"""Reference values of losses, advantages and off-policy estimates from other people's code; writes reference.json beside it.

Not run by the tests: it needs `pip install verl==0.9.1 torchrl==0.14.1 obp==0.4.1` (with ray, omegaconf, tensordict, scikit-learn) in an
environment of its own. What it writes is frozen; the tests compare ours with it.
Run: ENV/bin/python tests/golden/objectives/make_reference.py
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from obp.ope import (
    DoublyRobust,
    InverseProbabilityWeighting,
    SelfNormalizedDoublyRobust,
    SelfNormalizedInverseProbabilityWeighting,
)
from torchrl.objectives.value.functional import generalized_advantage_estimate, vtrace_advantage_estimate
from verl.trainer.ppo import core_algos as verl
from verl.trainer.ppo.rollout_corr_helper import (
    compute_rollout_correction_weights,
    compute_rollout_rejection_mask,
)
from verl.workers.config import ActorConfig

MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def main() -> None:
    torch.manual_seed(20_26)
    rows, width = 6, 9
    lengths = torch.tensor([9, 5, 1, 7, 3, 8])
    mask = (torch.arange(width)[None, :] < lengths[:, None]).double()
    behaviour = -3.0 * torch.rand(rows, width, dtype=torch.float64)
    prox = behaviour + 0.4 * torch.randn(rows, width, dtype=torch.float64)
    theta = (prox + 0.3 * torch.randn(rows, width, dtype=torch.float64)).requires_grad_()
    advantage = torch.randn(rows, width, dtype=torch.float64)
    groups = np.array(["a", "a", "b", "a", "b", "c"])
    outcomes = torch.tensor([1.0, 0.0, 0.25, 0.5, 1.0, 0.7], dtype=torch.float64)
    found: dict[str, Any] = {}

    def lossy(name: str, loss: torch.Tensor) -> None:
        (gradient,) = torch.autograd.grad(loss, theta)
        found[name] = {"loss": loss.item(), "gradient": gradient.tolist()}

    for mode in MODES:
        for name, low, high in (("symmetric", 0.2, 0.2), ("clip_higher", 0.2, 0.28), ("tight", 0.05, 0.05)):
            config = ActorConfig(
                strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True,
                clip_ratio=low, clip_ratio_low=low, clip_ratio_high=high,
            )  # fmt: skip
            for anchor, old in (("prox", prox), ("behaviour", behaviour)):
                for objective in ("vanilla", "gspo", "cispo"):
                    loss, _ = verl.get_policy_loss_fn(objective)(
                        old, theta, advantage, mask, mode, config, None
                    )
                    lossy(f"{objective}/{mode}/{name}/{anchor}", loss)
        weights, _ = compute_rollout_correction_weights(prox - behaviour, mask, "token", 1.3)
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, use_dynamic_bsz=True
        )
        loss, _ = verl.compute_policy_loss_vanilla(prox, theta, advantage, mask, mode, config, weights)
        lossy(f"decoupled_tis/{mode}", loss)
        loss, _ = verl.compute_policy_loss_reinforce(behaviour, theta, advantage, mask, mode, config, weights)
        lossy(f"reinforce_tis/{mode}", loss)
    for level in ("token", "sequence"):
        for threshold in ("1.3", "0.7_1.3"):
            weights, _ = compute_rollout_correction_weights(prox - behaviour, mask, level, threshold)
            found[f"correction/{level}/{threshold}"] = weights.tolist()
    for option, threshold in (
        ("token_k1", "0.8_1.25"), ("token_k2", "0.1"), ("token_k3", "0.1"), ("seq_mean_k1", "0.9_1.1"),
        ("seq_mean_k3", "0.08"), ("seq_sum_k1", "0.5_2.0"), ("seq_sum_k3", "0.4"), ("seq_max_k3", "0.3"),
    ):  # fmt: skip
        kept, _ = compute_rollout_rejection_mask(prox - behaviour, mask, option, threshold)
        found[f"rejection/{option}/{threshold}"] = kept.tolist()
    for kind in ("k1", "k2", "k3"):
        found[f"kl/{kind}"] = verl.kl_penalty(theta.detach(), prox, kind).tolist()
    rewards = torch.zeros(rows, width, dtype=torch.float64)
    rewards[:, 0] = outcomes
    ones = torch.ones_like(mask)
    for name, by_std in (("grpo", True), ("dr_grpo", False)):
        got, _ = verl.compute_grpo_outcome_advantage(rewards, ones, groups, 1e-6, by_std)
        found[f"advantage/{name}"] = got[:, 0].tolist()
    got, _ = verl.compute_rloo_outcome_advantage(rewards, ones, groups)
    found["advantage/rloo"] = got[:, 0].tolist()

    steps = 12  # gamma and lambda below are exact in float32, in which torchrl keeps them
    reward = torch.randn(steps, 1, dtype=torch.float64)
    value = torch.randn(steps, 1, dtype=torch.float64)
    following = torch.cat([value[1:], torch.zeros(1, 1, dtype=torch.float64)])
    done = torch.zeros(steps, 1, dtype=torch.bool)
    done[-1] = True
    pi = -2.0 * torch.rand(steps, 1, dtype=torch.float64)
    mu = pi + 0.8 * torch.randn(steps, 1, dtype=torch.float64)
    series = {"reward": reward, "value": value, "pi": pi, "mu": mu}
    found["series"] = {name: tensor[:, 0].tolist() for name, tensor in series.items()}
    for rho_max, c_max in ((1.0, 1.0), (2.0, 1.5)):
        advantage_t, target = vtrace_advantage_estimate(
            0.96875, pi, mu, value, following, reward, done, done,
            rho_thresh=torch.tensor(rho_max, dtype=torch.float64), c_thresh=torch.tensor(c_max, dtype=torch.float64),
        )  # fmt: skip
        found[f"vtrace/{rho_max}/{c_max}"] = {
            "advantage": advantage_t[:, 0].tolist(), "target": target[:, 0].tolist(),
        }  # fmt: skip
    advantage_g, target = generalized_advantage_estimate(0.96875, 0.875, value, following, reward, done, done)
    found["gae"] = {"advantage": advantage_g[:, 0].tolist(), "target": target[:, 0].tolist()}

    random = np.random.default_rng(7)
    rounds, actions = 400, 4
    target_p = random.dirichlet(np.ones(actions), rounds)
    logged_p = random.dirichlet(2.0 * np.ones(actions), rounds)
    action = np.array([random.choice(actions, p=p) for p in logged_p])
    gain = random.normal(size=rounds)
    q = random.normal(size=(rounds, actions))
    arguments = {
        "reward": gain, "action": action, "pscore": logged_p[np.arange(rounds), action],
        "action_dist": target_p[:, :, None],
    }  # fmt: skip
    hat = {"estimated_rewards_by_reg_model": q[:, :, None]}
    found["ope"] = {
        "target": target_p.tolist(), "pscore": arguments["pscore"].tolist(), "action": action.tolist(),
        "reward": gain.tolist(), "q": q.tolist(),
        "ips": InverseProbabilityWeighting().estimate_policy_value(**arguments),
        "snips": SelfNormalizedInverseProbabilityWeighting().estimate_policy_value(**arguments),
        "dr": DoublyRobust().estimate_policy_value(**arguments, **hat),
        "sndr": SelfNormalizedDoublyRobust().estimate_policy_value(**arguments, **hat),
    }  # fmt: skip
    inputs = SimpleNamespace(
        mask=mask,
        behaviour=behaviour,
        prox=prox,
        theta=theta.detach(),
        advantage=advantage,
        outcomes=outcomes,
    )
    found["inputs"] = {name: tensor.tolist() for name, tensor in vars(inputs).items()} | {
        "groups": groups.tolist()
    }
    lines = [f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found)]
    Path(__file__).with_name("reference.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
