"""Off-policy corrections: weights for drift one (proximal / behaviour) and tokens that are refused because it is too large.

Place: ``registry`` applies one of them to a surrogate. Weights and masks carry no gradient.
Invariants: a refused token keeps its place in the denominator (METHODS 4.2), so refusing never makes the others heavier; every
number is finite for finite log-probabilities, as log ratios are bounded by ``SAFE``.

Legend of suffixes: N tokens, S sequences. ``seq_N`` holds each token's sequence, 0 .. num - 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["SAFE", "accepted", "sequence_means", "sequence_sums", "weights"]

SAFE = 20.0
"""Largest absolute log ratio that is exponentiated."""


def sequence_sums(values_N: Tensor, seq_N: Tensor, num: int) -> Tensor:
    """Sum over the tokens of each sequence, (S,)."""
    return torch.zeros(num, dtype=values_N.dtype, device=values_N.device).index_add(0, seq_N, values_N)


def sequence_means(values_N: Tensor, seq_N: Tensor, num: int) -> Tensor:
    """Mean over the tokens of each sequence, (S,); 0 for one without tokens."""
    counts_S = sequence_sums(torch.ones_like(values_N), seq_N, num)
    return sequence_sums(values_N, seq_N, num) / counts_S.clamp_min(1.0)


def weights(
    prox_N: Tensor,
    behaviour_N: Tensor,
    seq_N: Tensor,
    num: int,
    *,
    kind: str,
    cap: float,
    floor: float = 0.0,
    level: str = "token",
) -> Tensor:
    """Importance weights w = exp(p - mu) of each token, or of its whole sequence.

    Args:
        prox_N: Log-probabilities before the update, nats.
        behaviour_N: Logged log-probabilities of what was sampled, nats.
        seq_N: Sequence of each token.
        num: Number of sequences.
        kind: tis: truncated at ``cap``; mis: 0 outside [``floor``, ``cap``].
        cap: Largest weight, > 0.
        floor: Smallest weight that mis keeps.
        level: token, or sequence: the product over the sequence's tokens.

    Source: METHODS 4.2; TIS (Ionides 2008), MIS and IcePop as in verl's rollout correction.

    >>> p, b = torch.tensor([-.9, -.7, -1.6]), torch.tensor([-1., -.5, -2.])
    >>> [round(float(w), 6) for w in weights(p, b, torch.zeros(3, dtype=torch.int64), 1, kind="tis", cap=1.3)]
    [1.105171, 0.818731, 1.3]
    >>> [round(float(w), 6) for w in weights(p, b, torch.zeros(3, dtype=torch.int64), 1, kind="mis", cap=1.3)]
    [1.105171, 0.818731, 0.0]
    """
    log_ratio_N = (prox_N - behaviour_N).detach()
    if level == "sequence":
        log_ratio_N = sequence_sums(log_ratio_N, seq_N, num)[seq_N]
    ratio_N = log_ratio_N.clamp(-SAFE, SAFE).exp()
    if kind == "tis":
        return ratio_N.clamp(max=cap)
    return ratio_N * ((ratio_N >= floor) & (ratio_N <= cap))


def accepted(
    prox_N: Tensor,
    behaviour_N: Tensor,
    seq_N: Tensor,
    num: int,
    *,
    kind: str,
    upper: float,
    lower: float = 0.0,
) -> Tensor:
    """True for the tokens that a hard trust region keeps.

    Args:
        prox_N: Log-probabilities before the update, nats.
        behaviour_N: Logged log-probabilities, nats.
        seq_N: Sequence of each token.
        num: Number of sequences.
        kind: token_k3: each token by w - ln w - 1; geometric: each sequence by exp(mean(p - mu)) in [``lower``,
            ``upper``]; k3: each sequence by its mean of w - ln w - 1.
        upper: Bound, see ``kind``.
        lower: Lower bound of geometric.

    Source: METHODS 4.2 (Geo-RS, K3-RS); verl's rollout correction.

    >>> p, b = torch.tensor([-.9, -.7, -1.6]), torch.tensor([-1., -.5, -2.])
    >>> one = torch.zeros(3, dtype=torch.int64)
    >>> accepted(p, b, one, 1, kind="geometric", lower=.9, upper=1.11).tolist()
    [True, True, True]
    >>> accepted(p, b, one, 1, kind="token_k3", upper=.05).tolist()
    [True, True, False]
    """
    log_ratio_N = (prox_N - behaviour_N).detach().clamp(-SAFE, SAFE)
    if kind == "geometric":
        mean_S = sequence_means(log_ratio_N, seq_N, num)
        low = math.log(lower) if lower > 0.0 else -math.inf
        return ((mean_S >= low) & (mean_S <= math.log(upper)))[seq_N]
    k3_N = log_ratio_N.exp() - log_ratio_N - 1.0
    if kind == "token_k3":
        return k3_N <= upper
    return (sequence_means(k3_N, seq_N, num) <= upper)[seq_N]
