"""Records of a topic to the columns of its tables (``views.TABLES``), for ``archive``.

Invariants: columns are a pure function of the records (the log is the truth, a table can always be rebuilt); a record that
cannot be read gives no row and is counted, it never fails a query. Spans are the bulk: their JSON parts become text columns
as they are on the log, without being decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from spanloop.pipeline.ports import LogRecord
from spanloop.pipeline.views import TABLES, TABLES_OF_TOPIC
from spanloop.schemas import topics
from spanloop.schemas.canonical import MICRO
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    CreditAssigned,
    DeadLettered,
    FeedbackReceived,
    OrchestrationRevised,
    RewardsComputed,
    SamplesBuilt,
    SpansReceived,
    ValueModelPublished,
    decode,
    encode,
)

__all__ = ["build"]

_INT_MAX = 2**63 - 1

Columns = dict[str, Any]
"""Column name -> list of Python values."""


class _Attributes(msgspec.Struct):
    """The GenAI attributes that become columns; of any type, since clients send what they like."""

    operation: Any = msgspec.field(default=None, name="gen_ai.operation.name")
    agent: Any = msgspec.field(default=None, name="gen_ai.agent.name")
    tool: Any = msgspec.field(default=None, name="gen_ai.tool.name")
    model: Any = msgspec.field(default=None, name="gen_ai.response.model")
    request_model: Any = msgspec.field(default=None, name="gen_ai.request.model")
    response_id: Any = msgspec.field(default=None, name="gen_ai.response.id")
    input_tokens: Any = msgspec.field(default=None, name="gen_ai.usage.input_tokens")
    output_tokens: Any = msgspec.field(default=None, name="gen_ai.usage.output_tokens")
    policy_version: Any = msgspec.field(default=None, name="spanloop.policy.version")


class _Resource(msgspec.Struct):
    service: Any = msgspec.field(default=None, name="service.name")


class _RawSpan(msgspec.Struct):
    """A span with its JSON parts left as they are on the log: they become text columns without decoding."""

    trace_id: str
    span_id: str
    name: str
    start_ns: int
    end_ns: int
    parent_span_id: str | None = None
    kind: int = 0
    status: str = "unset"
    status_message: str = ""
    attributes: msgspec.Raw = msgspec.Raw(b"{}")
    events: msgspec.Raw = msgspec.Raw(b"[]")
    links: msgspec.Raw = msgspec.Raw(b"[]")
    resource: msgspec.Raw = msgspec.Raw(b"{}")
    scope: str = ""


class _RawSpans(msgspec.Struct):
    type: str = ""
    tenant: str = "default"
    source: str = "otlp"
    spans: tuple[_RawSpan, ...] = ()
    schema_version: int = 1


_raw_spans = msgspec.json.Decoder(_RawSpans)
_attributes = msgspec.json.Decoder(_Attributes)
_resource = msgspec.json.Decoder(_Resource)


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else msgspec.json.encode(value).decode()


def _count(value: Any) -> int | None:
    return value if type(value) is int and abs(value) <= _INT_MAX else None


def _times(ns: Iterable[int]) -> list[int | None]:
    """Nanoseconds to the microseconds of a timestamp; 0 and what no calendar holds are unknown."""
    return [n // 1000 if 0 < n <= _INT_MAX else None for n in ns]


def _int64(values: Iterable[int]) -> list[int]:
    return [min(max(n, -_INT_MAX), _INT_MAX) for n in values]


def _units(values: Iterable[int | None]) -> list[float | None]:
    return [None if v is None else v / MICRO for v in values]


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _read_spans(record: LogRecord) -> _RawSpans:
    batch = _raw_spans.decode(record.value)
    if batch.type != "spans_received" or batch.schema_version != SpansReceived.VERSION:
        batch = _raw_spans.decode(encode(decode(record.value)))
    return batch


def _spans(records: Sequence[LogRecord]) -> tuple[dict[str, Columns], int]:
    rows: list[tuple[LogRecord, _RawSpans, int, _RawSpan, _Attributes]] = []
    bad = 0
    for record in records:
        try:
            batch = _read_spans(record)
            rows += [
                (record, batch, position, span, _attributes.decode(span.attributes))
                for position, span in enumerate(batch.spans)
            ]
        except (SchemaError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            bad += 1
    heads, batches, positions, spans, known = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    services: dict[bytes, str | None] = {}
    for span in spans:
        raw = bytes(span.resource)
        if raw not in services:
            services[raw] = _text(_resource.decode(raw).service)
    return {
        "spans": {
            "tenant": [b.tenant for b in batches],
            "trace_id": [s.trace_id for s in spans],
            "span_id": [s.span_id for s in spans],
            "parent_span_id": [s.parent_span_id for s in spans],
            "name": [s.name for s in spans],
            "kind": [s.kind for s in spans],
            "status": [s.status for s in spans],
            "status_message": [s.status_message for s in spans],
            "started": _times(s.start_ns for s in spans),
            "ended": _times(s.end_ns for s in spans),
            "duration_ms": [(s.end_ns - s.start_ns) / 1e6 for s in spans],
            "start_ns": _int64(s.start_ns for s in spans),
            "end_ns": _int64(s.end_ns for s in spans),
            "operation": [_text(a.operation) for a in known],
            "agent": [_text(a.agent) for a in known],
            "tool": [_text(a.tool) for a in known],
            "model": [_text(a.model if a.model is not None else a.request_model) for a in known],
            "response_id": [_text(a.response_id) for a in known],
            "input_tokens": [_count(a.input_tokens) for a in known],
            "output_tokens": [_count(a.output_tokens) for a in known],
            "policy_version": [_text(a.policy_version) for a in known],
            "scope": [s.scope for s in spans],
            "service": [services[bytes(s.resource)] for s in spans],
            "attributes": [bytes(s.attributes) for s in spans],
            "events": [bytes(s.events) for s in spans],
            "links": [bytes(s.links) for s in spans],
            "resource": [bytes(s.resource) for s in spans],
            "source": [b.source for b in batches],
            "received": _times(r.appended_ns for r in heads),
            "position": list(positions),
            "repeat": [False] * len(spans),
            "partition": [r.partition for r in heads],
            "offset": [r.offset for r in heads],
        }
    }, bad


Decoded = list[tuple[LogRecord, Any]]


def _owners(owners: Sequence[tuple[LogRecord, Any]]) -> Columns:
    return {
        "tenant": [o.tenant for _, o in owners],
        "orchestration_id": [o.orchestration_id for _, o in owners],
        "revision": [o.revision for _, o in owners],
        "partition": [r.partition for r, _ in owners],
        "offset": [r.offset for r, _ in owners],
    }


def _orchestrations(rows: Decoded) -> dict[str, Columns]:
    full = [(record, event) for record, event in rows if event.content is not None]
    return {
        "orchestrations": _orchestration_columns(rows),
        "events": _event_columns([(row, e) for row in full for e in row[1].content.events]),
        "edges": _edge_columns([(row, e) for row in full for e in row[1].content.edges]),
        "agents": _agent_columns([(row, a) for row in full for a in row[1].content.agents]),
        "calls": _call_columns([(row, c) for row in full for c in row[1].content.calls]),
    }


def _orchestration_columns(rows: Decoded) -> Columns:
    contents = [event.content for _, event in rows]

    def of(read: Callable[[Any], Any]) -> list[Any]:
        return [None if c is None else read(c) for c in contents]

    return {
        **_owners(rows),
        "complete": [o.complete for _, o in rows],
        "merged_into": [o.merged_into for _, o in rows],
        "content_hash": [o.content_hash for _, o in rows],
        "started": _times(0 if c is None else c.started_ns for c in contents),
        "ended": _times(0 if c is None else c.ended_ns for c in contents),
        "duration_ms": of(lambda c: (c.ended_ns - c.started_ns) / 1e6),
        "num_events": of(lambda c: len(c.events)),
        "num_edges": of(lambda c: len(c.edges)),
        "num_agents": of(lambda c: len(c.agents)),
        "num_calls": of(lambda c: len(c.calls)),
        "input_tokens": of(lambda c: c.tokens.input),
        "output_tokens": of(lambda c: c.tokens.output),
        "unknown_calls": of(lambda c: c.tokens.unknown_calls),
        "agents": of(lambda c: sorted({a.name for a in c.agents})),
        "policy_versions": of(lambda c: sorted({k.policy_version for k in c.calls if k.policy_version})),
        "task_key": of(lambda c: next((k.task_key for k in c.calls if k.task_key), "")),
        "trace_ids": of(lambda c: c.trace_ids),
        "flags": of(lambda c: c.flags),
        "revised": _times(r.appended_ns for r, _ in rows),
    }


def _event_columns(rows: Sequence[tuple[tuple[LogRecord, Any], Any]]) -> Columns:
    events = [e for _, e in rows]
    return {
        **_owners([o for o, _ in rows]),
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
        "t": _times(e.t_ns for e in events),
        "t_ns": _int64(e.t_ns for e in events),
        "confidence": [e.confidence for e in events],
        "rule": [e.rule for e in events],
        "evidence": [e.evidence for e in events],
        "call_id": [e.call_id for e in events],
    }


def _edge_columns(rows: Sequence[tuple[tuple[LogRecord, Any], Any]]) -> Columns:
    return {
        **_owners([o for o, _ in rows]),
        "src": [e.src for _, e in rows],
        "dst": [e.dst for _, e in rows],
        "type": [e.type for _, e in rows],
    }


def _agent_columns(rows: Sequence[tuple[tuple[LogRecord, Any], Any]]) -> Columns:
    agents = [a for _, a in rows]
    return {
        **_owners([o for o, _ in rows]),
        "id": [a.id for a in agents],
        "name": [a.name for a in agents],
        "role": [a.role for a in agents],
        "parent_id": [a.parent_id for a in agents],
        "span_id": [a.span_id for a in agents],
        "started": _times(a.started_ns for a in agents),
        "ended": _times(a.ended_ns for a in agents),
        "status": [a.status for a in agents],
        "virtual": [a.virtual for a in agents],
    }


def _call_columns(rows: Sequence[tuple[tuple[LogRecord, Any], Any]]) -> Columns:
    calls = [c for _, c in rows]
    return {
        **_owners([o for o, _ in rows]),
        "id": [c.id for c in calls],
        "agent_id": [c.agent_id for c in calls],
        "model": [c.model for c in calls],
        "policy_version": [c.policy_version for c in calls],
        "harness": [c.harness for c in calls],
        "task_key": [c.task_key for c in calls],
        "input_tokens": [c.input_tokens for c in calls],
        "output_tokens": [c.output_tokens for c in calls],
        "started": _times(c.start_ns for c in calls),
        "ended": _times(c.end_ns for c in calls),
        "status": [c.status for c in calls],
        "tools": [[t.name for t in c.tool_calls] for c in calls],
        "span_ids": [c.span_ids for c in calls],
    }


def _ledger_owner(owners: Sequence[tuple[LogRecord, Any]]) -> Columns:
    return {
        **_owners(owners),
        "orchestration_revision": [o.orchestration_revision for _, o in owners],
    }


def _rewards(rows: Decoded) -> dict[str, Columns]:
    owners = [row for row in rows for _ in row[1].rewards]
    rewards = [reward for _, event in rows for reward in event.rewards]
    return {
        "reward_heads": _owners(rows),
        "rewards": {
            **_ledger_owner(owners),
            "family": [r.family for r in rewards],
            "name": [r.name for r in rewards],
            "unit": [r.unit for r in rewards],
            "unit_id": [r.unit_id for r in rewards],
            "value": _units(r.value for r in rewards),
            "value_micro": [r.value for r in rewards],
            "status": [r.status for r in rewards],
            "estimator": [r.estimator for r in rewards],
            "weight": _units(r.weight for r in rewards),
            "scaffold": [r.scaffold for r in rewards],
            "evidence": [r.evidence for r in rewards],
            "team": _units(o.team for _, o in owners),
            "team_micro": [o.team for _, o in owners],
            "team_status": [o.status for _, o in owners],
            "computed": _times(r.appended_ns for r, _ in owners),
        },
    }


def _credits(rows: Decoded) -> dict[str, Columns]:
    owners = [row for row in rows for _ in row[1].nodes]
    nodes = [node for _, event in rows for node in event.nodes]
    return {
        "credit_heads": _owners(rows),
        "credits": {
            **_ledger_owner(owners),
            "reward": _units(o.reward for _, o in owners),
            "baseline": _units(o.baseline for _, o in owners),
            "value_model": [o.value_model for _, o in owners],
            "node": [n.id for n in nodes],
            "unit": [n.unit for n in nodes],
            "parent": [n.parent for n in nodes],
            "label": [n.label for n in nodes],
            "credit": _units(n.credit for n in nodes),
            "credit_micro": [n.credit for n in nodes],
            "raw": _units(n.raw for n in nodes),
            "variance": [n.variance for n in nodes],
            "estimator": [n.estimator for n in nodes],
            "subject": [n.subject for n in nodes],
        },
    }


def _samples(rows: Decoded) -> dict[str, Columns]:
    owners = [row for row in rows for _ in row[1].rows]
    samples = [sample for _, event in rows for sample in event.rows]
    reasons = [(row, reason, n) for row in rows for reason, n in sorted(row[1].excluded.items())]
    return {
        "sample_heads": _owners(rows),
        "samples": {
            **_owners(owners),
            "group_id": [o.group for _, o in owners],
            "harness": [o.harness for _, o in owners],
            "reward": _units(o.reward for _, o in owners),
            "baseline": _units(o.baseline for _, o in owners),
            "value_model": [o.value_model for _, o in owners],
            "holdout": [o.holdout for _, o in owners],
            "call_id": [s.call_id for s in samples],
            "agent_id": [s.agent_id for s in samples],
            "role": [s.role for s in samples],
            "policy_version": [s.policy_version for s in samples],
            "weight": [s.weight for s in samples],
            "prompt_token_ids": [s.prompt_token_ids for s in samples],
            "response_token_ids": [s.response_token_ids for s in samples],
            "logprobs": [s.logprobs for s in samples],
            "advantages": [_units(s.advantages) for s in samples],
            "accounts": [s.accounts for s in samples],
            "menu_ids": [s.menu_ids for s in samples],
            "menu_logprobs": [s.menu_logprobs for s in samples],
            "menu_values": [[_units(values) for values in s.menu_values] for s in samples],
        },
        "excluded": {
            **_owners([row for row, _, _ in reasons]),
            "reason": [reason for _, reason, _ in reasons],
            "num_calls": [n for _, _, n in reasons],
        },
    }


_AGAINST = ("against", "previous", "to", "parent", "parent_version", "champion")
_SHARE = ("share", "learning_share")
_VERSION = ("version", "learner")


def _first(event: Any, names: Sequence[str]) -> Any:
    return next((getattr(event, name) for name in names if hasattr(event, name)), None)


def _policies(rows: Decoded) -> dict[str, Columns]:
    events = [event for _, event in rows]

    def of(name: str) -> list[Any]:
        return [getattr(event, name, None) for event in events]

    estimates = [_first(event, ("estimate", "difference")) for event in events]
    counts = [_first(event, ("n", "n_version", "orchestrations")) for event in events]
    return {
        "policies": {
            "tenant": of("tenant"),
            "policy": of("policy"),
            "type": [str(type(event).__struct_config__.tag) for event in events],
            "logged": _times(r.appended_ns for r, _ in rows),
            "version": [_first(event, _VERSION) for event in events],
            "against": [_first(event, _AGAINST) for event in events],
            "epoch": of("epoch"),
            "batch": of("batch"),
            "canary": of("canary"),
            "share": [_first(event, _SHARE) for event in events],
            "verdict": of("verdict"),
            "passed": of("passed"),
            "estimate": _units(estimates),
            "lower": _units(of("lower")),
            "upper": _units(of("upper")),
            "n": counts,
            "reason": [_first(event, ("reason", "injected")) for event in events],
            "details": [_json(event) for event in events],
            "partition": [r.partition for r, _ in rows],
            "offset": [r.offset for r, _ in rows],
        }
    }


def _feedback(rows: Decoded) -> dict[str, Columns]:
    events = [event for _, event in rows]
    return {
        "feedback": {
            "tenant": [e.tenant for e in events],
            "feedback_id": [e.feedback_id for e in events],
            "target_kind": [e.target_kind for e in events],
            "target_id": [e.target_id for e in events],
            "name": [e.name for e in events],
            "value": [e.value for e in events],
            "label": [e.label for e in events],
            "comment": [_text(e.comment) for e in events],
            "scorer": [e.scorer for e in events],
            "final": [e.final for e in events],
            "observed": _times(e.observed_ns for e in events),
            "observed_ns": _int64(e.observed_ns for e in events),
            "received": _times(r.appended_ns for r, _ in rows),
            "partition": [r.partition for r, _ in rows],
            "offset": [r.offset for r, _ in rows],
        }
    }


def _models(rows: Decoded) -> dict[str, Columns]:
    events = [event for _, event in rows]
    return {
        "models": {
            "tenant": [e.tenant for e in events],
            "version": [e.version for e in events],
            "kind": [e.kind for e in events],
            "trained_on": [e.trained_on for e in events],
            "published": _times(r.appended_ns for r, _ in rows),
            "parameters": [_json(e.parameters) for e in events],
            "partition": [r.partition for r, _ in rows],
            "offset": [r.offset for r, _ in rows],
        }
    }


def _dead_letters(rows: Decoded) -> dict[str, Columns]:
    events = [event for _, event in rows]
    return {
        "dead_letters": {
            "tenant": [e.tenant for e in events],
            "source": [e.source for e in events],
            "reason": [e.reason for e in events],
            "size": [e.size for e in events],
            "sha256": [e.sha256 for e in events],
            "logged": _times(r.appended_ns for r, _ in rows),
            "details": [_json(e.details) for e in events],
            "data": [e.data for e in events],
            "partition": [r.partition for r, _ in rows],
            "offset": [r.offset for r, _ in rows],
        }
    }


_BUILDERS: dict[str, tuple[type | None, Callable[[Decoded], dict[str, Columns]]]] = {
    topics.ORCHESTRATIONS: (OrchestrationRevised, _orchestrations),
    topics.REWARDS: (RewardsComputed, _rewards),
    topics.CREDITS: (CreditAssigned, _credits),
    topics.SAMPLES: (SamplesBuilt, _samples),
    topics.POLICIES: (None, _policies),
    topics.FEEDBACK: (FeedbackReceived, _feedback),
    topics.MODELS: (ValueModelPublished, _models),
    topics.DEAD_LETTERS: (DeadLettered, _dead_letters),
}


def _array(values: Any, type_: pa.DataType) -> pa.Array:
    """An Arrow array; texts that UTF-8 cannot hold (lone surrogates) are escaped instead of failing the query."""
    try:
        return pa.array(values, type=type_)
    except UnicodeEncodeError:
        return pa.array([_printable(v) for v in values], type=type_)


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    return [_printable(v) for v in value] if isinstance(value, list | tuple) else value


def build(topic: str, records: Sequence[LogRecord]) -> tuple[dict[str, pa.Table], int]:
    """All tables that ``topic`` feeds, from its records.

    Args:
        topic: One of ``topics.ALL_TOPICS``.
        records: Records of that topic, in offset order.

    Returns:
        Table name -> Arrow table with exactly the table's schema, and the number of records that could not be read.
    """
    if topic == topics.SPANS:
        columns, bad = _spans(records)
    else:
        expected, builder = _BUILDERS[topic]
        rows: Decoded = []
        bad = 0
        for record in records:
            try:
                event = decode(record.value)
            except SchemaError:
                bad += 1
                continue
            if expected is None or isinstance(event, expected):
                rows.append((record, event))
            else:
                bad += 1
        columns = builder(rows)
    tables = {}
    for name in TABLES_OF_TOPIC[topic]:
        schema = TABLES[name].schema
        arrays = [_array(columns[name][field.name], field.type) for field in schema]
        tables[name] = pa.Table.from_arrays(arrays, schema=schema)
    return tables, bad
