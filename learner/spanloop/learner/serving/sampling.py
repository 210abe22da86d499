"""The behaviour distribution: what the embedded server samples from, and whose logarithm it reports.

    mu = (1 - eps) * softmax(logits of the open options / temperature) + eps * uniform(open options)

Invariants: it sums to 1 over the menu, every open option has at least eps / n, and a menu of one has probability 1.
Temperature 0 is greedy: the point mass on the largest logit, without exploration. Pure numpy, float64 inside.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["MASKED_LOGPROB", "behaviour", "draw", "log_behaviour"]

MASKED_LOGPROB = -9999.0
"""What stands for the logarithm of zero in JSON, as in vLLM."""

Array = NDArray[np.float64]


def behaviour(
    logits: NDArray[np.floating], *, temperature: float = 1.0, top_p: float = 1.0, exploration: float = 0.0
) -> Array:
    """Probabilities of the open options.

    Args:
        logits: (n,) logits of the open options only.
        temperature: >= 0; 0 is greedy (the first of equals).
        top_p: In (0, 1]; the softmax part is cut to the smallest set of options with at least this mass.
        exploration: eps in [0, 1).

    >>> behaviour(np.array([0.0, 0.0, np.log(2.0)]), exploration=0.3).round(3).tolist()
    [0.275, 0.275, 0.45]
    """
    scores = np.asarray(logits, dtype=np.float64)
    count = scores.shape[0]
    if temperature == 0.0:
        greedy = np.zeros(count)
        greedy[int(scores.argmax())] = 1.0
        return greedy
    scores = (scores - scores.max()) / temperature
    weights = np.exp(scores)
    weights /= weights.sum()
    if top_p < 1.0:
        order = np.argsort(-weights, kind="stable")
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= top_p]] = 0.0
        weights /= weights.sum()
    return (1.0 - exploration) * weights + exploration / count


def draw(probabilities: Array, u: float) -> int:
    """Index of the option that holds the uniform number ``u`` in [0, 1), by inversion."""
    index = int(np.searchsorted(np.cumsum(probabilities), u * probabilities.sum(), side="right"))
    index = min(index, len(probabilities) - 1)
    while probabilities[index] == 0.0:
        index -= 1
    return index


def log_behaviour(probabilities: Array) -> list[float]:
    """Logarithms rounded to float32, as they are recorded; zero becomes MASKED_LOGPROB."""
    with np.errstate(divide="ignore"):
        logs = np.log(probabilities)
    return np.where(np.isneginf(logs), MASKED_LOGPROB, logs).astype(np.float32).astype(float).tolist()
