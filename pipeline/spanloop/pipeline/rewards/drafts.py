"""Grades of drafts: how good the answer would have been, had the orchestration stopped there.

A scorer sends them as feedback named ``draft`` on the span of a stop/continue decision, or on the model call that decided. Each target
keeps its own grade: learned stopping compares them (METHODS 5.2). Reported, never paid.
Invariants: a function of the *set* of feedbacks, as the outcome is.
"""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from spanloop.pipeline.rewards.inputs import feedback_inputs
from spanloop.pipeline.rewards.outcome import is_usable
from spanloop.schemas.canonical import micro
from spanloop.schemas.events import FeedbackReceived, Reward

__all__ = ["DRAFT", "draft_rewards"]

DRAFT = "draft"
TARGETS = frozenset({"span", "response"})
ESTIMATOR = "feedback_mean/1"


def draft_rewards(feedback: Iterable[FeedbackReceived]) -> list[Reward]:
    """One reward a graded target, sorted by it: the mean over scorers of each one's latest value."""
    latest: dict[tuple[str, str], FeedbackReceived] = {}
    for item in feedback:
        if item.name != DRAFT or item.target_kind not in TARGETS or not is_usable(item.value):
            continue
        old = latest.get((item.target_id, item.scorer))
        if old is None or (old.observed_ns, old.feedback_id) < (item.observed_ns, item.feedback_id):
            latest[(item.target_id, item.scorer)] = item
    by_target: dict[str, list[FeedbackReceived]] = {}
    for (target, _), item in sorted(latest.items()):
        by_target.setdefault(target, []).append(item)
    return [
        Reward(
            "R4", DRAFT, "turn", target, round(Fraction(sum(micro(item.value) for item in items), len(items))),
            "final" if all(item.final for item in items) else "provisional", ESTIMATOR,
            evidence=tuple(sorted(item.feedback_id for item in items)), inputs_hash=feedback_inputs(items),
        )
        for target, items in by_target.items()
    ]  # fmt: skip
