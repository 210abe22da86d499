"""R2, an agent's own outcome: scores that name its span, call or response, never what its own spans claim.

Risk: it over-fits to easy sub-tasks and rewards the lazy agent that takes none (METHODS 1.2); the team's outcome stays the
objective, and the mean over agents is a channel of its own.
"""

from __future__ import annotations

from spanloop.pipeline.rewards.registry import Case, reward
from spanloop.pipeline.rewards.targets import agent_scores, mean_micro
from spanloop.schemas.events import Reward

__all__ = ["individual"]


@reward("individual/1", family="R2")
def individual(case: Case) -> list[Reward]:
    """Mean score of each agent, and the mean over those that have one.

    Options: channel (feedback name; "agent_outcome").
    """
    channel = str(case.option("channel", "agent_outcome"))
    scores = agent_scores(case.content, case.feedback, channel)
    found = [
        Reward("R2", channel, "agent", agent, value, "final" if final else "provisional", "", evidence=ids)
        for agent, (value, final, ids) in scores.items()
    ]
    team = mean_micro(value for value, _, _ in scores.values())
    settled = all(final for _, final, _ in scores.values())
    status = "missing" if team is None else "final" if settled else "provisional"
    return [*found, Reward("R2", channel, "team", "", team, status, "")]
