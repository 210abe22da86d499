"""The critical path as the rewards define it, for SQL: the function behind the macro ``critical_path``.

Place in the flow: ``sandbox`` registers ``rows`` in DuckDB. The order of work comes from ``rewards.orchestration``, so that the
path's length is the span of the reward channel ``work_span`` (to the microsecond that the tables keep).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from spanloop.pipeline.rewards.orchestration import work_graph
from spanloop.schemas.orchestration import (
    Agent,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
)

__all__ = ["PARAMETERS", "RETURNS", "heaviest_path", "rows"]

PARAMETERS = (
    "STRUCT(id VARCHAR, name VARCHAR, parent_id VARCHAR, started BIGINT, ended BIGINT)[]",
    "STRUCT(id VARCHAR, agent_id VARCHAR, started BIGINT, ended BIGINT)[]",
    "STRUCT(to_id VARCHAR, call_id VARCHAR)[]",
)
RETURNS = (
    "STRUCT(step BIGINT, kind VARCHAR, node VARCHAR, agent_id VARCHAR, agent VARCHAR, started BIGINT, own_us BIGINT, "
    "total_us BIGINT, span_us BIGINT, work_us BIGINT)[]"
)


def heaviest_path(weights: Mapping[str, int], after: Mapping[str, AbstractSet[str]]) -> list[str]:
    """Nodes of the heaviest path through the order ``after`` (predecessors of each node), first to last; of equal ones the
    path whose nodes come first by name, from the end. Nodes on a cycle are left out.

    Source: METHODS 2.1, L(v) = w_v + max over u -> v of L(u).

    >>> heaviest_path({"o": 1, "a": 5, "b": 3, "c": 6, "g": 1}, {"a": {"o"}, "b": {"o"}, "c": {"o"}, "g": {"a", "b", "c"}})
    ['o', 'c', 'g']
    """
    followers: dict[str, list[str]] = {}
    missing: dict[str, int] = {}
    for node in weights:
        sources = [source for source in after.get(node, ()) if source in weights]
        missing[node] = len(sources)
        for source in sources:
            followers.setdefault(source, []).append(node)
    total: dict[str, int] = {}
    before: dict[str, str] = {}
    ready = [node for node, number in missing.items() if number == 0]
    while ready:
        node = ready.pop()
        known = [source for source in after.get(node, ()) if source in total]
        if known:
            before[node] = min(known, key=lambda source: (-total[source], source))
        total[node] = weights[node] + (total[before[node]] if known else 0)
        for follower in followers.get(node, ()):
            missing[follower] -= 1
            if missing[follower] == 0:
                ready.append(follower)
    if not total:
        return []
    path = [min(total, key=lambda node: (-total[node], node))]
    while path[-1] in before:
        path.append(before[path[-1]])
    return path[::-1]


def rows(
    agents: Sequence[Mapping[str, Any]],
    calls: Sequence[Mapping[str, Any]],
    starts: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """The path of one orchestration, one row a step; times in microseconds."""
    content = OrchestrationContent(
        orchestration_id="", tenant="", trace_ids=(), edges=(), tokens=TokenUsage(), started_ns=0, ended_ns=0,
        events=tuple(
            OrchestrationEvent("", "spawn", "", 0, 1.0, "", (), to_id=s["to_id"], call_id=s["call_id"]) for s in starts
        ),
        agents=tuple(
            Agent(a["id"], a["name"], parent_id=a["parent_id"], started_ns=a["started"], ended_ns=a["ended"]) for a in agents
        ),
        calls=tuple(ModelCall(c["id"], c["agent_id"], (), c["started"], c["ended"]) for c in calls),
    )  # fmt: skip
    weights, after = work_graph(content)
    path = heaviest_path(weights, after)
    call_of = {call.id: call for call in content.calls}
    agent_of = {agent.id: agent for agent in content.agents}
    span, work, total = sum(weights[node] for node in path), sum(weights.values()), 0
    found = []
    for step, node in enumerate(path, start=1):
        call = call_of.get(node)
        agent_id = call.agent_id if call is not None else node.removeprefix("agent:")
        agent = agent_of.get(agent_id)
        total += weights[node]
        found.append({
            "step": step, "kind": "call" if call is not None else "agent", "node": node if call is not None else agent_id,
            "agent_id": agent_id, "agent": agent.name if agent is not None else agent_id,
            "started": call.start_ns if call is not None else agent.started_ns if agent is not None else 0,
            "own_us": weights[node], "total_us": total, "span_us": span, "work_us": work,
        })  # fmt: skip
    return found
