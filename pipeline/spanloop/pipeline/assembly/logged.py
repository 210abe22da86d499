"""Events that an imported log states: taken over as they are, with the agents that they name and the edges that it tells.

Rule "imported", confidence 1. An agent of a log has no span; its id is made of the trace and its name, so that it is the same
in every revision.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from spanloop.schemas.canonical import digest
from spanloop.schemas.orchestration import Agent, OrchestrationEvent

if TYPE_CHECKING:
    from spanloop.pipeline.assembly.infer import Inference

__all__ = ["IMPORTED", "LoggedEvents", "add_logged_events", "logged_agents", "with_logged_edges"]

IMPORTED = "imported"
_NOBODY = frozenset({"", "user", "human"})
_CALLS_ON = frozenset({"spawn", "delegate"})


class LoggedEvents:
    """What was taken over from logs; empty where there are none."""

    def __init__(self) -> None:
        self.events: list[tuple[str, OrchestrationEvent]] = []
        """(trace id, event)."""
        self.ids: dict[tuple[str, str], str] = {}
        """Event id by (trace id, the log's key)."""
        self.edges: list[tuple[str, tuple[str, str, str]]] = []


def _agent_id(trace_id: str, name: str) -> str:
    return "" if name in _NOBODY else digest("logged_agent", trace_id, name)[:16]


def add_logged_events(work: Inference) -> None:
    """Take over the events of the tree's logs."""
    for i in work.tree.census.logged:
        op = work.tree.ops[i]
        logged = op.logged
        if logged is None:
            continue
        work.logged.edges += [(op.trace_id, edge) for edge in logged.edges]
        if not logged.type:
            continue
        event = work.add(logged.type, op.start_ns, IMPORTED, 1.0, (op.span_id,), agent=-1, name=logged.agent,
                         to_name=logged.to, tool=logged.tool, status=logged.status, mode=logged.mode,
                         triggered=logged.triggered, operation=i)  # fmt: skip
        event = msgspec.structs.replace(
            event,
            agent_id=_agent_id(op.trace_id, logged.agent),
            to_id=_agent_id(op.trace_id, logged.to),
        )
        work.events[-1] = event
        work.logged.events.append((op.trace_id, event))
        if logged.key:
            work.logged.ids[(op.trace_id, logged.key)] = event.id


def logged_agents(work: Inference) -> list[Agent]:
    """The agents that logs name."""
    found: dict[str, Agent] = {}
    for _, event in work.logged.events:
        for name, agent_id in ((event.agent, event.agent_id), (event.to, event.to_id)):
            if not agent_id:
                continue
            known = found.get(agent_id)
            if known is None:
                known = Agent(
                    id=agent_id, name=name, role=name.lower(), started_ns=event.t_ns, ended_ns=event.t_ns
                )
            parent = known.parent_id
            if not parent and event.type in _CALLS_ON and agent_id == event.to_id != event.agent_id:
                parent = event.agent_id
            found[agent_id] = msgspec.structs.replace(
                known,
                parent_id=parent,
                started_ns=min(known.started_ns, event.t_ns),
                ended_ns=max(known.ended_ns, event.t_ns),
            )
    return list(found.values())


def with_logged_edges(work: Inference, edges: set[tuple[str, str, str]]) -> set[tuple[str, str, str]]:
    """``edges``; where a log tells its own, these in place of what was inferred between its events."""
    ids = work.logged.ids
    if not ids:
        return edges
    own = set(ids.values())
    found = {edge for edge in edges if edge[0] not in own or edge[1] not in own}
    for trace_id, (source, target, kind) in work.logged.edges:
        one, two = ids.get((trace_id, source)), ids.get((trace_id, target))
        if one and two:
            found.add((one, two, kind))
    return found
