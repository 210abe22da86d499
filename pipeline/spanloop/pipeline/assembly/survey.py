"""Export to and import from the orchestration-trace format of the LLM multi-agent RL survey
(xxzcc/awesome-llm-mas-rl, trace-schema/trace_schema.json at a14d8de1).

The format knows ten event types and we know twelve. Mapping on export; ``spanloop_type`` on the event keeps
ours, and import reads it back:

======================= =============================================================
ours                    theirs
======================= =============================================================
delegate                message, from the delegator to the delegatee
stop                    despawn of the entry agent
all others              the same type
======================= =============================================================

``t`` is in seconds since the orchestration's start. ``agent`` may not be empty there: an unknown one is
"unknown". Costs: tokens are input plus output of the calls that told them, messages are delegations and
messages. Rewards are what the caller knows, never zero for missing. Everything else of theirs (``role``,
``content_ref``, ``trusted``, metrics, ...) is kept by ``SurveyTrace`` and written back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from spanloop.pipeline.assembly.infer import RANK
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.ids import orchestration_id
from spanloop.schemas.orchestration import (
    EDGE_TYPES,
    EVENT_TYPES,
    Agent,
    Edge,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
)

__all__ = ["SurveyTrace", "from_survey", "is_survey", "survey_of", "to_survey"]

_TYPE = {"delegate": "message", "stop": "despawn"}
_OURS = ("id", "t", "type", "agent", "to", "tool", "spanloop_type", "confidence", "rule", "evidence", "status",
         "triggered", "mode")  # fmt: skip
"""Keys of an event that an OrchestrationEvent holds."""
_HEADER = ("trace_id", "task_id", "system", "topology", "rewards", "costs", "metrics")
_UNKNOWN = "unknown"


class SurveyTrace(msgspec.Struct, frozen=True):
    """A trace of the survey's format: our content, and what only theirs has."""

    content: OrchestrationContent
    header: dict[str, Any]
    """trace_id, task_id, rewards, costs, ... as they stood."""
    extras: dict[str, dict[str, Any]]
    """Further properties of events, by event id."""
    order: tuple[str, ...]
    """Event ids in the document's order."""
    edges: tuple[Edge, ...]
    """Edges in the document's order."""


def is_survey(document: Any) -> bool:
    """Whether a JSON document claims to be a trace of this format."""
    return isinstance(document, dict) and {"trace_id", "events"} <= document.keys()


def from_survey(document: Mapping[str, Any], tenant: str = "default") -> SurveyTrace:
    """Read a document of the format. Raises SchemaError that names what is missing or wrong."""
    missing = [k for k in ("trace_id", "task_id", "events", "edges", "rewards", "costs") if k not in document]
    if missing:
        raise SchemaError(f"a survey trace needs {', '.join(missing)}")
    unknown = sorted(set(document) - {*_HEADER, "events", "edges"})
    if unknown:
        raise SchemaError(f"a survey trace has no {', '.join(unknown)}")
    trace_id = document["trace_id"]
    if not isinstance(trace_id, str) or not trace_id:
        raise SchemaError(f"trace_id is {trace_id!r}, expected a text")
    raw_events, raw_edges = document["events"], document["edges"]
    if not isinstance(raw_events, list) or not raw_events or not isinstance(raw_edges, list):
        raise SchemaError("events and edges must be lists, with at least one event")
    events = [_event(number, raw) for number, raw in enumerate(raw_events)]
    edges = tuple(_edge(number, raw) for number, raw in enumerate(raw_edges))
    _check_references(events, edges)
    names = sorted({name for event in events for name in (event.agent, event.to) if name})
    times = [event.t_ns for event in events]
    costs = document["costs"] if isinstance(document["costs"], dict) else {}
    content = OrchestrationContent(
        orchestration_id=orchestration_id(tenant, [trace_id]),
        tenant=tenant,
        trace_ids=(trace_id,),
        events=tuple(sorted(events, key=lambda e: (e.t_ns, RANK[e.type], e.id))),
        edges=tuple(sorted(edges, key=lambda e: (e.src, e.dst, e.type))),
        agents=tuple(Agent(id=name, name=name, role=name.lower()) for name in names),
        calls=(),
        tokens=TokenUsage(input=_whole(costs.get("tokens"))),
        started_ns=min(times),
        ended_ns=max(times),
        flags=("imported:survey",),
    )
    return SurveyTrace(
        content=content,
        header={key: document[key] for key in _HEADER if key in document},
        extras={e.id: {k: v for k, v in raw.items() if k not in _OURS} for e, raw in zip(events, raw_events, strict=True)},
        order=tuple(event.id for event in events),
        edges=edges,
    )  # fmt: skip


def to_survey(trace: SurveyTrace) -> dict[str, Any]:
    """The document of the format; the inverse of ``from_survey``."""
    by_id = {event.id: event for event in trace.content.events}
    start = 0 if "imported:survey" in trace.content.flags else trace.content.started_ns
    return {
        **trace.header,
        "events": [_raw_event(by_id[i], start, trace.extras.get(i, {})) for i in trace.order],
        "edges": [{"src": e.src, "dst": e.dst, "type": e.type} for e in trace.edges],
    }


def survey_of(content: OrchestrationContent, rewards: Mapping[str, float] | None = None) -> SurveyTrace:
    """An orchestration as a survey trace; one without events cannot be told in the format (SchemaError)."""
    if not content.events:
        raise SchemaError(
            f"orchestration {content.orchestration_id} has no events; the survey's format needs one"
        )
    types = [event.type for event in content.events]
    roles = {agent.id: agent.role for agent in content.agents}
    extras: dict[str, dict[str, Any]] = {}
    for event in content.events:
        extra: dict[str, Any] = {}
        if roles.get(event.agent_id):
            extra["role"] = roles[event.agent_id]
        if event.type in ("message", "delegate", "return") and event.agent:
            extra["from"] = event.agent
        if event.call_id:
            extra["call_id"] = event.call_id
        if event.decision is not None:
            extra["decision"] = msgspec.to_builtins(event.decision)
        extras[event.id] = extra
    header = {
        "trace_id": content.orchestration_id,
        "task_id": next((c.task_key for c in content.calls if c.task_key), "") or content.orchestration_id,
        "system": "spanloop",
        "topology": _topology(content),
        "rewards": dict(rewards or {}),
        "costs": {
            "tokens": content.tokens.input + content.tokens.output,
            "wall_clock_s": max(0, content.ended_ns - content.started_ns) / 1e9,
            "tool_calls": types.count("tool_call"),
            "messages": types.count("message") + types.count("delegate"),
        },
    }
    return SurveyTrace(content, header, extras, tuple(e.id for e in content.events), content.edges)


def _topology(content: OrchestrationContent) -> str:
    parents = {agent.parent_id for agent in content.agents if agent.parent_id}
    if not parents:
        return "unknown"
    return "centralized" if len(parents) == 1 else "hierarchical"


def _raw_event(event: OrchestrationEvent, start_ns: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    raw: dict[str, Any] = {
        "id": event.id,
        "t": max(0, event.t_ns - start_ns) / 1e9,
        "type": _TYPE.get(event.type, event.type),
        "agent": event.agent or _UNKNOWN,
    }
    for key in ("to", "tool", "status", "mode"):
        if value := getattr(event, key):
            raw[key] = value
    if event.triggered is not None:
        raw["triggered"] = event.triggered
    if event.rule != "imported":
        raw |= {"spanloop_type": event.type, "confidence": event.confidence, "rule": event.rule}
        raw["evidence"] = list(event.evidence)
    return {**raw, **extra}


def _event(number: int, raw: Any) -> OrchestrationEvent:
    if not isinstance(raw, dict):
        raise SchemaError(f"events[{number}] is no object")
    kind = raw.get("spanloop_type", raw.get("type"))
    if kind not in EVENT_TYPES:
        raise SchemaError(f"events[{number}].type is {kind!r}, expected one of {', '.join(EVENT_TYPES)}")
    t = raw.get("t")
    if isinstance(t, bool) or not isinstance(t, int | float) or not 0 <= t < 9e9:
        raise SchemaError(f"events[{number}].t is {t!r}, expected seconds of at least 0")
    fields: dict[str, Any] = {"rule": "imported", "confidence": 1.0, "evidence": (), **raw, "type": kind}
    fields["t_ns"] = round(t * 1e9)
    fields = {
        k: v
        for k, v in fields.items()
        if k in OrchestrationEvent.__struct_fields__ and (k in _OURS or k == "t_ns")
    }
    try:
        event = msgspec.convert(fields, OrchestrationEvent)
    except msgspec.ValidationError as exc:
        raise SchemaError(f"events[{number}]: {exc}") from exc
    if not event.id or not event.agent:
        raise SchemaError(f"events[{number}] needs an id and an agent that are not empty")
    return event


def _edge(number: int, raw: Any) -> Edge:
    try:
        edge = msgspec.convert(raw, Edge)
    except msgspec.ValidationError as exc:
        raise SchemaError(f"edges[{number}]: {exc}") from exc
    if edge.type not in EDGE_TYPES:
        raise SchemaError(f"edges[{number}].type is {edge.type!r}, expected one of {', '.join(EDGE_TYPES)}")
    return edge


def _check_references(events: list[OrchestrationEvent], edges: tuple[Edge, ...]) -> None:
    known: dict[str, int] = {}
    for number, event in enumerate(events):
        if (first := known.setdefault(event.id, number)) != number:
            raise SchemaError(f"events[{number}].id is {event.id!r}, which events[{first}] has already")
    for number, edge in enumerate(edges):
        for end in ("src", "dst"):
            if getattr(edge, end) not in known:
                raise SchemaError(
                    f"edges[{number}].{end} is {getattr(edge, end)!r}, expected the id of an event"
                )


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else 0
