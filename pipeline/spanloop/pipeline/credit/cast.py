"""Who took part in an orchestration, in the terms of the ledger: orchestrator, roles, turns, tools, and what lay between turns.

The *line* is the orchestrator's turns in time. The *gap* k is what happened between turn k and turn k + 1 (or the end): the
agents that turn k started and the tools it called. Both come from structure first (the decision's call id on the spawn
event) and from clocks only where structure is silent.
Invariants: pure; sorted by (time, id); every agent, model call and leaf tool call is in exactly one place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping

import msgspec

from spanloop.schemas.orchestration import Agent, ModelCall, OrchestrationContent, OrchestrationEvent

__all__ = ["Cast", "cast_of", "role_of"]

UNATTRIBUTED = "unattributed"


class Cast(msgspec.Struct, frozen=True):
    """The parties and the order of an orchestration."""

    orchestrators: tuple[Agent, ...]
    """Entry agents; together they are the unit ``orchestrator``."""
    others: tuple[Agent, ...]
    """All other agents, by (start, id)."""
    turns: Mapping[str, tuple[ModelCall, ...]]
    """Model calls by agent id."""
    tools: Mapping[str, tuple[OrchestrationEvent, ...]]
    """Leaf tool calls by the id of the model call that asked for them."""
    loose_tools: Mapping[str, tuple[OrchestrationEvent, ...]]
    """Leaf tool calls of agents that made no model call, by agent id."""
    tool_status: Mapping[str, str]
    """Status of the result by id of the tool_call event; absent: no result seen."""
    line: tuple[ModelCall, ...]
    """The orchestrator's turns."""
    gap_of: Mapping[str, int]
    """Index on the line of the turn after which an agent or an orchestrator's tool call did its work."""


def role_of(agent: Agent) -> str:
    """The role whose account an agent's credit goes through."""
    return agent.role or agent.name.lower() or UNATTRIBUTED


def cast_of(content: OrchestrationContent) -> Cast:
    """The cast of an orchestration."""
    agents = {agent.id: agent for agent in content.agents}
    turns: dict[str, list[ModelCall]] = {}
    for call in sorted(content.calls, key=lambda c: (c.start_ns, c.id)):
        owner = call.agent_id or UNATTRIBUTED
        if owner not in agents:
            agents[owner] = Agent(id=owner, name=owner, role=UNATTRIBUTED, started_ns=call.start_ns)
        turns.setdefault(owner, []).append(call)
    everyone = sorted(agents.values(), key=lambda a: (a.started_ns, a.id))
    leading = _leading(everyone, turns)
    orchestrators = tuple(agent for agent in everyone if agent.id in leading)
    others = tuple(agent for agent in everyone if agent.id not in leading)
    tools, loose, status = _tools(content, turns)
    line = tuple(
        sorted(
            (call for a in orchestrators for call in turns.get(a.id, ())), key=lambda c: (c.start_ns, c.id)
        )
    )
    own_loose = {agent.id: loose[agent.id] for agent in orchestrators if agent.id in loose}
    return Cast(
        orchestrators,
        others,
        {owner: tuple(calls) for owner, calls in turns.items()},
        tools,
        loose,
        status,
        line,
        _gaps(content, line, others=others, tools=tools, loose=own_loose),
    )


def _leading(everyone: list[Agent], turns: Mapping[str, list[ModelCall]]) -> set[str]:
    """Ids of the orchestrator's agents: of those without a parent the first, those that have children or serve a policy,
    and all that share a role with these. An app's helper that merely runs beside them stays a role of its own."""
    known = {agent.id for agent in everyone}
    roots = [agent for agent in everyone if not agent.parent_id]
    if not roots:
        roots = [agent for agent in everyone if agent.parent_id not in known][:1] or everyone[:1]
    parents = {agent.parent_id for agent in everyone}
    leading = [
        agent
        for i, agent in enumerate(roots)
        if i == 0 or agent.id in parents or any(call.policy_version for call in turns.get(agent.id, ()))
    ]
    roles = {role_of(agent) for agent in leading}
    return {agent.id for agent in roots if role_of(agent) in roles}


def _tools(
    content: OrchestrationContent, turns: Mapping[str, list[ModelCall]]
) -> tuple[
    dict[str, tuple[OrchestrationEvent, ...]], dict[str, tuple[OrchestrationEvent, ...]], dict[str, str]
]:
    calls = {call.id for owned in turns.values() for call in owned}
    by_turn: dict[str, list[OrchestrationEvent]] = {}
    loose: dict[str, list[OrchestrationEvent]] = {}
    results: dict[str, str] = {}
    for event in content.events:
        if event.type == "tool_result":
            for span in event.evidence:
                results.setdefault(span, event.status or "ok")
    status: dict[str, str] = {}
    for event in content.events:
        if event.type != "tool_call":
            continue
        found = next((results[span] for span in event.evidence if span in results), None)
        if found is not None:
            status[event.id] = found
        own = turns.get(event.agent_id or UNATTRIBUTED, [])
        if event.call_id in calls:
            by_turn.setdefault(event.call_id, []).append(event)
        elif own:
            before = [call for call in own if call.start_ns <= event.t_ns] or own[:1]
            by_turn.setdefault(before[-1].id, []).append(event)
        else:
            loose.setdefault(event.agent_id, []).append(event)
    return (
        {key: tuple(events) for key, events in by_turn.items()},
        {key: tuple(events) for key, events in loose.items()},
        status,
    )


def _gaps(
    content: OrchestrationContent,
    line: tuple[ModelCall, ...],
    *,
    others: tuple[Agent, ...],
    tools: Mapping[str, tuple[OrchestrationEvent, ...]],
    loose: Mapping[str, tuple[OrchestrationEvent, ...]],
) -> dict[str, int]:
    index = {call.id: i for i, call in enumerate(line)}
    starts = [call.start_ns for call in line]
    started_by = {
        event.to_id: index[event.call_id]
        for event in content.events
        if event.to_id and event.call_id in index and event.type in {"spawn", "delegate"}
    }
    gaps: dict[str, int] = {}
    by_id = {agent.id: agent for agent in others}
    for agent in others:
        at: Agent | None = agent
        for _ in range(len(others)):
            if at is None or at.id in started_by:
                break
            at = by_id.get(at.parent_id)
        if at is not None and at.id in started_by:
            gaps[agent.id] = started_by[at.id]
        else:
            gaps[agent.id] = max(0, bisect_right(starts, agent.ended_ns or agent.started_ns) - 1)
    for i, call in enumerate(line):
        for event in tools.get(call.id, ()):
            gaps[event.id] = i
    for events in loose.values():
        for event in events:
            gaps[event.id] = max(0, bisect_right(starts, event.t_ns) - 1)
    return gaps
