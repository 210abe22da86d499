"""An orchestration as a run of a Dynamic-Dec-POMDP: which agents there were at each time, and what each saw and did.

Source: METHODS 1.1 (Def. 2 and 3), M+ = (I_t, S, A(.), A_spawn, P, Omega, r, gamma). Of it a trace shows I_t, the
observations and the actions with the options that were told; it does not show the state, and texts stay where the
deployment keeps content. Rewards are not part of it: they come from feedback (``spanloop explain credit``).

A step of an agent is one model call: what it had seen since its last one, and what it did by it. What an agent does
without a model call is a step of its own. Within one agent the order is exact; between agents on different machines
it is as good as their clocks, which only the active set compares.

Invariants: a pure function of the content; every action of an agent and every observation stands in exactly one of its
steps; the active set changes exactly at starts and ends.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

import msgspec

from spanloop.schemas.orchestration import (
    Agent,
    Decision,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
)

__all__ = ["Act", "AgentRun", "Change", "Observation", "PomdpTrace", "Step", "active_at", "pomdp_of"]

_ACTIONS = frozenset({"spawn", "delegate", "message", "tool_call", "aggregate", "return", "stop"})
_SPAWN_ACTIONS = frozenset({"spawn"})
_OBSERVED_BY_ACTOR = {"tool_result": "tool_result", "safety_event": "safety"}
_OBSERVED_BY_OTHER = {
    "delegate": "task",
    "message": "message",
    "return": "result",
    "human_intervention": "human",
}


class Observation(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that reached an agent."""

    kind: str
    """task, result (of an agent that it started), message, tool_result, human or safety."""
    t_ns: int
    source: str = ""
    """Agent, tool or person that it came from."""
    event_id: str = ""
    status: str = ""


class Act(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that an agent did."""

    kind: str
    """spawn, delegate, message, tool_call, aggregate, return or stop; orchestrator_decision: one told apart from its act."""
    t_ns: int
    target: str = ""
    """Agent, tool or receiver."""
    event_id: str = ""
    changes_agents: bool = False
    """It is in A_spawn: it changed who there is."""
    decision: Decision | None = None
    """Options and propensities, where the program told them; None: not told."""


class Step(msgspec.Struct, frozen=True, omit_defaults=True):
    """One observation-action pair of an agent."""

    index: int
    """0, 1, ... within the agent."""
    t_ns: int
    """When it acted; of a last step in which it only saw something: when it saw it."""
    observations: tuple[Observation, ...] = ()
    actions: tuple[Act, ...] = ()
    """Empty beside a call: it answered, or asked for something that never ran."""
    call_id: str = ""
    """ModelCall that the step is; empty: no model took part, or none is known."""
    model: str = ""
    policy_version: str = ""


class AgentRun(msgspec.Struct, frozen=True, omit_defaults=True):
    """One agent instance i with its history."""

    id: str
    name: str
    role: str = ""
    parent_id: str = ""
    started_ns: int = 0
    ended_ns: int = 0
    """0: its end is not known; it counts as active to the end."""
    steps: tuple[Step, ...] = ()
    tools: tuple[str, ...] = ()
    """Tools that it used or that its models asked for: a lower bound of A(i, r, h), which is told only by ``decision``."""


class Change(msgspec.Struct, frozen=True, omit_defaults=True):
    """The active set I_t from ``t_ns`` on, until the next change."""

    t_ns: int
    active: tuple[str, ...]
    """Agent ids, sorted."""
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()


class PomdpTrace(msgspec.Struct, frozen=True, omit_defaults=True):
    """The view of one orchestration."""

    orchestration_id: str
    agents: tuple[AgentRun, ...]
    changes: tuple[Change, ...]
    most_active: int
    """Largest |I_t|."""
    linear: bool
    """Nobody was spawned: a trajectory of one agent, or of several that nobody started."""
    elsewhere: tuple[str, ...] = ()
    """Ids of events and calls of no known agent, sorted."""
    flags: tuple[str, ...] = ()


def pomdp_of(content: OrchestrationContent) -> PomdpTrace:
    """The view of ``content``."""
    agents = {agent.id: agent for agent in content.agents}
    seen: dict[str, list[Observation]] = defaultdict(list)
    done: dict[str, list[tuple[Act, str]]] = defaultdict(list)
    elsewhere = {call.id for call in content.calls if call.agent_id not in agents}
    delegated = {(event.agent_id, event.to_id) for event in content.events if event.type == "delegate"}
    for event in content.events:
        observer, observation = _observation(event, delegated)
        if observer in agents and observation is not None:
            seen[observer].append(observation)
        if event.agent_id in agents and (event.type in _ACTIONS or event.decision is not None):
            done[event.agent_id].append((_act(event), event.call_id))
        elif event.agent_id not in agents and observer not in agents:
            elsewhere.add(event.id)
    calls: dict[str, list[ModelCall]] = defaultdict(list)
    for call in content.calls:
        calls[call.agent_id].append(call)
    changes = _changes(content)
    return PomdpTrace(
        orchestration_id=content.orchestration_id,
        agents=tuple(
            _run(agent, calls[agent.id], seen[agent.id], done[agent.id]) for agent in content.agents
        ),
        changes=changes,
        most_active=max((len(change.active) for change in changes), default=0),
        linear=not any(event.type == "spawn" for event in content.events),
        elsewhere=tuple(sorted(elsewhere)),
        flags=content.flags,
    )


def active_at(trace: PomdpTrace, t_ns: int) -> tuple[str, ...]:
    """I_t: ids of the agents that were active at ``t_ns``."""
    place = bisect_right([change.t_ns for change in trace.changes], t_ns)
    return trace.changes[place - 1].active if place else ()


def _observation(
    event: OrchestrationEvent, delegated: set[tuple[str, str]]
) -> tuple[str, Observation | None]:
    """(agent id, what reached it) of an event. A start without a delegation is a task as well."""
    if event.type == "spawn" and (event.agent_id, event.to_id) not in delegated:
        return event.to_id, Observation("task", event.t_ns, event.agent, event.id)
    if event.type in _OBSERVED_BY_ACTOR:
        kind = _OBSERVED_BY_ACTOR[event.type]
        status = event.status or (
            "" if event.triggered is None else "triggered" if event.triggered else "passed"
        )
        return event.agent_id, Observation(kind, event.t_ns, event.tool, event.id, status)
    if event.type in _OBSERVED_BY_OTHER:
        kind = _OBSERVED_BY_OTHER[event.type]
        return event.to_id, Observation(kind, event.t_ns, event.agent, event.id, event.status)
    return "", None


def _act(event: OrchestrationEvent) -> Act:
    target = event.to or event.tool
    changes = event.type in _SPAWN_ACTIONS
    return Act(event.type, event.t_ns, target, event.id, changes_agents=changes, decision=event.decision)


def _run(
    agent: Agent, calls: list[ModelCall], seen: list[Observation], done: list[tuple[Act, str]]
) -> AgentRun:
    tools = {act.target for act, _ in done if act.kind == "tool_call" and act.target}
    tools |= {asked.name for call in calls for asked in call.tool_calls if asked.name}
    return AgentRun(
        id=agent.id,
        name=agent.name,
        role=agent.role,
        parent_id=agent.parent_id,
        started_ns=agent.started_ns,
        ended_ns=agent.ended_ns,
        steps=_steps(calls, seen, done),
        tools=tuple(sorted(tools)),
    )


class _Draft:
    """A step that is being filled."""

    def __init__(self, t_ns: int, call: ModelCall | None = None) -> None:
        self.t_ns, self.call = t_ns, call
        self.observations: list[Observation] = []
        self.actions: list[Act] = []


def _steps(calls: list[ModelCall], seen: list[Observation], done: list[tuple[Act, str]]) -> tuple[Step, ...]:
    """Calls are steps; an action belongs to the call that took it, else to the last step begun before it, unless
    something was seen in between. What was seen belongs to the step that follows. At one nanosecond the order of the content counts."""
    order: list[tuple[int, int, Observation | ModelCall | tuple[Act, str]]] = []
    order += [(item.t_ns, 0, item) for item in seen]
    order += [(call.start_ns, 1, call) for call in calls]
    order += [(act.t_ns, 2, (act, call_id)) for act, call_id in done]
    order.sort(key=lambda entry: entry[:2])
    of_call = {call.id: _Draft(call.start_ns, call) for call in calls}
    drafts: list[_Draft] = []
    pending: list[Observation] = []
    for t_ns, _, item in order:
        if isinstance(item, Observation):
            pending.append(item)
            continue
        if isinstance(item, ModelCall):
            drafts.append(of_call[item.id])
        else:
            act, call_id = item
            own = of_call.get(call_id)
            if own is not None:
                own.actions.append(act)
                continue
            if pending or not drafts:
                drafts.append(_Draft(t_ns))
            drafts[-1].actions.append(act)
        drafts[-1].observations += pending
        pending = []
    if pending:
        drafts.append(_Draft(pending[-1].t_ns))
        drafts[-1].observations = pending
    return tuple(
        Step(
            index=index,
            t_ns=draft.t_ns,
            observations=tuple(draft.observations),
            actions=tuple(draft.actions),
            call_id=draft.call.id if draft.call else "",
            model=draft.call.model if draft.call else "",
            policy_version=draft.call.policy_version if draft.call else "",
        )
        for index, draft in enumerate(drafts)
    )


def _changes(content: OrchestrationContent) -> tuple[Change, ...]:
    """Starts and ends in order; at one nanosecond all of them are one change."""
    joined: dict[int, list[str]] = defaultdict(list)
    left: dict[int, list[str]] = defaultdict(list)
    for agent in content.agents:
        joined[agent.started_ns].append(agent.id)
        left[max(agent.ended_ns or content.ended_ns, agent.started_ns)].append(agent.id)
    active: set[str] = set()
    changes = []
    for t_ns in sorted({*joined, *left}):
        active |= set(joined[t_ns])
        active -= set(left[t_ns])
        changes.append(
            Change(t_ns, tuple(sorted(active)), tuple(sorted(joined[t_ns])), tuple(sorted(left[t_ns])))
        )
    return tuple(changes)
