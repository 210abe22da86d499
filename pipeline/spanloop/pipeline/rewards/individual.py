"""R2, an agent's own outcome: scores that name its span, call or response, never what its own spans claim.

Risk: it over-fits to easy sub-tasks and rewards the lazy agent that takes none (METHODS 1.2); the team's outcome stays the
objective, and the mean over agents is a channel of its own. A mean over those that happen to have a score pays for scoring the good
ones only: ``individual/2`` is missing until every sub-agent that did something has one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from spanloop.pipeline.rewards.inputs import inputs_of
from spanloop.pipeline.rewards.registry import Case, reward
from spanloop.pipeline.rewards.targets import agent_scores, mean_micro, status_of, told_about
from spanloop.schemas.canonical import micro
from spanloop.schemas.events import FeedbackReceived, Reward

__all__ = ["individual", "individual_of_all"]


@reward("individual/1", family="R2")
def individual(case: Case) -> list[Reward]:
    """Mean score of each agent, and the mean over those that have one.

    Options: channel (feedback name; "agent_outcome").
    """
    return _individual(case, frozenset())


@reward("individual/2", family="R2")
def individual_of_all(case: Case) -> list[Reward]:
    """Mean score of each agent, and the mean over all that were due one: sub-agents that called a model or did something (where
    there are none, the entry agents), and whoever was scored besides. Missing until all have one.

    Options: channel (feedback name; "agent_outcome"), roles (only agents of these are due or counted; all).
    """
    roles = {str(role).lower() for role in case.option("roles", ())}
    content = case.content
    acted = {call.agent_id for call in content.calls} | {event.agent_id for event in content.events}
    mine = [a for a in content.agents if a.id in acted and (not roles or (a.role or a.name.lower()) in roles)]
    due = {agent.id for agent in mine if agent.parent_id and not roles} or {agent.id for agent in mine}
    return _individual(case, due, {agent.id for agent in mine} if roles else None)


def _individual(case: Case, due: Collection[str], of: Collection[str] | None = None) -> list[Reward]:
    channel = str(case.option("channel", "agent_outcome"))
    told = told_about(case.content, case.feedback, (channel,))
    scores = {agent: score for agent, score in agent_scores(told).items() if of is None or agent in of}
    found = [
        Reward(
            "R2", channel, "agent", agent, score.value, score.status, "", evidence=score.evidence,
            inputs_hash=score.inputs,
        )
        for agent, score in scores.items()
    ]  # fmt: skip
    items = [item for item in told.items if told.of[item.target_id] in scores]

    def team_of(seen: Sequence[FeedbackReceived]) -> int | None:
        means = [mean_micro(micro(i.value) for i in counted) or 0 for counted in told.by_agent(seen).values()]
        return mean_micro(means)

    needs = frozenset(due)
    team = mean_micro(score.value for score in scores.values()) if needs <= scores.keys() else None
    status = status_of(items, team, team_of, unit_of=lambda item: told.of[item.target_id], needs=needs)
    if team is None:
        return [*found, Reward("R2", channel, "team", "", None, status, "")]
    inputs = inputs_of(*(part for agent, score in scores.items() for part in (agent, score.inputs)))
    evidence = tuple(sorted(name for score in scores.values() for name in score.evidence))
    return [
        *found,
        Reward("R2", channel, "team", "", team, status, "", evidence=evidence, inputs_hash=inputs),
    ]
