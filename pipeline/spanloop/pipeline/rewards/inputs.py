"""What a reward was made from, as a short hash on each value.

Two values of one unit with the same estimator, the same definitions and the same inputs hash are equal; where a value changed, the
hash or the definitions did. It covers what was read and no more, so that a span that does not matter to a reward leaves it alone.
Invariants: pure; independent of the order in which feedback came.
"""

from __future__ import annotations

from collections.abc import Iterable

from spanloop.schemas.canonical import digest, micro
from spanloop.schemas.events import FeedbackReceived

__all__ = ["feedback_inputs", "inputs_of"]

DIGITS = 16


def inputs_of(*parts: str | bytes) -> str:
    """Hash of what was read, in the order given.

    >>> inputs_of("a", "bc") == inputs_of("ab", "c")
    False
    """
    return digest(*parts)[:DIGITS]


def feedback_inputs(counted: Iterable[FeedbackReceived]) -> str:
    """Hash of the feedback that counts: ids and values."""
    pairs = sorted((item.feedback_id, str(micro(item.value))) for item in counted)
    return inputs_of(*(part for pair in pairs for part in pair))
