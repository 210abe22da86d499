"""Objectives by name: which surrogate, against which policy, with which correction, trust region and mean.

A deployment names one (``[learner] objective``) and may overrule single numbers. A new objective enters with a benchmark that it
wins, as a surrogate and a line here.
"""

from __future__ import annotations

import msgspec
from torch import Tensor

from spanloop.learner.objectives.ratios import accepted, weights
from spanloop.learner.objectives.surrogates import Clip, Surrogate, Tokens, cispo, gspo, ppo, reinforce

__all__ = ["OBJECTIVES", "Objective", "token_losses"]


class Objective(msgspec.Struct, frozen=True):
    """A named objective."""

    surrogate: Surrogate
    behaviour: bool = False
    """The ratio is against the policy that acted, and there is no drift one left to correct; else against the one before the
    update."""
    clip: Clip = Clip()
    correction: str = "tis"
    """none, tis or mis."""
    level: str = "token"
    """token or sequence: of the correction's weights."""
    cap: float = 2.0
    """Largest weight of the correction."""
    floor: float = 0.0
    """Smallest weight that mis keeps."""
    rejection: str = "none"
    """none, token_k3, k3 or geometric."""
    bounds: tuple[float, float] = (0.0, 0.0)
    """Lower and upper bound of the rejection."""
    mean: str = "token-mean"


OBJECTIVES: dict[str, Objective] = {
    "decoupled_ppo": Objective(ppo),
    "ppo": Objective(ppo, correction="none", clip=Clip(dual=3.0)),
    "bypass_ppo": Objective(ppo, behaviour=True, correction="none"),
    "grpo": Objective(ppo, mean="seq-mean-token-mean"),
    "dapo": Objective(ppo, clip=Clip(0.2, 0.28)),
    "dr_grpo": Objective(ppo, mean="seq-mean-token-sum-norm"),
    "gspo": Objective(
        gspo, behaviour=True, correction="none", clip=Clip(3e-4, 4e-4), mean="seq-mean-token-mean"
    ),
    "cispo": Objective(cispo, behaviour=True, correction="none", clip=Clip(0.2, 0.28)),
    "reinforce": Objective(reinforce),
    "mis": Objective(ppo, correction="mis"),
    "sequence_tis": Objective(ppo, level="sequence", cap=5.0),
    "k3_rejection": Objective(ppo, rejection="k3", bounds=(0.0, 0.01)),
    "geometric_rejection": Objective(ppo, rejection="geometric", bounds=(0.99, 1.01)),
}
"""Group-relative advantages (grpo, dapo, dr_grpo) are a matter of ``[learner] advantage``: any objective takes any advantage."""


def token_losses(objective: Objective, tokens: Tokens, behaviour_N: Tensor) -> Tensor:
    """Loss (N,) of each token, corrected; 0 where it was refused.

    Args:
        objective: One of ``OBJECTIVES`` or made from it.
        tokens: With the policy before the update as ``old_N``.
        behaviour_N: Logged log-probabilities of what was sampled.
    """
    prox_N, seq_N, num = tokens.old_N, tokens.seq_N, tokens.num
    if objective.behaviour:
        tokens = msgspec.structs.replace(tokens, old_N=behaviour_N)
    loss_N = objective.surrogate(tokens, objective.clip)
    if objective.correction != "none":
        loss_N = loss_N * weights(
            prox_N, behaviour_N, seq_N, num,
            kind=objective.correction, cap=objective.cap, floor=objective.floor, level=objective.level,
        )  # fmt: skip
    if objective.rejection != "none":
        lower, upper = objective.bounds
        loss_N = loss_N * accepted(
            prox_N, behaviour_N, seq_N, num, kind=objective.rejection, lower=lower, upper=upper
        )
    return loss_N
