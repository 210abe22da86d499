"""Orchestrations for people and pipes: the JSON object that ``assemble`` prints, rows of ``traces``, and
plain tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from spanloop.schemas.canonical import unmicro
from spanloop.schemas.events import OrchestrationRevised, RewardsComputed
from spanloop.schemas.orchestration import OrchestrationContent, OrchestrationEvent

__all__ = [
    "CLOCK_SKEW",
    "aligned",
    "clock_skew_s",
    "orchestration_line",
    "orchestration_table",
    "plain_text",
    "trace_row",
]

CLOCK_SKEW = "clock_skew:"
"""Begins the flag that a row has beside those of its content; seconds follow."""


def orchestration_line(content: OrchestrationContent, revision: int = 1) -> dict[str, Any]:
    """An orchestration as ``assemble`` prints it; times in seconds since the epoch."""
    return {
        "orchestration_id": content.orchestration_id,
        "revision": revision,
        "events": [_event(event) for event in content.events],
        "edges": [msgspec.to_builtins(edge) for edge in content.edges],
        "agents": [msgspec.to_builtins(agent) for agent in content.agents],
        "tokens": {name: getattr(content.tokens, name) for name in content.tokens.__struct_fields__},
        "policy_versions": _versions(content),
        "traces": list(content.trace_ids),
        "flags": list(content.flags),
    }


def _event(event: OrchestrationEvent) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(event)
    fields["t"] = fields.pop("t_ns") / 1e9
    return fields


def _versions(content: OrchestrationContent) -> list[str]:
    return sorted({call.policy_version for call in content.calls if call.policy_version})


def trace_row(
    revised: OrchestrationRevised, content: OrchestrationContent, rewards: RewardsComputed | None
) -> dict[str, Any]:
    """One orchestration of a workspace in a line."""
    team = rewards.team if rewards is not None else None
    return {
        "orchestration_id": revised.orchestration_id,
        "tenant": revised.tenant,
        "revision": revised.revision,
        "complete": revised.complete,
        "started_ns": content.started_ns,
        "seconds": max(0, content.ended_ns - content.started_ns) / 1e9,
        "agents": [agent.name for agent in content.agents],
        "events": len(content.events),
        "tokens": content.tokens.input + content.tokens.output,
        "unknown_usage": content.tokens.unknown_calls,
        "reward": None if team is None else unmicro(team),
        "reward_status": "missing" if rewards is None else rewards.status,
        "policy_versions": _versions(content),
        "flags": [*content.flags, *([f"{CLOCK_SKEW}{skew}s"] if (skew := clock_skew_s(content)) else [])],
    }


def clock_skew_s(content: OrchestrationContent) -> int:
    """By how many seconds the clocks of hosts must differ at least: an agent that began before who spawned it, or whose result was
    taken before it was given. 0: nothing shows that they do; a host that is ahead shows only where results come back."""
    began = {agent.id: agent.started_ns for agent in content.agents}
    times = {event.id: event.t_ns for event in content.events}
    gaps = [
        began[agent.parent_id] - agent.started_ns
        for agent in content.agents
        if agent.started_ns > 1 and agent.parent_id in began
    ]
    gaps += [
        times[edge.src] - times[edge.dst]
        for edge in content.edges
        if edge.type == "aggregate" and edge.src in times and edge.dst in times
    ]
    return max(0, *gaps) // 1_000_000_000 if gaps else 0


def plain_text(text: str) -> str:
    """``text`` without characters that steer a terminal: spans are written by strangers.

    >>> plain_text("a" + chr(27) + "[2Jb")
    'a?[2Jb'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def aligned(names: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Lines of a table with a header."""
    cells = [[plain_text("" if value is None else str(value)) for value in row] for row in rows]
    widths = [max(len(name), *(len(row[i]) for row in cells), 0) for i, name in enumerate(names)]
    lines = [list(names), ["-" * width for width in widths], *cells]
    return ["  ".join(t.ljust(w) for t, w in zip(line, widths, strict=True)).rstrip() for line in lines]


def orchestration_table(content: OrchestrationContent) -> list[str]:
    """An orchestration for reading: a heading and its events in order."""
    tokens = content.tokens
    usage = f"{tokens.input} + {tokens.output} tokens in {tokens.calls} model calls"
    if tokens.unknown_calls:
        usage += f" ({tokens.unknown_calls} without usage)"
    heading = f"orchestration {content.orchestration_id}: {len(content.agents)} agents, {usage}"
    if content.flags:
        heading += f"; {', '.join(content.flags)}"
    rows = [
        (f"{(e.t_ns - content.started_ns) / 1e9:.3f}", e.type, e.agent, e.to, e.tool, e.mode or _verdict(e), e.rule,
         f"{e.confidence:.1f}")
        for e in content.events
    ]  # fmt: skip
    return [
        plain_text(heading),
        *aligned(("t s", "type", "agent", "to", "tool", "status", "rule", "conf"), rows),
        "",
    ]


def _verdict(event: OrchestrationEvent) -> str:
    if event.triggered is None:
        return event.status
    return "triggered" if event.triggered else "passed"
