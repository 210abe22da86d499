"""Who took part in an orchestration, in the terms of the ledger: orchestrator, roles, turns, tools, and what lay between turns.

The *line* is the orchestrator's turns in time. The *gap* k is what happened between turn k and turn k + 1 (or the end): the
agents that turn k started and the tools it called. Both come from structure first (the decision's call id on the spawn
event) and from clocks only where structure is silent.
Invariants: pure; sorted by (time, id); every agent, model call and leaf tool call is in exactly one place.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TypeVar
from typing import cast as typed

import msgspec

from spanloop.schemas.orchestration import Agent, ModelCall, OrchestrationContent, OrchestrationEvent

__all__ = ["UNATTRIBUTED", "Cast", "cast_of", "known_cast", "renewed", "role_of"]

UNATTRIBUTED = "unattributed"
_IN_TIME = attrgetter("start_ns", "id")
"""Order of model calls."""


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
    made: dict[str, object] = {}
    """What was made of the cast already, by who made it; a cache."""


def role_of(agent: Agent) -> str:
    """The role whose account an agent's credit goes through."""
    return agent.role or agent.name.lower() or UNATTRIBUTED


def cast_of(content: OrchestrationContent) -> Cast:
    """The cast of an orchestration."""
    agents = {agent.id: agent for agent in content.agents}
    turns: dict[str, list[ModelCall]] = {}
    for call in sorted(content.calls, key=_IN_TIME):
        owner = call.agent_id or UNATTRIBUTED
        if owner not in agents:
            agents[owner] = Agent(id=owner, name=owner, role=UNATTRIBUTED, started_ns=call.start_ns)
        turns.setdefault(owner, []).append(call)
    everyone = sorted(agents.values(), key=attrgetter("started_ns", "id"))
    leading = _leading(everyone, turns)
    orchestrators = tuple(agent for agent in everyone if agent.id in leading)
    others = tuple(agent for agent in everyone if agent.id not in leading)
    tools, loose, status = _tools(content, turns)
    line = tuple(sorted([call for a in orchestrators for call in turns.get(a.id, ())], key=_IN_TIME))
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


_known: dict[int, tuple[weakref.ref[OrchestrationContent], Cast]] = {}


def known_cast(content: OrchestrationContent) -> Cast:
    """``cast_of``, made once for a content that several stages are given; not to be renewed."""
    key = id(content)
    known = _known.get(key)
    if known is not None and known[0]() is content:
        return known[1]
    cast = cast_of(content)
    _known[key] = (weakref.ref(content, lambda _: _known.pop(key, None)), cast)
    return cast


def renewed(cast: Cast, old: OrchestrationContent, new: OrchestrationContent) -> frozenset[str] | None:
    """Bring the cast of ``old`` up to date with ``new``, in place, where only calls and tools of sub-agents came, went or
    changed; returns those sub-agents. None: more than that changed, and nothing was done.
    """
    calls, events = _moved(old.calls, new.calls), _moved(old.events, new.events)
    agents = _moved(old.agents, new.agents)
    if calls is None or events is None or agents is None or any(agents):
        return None
    moved = [event for part in events for event in part if event.type in _TELLING]
    owners = {call.agent_id or UNATTRIBUTED for part in calls for call in part}
    owners |= {event.agent_id or UNATTRIBUTED for event in moved}
    subs = {agent.id for agent in cast.others if agent.parent_id}
    if not owners <= subs or any(event.type in {"spawn", "delegate"} for event in moved):
        return None
    turns = {owner: _merged(cast.turns.get(owner, ()), calls, owner) for owner in owners}
    spans = {span for event in moved if event.type == "tool_result" for span in event.evidence}
    ids = {call.id for owner in owners for call in (*cast.turns.get(owner, ()), *turns[owner])}
    own: list[OrchestrationEvent] = []
    results: list[OrchestrationEvent] = []
    for event in new.events:
        if event.type == "tool_call":
            if (event.agent_id or UNATTRIBUTED) in owners:
                own.append(event)
            elif event.call_id in ids or (spans and not spans.isdisjoint(event.evidence)):
                return None  # work of one that another asked for
        elif event.type == "tool_result":
            results.append(event)
    foreign = {event.call_id for event in (*moved, *own) if event.call_id} - ids
    if foreign and any(call.id in foreign for call in new.calls):
        return None
    _renew(cast, new, turns, own, results)
    return frozenset(owners)


def _merged(
    before: tuple[ModelCall, ...], moved: tuple[Sequence[ModelCall], Sequence[ModelCall]], owner: str
) -> list[ModelCall]:
    """An agent's turns after some went and some came."""
    gone, come = ([call for call in part if (call.agent_id or UNATTRIBUTED) == owner] for part in moved)
    left = [call for call in before if call not in gone] if gone else list(before)
    return sorted((*left, *come), key=_IN_TIME)


_TELLING = frozenset({"tool_call", "tool_result", "spawn", "delegate"})
MOVED_MAX = 256
"""Calls or events that may have moved; with more a cast is made anew."""
_Part = TypeVar("_Part", ModelCall, OrchestrationEvent, Agent)


def _moved(
    old: tuple[_Part, ...], new: tuple[_Part, ...]
) -> tuple[tuple[_Part, ...], tuple[_Part, ...]] | None:
    """What went and what came, where they have a beginning and an end in common; None: too much of it."""
    start = _common(old, new)
    most = min(len(old), len(new)) - start
    end = _common(old[len(old) - most :][::-1], new[len(new) - most :][::-1]) if most else 0
    gone, come = old[start : len(old) - end], new[start : len(new) - end]
    return (gone, come) if len(gone) + len(come) <= MOVED_MAX else None


def _common(one: tuple[_Part, ...], other: tuple[_Part, ...]) -> int:
    """How many the beginnings of two tuples have in common."""
    low, step = 0, 1024
    most = min(len(one), len(other))
    while step:
        while low + step <= most and one[low : low + step] == other[low : low + step]:
            low += step
        step //= 2
    return low


def _renew(
    cast: Cast,
    new: OrchestrationContent,
    turns: Mapping[str, list[ModelCall]],
    own: list[OrchestrationEvent],
    results: list[OrchestrationEvent],
) -> None:
    """Put the turns of some agents and the tool calls of theirs, ``own``, in the place of those that they had."""
    cast.made.clear()
    of_agent = typed("dict[str, tuple[ModelCall, ...]]", cast.turns)
    tools, loose = (
        typed("dict[str, tuple[OrchestrationEvent, ...]]", part) for part in (cast.tools, cast.loose_tools)
    )
    status = typed("dict[str, str]", cast.tool_status)
    for owner, calls in turns.items():
        gone = [event for call in of_agent.pop(owner, ()) for event in tools.pop(call.id, ())]
        for event in (*gone, *loose.pop(owner, ())):
            status.pop(event.id, None)
        if calls:
            of_agent[owner] = tuple(calls)
    spans = {span for event in own for span in event.evidence}
    told = [event for event in results if not spans.isdisjoint(event.evidence)]
    part = msgspec.structs.replace(new, events=(*told, *own))
    placed, unplaced, known = _tools(part, {owner: calls for owner, calls in turns.items() if calls})
    tools.update(placed)
    loose.update(unplaced)
    status.update(known)


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
    asked: list[OrchestrationEvent] = []
    for event in content.events:
        kind = event.type
        if kind == "tool_result":
            for span in event.evidence:
                results.setdefault(span, event.status or "ok")
        elif kind == "tool_call":
            asked.append(event)
    status: dict[str, str] = {}
    for event in asked:
        for span in event.evidence:
            if span in results:
                status[event.id] = results[span]
                break
        if event.call_id in calls:
            by_turn.setdefault(event.call_id, []).append(event)
            continue
        own = turns.get(event.agent_id or UNATTRIBUTED, [])
        if own:
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
