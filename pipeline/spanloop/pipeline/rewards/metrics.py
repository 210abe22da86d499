"""The survey's evaluation dimensions E1 to E4 and its five trace metrics, for any orchestration.

Reported, never paid: computed when somebody asks. Each is None where the orchestration does not say (no usage on a call, nobody
spawned, nothing went wrong), which is not zero.
Invariants: pure; clocks enter only where a makespan is asked for.

Source: arXiv 2605.02801, sections 8.1 and 8.3, table 13; METHODS 1.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec

from spanloop.pipeline.rewards.orchestration import makespan, work_and_span, work_graph
from spanloop.schemas.canonical import unmicro
from spanloop.schemas.events import Reward
from spanloop.schemas.orchestration import Edge, ModelCall, OrchestrationContent, OrchestrationEvent

__all__ = ["Metrics", "amplification", "metrics_of", "redundancy"]

_COORDINATION = frozenset(
    {"spawn", "despawn", "delegate", "message", "aggregate", "stop", "orchestrator_decision"}
)
_ENDS = frozenset({"aggregate", "stop"})
_ACTS = frozenset({"tool_call", "message", "delegate", "spawn", "aggregate"})


class Metrics(msgspec.Struct, frozen=True):
    """What an orchestration was like; shares in 0..1, ratios above."""

    success: float | None
    """E1: the outcome R1."""
    parallel_efficiency: float | None
    """E2: T_serial / T_parallel, work over makespan by the clock."""
    work_over_span: float | None
    """E2 by structure: work over the longest causal path; needs no clock across hosts."""
    useful_agents: float | None
    """E3: actions of sub-agents whose work reached the end, over all of theirs."""
    redundant_messages: float | None
    """E3: messages between agents that say what one said before; needs their texts."""
    protocol_overhead: float | None
    """E4: tokens of calls that only coordinated, over all tokens."""
    error_amplification: float | None
    """E4: events that something wrong reached, over those that were wrong first."""
    safety_events: int
    """E4: safety events that were triggered."""
    interventions: int
    """E4: times that a person stepped in."""


def metrics_of(
    content: OrchestrationContent, rewards: Iterable[Reward] = (), texts: Mapping[str, str] | None = None
) -> Metrics:
    """Metrics of one orchestration.

    Args:
        content: What happened.
        rewards: Its rewards; for the outcome.
        texts: Text, or a hash of it, by id of the message event; None: not known.
    """
    outcome = next((r.value for r in rewards if r.family == "R1" and r.name == "outcome"), None)
    weights, after = work_graph(content)
    work, span = work_and_span(weights, after)
    elapsed = makespan(
        [(c.start_ns, c.end_ns) for c in content.calls]
        + [(a.started_ns, a.ended_ns) for a in content.agents if weights.get(f"agent:{a.id}")]
    )
    return Metrics(
        success=None if outcome is None else unmicro(outcome),
        parallel_efficiency=work / elapsed if elapsed else None,
        work_over_span=work / span if span else None,
        useful_agents=_useful(content),
        redundant_messages=redundancy([texts[e.id] for e in _messages(content) if e.id in texts])
        if texts
        else None,
        protocol_overhead=_overhead(content),
        error_amplification=_amplified(content),
        safety_events=sum(bool(e.triggered) for e in content.events if e.type == "safety_event"),
        interventions=sum(e.type == "human_intervention" for e in content.events),
    )


def amplification(corrupted: AbstractSet[str], edges: Iterable[Edge]) -> float | None:
    """Events downstream of corrupted ones over those corrupted first (the ones that no other corrupted event reaches).

    Source: METHODS 1.5, 6 (G4).

    >>> chain = [Edge("1", "2", "causal"), Edge("1", "3", "causal"), Edge("3", "4", "message")]
    >>> amplification({"1"}, chain)
    3.0
    """
    out: dict[str, list[str]] = {}
    for edge in edges:
        if edge.type != "temporal":
            out.setdefault(edge.src, []).append(edge.dst)
    reached: set[str] = set()
    frontier = list(corrupted)
    while frontier:
        for follower in out.get(frontier.pop(), ()):
            if follower not in reached:
                reached.add(follower)
                frontier.append(follower)
    first = corrupted - reached
    return len(reached) / len(first) if first else None


def redundancy(texts: Sequence[str]) -> float | None:
    """Messages that repeat an earlier one, over all; None for no messages.

    >>> redundancy(["a", "b", "a", "a"])
    0.5
    """
    return 1.0 - len(set(texts)) / len(texts) if texts else None


def _messages(content: OrchestrationContent) -> list[OrchestrationEvent]:
    return [event for event in content.events if event.type == "message" and event.to != "user"]


def _useful(content: OrchestrationContent) -> float | None:
    """A sub-agent's work reached the end where one of its events leads to an aggregate or a stop of another agent."""
    subs = {agent.id for agent in content.agents if agent.parent_id}
    if not subs:
        return None
    into: dict[str, list[str]] = {}
    for edge in content.edges:
        if edge.type != "temporal":
            into.setdefault(edge.dst, []).append(edge.src)
    frontier = [
        e.id for e in content.events if e.type in _ENDS or (e.type == "return" and e.agent_id not in subs)
    ]
    reached: set[str] = set()
    while frontier:
        for source in into.get(frontier.pop(), ()):
            if source not in reached:
                reached.add(source)
                frontier.append(source)
    owners = {event.id: event.agent_id for event in content.events}
    useful = {owners[event] for event in reached if owners.get(event) in subs}
    actions = dict.fromkeys(subs, 0)
    for call in content.calls:
        if call.agent_id in actions:
            actions[call.agent_id] += 1
    for event in content.events:
        if event.agent_id in actions and event.type in _ACTS:
            actions[event.agent_id] += 1
    total = sum(actions.values())
    return sum(count for name, count in actions.items() if name in useful) / total if total else None


def _overhead(content: OrchestrationContent) -> float | None:
    tokens = [_tokens(call) for call in content.calls]
    if not tokens or any(count is None for count in tokens):
        return None
    kinds: dict[str, set[str]] = {}
    for event in content.events:
        if event.call_id:
            kinds.setdefault(event.call_id, set()).add(event.type)
    total = sum(count or 0 for count in tokens)
    spent = sum(
        count or 0
        for call, count in zip(content.calls, tokens, strict=True)
        if (found := kinds.get(call.id)) and found <= _COORDINATION and not found <= {"stop"}
    )
    return spent / total if total else None


def _tokens(call: ModelCall) -> int | None:
    if call.input_tokens is None or call.output_tokens is None:
        return None
    return call.input_tokens + call.output_tokens


def _amplified(content: OrchestrationContent) -> float | None:
    wrong = {
        event.id
        for event in content.events
        if event.status == "error" or (event.type == "safety_event" and event.triggered)
    }
    return amplification(wrong, content.edges) if wrong else None
