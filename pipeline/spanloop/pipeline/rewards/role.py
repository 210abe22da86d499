"""R3, a role's rubric: declared items that scorers or judges answer for the agents of a role.

Risk: a rubric that does not fit the role (METHODS 1.2): items are declared by people and recorded with their weights in the
settings; an item that nobody answered is missing, not zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from spanloop.pipeline.rewards.registry import Case, reward
from spanloop.pipeline.rewards.targets import agent_scores, mean_micro
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.events import Reward

__all__ = ["rubric"]


@reward("rubric/1", family="R3")
def rubric(case: Case) -> list[Reward]:
    """Weighted mean of a role's items over its agents.

    Options: role; items (feedback name -> weight > 0).
    """
    role = str(case.option("role", "")).lower()
    items: object = case.option("items", {})
    if not role or not isinstance(items, Mapping) or not items:
        raise ConfigError(
            "reward rubric/1 needs options role = 'writer' and items = { clarity = 2, sources = 1 }"
        )
    members = {agent.id for agent in case.content.agents if (agent.role or agent.name.lower()) == role}
    total, weight = Fraction(0), Fraction(0)
    evidence: list[str] = []
    settled = True
    for channel, share in sorted(items.items()):
        scores = agent_scores(case.content, case.feedback, str(channel))
        mine = [score for agent, score in scores.items() if agent in members]
        mean = mean_micro(value for value, _, _ in mine)
        if mean is None:
            continue
        total += Fraction(share) * mean
        weight += Fraction(share)
        settled = settled and all(final for _, final, _ in mine)
        evidence += [name for _, _, ids in mine for name in ids]
    value = round(total / weight) if weight else None
    status = "missing" if value is None else "final" if settled else "provisional"
    name, ids = f"rubric:{role}", tuple(sorted(set(evidence)))
    return [
        Reward("R3", name, "role", role, value, status, "", evidence=ids),
        Reward("R3", name, "team", "", value, status, ""),
    ]
