"""From tokens to one number: how much each token's loss counts.

The mean of a batch is sum(weight * loss); these are the weights. Whether a rollout with more tokens counts more is decided here.

Legend of suffixes: N tokens, S sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spanloop.learner.objectives.ratios import sequence_sums

__all__ = ["MEANS", "token_weights"]

MEANS = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def token_weights(seq_N: Tensor, num: int, mean: str, *, horizon: int = 0) -> Tensor:
    """Weight (N,), float64, of each token.

    Args:
        seq_N: Sequence of each token.
        num: Number of sequences.
        mean: token-mean: all tokens alike (DAPO); seq-mean-token-mean: all sequences alike (GRPO); seq-mean-token-sum: sum over
            a sequence, mean over sequences; seq-mean-token-sum-norm: that divided by a constant ``horizon`` (Dr. GRPO).
        horizon: Longest possible sequence, > 0 for the last one.

    Raises:
        ValueError: for a name that is not one of ``MEANS``, or a missing horizon.

    Source: verl's agg_loss; Dr. GRPO, arXiv 2503.20783, section 3.

    >>> token_weights(torch.tensor([0, 0, 0, 1]), 2, "seq-mean-token-mean").tolist()
    [0.16666666666666666, 0.16666666666666666, 0.16666666666666666, 0.5]
    """
    if mean not in MEANS:
        raise ValueError(f"mean {mean!r} is none of {', '.join(MEANS)}")
    ones_N = torch.ones(len(seq_N), dtype=torch.float64, device=seq_N.device)
    if mean == "token-mean":
        return ones_N / max(1, len(seq_N))
    counts_S = sequence_sums(ones_N, seq_N, num)
    sequences = max(1, int((counts_S > 0).sum()))
    if mean == "seq-mean-token-mean":
        return 1.0 / counts_S[seq_N] / sequences
    if mean == "seq-mean-token-sum":
        return ones_N / sequences
    if horizon <= 0:
        raise ValueError("seq-mean-token-sum-norm needs the longest possible sequence as its horizon")
    return ones_N / sequences / horizon
