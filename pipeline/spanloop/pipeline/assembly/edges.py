"""Edges between the events of one orchestration.

temporal: consecutive events of one agent. causal: decision -> what it did, and a run's start -> its first
event. spawn: delegate -> spawn. message: message -> the receiver's next event. tool_dependency: tool_result
-> the agent's next event. return: tool_call -> tool_result, and return -> the receiver's next event;
aggregate: return -> the aggregate that used it. safety_flow: safety_event -> what it guards. Wall clocks
are compared only within one agent.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict

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
        self.keys: list[tuple[int, int, str]] = []

    def append(self, event: OrchestrationEvent) -> None:
        self.events.append(event)
        self.keys.append(_key(event))

    def after(self, event: OrchestrationEvent, kind: str = "") -> OrchestrationEvent | None:
        """First event, of type ``kind`` if given, behind ``event`` (of any agent)."""
        for place in range(bisect_right(self.keys, _key(event)), len(self.events)):
            if not kind or self.events[place].type == kind:
                return self.events[place]
        return None


def _key(event: OrchestrationEvent) -> tuple[int, int, str]:
    return event.t_ns, RANK[event.type], event.id


def build_edges(work: Inference) -> tuple[Edge, ...]:
    """Edges of ``work.events`` (sorted), sorted and without repeats."""
    lines: dict[str, _Line] = defaultdict(_Line)
    for event in work.events:
        lines[event.agent_id or event.agent].append(event)
    edges: set[tuple[str, str, str]] = set()
    for line in lines.values():
        for one, two in zip(line.events, line.events[1:], strict=False):
            edges.add((one.id, two.id, "temporal"))
    _decisions(work, edges)
    _results(work, lines, edges)
    _flows(work, lines, edges)
    return tuple(Edge(*edge) for edge in sorted(with_logged_edges(work, edges)))


def _decisions(work: Inference, edges: set[tuple[str, str, str]]) -> None:
    decision_of: dict[tuple[str, str], str] = {}
    delegate_of: dict[tuple[str, str], str] = {}
    for event in work.events:
        if event.type == "orchestrator_decision":
            if event.call_id and event.id not in work.told_decisions:
                decision_of[(event.agent_id, event.call_id)] = event.id
        elif event.type == "delegate":
            delegate_of[(event.agent_id, event.to_id)] = event.id
    for event in work.events:
        told = work.decided_by.get(event.id)
        if told and event.type != "spawn":
            edges.add((told, event.id, "causal"))
            continue
        if event.type not in ("delegate", "tool_call", "aggregate", "spawn"):
            continue
        decision = told or decision_of.get((event.agent_id, event.call_id))
        if event.type == "aggregate":
            if decision:
                edges.add((event.id, decision, "causal"))
        elif event.type == "spawn":
            started = work.acts.act(work.operation_of_event.get(event.id, -1)) == "spawn"
            cause = told if started else delegate_of.get((event.agent_id, event.to_id)) or decision
            if cause:
                edges.add((cause, event.id, "spawn"))
        elif decision:
            edges.add((decision, event.id, "causal"))


def _results(work: Inference, lines: dict[str, _Line], edges: set[tuple[str, str, str]]) -> None:
    calls = {
        work.operation_of_event[e.id]: e.id
        for e in work.events
        if e.type == "tool_call" and e.id in work.operation_of_event
    }
    targets: dict[str, list[str]] = defaultdict(list)
    runs: dict[str, int] = {}
    for i in work.runs:
        runs.setdefault(work.tree.ops[i].span_id, i)
    by_span = {e.evidence[0]: e.id for e in work.events if e.type == "return"}
    for event in work.events:
        if event.type == "aggregate":
            for span in event.evidence:
                if span in by_span:
                    edges.add((by_span[span], event.id, "aggregate"))
                    targets[by_span[span]].append(event.id)
    for event in work.events:
        if event.type == "tool_result":
            call = calls.get(work.operation_of_event.get(event.id, -1))
            if call:
                edges.add((call, event.id, "return"))
            following = lines[event.agent_id or event.agent].after(event)
            if following is not None:
                edges.add((event.id, following.id, "tool_dependency"))
        elif event.type == "return" and event.to_id and event.id not in targets:
            following = lines[event.to_id].after(_as_received(work, runs, event))
            if following is not None:
                edges.add((event.id, following.id, "return"))


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


def _flows(work: Inference, lines: dict[str, _Line], edges: set[tuple[str, str, str]]) -> None:
    first: set[str] = set()
    for event in work.events:
        if event.type == "spawn" and event.to_id and event.to_id not in first:
            first.add(event.to_id)
            line = lines.get(event.to_id)
            if line and line.events:
                edges.add((event.id, line.events[0].id, "causal"))
        elif event.type == "message" and event.to_id in lines:
            following = lines[event.to_id].after(event)
            if following is not None:
                edges.add((event.id, following.id, "message"))
        elif event.type == "safety_event":
            following = lines[event.agent_id or event.agent].after(event)
            if following is not None:
                edges.add((event.id, following.id, "safety_flow"))
