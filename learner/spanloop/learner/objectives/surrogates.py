"""What each token's log-probability is pushed with: one function an objective, all of one shape.

Place: ``registry`` names them. Each gives the loss of each token, to be minimised, before correction weights and averaging
(``means``). The ratio is against the policy before the update, or against the one that acted.

Legend of suffixes: N tokens, S sequences.
"""

from __future__ import annotations

from typing import Protocol

import msgspec
import torch
from torch import Tensor

from spanloop.learner.objectives.ratios import SAFE, sequence_means

__all__ = ["Clip", "Surrogate", "Tokens", "cispo", "gspo", "ppo", "reinforce"]


class Clip(msgspec.Struct, frozen=True):
    """Trust region of a ratio: [1 - low, 1 + high]."""

    low: float = 0.2
    high: float = 0.2
    dual: float = 0.0
    """With a negative advantage the loss is at most -``dual`` A (dual clip, > 1); 0: no such bound."""


class Tokens(msgspec.Struct, frozen=True):
    """What an objective looks at."""

    theta_N: Tensor
    """Log-probabilities in training, nats; carries the gradient."""
    old_N: Tensor
    """Log-probabilities of the policy that the ratio is taken against."""
    advantage_N: Tensor
    """Advantages, any unit."""
    seq_N: Tensor
    """Sequence of each token."""
    num: int
    """Number of sequences."""


class Surrogate(Protocol):
    """An objective."""

    def __call__(self, tokens: Tokens, clip: Clip) -> Tensor:
        """Loss (N,) of each token."""
        ...


def reinforce(tokens: Tokens, clip: Clip) -> Tensor:
    """-A log pi. Source: Williams 1992; with correction weights, off-policy policy gradient."""
    del clip
    return -tokens.advantage_N * tokens.theta_N


def ppo(tokens: Tokens, clip: Clip) -> Tensor:
    """max(-r A, -clip(r) A), with dual clip at most -c A where A < 0.

    Source: PPO, arXiv 1707.06347, eq. 7; dual clip, arXiv 1912.09729, eq. 5; separate bounds ("clip-higher") DAPO, arXiv
    2503.14476, eq. 10. Against the policy before the update and times the weights of drift one it is decoupled PPO (AReaL,
    arXiv 2505.24298, eq. 5).
    """
    gain_N = -tokens.advantage_N
    ratio_N = (tokens.theta_N - tokens.old_N).clamp(-SAFE, SAFE).exp()
    loss_N = torch.maximum(gain_N * ratio_N, gain_N * ratio_N.clamp(1.0 - clip.low, 1.0 + clip.high))
    if clip.dual <= 0.0:
        return loss_N
    return torch.where(gain_N > 0, torch.minimum(loss_N, gain_N * clip.dual), loss_N)


def gspo(tokens: Tokens, clip: Clip) -> Tensor:
    """PPO on the sequence's geometric mean ratio s = exp(mean_t(theta - old)), its gradient spread over the tokens.

    Source: GSPO, arXiv 2507.18071, eq. 5 to 14 (the token form, so that tokens may have advantages of their own).
    """
    theta_N, gain_N = tokens.theta_N, -tokens.advantage_N
    mean_S = sequence_means((theta_N - tokens.old_N).detach(), tokens.seq_N, tokens.num)
    ratio_N = (theta_N - theta_N.detach() + mean_S[tokens.seq_N]).clamp(-SAFE, 10.0).exp()
    return torch.maximum(gain_N * ratio_N, gain_N * ratio_N.clamp(1.0 - clip.low, 1.0 + clip.high))


def cispo(tokens: Tokens, clip: Clip) -> Tensor:
    """-sg(clip(r)) A log pi: no token loses its gradient. Source: MiniMax-M1, arXiv 2506.13585, eq. 4."""
    ratio_N = (tokens.theta_N - tokens.old_N).detach().clamp(-SAFE, SAFE).exp()
    return -ratio_N.clamp(1.0 - clip.low, 1.0 + clip.high) * tokens.advantage_N * tokens.theta_N
