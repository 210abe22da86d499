"""The team's composite reward: R1 plus weighted structural terms, each gated by the outcome.

team = sum over channels of weight * value, with the weight *as paid* on each ``Reward``: a reader can check it from the event
alone. Structural terms (R5, R7) are scaffolds: they are reported always and paid only where R1 is at least the floor.
Invariants: a function of (content, set of feedback, completeness, terms); no outcome, no team reward.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import msgspec

from spanloop.pipeline.rewards.declared import Term, declared_rewards, terms_of
from spanloop.pipeline.rewards.drafts import draft_rewards
from spanloop.pipeline.rewards.orchestration import orchestration_rewards
from spanloop.pipeline.rewards.outcome import channel_rewards, outcome_reward
from spanloop.pipeline.rewards.registry import Case
from spanloop.pipeline.rewards.tool import ToolTerms, tool_rewards
from spanloop.schemas.canonical import MICRO, micro
from spanloop.schemas.events import FeedbackReceived, Reward
from spanloop.schemas.orchestration import OrchestrationContent

if TYPE_CHECKING:
    from spanloop.schemas.settings import Pipeline

__all__ = ["Composite", "RewardTerms", "compose", "paid"]


class RewardTerms(msgspec.Struct, frozen=True):
    """Weights of the structural terms, in units; see the settings of the pipeline."""

    parallel: float = 0.0
    finish: float = 0.0
    tool: float = 0.0
    floor: float = 0.0
    prices: ToolTerms = ToolTerms()
    declared: tuple[Term, ...] = ()

    @staticmethod
    def of(settings: Pipeline) -> RewardTerms:
        """The terms that a deployment's settings name."""
        return RewardTerms(
            settings.parallel_weight,
            settings.finish_weight,
            settings.tool_weight,
            settings.outcome_floor,
            ToolTerms(settings.tool_price, settings.tool_duplicate_penalty),
            terms_of(settings),
        )


class Composite(msgspec.Struct, frozen=True):
    """All rewards of one orchestration and what they come to."""

    rewards: tuple[Reward, ...]
    team: int | None
    """Micro-units."""
    status: str
    """missing, provisional, final or corrected."""


def paid(rewards: Sequence[Reward]) -> int:
    """What the channels of the team come to, in micro-units."""
    return sum(
        reward.value if reward.weight == MICRO else round(Fraction(reward.weight * reward.value, MICRO))
        for reward in rewards
        if reward.unit == "team" and reward.weight and reward.value is not None
    )


def compose(
    content: OrchestrationContent,
    feedback: Sequence[FeedbackReceived],
    *,
    complete: bool,
    terms: RewardTerms,
    progress: int = 0,
) -> Composite:
    """Rewards of an orchestration.

    Args:
        content: What happened.
        feedback: All feedback on it, in any order.
        complete: False: closed by time-out; then the team's reward stays provisional.
        terms: Weights of the structural terms, and what the deployment declares.
        progress: Number of the recorded value model's version: what schedules go by.
    """
    outcome = outcome_reward(feedback)
    good = outcome.value is not None and outcome.value >= micro(terms.floor)
    weights = (micro(terms.parallel) if good else 0, micro(terms.finish) if good else 0)
    rewards = (
        outcome,
        *channel_rewards(feedback),
        *draft_rewards(feedback),
        *tool_rewards(
            content,
            outcome.value,
            terms.floor,
            weight=micro(terms.tool) if good else 0,
            terms=terms.prices,
        ),
        *orchestration_rewards(content, weights),
    )
    if terms.declared:
        case = Case(content, feedback, outcome.value)
        rewards += tuple(declared_rewards(terms.declared, case, good=good, progress=progress))
    if outcome.value is None:
        return Composite(rewards, None, "missing")
    open_ = any(r.status == "provisional" for r in rewards if r.unit == "team" and r.weight)
    status = outcome.status if complete and not open_ else "provisional"
    return Composite(rewards, paid(rewards), status)
