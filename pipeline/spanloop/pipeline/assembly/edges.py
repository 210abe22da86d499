"""Edges between the events of one orchestration.

temporal: consecutive events of one agent. causal: decision -> what it did, and a run's start -> its first
event. spawn: delegate -> spawn. message: message -> the receiver's next event. tool_dependency: tool_result
-> the agent's next event. return: tool_call -> tool_result, and return -> the receiver's next event;
aggregate: return -> the aggregate that used it. safety_flow: safety_event -> what it guards. Wall clocks
are compared only within one agent.
"""

from __future__ import annotations

from bisect import bisect_right

import msgspec

from spanloop.pipeline.assembly.clocks import one_clock
from spanloop.pipeline.assembly.infer import RANK, Inference
from spanloop.pipeline.assembly.logged import with_logged_edges
from spanloop.schemas.orchestration import Edge, OrchestrationEvent

__all__ = ["build_edges"]


class _Line:
    """Events of one agent in order."""

    def __init__(self) -> None:
        self.events: list[OrchestrationEvent] = []
        self._keys: list[tuple[int, int, str]] | None = None

    def after(self, event: OrchestrationEvent) -> OrchestrationEvent | None:
        """First event behind ``event`` (of any agent)."""
        if self._keys is None:
            self._keys = [_key(own) for own in self.events]
        place = bisect_right(self._keys, _key(event))
        return self.events[place] if place < len(self.events) else None


def _key(event: OrchestrationEvent) -> tuple[int, int, str]:
    return event.t_ns, RANK[event.type], event.id


class _Edges:
    """Edges by their source, each once: sorting the many short lists costs the same for each edge, however many there are."""

    def __init__(self) -> None:
        self._from: dict[str, list[tuple[str, str]]] = {}

    def add(self, source: str, target: str, kind: str) -> None:
        """Take an edge, perhaps again."""
        known = self._from.get(source)
        if known is None:
            self._from[source] = [(target, kind)]
        else:
            known.append((target, kind))

    def of(self, work: Inference) -> tuple[Edge, ...]:
        """Sorted, with those that logs tell."""
        found = self._from
        if work.logged.ids:
            triples = {(source, *edge) for source, edges in found.items() for edge in edges}
            return tuple([Edge(*edge) for edge in sorted(with_logged_edges(work, triples))])
        listed = []
        for source in sorted(found):
            edges = found[source]
            for target, kind in sorted(set(edges)) if len(edges) > 1 else edges:
                listed.append(Edge(source, target, kind))
        return tuple(listed)


class _Sorted:
    """The events of an orchestration by agent and by type."""

    def __init__(self, events: list[OrchestrationEvent]) -> None:
        self.lines: dict[str, _Line] = {}
        self.next_of: dict[str, OrchestrationEvent] = {}
        """The same agent's next event, by the event's id."""
        self._of_type: dict[str, list[OrchestrationEvent]] = {kind: [] for kind in RANK}
        last: dict[str, OrchestrationEvent] = {}
        for event in events:
            agent = event.agent_id or event.agent
            line = self.lines.get(agent)
            if line is None:
                line = self.lines[agent] = _Line()
            else:
                self.next_of[last[agent].id] = event
            last[agent] = event
            line.events.append(event)
            self._of_type[event.type].append(event)

    def of(self, kind: str) -> list[OrchestrationEvent]:
        """Events of one type, in order."""
        return self._of_type[kind]


def build_edges(work: Inference) -> tuple[Edge, ...]:
    """Edges of ``work.events`` (sorted), sorted and without repeats."""
    events = _Sorted(work.events)
    edges = _Edges()
    for one, two in events.next_of.items():
        edges.add(one, two.id, "temporal")
    _decisions(work, events, edges)
    _results(work, events, edges)
    _flows(events, edges)
    return edges.of(work)


def _decisions(work: Inference, events: _Sorted, edges: _Edges) -> None:
    decision_of: dict[tuple[str, str], str] = {}
    for event in events.of("orchestrator_decision"):
        if event.call_id and event.id not in work.told_decisions:
            decision_of[(event.agent_id, event.call_id)] = event.id
    delegate_of = {(event.agent_id, event.to_id): event.id for event in events.of("delegate")}
    decided_by = work.decided_by
    if decided_by:
        for event in work.events:
            if event.type != "spawn" and (told := decided_by.get(event.id)):
                edges.add(told, event.id, "causal")
    for kind in ("delegate", "tool_call", "aggregate"):
        for event in events.of(kind):
            decision = decision_of.get((event.agent_id, event.call_id))
            if not decision or (decided_by and decided_by.get(event.id)):
                continue
            if kind == "aggregate":
                edges.add(event.id, decision, "causal")
            else:
                edges.add(decision, event.id, "causal")
    for event in events.of("spawn"):
        told = decided_by.get(event.id)
        started = work.acts.act(work.operation_of_event.get(event.id, -1)) == "spawn"
        cause = told if started else delegate_of.get((event.agent_id, event.to_id))
        if cause is None and not started:
            cause = told or decision_of.get((event.agent_id, event.call_id))
        if cause:
            edges.add(cause, event.id, "spawn")


def _results(work: Inference, events: _Sorted, edges: _Edges) -> None:
    operation_of = work.operation_of_event
    calls = {operation_of[e.id]: e.id for e in events.of("tool_call") if e.id in operation_of}
    runs: dict[str, int] = {}
    for i in work.runs:
        runs.setdefault(work.tree.ops[i].span_id, i)
    returns = events.of("return")
    by_span = {event.evidence[0]: event.id for event in returns}
    used: set[str] = set()
    for event in events.of("aggregate"):
        for span in event.evidence:
            if span in by_span:
                edges.add(by_span[span], event.id, "aggregate")
                used.add(by_span[span])
    for event in events.of("tool_result"):
        call = calls.get(operation_of.get(event.id, -1))
        if call:
            edges.add(call, event.id, "return")
        if (following := events.next_of.get(event.id)) is not None:
            edges.add(event.id, following.id, "tool_dependency")
    for event in returns:
        if event.to_id and event.id not in used and (line := events.lines.get(event.to_id)) is not None:
            following = line.after(_as_received(work, runs, event))
            if following is not None:
                edges.add(event.id, following.id, "return")


def _as_received(work: Inference, runs: dict[str, int], event: OrchestrationEvent) -> OrchestrationEvent:
    """A return at the time when the receiver's own clock saw it: the end of the tool call that it came back by.

    Args:
        work: with the tree.
        runs: agent runs by span id; of equal ids the first.
        event: the return.
    """
    tool = work.operation_of_event.get(event.id, -1)
    if tool < 0 or work.tree.ops[tool].span_id in event.evidence:
        return event
    back = work.tree.ops[tool]
    run = min((runs[span] for span in event.evidence if span in runs), default=-1)
    sent = work.tree.ops[run] if run >= 0 else back
    return event if one_clock(sent, back) else msgspec.structs.replace(event, t_ns=max(back.end_ns, 0))


def _flows(events: _Sorted, edges: _Edges) -> None:
    lines = events.lines
    first: set[str] = set()
    for event in events.of("spawn"):
        if event.to_id and event.to_id not in first:
            first.add(event.to_id)
            if event.to_id in lines:
                edges.add(event.id, lines[event.to_id].events[0].id, "causal")
    for event in events.of("message"):
        if event.to_id in lines:
            following = lines[event.to_id].after(event)
            if following is not None:
                edges.add(event.id, following.id, "message")
    for event in events.of("safety_event"):
        if (following := events.next_of.get(event.id)) is not None:
            edges.add(event.id, following.id, "safety_flow")
