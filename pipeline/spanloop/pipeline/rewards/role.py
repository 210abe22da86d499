"""R3, a role's rubric: declared items that scorers or judges answer for the agents of a role.

Risk: a rubric that does not fit the role (METHODS 1.2): items are declared by people and recorded with their weights in the
settings; an item that nobody answered is missing, not zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from spanloop.pipeline.rewards.inputs import feedback_inputs, inputs_of
from spanloop.pipeline.rewards.registry import Case, reward
from spanloop.pipeline.rewards.targets import Told, mean_micro, status_of, told_about
from spanloop.schemas.canonical import micro
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.events import FeedbackReceived, Reward

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
    weights = {str(channel): Fraction(share) for channel, share in items.items()}
    members = {agent.id for agent in case.content.agents if (agent.role or agent.name.lower()) == role}
    told = told_about(case.content, case.feedback, weights)
    mine = [item for item in told.items if told.of[item.target_id] in members]
    value = _weighted(told, mine, weights)
    status = status_of(mine, value, lambda seen: _weighted(told, seen, weights))
    name = f"rubric:{role}"
    if value is None:
        return [
            Reward("R3", name, "role", role, None, status, ""),
            Reward("R3", name, "team", "", None, status, ""),
        ]
    counted = [item for group in told.by_agent(mine).values() for item in group]
    ids = tuple(sorted(item.feedback_id for item in counted))
    inputs = inputs_of(
        feedback_inputs(counted),
        *sorted(f"{told.of[item.target_id]} {item.name} {item.feedback_id}" for item in counted),
    )
    return [
        Reward("R3", name, "role", role, value, status, "", evidence=ids, inputs_hash=inputs),
        Reward("R3", name, "team", "", value, status, "", evidence=ids, inputs_hash=inputs),
    ]


def _weighted(told: Told, items: Sequence[FeedbackReceived], weights: Mapping[str, Fraction]) -> int | None:
    """Weighted mean over the items that were answered, of the mean over agents of each one's mean."""
    answers: dict[str, list[int]] = {}
    for counted in told.by_agent(items).values():
        by_name: dict[str, list[int]] = {}
        for item in counted:
            by_name.setdefault(item.name, []).append(micro(item.value))
        for channel, values in by_name.items():
            answers.setdefault(channel, []).append(mean_micro(values) or 0)
    total = sum(
        (weights[channel] * (mean_micro(means) or 0) for channel, means in answers.items()), Fraction(0)
    )
    weight = sum((weights[channel] for channel in answers), Fraction(0))
    return round(total / weight) if weight else None
