"""The team's composite reward: R1 plus weighted structural terms, each gated by the outcome.

team = sum over channels of weight * value, with the weight *as paid* on each ``Reward``: a reader can check it from the event
alone. Structural terms (R5, R7) are scaffolds: they are reported always and paid only where R1 is at least the floor.
What is made of an incomplete orchestration is provisional; the team's reward is as long as something that is paid is, and corrected
where something that is paid was corrected.
Invariants: a function of (content, set of feedback, completeness, terms); no outcome, no team reward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING

import msgspec

from spanloop.pipeline.rewards import orchestration, outcome, tool
from spanloop.pipeline.rewards.declared import Term, declared_rewards, terms_of
from spanloop.pipeline.rewards.drafts import draft_rewards
from spanloop.pipeline.rewards.inputs import DIGITS
from spanloop.pipeline.rewards.orchestration import orchestration_rewards
from spanloop.pipeline.rewards.outcome import channel_rewards, outcome_reward
from spanloop.pipeline.rewards.registry import Case
from spanloop.pipeline.rewards.tool import ToolTerms, tool_rewards
from spanloop.schemas.canonical import MICRO, content_hash, micro
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

    definitions: str = ""
    """16 hex digits of these terms and of the versions of the built-in channels: under which definitions a value was made."""

    @property
    def goes_by_indicators(self) -> bool:
        """Whether a schedule needs what a version of the value model says of indicators."""
        return any(term.indicator for term in self.declared)

    @staticmethod
    def of(settings: Pipeline) -> RewardTerms:
        """The terms that a deployment's settings name."""
        found = RewardTerms(
            settings.parallel_weight,
            settings.finish_weight,
            settings.tool_weight,
            settings.outcome_floor,
            ToolTerms(settings.tool_price, settings.tool_duplicate_penalty),
            terms_of(settings),
        )
        built_in = (outcome.ESTIMATOR, tool.ESTIMATOR, orchestration.ESTIMATOR)
        declared = [term.definition_parts for term in found.declared]
        parts = (found.parallel, found.finish, found.tool, found.floor, found.prices, declared, built_in)
        return msgspec.structs.replace(found, definitions=content_hash(parts)[:DIGITS])


class Composite(msgspec.Struct, frozen=True):
    """All rewards of one orchestration and what they come to."""

    rewards: tuple[Reward, ...]
    team: int | None
    """Micro-units."""
    status: str
    """missing, provisional, final or corrected."""
    definitions: str = ""


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
    indicators: Mapping[str, float] = {},
) -> Composite:
    """Rewards of an orchestration.

    Args:
        content: What happened.
        feedback: All feedback on it, in any order.
        complete: False: closed by time-out; then the team's reward stays provisional.
        terms: Weights of the structural terms, and what the deployment declares.
        progress: Number of the recorded value model's version: what schedules go by.
        indicators: What that version says of those that go by a measured number.
    """
    team = outcome_reward(feedback)
    good = team.value is not None and team.value >= micro(terms.floor)
    weights = (micro(terms.parallel) if good else 0, micro(terms.finish) if good else 0)
    rewards = (
        team,
        *channel_rewards(feedback),
        *draft_rewards(feedback),
        *tool_rewards(
            content,
            team.value,
            terms.floor,
            weight=micro(terms.tool) if good else 0,
            terms=terms.prices,
            status=team.status if complete else "provisional",
        ),
        *orchestration_rewards(content, weights, complete=complete),
    )
    if terms.declared:
        case = Case(content, feedback, team.value, outcome_status=team.status, complete=complete)
        rewards += tuple(
            declared_rewards(terms.declared, case, good=good, progress=progress, indicators=indicators)
        )
    if team.value is None:
        return Composite(rewards, None, "missing", terms.definitions)
    return Composite(rewards, paid(rewards), _status(rewards, complete=complete), terms.definitions)


def _status(rewards: Sequence[Reward], *, complete: bool) -> str:
    """Of the team's reward: that of the least settled of what is paid."""
    said = {r.status for r in rewards if r.unit == "team" and r.weight}
    if not complete or "provisional" in said:
        return "provisional"
    return "corrected" if "corrected" in said else "final"
