"""Orchestrations to columns: the revision itself, its events, edges, agents and model calls.

What becomes no column (token ids, menus, sampling) is skipped while decoding; the samples have it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from spanloop.pipeline.columns.cells import Columns, Decoded, Owners, count, flat, int64, times
from spanloop.pipeline.decisions.told import context_of, group_of, has_told, told_of
from spanloop.pipeline.ports import LogRecord
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import OrchestrationRevised, decode, encode
from spanloop.schemas.orchestration import Agent, Decision, TokenUsage

__all__ = ["orchestration_columns"]


class _Event(msgspec.Struct, gc=False):
    id: str
    type: str
    agent: str
    t_ns: int
    confidence: float
    rule: str
    evidence: tuple[str, ...]
    agent_id: str = ""
    to: str = ""
    to_id: str = ""
    tool: str = ""
    status: str = ""
    triggered: bool | None = None
    mode: str = ""
    call_id: str = ""
    decision: Decision | None = None


class _Edge(msgspec.Struct, gc=False):
    src: str
    dst: str
    type: str


class _ToolCall(msgspec.Struct, gc=False):
    name: str


class _Call(msgspec.Struct, gc=False):
    id: str
    agent_id: str
    span_ids: tuple[str, ...]
    start_ns: int
    end_ns: int
    model: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    tool_calls: tuple[_ToolCall, ...] = ()
    policy_version: str = ""
    harness: str = ""
    task_key: str = ""
    status: str = "ok"


class _Content(msgspec.Struct, gc=False):
    trace_ids: tuple[str, ...]
    events: tuple[_Event, ...]
    edges: tuple[_Edge, ...]
    agents: tuple[Agent, ...]
    calls: tuple[_Call, ...]
    tokens: TokenUsage
    started_ns: int
    ended_ns: int
    flags: tuple[str, ...] = ()


class _Revised(msgspec.Struct, gc=False):
    orchestration_id: str
    revision: int
    complete: bool
    type: str = ""
    tenant: str = "default"
    content_hash: str = ""
    content: _Content | None = None
    merged_into: str = ""
    schema_version: int = 1


_decoder = msgspec.json.Decoder(_Revised)
_UNREADABLE = (SchemaError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _read(record: LogRecord) -> _Revised:
    event = _decoder.decode(record.value)
    if event.type != "orchestration_revised" or event.schema_version != OrchestrationRevised.VERSION:
        event = _decoder.decode(encode(decode(record.value)))
        if event.type != "orchestration_revised":
            raise SchemaError(f"{event.type} is no orchestration")
    return event


def orchestration_columns(records: Sequence[LogRecord]) -> tuple[dict[str, Columns], int]:
    """Columns of the tables of ``orchestrations``, and the number of records that could not be read."""
    rows: list[tuple[LogRecord, _Revised]] = []
    bad = 0
    for record in records:
        try:
            rows.append((record, _read(record)))
        except _UNREADABLE:
            bad += 1
    full = [row for row in rows if row[1].content is not None]
    return {
        "orchestrations": _revisions(rows),
        "events": _events(full),
        "edges": _edges(full),
        "agents": _agents(full),
        "calls": _calls(full),
    }, bad


def _revisions(rows: Decoded) -> Columns:
    contents = [event.content for _, event in rows]

    def of(read: Callable[[Any], Any]) -> list[Any]:
        return [None if c is None else read(c) for c in contents]

    return {
        **Owners.of([1] * len(rows)).columns(rows),
        "complete": [o.complete for _, o in rows],
        "merged_into": [o.merged_into for _, o in rows],
        "content_hash": [o.content_hash for _, o in rows],
        "started": times(0 if c is None else c.started_ns for c in contents),
        "ended": times(0 if c is None else c.ended_ns for c in contents),
        "duration_ms": of(lambda c: (c.ended_ns - c.started_ns) / 1e6),
        "num_events": of(lambda c: len(c.events)),
        "num_edges": of(lambda c: len(c.edges)),
        "num_agents": of(lambda c: len(c.agents)),
        "num_calls": of(lambda c: len(c.calls)),
        "input_tokens": of(lambda c: count(c.tokens.input)),
        "output_tokens": of(lambda c: count(c.tokens.output)),
        "unknown_calls": of(lambda c: c.tokens.unknown_calls),
        "agents": of(lambda c: sorted({a.name for a in c.agents})),
        "policy_versions": of(lambda c: sorted({k.policy_version for k in c.calls if k.policy_version})),
        "task_key": of(lambda c: next((k.task_key for k in c.calls if k.task_key), "")),
        "trace_ids": of(lambda c: c.trace_ids),
        "flags": of(lambda c: c.flags),
        "revised": times(r.appended_ns for r, _ in rows),
    }


def _events(rows: Decoded) -> Columns:
    events: list[_Event] = list(flat(o.content.events for _, o in rows))
    return {
        **Owners.of(len(o.content.events) for _, o in rows).columns(rows),
        "id": [e.id for e in events],
        "type": [e.type for e in events],
        "agent": [e.agent for e in events],
        "agent_id": [e.agent_id for e in events],
        "to_agent": [e.to for e in events],
        "to_id": [e.to_id for e in events],
        "tool": [e.tool for e in events],
        "status": [e.status for e in events],
        "triggered": [e.triggered for e in events],
        "mode": [e.mode for e in events],
        "t": times([e.t_ns for e in events]),
        "t_ns": int64([e.t_ns for e in events]),
        "confidence": [e.confidence for e in events],
        "rule": [e.rule for e in events],
        "evidence": [e.evidence for e in events],
        "call_id": [e.call_id for e in events],
        **_decided([e.decision for e in events]),
        **_compared(rows, events),
    }


def _decided(told: list[Decision | None]) -> Columns:
    """What programs told of their decisions; NULL where nothing was told."""
    return {
        "decision_kind": [None if d is None else d.kind for d in told],
        "chosen": [None if d is None else d.chosen for d in told],
        "options": [None if d is None or not d.options else d.options for d in told],
        "propensities": [None if d is None or not d.propensities else d.propensities for d in told],
        "by_policy": [None if d is None else d.by_policy for d in told],
    }


def _compared(rows: Decoded, events: list[_Event]) -> Columns:
    """What a told decision can be compared with, in the words of ``decision_effects``."""
    groups: dict[int, tuple[str, str]] = {}
    for _, revised in rows:
        if has_told(revised.content):
            groups.update({id(t.event): (group_of(t), context_of(t)) for t in told_of(revised.content)})
    pairs = [groups.get(id(e), (None, None)) for e in events]
    return {"decision_group": [g for g, _ in pairs], "decision_context": [c for _, c in pairs]}


def _edges(rows: Decoded) -> Columns:
    edges: list[_Edge] = list(flat(o.content.edges for _, o in rows))
    return {
        **Owners.of(len(o.content.edges) for _, o in rows).columns(rows),
        "src": [e.src for e in edges],
        "dst": [e.dst for e in edges],
        "type": [e.type for e in edges],
    }


def _agents(rows: Decoded) -> Columns:
    agents: list[Agent] = list(flat(o.content.agents for _, o in rows))
    return {
        **Owners.of(len(o.content.agents) for _, o in rows).columns(rows),
        "id": [a.id for a in agents],
        "name": [a.name for a in agents],
        "role": [a.role for a in agents],
        "parent_id": [a.parent_id for a in agents],
        "span_id": [a.span_id for a in agents],
        "started": times([a.started_ns for a in agents]),
        "ended": times([a.ended_ns for a in agents]),
        "status": [a.status for a in agents],
        "virtual": [a.virtual for a in agents],
    }


def _calls(rows: Decoded) -> Columns:
    calls: list[_Call] = list(flat(o.content.calls for _, o in rows))
    return {
        **Owners.of(len(o.content.calls) for _, o in rows).columns(rows),
        "id": [c.id for c in calls],
        "agent_id": [c.agent_id for c in calls],
        "model": [c.model for c in calls],
        "policy_version": [c.policy_version for c in calls],
        "harness": [c.harness for c in calls],
        "task_key": [c.task_key for c in calls],
        "input_tokens": [count(c.input_tokens) for c in calls],
        "output_tokens": [count(c.output_tokens) for c in calls],
        "started": times([c.start_ns for c in calls]),
        "ended": times([c.end_ns for c in calls]),
        "status": [c.status for c in calls],
        "tools": [[t.name for t in c.tool_calls] for c in calls],
        "span_ids": [c.span_ids for c in calls],
    }
