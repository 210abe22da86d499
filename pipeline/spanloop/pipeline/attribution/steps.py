"""The steps of an orchestration that can be to blame: one turn each, who took it, of which kind, and what it said.

A model call with all that it decided is one step; so is an event that no model call is known for (a turn of an imported log, a
tool's result). A step's number is its place among these, from 0; of an imported chat log this is the place in its history.
Invariants: pure; the order depends on times, kinds and span ids, never on a name; a renamed agent is the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from spanloop.pipeline.attribution.texts import NOTHING, Words, join_words
from spanloop.schemas.orchestration import ModelCall, OrchestrationContent, OrchestrationEvent

__all__ = ["KINDS", "Step", "evidence_of", "steps_of"]

KINDS = ("instruct", "plan", "work", "talk", "act", "result", "end", "human")
"""instruct: gives work to another agent. plan: decides. work: hands a result back. talk: says something to others, or
answers. act: calls tools. result: what a tool gave back. end: stops the run. human: a person's."""

_KIND = {
    "delegate": "instruct",
    "orchestrator_decision": "plan",
    "return": "work",
    "message": "talk",
    "aggregate": "talk",
    "tool_call": "act",
    "tool_result": "result",
    "stop": "end",
    "human_intervention": "human",
}
"""Spawns go with their delegations, despawns and guardrails decide nothing that an agent could have done otherwise."""
_PEOPLE = frozenset({"", "user", "human"})


class Step(msgspec.Struct, frozen=True):
    """One turn."""

    index: int
    agent: str
    agent_id: str
    kind: str
    """One of KINDS."""
    t_ns: int
    event_ids: tuple[str, ...]
    """Events of the orchestration; empty: a model call that led to none."""
    span_ids: tuple[str, ...]
    call_id: str = ""
    """The model call that it is; empty: none is known."""
    failed: bool = False
    """A status says so."""
    words: Words = NOTHING


def steps_of(content: OrchestrationContent, words: Mapping[str, Words]) -> tuple[Step, ...]:
    """Steps in the order in which they were taken; ``words``: what each span said, by span id."""
    groups: dict[tuple[str, str], list[OrchestrationEvent]] = {}
    calls = {call.id: call for call in content.calls}
    for event in content.events:
        if event.type not in _KIND:
            continue
        called = event.call_id in calls and event.type not in ("tool_result", "human_intervention")
        key = ("call", event.call_id) if called else ("event", event.id)
        groups.setdefault(key, []).append(event)
    for call in content.calls:
        groups.setdefault(("call", call.id), [])
    names = {agent.id: agent.name for agent in content.agents}
    drafts = [
        _draft(events, calls.get(key[1]) if key[0] == "call" else None, names, words)
        for key, events in groups.items()
    ]
    drafts.sort(key=lambda step: (step.t_ns, KINDS.index(step.kind), step.span_ids, step.event_ids))
    return tuple(msgspec.structs.replace(step, index=index) for index, step in enumerate(drafts))


def evidence_of(content: OrchestrationContent) -> set[str]:
    """Span ids whose words ``steps_of`` asks for."""
    told = {span for event in content.events if event.type in _KIND for span in event.evidence}
    return told | {span for call in content.calls for span in call.span_ids}


def _draft(
    events: list[OrchestrationEvent],
    call: ModelCall | None,
    names: Mapping[str, str],
    words: Mapping[str, Words],
) -> Step:
    kinds = {_kind(event) for event in events} or {"talk"}
    spans = call.span_ids if call is not None else tuple(sorted({s for e in events for s in e.evidence}))
    agent_id = call.agent_id if call is not None else events[0].agent_id
    named = names.get(agent_id) or (events[0].agent if events else "")
    return Step(
        index=0,
        agent=named,
        agent_id=agent_id,
        kind=min(kinds, key=KINDS.index),
        t_ns=call.start_ns if call is not None else min(event.t_ns for event in events),
        event_ids=tuple(sorted(event.id for event in events)),
        span_ids=spans,
        call_id=call.id if call is not None else "",
        failed=any(event.status == "error" for event in events)
        or (call is not None and call.status == "error"),
        words=join_words(words.get(span, NOTHING) for span in spans),
    )


def _kind(event: OrchestrationEvent) -> str:
    if event.agent in _PEOPLE and not event.agent_id:
        return "human"
    if event.type == "return" and event.to in _PEOPLE:
        return "talk"
    return _KIND[event.type]
