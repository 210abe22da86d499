"""R1, the team's outcome, and the other channels that scorers send: from feedback only, never from a span.

Several feedbacks of one (target, name, scorer): the one with the largest (observed_ns, feedback_id) counts, whatever the order
of arrival. Several of these (more scorers, or one scorer on trace and response): their mean.
Invariants: a function of the *set* of feedbacks; no feedback is ``missing``, which is not zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from fractions import Fraction

from spanloop.pipeline.rewards.inputs import feedback_inputs
from spanloop.schemas.canonical import MICRO, micro
from spanloop.schemas.events import FeedbackReceived, Reward

__all__ = ["OUTCOME", "OUTCOME_LIMIT", "channel_rewards", "is_usable", "outcome_reward"]

OUTCOME = "outcome"
"""Name of the feedback that is the team's reward."""
OUTCOME_LIMIT = 1e6
"""Largest absolute value of a score; micro-credits of it still fit 64 bits with room to spare."""
ESTIMATOR = "feedback_mean/1"


def is_usable(value: float) -> bool:
    """Whether a score can enter a reward: finite and within ``OUTCOME_LIMIT``.

    >>> is_usable(0.5), is_usable(float("nan")), is_usable(1e300)
    (True, False, False)
    """
    return math.isfinite(value) and abs(value) <= OUTCOME_LIMIT


def outcome_reward(feedback: Iterable[FeedbackReceived]) -> Reward:
    """The team's outcome R1: mean over (target, scorer) of the latest value.

    Status: ``missing`` without feedback; ``provisional`` while one of the values that count is; ``corrected`` where a final
    value was replaced by another final one; else ``final``.
    """
    return _channel(OUTCOME, [f for f in feedback if f.name == OUTCOME], weight=MICRO)


def channel_rewards(feedback: Iterable[FeedbackReceived]) -> list[Reward]:
    """Feedback under other names, one reward a name, reported and not paid; sorted by name."""
    names: dict[str, list[FeedbackReceived]] = {}
    for item in feedback:
        if item.name != OUTCOME:
            names.setdefault(item.name, []).append(item)
    return [_channel(name, names[name], weight=0) for name in sorted(names)]


def _channel(name: str, feedback: Iterable[FeedbackReceived], weight: int) -> Reward:
    latest: dict[tuple[str, str, str], FeedbackReceived] = {}
    usable = sorted((f for f in feedback if is_usable(f.value)), key=lambda f: (f.observed_ns, f.feedback_id))
    for item in usable:
        latest[(item.target_kind, item.target_id, item.scorer)] = item
    if not latest:
        return Reward("R1", name, "team", "", None, "missing", ESTIMATOR, weight=weight)
    counted = [latest[key] for key in sorted(latest)]
    total = sum(micro(item.value) for item in counted)
    value = total if len(counted) == 1 else round(Fraction(total, len(counted)))
    status = "final"
    if not all(item.final for item in counted):
        status = "provisional"
    elif any(
        item.final and item.value != latest[(item.target_kind, item.target_id, item.scorer)].value
        for item in usable
    ):
        status = "corrected"
    evidence = tuple(sorted(item.feedback_id for item in counted))
    return Reward(
        "R1", name, "team", "", value, status, ESTIMATOR, weight=weight, evidence=evidence,
        inputs_hash=feedback_inputs(counted),
    )  # fmt: skip
