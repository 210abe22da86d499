"""Spans for assembly tests in few words, the stage driven without a runtime, and the shared case files.

Not a test: ``pythonpath`` has ``tests``, so suites import it as ``made_spans``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.assembly.stage import AssemblyStage
from spanloop.pipeline.otlp.decode_json import decode_json
from spanloop.pipeline.ports import LogRecord
from spanloop.schemas.canonical import content_hash
from spanloop.schemas.events import Event, OrchestrationRevised, SpansReceived, encode
from spanloop.schemas.ids import gateway_span_id, gateway_trace_id
from spanloop.schemas.orchestration import OrchestrationContent
from spanloop.schemas.settings import Pipeline
from spanloop.schemas.spans import Span

SHARED = Path(__file__).resolve().parents[2] / "shared"
S = 1_000_000_000
TRACE = "a" * 31 + "1"


def hex16(name: str | int) -> str:
    """A span id from a short name or number."""
    number = name if isinstance(name, int) else int.from_bytes(name.encode()[-7:], "big")
    return f"{number:016x}"


def hex32(name: str | int) -> str:
    """A trace id from a short name or number; a trace id as it is."""
    if isinstance(name, str) and len(name) == 32:
        return name
    number = name if isinstance(name, int) else int.from_bytes(name.encode()[-15:], "big")
    return f"{number:032x}"


def span(
    key: str | int, parent: str | int | None, start: float, end: float, *, trace: str | int = TRACE, name: str = "",
    error: bool = False, scope: str = "test", attributes: dict[str, Any] | None = None, **more: Any,
) -> Span:  # fmt: skip
    """A span; times in seconds."""
    return Span(
        trace_id=hex32(trace),
        span_id=hex16(key),
        parent_span_id=None if parent is None else hex16(parent),
        name=name or str(key),
        start_ns=round(start * S),
        end_ns=round(end * S),
        status="error" if error else "unset",
        scope=scope,
        attributes=attributes or {},
        **more,
    )


def agent(
    key: str | int, parent: str | int | None, start: float, end: float, name: str = "", **more: Any
) -> Span:
    """An agent's run."""
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name or str(key)}
    return span(key, parent, start, end, **_with(more, attributes))


def chat(
    key: str | int, parent: str | int | None, start: float, end: float, *, asks: dict[str, str] | None = None,
    response: str = "", usage: tuple[int, int] | None = (10, 2), **more: Any,
) -> Span:  # fmt: skip
    """A model call; ``asks`` maps tool call ids to tool names."""
    attributes: dict[str, Any] = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "tiny"}
    if usage is not None:
        attributes |= {"gen_ai.usage.input_tokens": usage[0], "gen_ai.usage.output_tokens": usage[1]}
    if response:
        attributes["gen_ai.response.id"] = response
    if asks:
        parts = [{"type": "tool_call", "id": i, "name": n} for i, n in asks.items()]
        attributes["gen_ai.output.messages"] = json.dumps([{"role": "assistant", "parts": parts}])
    return span(key, parent, start, end, **_with(more, attributes))


def tool(
    key: str | int,
    parent: str | int | None,
    start: float,
    end: float,
    name: str = "",
    *,
    call: str = "",
    **more: Any,
) -> Span:
    """A tool's execution."""
    attributes: dict[str, Any] = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": name or str(key),
    }
    if call:
        attributes["gen_ai.tool.call.id"] = call
    return span(key, parent, start, end, **_with(more, attributes))


def gateway(response: str, start: float, end: float, version: str = "policy@v3", **attributes: Any) -> Span:
    """The gateway's span of a call that came without a trace context."""
    given = {name.replace("__", "."): value for name, value in attributes.items()}
    return Span(
        trace_id=gateway_trace_id(response),
        span_id=gateway_span_id(response),
        name="chat policy",
        kind=3,
        start_ns=round(start * S),
        end_ns=round(end * S),
        scope="spanloop.gateway",
        attributes={
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": "policy",
            "gen_ai.response.model": version,
            "gen_ai.response.id": response,
            "gen_ai.usage.input_tokens": 7,
            "gen_ai.usage.output_tokens": 3,
            "spanloop.policy.version": version,
            "spanloop.policy.route": "champion",
            "spanloop.harness": "harness-1",
            **given,
        },
    )


def _with(more: dict[str, Any], attributes: dict[str, Any]) -> dict[str, Any]:
    return {**more, "attributes": {**attributes, **(more.get("attributes") or {})}}


def one(spans: Iterable[Span], source: str = "import") -> OrchestrationContent:
    """The only orchestration of ``spans``."""
    (content,) = assemble_spans(spans, "default", source)
    return content


def told(content: OrchestrationContent, *kinds: str) -> list[tuple[str, ...]]:
    """(type, agent, to or tool, status or mode) of the events, of ``kinds`` if given, without what is empty."""
    return [
        tuple(x for x in (e.type, e.agent, e.to or e.tool, e.status or e.mode) if x)
        for e in content.events
        if not kinds or e.type in kinds
    ]


class Desk:
    """The stage with its committed state, as a runtime would carry it."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Pipeline(**settings)
        self.stage = AssemblyStage(self.settings)
        self.state: dict[str, bytes] = {}
        self.events: list[Event] = []
        self.now_ns = 0
        self._offset = 0

    @property
    def now(self) -> float:
        return self.now_ns / S

    def restart(self) -> None:
        """Lose the process, keep what was committed."""
        self.stage = AssemblyStage(self.settings)
        self.stage.restore(dict(self.state))

    def send(self, *spans: Span, source: str = "otlp", tenant: str = "default") -> list[Event]:
        """One record a trace, in one batch."""
        by_trace: dict[str, list[Span]] = {}
        for item in spans:
            by_trace.setdefault(item.trace_id, []).append(item)
        records = [
            SpansReceived(tenant=tenant, trace_id=t, spans=tuple(part), source=source)
            for t, part in by_trace.items()
        ]
        return self.send_raw(*((r.key, r.event_id, encode(r)) for r in records))

    def send_raw(self, *records: tuple[str, str, bytes]) -> list[Event]:
        batch = []
        for key, event_id, value in records:
            batch.append(LogRecord("spans", self._offset, key, event_id, value, self.now_ns))
            self._offset += 1
        return self._apply(self.stage.process(batch, self.now_ns))

    def at(self, seconds: float) -> list[Event]:
        """Let time come to ``seconds``, firing timers on the way at their own times."""
        fired: list[Event] = []
        goal = round(seconds * S)
        while (due := self.stage.next_timer_ns()) is not None and due <= goal:
            self.now_ns = max(self.now_ns, due)
            fired += self._apply(self.stage.tick(self.now_ns))
        self.now_ns = max(self.now_ns, goal)
        return fired

    def later(self, seconds: float) -> list[Event]:
        return self.at(self.now + seconds)

    def _apply(self, output: Any) -> list[Event]:
        for key, value in output.writes.items():
            if value is None:
                self.state.pop(key)  # deleting what is not there is a bug of the stage
            else:
                self.state[key] = value
        self.events += output.events
        return list(output.events)

    def live(self) -> dict[str, OrchestrationRevised]:
        """Last revision of each orchestration that was not merged away."""
        last = {e.orchestration_id: e for e in self.events if isinstance(e, OrchestrationRevised)}
        return {key: event for key, event in last.items() if not event.merged_into}


def hashes(spans: Sequence[Span], source: str = "otlp", tenant: str = "default") -> dict[str, str]:
    """Content hash by orchestration id of the batch assembly."""
    return {c.orchestration_id: content_hash(c) for c in assemble_spans(spans, tenant, source)}


def load_case(number: int) -> tuple[dict[str, Any], list[Span]]:
    """A case of the shared bug collection with its spans decoded by the product; skips where the folder
    is not there."""
    found = sorted((SHARED / "cases").glob(f"{number:02d}-*.json"))
    if not found:
        pytest.skip(f"no shared/cases/{number:02d}-*.json beside this checkout")
    case = json.loads(found[0].read_text())
    raw = list(case["spans"])
    if expand := case.get("expand"):
        raw += _expanded(expand, raw[0])
    decoded: list[Span] = []
    for item in raw:
        resource = [{"key": k, "value": {"stringValue": v}} for k, v in item.pop("resource", {}).items()]
        request = {
            "resourceSpans": [{"resource": {"attributes": resource}, "scopeSpans": [{"spans": [item]}]}]
        }
        decoded += decode_json(json.dumps(request).encode()).spans
    return case, decoded


def _expanded(rule: dict[str, Any], root: dict[str, Any]) -> list[dict[str, Any]]:
    first, t0 = int(rule["id_base_hex"], 16), int(root["startTimeUnixNano"])
    attributes = [
        {"key": k, "value": {"intValue": str(v)} if isinstance(v, int) else {"stringValue": v}}
        for k, v in rule["attrs"].items()
    ]
    return [
        {
            "traceId": rule["trace_id"], "spanId": format(first + i, "016x"), "name": "chat", "kind": 1,
            "parentSpanId": format(first + i - 1, "016x") if 1 < i <= 3000 else root["spanId"],
            "startTimeUnixNano": str(t0 + rule["start_s"] * S), "endTimeUnixNano": str(t0 + rule["end_s"] * S),
            "attributes": attributes, "status": {"code": 1},
        }
        for i in range(1, rule["count"] + 1)
    ]  # fmt: skip
