"""Whom feedback is about: the agent whose span, call or response it names. Feedback on the orchestration is about nobody alone."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction

from spanloop.pipeline.rewards.outcome import is_usable
from spanloop.schemas.canonical import micro
from spanloop.schemas.events import FeedbackReceived
from spanloop.schemas.orchestration import OrchestrationContent

__all__ = ["Scores", "agent_scores", "mean_micro", "owners"]

Scores = dict[str, tuple[int, bool, tuple[str, ...]]]
"""By agent id: mean in micro-units, whether all are final, feedback ids."""


def owners(content: OrchestrationContent) -> dict[str, str]:
    """Agent id by what feedback may name: span ids, response ids, call ids, agent ids."""
    found: dict[str, str] = {}
    for event in content.events:
        for span in event.evidence:
            found.setdefault(span, event.agent_id)
    for call in content.calls:
        for name in (*call.span_ids, call.response_id, call.id):
            if name:
                found[name] = call.agent_id
    for agent in content.agents:
        found[agent.id] = agent.id
        if agent.span_id:
            found[agent.span_id] = agent.id
    return found


def agent_scores(content: OrchestrationContent, feedback: Iterable[FeedbackReceived], channel: str) -> Scores:
    """Mean score of each agent on a channel: of several values of one scorer for one target the latest counts."""
    of = owners(content)
    latest: dict[tuple[str, str, str], FeedbackReceived] = {}
    usable = [f for f in feedback if f.name == channel and is_usable(f.value)]
    for item in sorted(usable, key=lambda f: (f.observed_ns, f.feedback_id)):
        if of.get(item.target_id):
            latest[item.target_kind, item.target_id, item.scorer] = item
    groups: dict[str, list[FeedbackReceived]] = {}
    for key in sorted(latest):
        groups.setdefault(of[latest[key].target_id], []).append(latest[key])
    return {
        agent: (
            mean_micro([micro(item.value) for item in items]) or 0,
            all(item.final for item in items),
            tuple(sorted(item.feedback_id for item in items)),
        )
        for agent, items in sorted(groups.items())
    }


def mean_micro(values: Iterable[int]) -> int | None:
    """Mean in micro-units, exact before it is rounded; None for none."""
    known = list(values)
    return round(Fraction(sum(known), len(known))) if known else None
