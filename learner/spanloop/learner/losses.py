"""Objectives of the policy update, as pure functions of tensors.

Place: ``trainer`` gathers the logits of the decisions of a minibatch, these functions turn them into a scalar. A decision
is one response token with more than one open option; its *menu* are the options that the server left open. Where these are
not known it is the whole vocabulary: such a decision is a row whose only column is the token taken, with its entropy beside
it (``FullVocabulary``), so that nothing of size (N, V) is kept.

Invariants: an option that was closed, and a decision of weight zero, has no gradient; nothing here reads a clock, a
random number or a global. Ratios follow METHODS 4.2: behaviour ``mu`` acted, proximal ``p`` is the policy before the
update, ``theta`` is being trained; drift one is w = p/mu, drift two r = theta/p.

Legend of suffixes: N decisions, K options of a menu (padded), V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from spanloop.learner.objectives.ratios import SAFE
from spanloop.learner.objectives.registry import Objective, token_losses
from spanloop.learner.objectives.surrogates import Clip, Tokens

__all__ = [
    "CLOSED",
    "FullVocabulary",
    "LossTerms",
    "decision_log_probs",
    "effective_sample_size",
    "entropy",
    "joined",
    "k3",
    "menu_log_probs",
    "policy_loss",
    "soft_greedy_divergence",
    "taken",
    "with_exploration",
]

CLOSED = -1e4
"""Log-probability written for a closed option: exp is 0 and 0 * CLOSED is 0, so sums over a menu need no mask."""
TEMPERATURE_MIN = 1e-3
"""Smallest temperature of the all-action target, units of reward."""


def menu_log_probs(logits_NV: Tensor, menu_NK: Tensor, open_NK: Tensor, exploration: float = 0.0) -> Tensor:
    """Log-probabilities over each menu, as ``with_exploration`` of the masked softmax.

    Args:
        logits_NV: Unmasked logits, float.
        menu_NK: Token ids of the options, int64; padding repeats any valid id.
        open_NK: True where the option exists.
        exploration: eps in [0, 1).

    Returns:
        (N, K), nats; CLOSED at padding.
    """
    gathered_NK = logits_NV.gather(1, menu_NK).masked_fill(~open_NK, CLOSED)
    logp_NK = torch.log_softmax(gathered_NK, dim=1).masked_fill(~open_NK, CLOSED)
    return with_exploration(logp_NK, open_NK, exploration)


class FullVocabulary(msgspec.Struct, frozen=True):
    """Which decisions of a batch are over the whole vocabulary, and what their single column does not say."""

    full_N: Tensor
    entropy_N: Tensor
    """Nats; carries a gradient. Only read where ``full_N``."""
    size: int
    """Options of each: V."""


def decision_log_probs(
    logits_NV: Tensor, menu_NK: Tensor, open_NK: Tensor, full_N: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of menus and of whole-vocabulary decisions, and the latter's entropies.

    Args:
        logits_NV: Unmasked logits, float32.
        menu_NK: Token ids; of a whole-vocabulary decision the token taken, in column 0.
        open_NK: True where the option exists.
        full_N: True for decisions over the whole vocabulary.

    Returns:
        (N, K) nats, CLOSED at padding; (N,) entropy in nats, 0 where not ``full_N``.
    """
    logp_NK = menu_log_probs(logits_NV, menu_NK, open_NK)
    total_N = logits_NV.logsumexp(1)
    logp_N = logits_NV.gather(1, menu_NK[:, :1])[:, 0] - total_N
    entropy_N = total_N - (torch.softmax(logits_NV, dim=1) * logits_NV).sum(1)
    first_NK = torch.arange(menu_NK.shape[1], device=menu_NK.device) == 0
    logp_NK = torch.where(full_N[:, None] & first_NK, logp_N[:, None], logp_NK)
    return logp_NK, torch.where(full_N, entropy_N, torch.zeros_like(entropy_N))


def with_exploration(
    logp_NK: Tensor, open_NK: Tensor, exploration: float, full: FullVocabulary | None = None
) -> Tensor:
    """What the server samples from: (1 - eps) of the policy and eps spread evenly over the open options, in nats."""
    if exploration <= 0.0:
        return logp_NK
    num_N1 = open_NK.sum(1, keepdim=True).to(logp_NK.dtype)
    if full is not None:
        num_N1 = num_N1.masked_fill(full.full_N[:, None], float(full.size))
    floor_N1 = math.log(exploration) - num_N1.log()
    mixed_NK = torch.logaddexp(logp_NK + math.log1p(-exploration), floor_N1)
    return mixed_NK.masked_fill(~open_NK, CLOSED)


def taken(logp_NK: Tensor, chosen_N: Tensor) -> Tensor:
    """Log-probability (N,) of the option that was taken; ``chosen_N`` is its index in the menu."""
    return logp_NK.gather(1, chosen_N[:, None])[:, 0]


def soft_greedy_divergence(
    theta_NK: Tensor, values_NK: Tensor, open_NK: Tensor, temperature: float, *, forward: bool
) -> Tensor:
    """Divergence of each decision from the soft-greedy policy of its values, t = softmax(Q / T); zero where pi = t.

    Reverse, KL(pi || t): its gradient is that of -(sum_a pi(a) Q(a) + T entropy(pi)) / T, the all-action policy gradient with
    an entropy bonus. Forward, KL(t || pi): the same minimum, and a gradient that does not vanish where pi is sure and
    wrong. Both sum over the menu instead of sampling it: no importance ratio and no variance from the choice; only
    the states are those of the behaviour.

    Args:
        theta_NK: Log-probabilities of the policy itself, without the exploration floor.
        values_NK: Counterfactual values of the options, units of reward.
        open_NK: True where the option exists.
        temperature: T > 0, units of reward a nat.
        forward: Which of the two.

    Source: Mean Actor-Critic (Allen et al. 2017, arXiv 1709.00503), eq. 6, towards the target of soft actor-critic
    (Haarnoja et al. 2018, arXiv 1801.01290), eq. 10.
    """
    target_NK = torch.log_softmax((values_NK / temperature).masked_fill(~open_NK, CLOSED), dim=1)
    if forward:
        return (target_NK.exp() * (target_NK - theta_NK)).masked_fill(~open_NK, 0.0).sum(1)
    return (theta_NK.exp() * (theta_NK - target_NK)).masked_fill(~open_NK, 0.0).sum(1)


def entropy(logp_NK: Tensor) -> Tensor:
    """Entropy (N,) of each decision, nats."""
    return -(logp_NK.exp() * logp_NK).sum(1)


def k3(log_ratio_N: Tensor) -> Tensor:
    """w - ln w - 1 with w = exp(log ratio): a non-negative estimate of the KL divergence for each token.

    Source: METHODS 4.2 (Schulman, "Approximating KL divergence").
    """
    return log_ratio_N.exp() - log_ratio_N - 1.0


def effective_sample_size(weights_N: Tensor) -> Tensor:
    """(sum w)^2 / sum w^2, in samples; 0 when all weights are 0."""
    square = weights_N.square().sum()
    return torch.where(square > 0, weights_N.sum().square() / square.clamp_min(1e-300), square)


class LossTerms(msgspec.Struct, frozen=True):
    """What a minibatch's loss is made of; the numbers are detached."""

    loss: Tensor
    entropy: float
    clipped: float
    """Share of decisions whose ratio left the clip range."""
    kl: float
    """Mean k3 of theta against the proximal policy."""
    ess: float
    """Effective sample size of the drift-one weights over the number of decisions."""
    weight: float = 0.0
    """Sum of the decisions' weights."""
    decisions: int = 0
    drift: tuple[float, float] = (0.0, 0.0)
    """Sum of the drift-one weights and of their squares."""


def joined(parts: Sequence[LossTerms]) -> LossTerms:
    """Terms of a minibatch that went through the model in parts: losses add up, the rest is over all decisions."""
    if len(parts) == 1:
        return parts[0]
    count = max(1, sum(p.decisions for p in parts))
    weight = max(1e-12, math.fsum(p.weight for p in parts))
    drift, square = (math.fsum(p.drift[i] for p in parts) for i in (0, 1))
    return LossTerms(
        loss=torch.stack([p.loss.detach() for p in parts]).sum(),
        entropy=math.fsum(p.entropy * p.weight for p in parts) / weight,
        clipped=math.fsum(p.clipped * p.decisions for p in parts) / count,
        kl=math.fsum(p.kl * p.decisions for p in parts) / count,
        ess=drift * drift / square / count if square > 0.0 else 0.0,
        weight=weight,
        decisions=count,
        drift=(drift, square),
    )


def policy_loss(
    theta_NK: Tensor,
    *,
    open_NK: Tensor,
    prox_NK: Tensor,
    behaviour_N: Tensor,
    chosen_N: Tensor,
    advantage_N: Tensor,
    values_NK: Tensor,
    valued_N: Tensor,
    weight_N: Tensor,
    seq_N: Tensor,
    num: int,
    exploration: float,
    objective: Objective,
    temperature: float,
    forward: bool = True,
    full: FullVocabulary | None = None,
) -> LossTerms:
    """Loss to minimise: the weighted mean over decisions.

    Decisions with counterfactual values (``valued_N``) use the all-action divergence, the others the objective on the
    account's advantage and minus the entropy bonus. ``weight_N`` says how much each counts; sum 1 is a mean.

    Args:
        theta_NK: Log-probabilities under the policy in training, without exploration floor; carries the gradient.
        open_NK: True where an option exists.
        prox_NK: The same before the update.
        behaviour_N: Logged log-probability of the option taken, with the floor, nats.
        chosen_N: Its index in the menu.
        advantage_N: The token's account (in units of the batch's spread when standardised).
        values_NK: Counterfactual values of the options, units of reward; ignored where not ``valued_N``.
        valued_N: True where ``values_NK`` is known.
        weight_N: Non-negative weights.
        seq_N: Model call of each decision: what a sequence-level ratio is taken over.
        num: Number of calls.
        exploration: Floor with which both policies are served.
        objective: What pushes the log-probabilities, with its correction of drift one.
        temperature: Coefficient of the entropy bonus; the all-action target's temperature.
        forward: Direction of the all-action divergence.
        full: Which decisions are over the whole vocabulary, with their entropies under theta; None: none.
    """
    theta_N = taken(with_exploration(theta_NK, open_NK, exploration, full), chosen_N)
    prox_N = taken(with_exploration(prox_NK, open_NK, exploration, full), chosen_N)
    drift_N = (prox_N - behaviour_N).detach().clamp(-SAFE, SAFE).exp()
    entropy_N = entropy(theta_NK)
    if full is not None:
        entropy_N = torch.where(full.full_N, full.entropy_N, entropy_N)
    pushed_N = token_losses(objective, Tokens(theta_N, prox_N, advantage_N, seq_N, num), behaviour_N)
    divergence_N = soft_greedy_divergence(
        theta_NK, values_NK, open_NK, max(temperature, TEMPERATURE_MIN), forward=forward
    )
    loss_N = torch.where(valued_N, divergence_N, pushed_N - temperature * entropy_N)
    loss = (weight_N * loss_N).sum()
    with torch.no_grad():
        log_ratio_N = theta_N - prox_N
        total = weight_N.sum().clamp_min(1e-12)
        return LossTerms(
            loss=loss,
            entropy=float((weight_N * entropy_N).sum() / total),
            clipped=float(_clipped(log_ratio_N, objective.clip).to(weight_N.dtype).mean()),
            kl=float(k3(log_ratio_N).mean()),
            ess=float(effective_sample_size(drift_N) / max(1, drift_N.numel())),
            weight=float(weight_N.sum()),
            decisions=drift_N.numel(),
            drift=(float(drift_N.sum()), float(drift_N.square().sum())),
        )


def _clipped(log_ratio_N: Tensor, clip: Clip) -> Tensor:
    ratio_N = log_ratio_N.exp()
    return (ratio_N > 1.0 + clip.high) | (ratio_N < 1.0 - clip.low)
