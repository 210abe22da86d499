"""The view ``pipeline.pomdp`` for SQL: the functions behind the macros ``pomdp`` and ``active_agents``.

Times are microseconds, which is what the tables keep; within one microsecond the order is theirs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spanloop.pipeline.pomdp import pomdp_of
from spanloop.schemas.orchestration import (
    Agent,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
)

__all__ = ["CHANGES", "PARAMETERS", "STEPS", "change_rows", "step_rows"]

PARAMETERS = (
    "STRUCT(id VARCHAR, name VARCHAR, role VARCHAR, parent_id VARCHAR, started BIGINT, ended BIGINT)[]",
    "STRUCT(id VARCHAR, agent_id VARCHAR, started BIGINT, model VARCHAR, policy_version VARCHAR)[]",
    "STRUCT(id VARCHAR, kind VARCHAR, agent VARCHAR, agent_id VARCHAR, to_agent VARCHAR, to_id VARCHAR, tool VARCHAR, "
    "status VARCHAR, triggered BOOLEAN, t BIGINT, call_id VARCHAR)[]",
)
STEPS = (
    "STRUCT(agent_id VARCHAR, agent VARCHAR, role VARCHAR, step BIGINT, t BIGINT, call_id VARCHAR, model VARCHAR, "
    "policy_version VARCHAR, part VARCHAR, kind VARCHAR, other VARCHAR, status VARCHAR, event_id VARCHAR, moment BIGINT)[]"
)
CHANGES = "STRUCT(t BIGINT, num_active BIGINT, active VARCHAR[], joined VARCHAR[], gone VARCHAR[])[]"


def step_rows(
    agents: Sequence[Mapping[str, Any]],
    calls: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """One row for each observation and action of each step, and one for a step that has neither."""
    content = _content(agents, calls, events)
    found = []
    for run in pomdp_of(content).agents:
        for step in run.steps:
            head = {
                "agent_id": run.id, "agent": run.name, "role": run.role, "step": step.index, "t": step.t_ns,
                "call_id": step.call_id, "model": step.model, "policy_version": step.policy_version,
            }  # fmt: skip
            parts = [
                *(("observation", o.kind, o.source, o.status, o.event_id, o.t_ns) for o in step.observations),
                *(("action", a.kind, a.target, "", a.event_id, a.t_ns) for a in step.actions),
            ] or [("action", "answer", "", "", "", step.t_ns)]
            keys = ("part", "kind", "other", "status", "event_id", "moment")
            found += [head | dict(zip(keys, part, strict=True)) for part in parts]
    return found


def change_rows(agents: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each change of the active set; agents by name and the beginning of their id."""
    content = _content(agents, (), ())
    names = {agent.id: f"{agent.name} {agent.id[:6]}" for agent in content.agents}
    return [
        {
            "t": change.t_ns, "num_active": len(change.active), "active": [names[i] for i in change.active],
            "joined": [names[i] for i in change.joined], "gone": [names[i] for i in change.left],
        }
        for change in pomdp_of(content).changes
    ]  # fmt: skip


def _content(
    agents: Sequence[Mapping[str, Any]],
    calls: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
) -> OrchestrationContent:
    """An orchestration of what the tables keep, with microseconds for nanoseconds."""
    ends = [a["ended"] for a in agents] + [c["started"] for c in calls] + [e["t"] for e in events]
    return OrchestrationContent(
        orchestration_id="", tenant="", trace_ids=(), edges=(), tokens=TokenUsage(), started_ns=0, ended_ns=max(ends, default=0),
        events=tuple(
            OrchestrationEvent(
                e["id"], e["kind"], e["agent"], e["t"], 1.0, "", (), agent_id=e["agent_id"], to=e["to_agent"], to_id=e["to_id"],
                tool=e["tool"], status=e["status"], triggered=e["triggered"], call_id=e["call_id"],
            )
            for e in events
        ),
        agents=tuple(
            Agent(a["id"], a["name"], a["role"], a["parent_id"], started_ns=a["started"], ended_ns=a["ended"]) for a in agents
        ),
        calls=tuple(
            ModelCall(c["id"], c["agent_id"], (), c["started"], c["started"], model=c["model"], policy_version=c["policy_version"])
            for c in calls
        ),
    )  # fmt: skip
