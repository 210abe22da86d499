"""What a judge is asked about one orchestration: a case for each agent that said something and that the settings name.

Place in the flow: ``running`` reads contents and words from the log, ``port.ask`` asks. A tool's result is never shown: what strangers
wrote reaches a judge only as far as an agent repeated it.
Invariants: pure; a case is a function of the orchestration and of the words of its spans.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from spanloop.pipeline.attribution.steps import Step, steps_of
from spanloop.pipeline.attribution.texts import Words
from spanloop.pipeline.judges.port import Case, Segment
from spanloop.schemas.canonical import digest
from spanloop.schemas.orchestration import Agent, OrchestrationContent
from spanloop.schemas.settings import JudgeTerm

__all__ = ["cases_of", "is_drawn"]

_SHOWN = frozenset({"instruct", "plan", "work", "talk", "act", "end", "human"})
_TO_OTHERS = frozenset({"instruct", "work", "talk", "human"})


def is_drawn(term: JudgeTerm, tenant: str, orchestration_id: str) -> bool:
    """Whether an orchestration belongs to the judge's share: always the same answer."""
    drawn = int(digest("judged", term.name, tenant, orchestration_id)[:8], 16)
    return drawn < term.share * 2**32


def cases_of(content: OrchestrationContent, words: Mapping[str, Words], term: JudgeTerm) -> list[Case]:
    """The cases of one orchestration, by agent; none of an agent whose words are not kept."""
    steps = [step for step in steps_of(content, words) if step.kind in _SHOWN and step.words.text]
    warned = {e.agent_id for e in content.events if e.type == "safety_event" and e.triggered and e.agent_id}
    found = []
    for agent in content.agents:
        if term.role and (agent.role or agent.name.lower()) != term.role.lower():
            continue
        own = [step for step in steps if step.agent_id == agent.id]
        target = _target(content, agent, own)
        if not own or target is None:
            continue
        shown = steps if term.shows == "all" else list(_about(content, agent, steps))
        found.append(
            Case(
                content.tenant, target[0], target[1], content.trace_ids[0] if len(content.trace_ids) == 1 else "", term.channel,
                term.rubric,
                tuple(Segment(step.agent or "user", step.words.text, step.agent_id in warned) for step in shown),
                tuple(dict.fromkeys(span for step in shown for span in step.span_ids)),
            )
        )  # fmt: skip
    return found


def _about(content: OrchestrationContent, agent: Agent, steps: Sequence[Step]) -> Iterator[Step]:
    """What the agent said, and what others said to it, in order."""
    to_it = {e.id for e in content.events if e.to_id == agent.id}
    for step in steps:
        if step.agent_id == agent.id or (step.kind in _TO_OTHERS and to_it.intersection(step.event_ids)):
            yield step


def _target(
    content: OrchestrationContent, agent: Agent, own: Sequence[Step]
) -> tuple[Literal["span", "response"], str] | None:
    if agent.span_id:
        return "span", agent.span_id
    last = next((c for c in reversed(content.calls) if c.agent_id == agent.id and c.response_id), None)
    if last is not None:
        return "response", last.response_id
    spans = [span for step in own for span in step.span_ids]
    return ("span", spans[-1]) if spans else None
