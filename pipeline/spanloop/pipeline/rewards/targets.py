"""Whom feedback is about: the agent whose span, call or response it names. Feedback on the orchestration is about nobody alone.

Of several values of one scorer for one target under one name the one with the largest (observed_ns, feedback_id) counts. A value
made of them is provisional while one that counts is; it is corrected where it was final once, by what had been observed until then,
and is another now: a judge that comes late, a scorer who changes his mind.
Invariants: functions of the *set* of feedback.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from fractions import Fraction

import msgspec

from spanloop.pipeline.rewards.inputs import feedback_inputs
from spanloop.pipeline.rewards.outcome import is_usable
from spanloop.schemas.canonical import micro
from spanloop.schemas.events import FeedbackReceived
from spanloop.schemas.orchestration import OrchestrationContent

__all__ = ["Score", "Told", "agent_scores", "mean_micro", "owners", "status_of", "told_about"]

Items = Sequence[FeedbackReceived]


class Score(msgspec.Struct, frozen=True):
    """One agent's score: mean over targets and scorers, micro-units."""

    value: int
    status: str
    evidence: tuple[str, ...]
    inputs: str


class Told(msgspec.Struct, frozen=True):
    """Feedback about agents, oldest first, and the agent of each target that it names."""

    items: tuple[FeedbackReceived, ...]
    of: Mapping[str, str]

    def by_agent(self, items: Items | None = None) -> dict[str, list[FeedbackReceived]]:
        """What counts of ``items`` (all of them), by agent."""
        found: dict[str, list[FeedbackReceived]] = {}
        for item in _latest(self.items if items is None else items):
            found.setdefault(self.of[item.target_id], []).append(item)
        return dict(sorted(found.items()))


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


def told_about(
    content: OrchestrationContent, feedback: Iterable[FeedbackReceived], channels: Collection[str]
) -> Told:
    """Usable feedback under the names ``channels`` that is about an agent."""
    usable = [item for item in feedback if item.name in channels and is_usable(item.value)]
    of = owners(content) if usable else {}
    about = [item for item in usable if of.get(item.target_id)]
    return Told(tuple(sorted(about, key=_order)), of)


def agent_scores(told: Told) -> dict[str, Score]:
    """Mean score of each agent that somebody scored."""
    mine: dict[str, list[FeedbackReceived]] = {}
    for item in told.items:
        mine.setdefault(told.of[item.target_id], []).append(item)
    found = {}
    for agent, items in told.by_agent().items():
        value = _mean(items)
        found[agent] = Score(
            value,
            status_of(mine[agent], value, lambda seen: _mean(_latest(seen))),
            tuple(sorted(item.feedback_id for item in items)),
            feedback_inputs(items),
        )
    return found


def status_of(
    items: Items,
    value: int | None,
    value_of: Callable[[Items], int | None],
    *,
    unit_of: Callable[[FeedbackReceived], str] = lambda _: "",
    needs: AbstractSet[str] = frozenset(),
) -> str:
    """missing, provisional, final or corrected; see the module. What was observed at one time belongs together.

    Args:
        items: All that the value can rest on.
        value: What it is.
        value_of: What it would be, had only these been observed.
        unit_of: Of whom or what an item tells; with ``needs``.
        needs: Without an item of each of these there is no value.
    """
    if value is None:
        return "missing"
    ordered = sorted(items, key=_order)
    settled: dict[tuple[str, str, str, str], bool] = {}
    seen: set[str] = set()
    open_, first = 0, len(ordered)
    for end, item in enumerate(ordered, start=1):
        open_ += settled.get(_key(item), True) - item.final
        settled[_key(item)] = item.final
        seen.add(unit_of(item))
        whole = end == len(ordered) or ordered[end].observed_ns != item.observed_ns
        if first == len(ordered) and whole and not open_ and needs <= seen:
            first = end
    if open_:
        return "provisional"
    return "final" if first == len(ordered) or value_of(ordered[:first]) == value else "corrected"


def mean_micro(values: Iterable[int]) -> int | None:
    """Mean in micro-units, exact before it is rounded; None for none."""
    known = list(values)
    return round(Fraction(sum(known), len(known))) if known else None


def _mean(items: Items) -> int:
    return mean_micro(micro(item.value) for item in items) or 0


def _order(item: FeedbackReceived) -> tuple[int, str]:
    return item.observed_ns, item.feedback_id


def _key(item: FeedbackReceived) -> tuple[str, str, str, str]:
    return item.target_kind, item.target_id, item.name, item.scorer


def _latest(items: Items) -> list[FeedbackReceived]:
    latest = {_key(item): item for item in sorted(items, key=_order)}
    return [latest[key] for key in sorted(latest)]
