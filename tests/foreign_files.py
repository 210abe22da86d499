"""Small hand-made records of each file format, for tests of reading and importing.

Not a test: ``pythonpath`` has ``tests``.
"""

from __future__ import annotations

import json
from typing import Any

__all__ = ["LINES", "langfuse_trace", "native", "phoenix_span", "survey_document", "tau_try", "who_log"]

T = "2026-03-01T10:00:0"


def native(trace: str = "ab") -> list[dict[str, Any]]:
    """A run of the openai-agents SDK: lead asks helper through a tool, then hands over to closer."""
    name = f"trace_{trace * 16}"

    def one(
        n: int, parent: int | None, begin: int, end: int, data: dict[str, Any], error: Any = None
    ) -> dict[str, Any]:
        return {
            "object": "trace.span", "id": f"span_{n:024x}", "trace_id": name,
            "parent_id": None if parent is None else f"span_{parent:024x}",
            "started_at": f"{T}{begin}.000001+00:00", "ended_at": f"{T}{end}+00:00", "span_data": data, "error": error,
        }  # fmt: skip

    def says(*calls: str) -> dict[str, Any]:
        asked = [
            {"id": f"c{c}", "type": "function", "function": {"name": c, "arguments": "{}"}} for c in calls
        ]
        return {
            "type": "generation", "model": "tiny", "input": [{"role": "user", "content": "hi"}],
            "output": [{"role": "assistant", "content": None, "tool_calls": asked}],
            "usage": {"input_tokens": 5, "output_tokens": 2},
        }  # fmt: skip

    return [
        {"object": "trace", "id": name, "workflow_name": "job", "group_id": "room-1", "metadata": None},
        one(0x20 << 64, 0x10 << 64, 0, 1, {"type": "guardrail", "name": "g", "triggered": False}),
        one(0x21 << 64, 0x10 << 64, 1, 2, says("ask")),
        one(0x40 << 64, 0x30 << 64, 3, 4, {"type": "agent", "name": "helper", "tools": ["dig"]}),
        one(0x41 << 64, 0x40 << 64, 3, 4, {"type": "function", "name": "dig", "input": '{"q": 1}', "output": "no"},
            {"message": "failed", "data": None}),
        one(0x30 << 64, 0x10 << 64, 2, 5, {"type": "function", "name": "ask", "input": "{}", "output": "ok"}),
        one(0x22 << 64, 0x10 << 64, 5, 6, {"type": "handoff", "from_agent": "lead", "to_agent": "closer"}),
        one(0x10 << 64, 0x1 << 64, 0, 6, {"type": "agent", "name": "lead"}),
        one(0x50 << 64, 0x1 << 64, 6, 8, {"type": "agent", "name": "closer"}),
        one(0x51 << 64, 0x50 << 64, 6, 7, says()),
        one(0x1 << 64, None, 0, 8, {"type": "custom", "name": "task", "data": {"sdk_span_type": "task", "name": "job"}}),
    ]  # fmt: skip


def langfuse_trace() -> dict[str, Any]:
    """A trace with a framework's observation, one of Langfuse's own SDK and a score."""
    attributes = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "tiny",
        "gen_ai.response.id": "r-1",
    }
    scope = {"name": "some.framework", "version": "2", "attributes": {}}
    return {
        "trace": {
            "id": "c" * 32, "name": "my trace", "timestamp": f"{T}0.000Z", "sessionId": "s-1",
            "scores": [
                {"id": "sc", "name": "tone of voice", "value": 0.5, "dataType": "NUMERIC", "traceId": "c" * 32,
                 "timestamp": f"{T}9.000Z", "comment": "fine", "observationId": None},
                {"id": "sd", "name": "kind", "value": None, "stringValue": "x", "dataType": "CATEGORICAL"},
            ],
        },
        "observations": [
            {"id": "1" * 16, "traceId": "c" * 32, "type": "AGENT", "name": "root", "parentObservationId": None,
             "startTime": f"{T}0.001Z", "endTime": f"{T}5.000Z", "level": "ERROR", "statusMessage": "bad",
             "metadata": {"langgraph_node": "a", "scope": {"name": "langfuse-sdk", "version": "3"}},
             "input": {"q": 1}, "output": "done", "usageDetails": {}},
            {"id": "2" * 16, "traceId": "c" * 32, "type": "GENERATION", "name": "chat tiny", "parentObservationId": "1" * 16,
             "startTime": f"{T}1.000Z", "endTime": f"{T}2.000Z", "level": "DEFAULT",
             "metadata": json.dumps({"attributes": attributes, "resourceAttributes": {"service.name": "x"}, "scope": scope}),
             "input": json.dumps([{"role": "user", "parts": [{"type": "text", "content": "hi"}]}]),
             "output": json.dumps([{"role": "assistant", "parts": [{"type": "tool_call", "id": "k", "name": "dig"}]}]),
             "usageDetails": {"input": 7, "output": 3, "total": 10}},
        ],
    }  # fmt: skip


def phoenix_span(n: int = 1, flat: bool = False) -> dict[str, Any]:
    """A model call, as the REST API gives it or as a data frame writes it."""
    attributes = {
        "llm": {
            "model_name": "tiny", "token_count": {"prompt": 4, "completion": 1},
            "input_messages": [{"message": {"role": "user", "content": "hi"}}],
            "output_messages": [
                {"message": {"role": "assistant", "tool_calls": [
                    {"tool_call": {"id": "k", "function": {"name": "dig", "arguments": {"q": 1}}}}]}}
            ],
        },
        "metadata": {"a": [1]}, "session": {"id": "s-1"}, "input": {"value": "x", "mime_type": None},
    }  # fmt: skip
    base: dict[str, Any] = {
        "name": "call", "span_kind": "LLM", "parent_id": None, "status_code": "ERROR", "status_message": "late",
        "start_time": f"{T}1.5+00:00", "end_time": f"{T}2+00:00",
        "events": [{"name": "exception", "timestamp": f"{T}2+00:00", "attributes": {"exception": {"type": "E"}}}],
    }  # fmt: skip
    if not flat:
        notes = [
            {"id": "n1", "name": "outcome", "result": {"score": 0.25, "label": "meh", "explanation": ""}}
        ]
        context = {"trace_id": "d" * 32, "span_id": f"{n:016x}"}
        return {"id": "U3Bhbg==", "context": context, "attributes": attributes, "annotations": notes, **base}
    columns = {
        "attributes.llm.model_name": "tiny", "attributes.llm.token_count.prompt": 4,
        "attributes.llm.token_count.completion": 1, "attributes.openinference.span.kind": "LLM",
        "attributes.llm.input_messages": [{"message.role": "user", "message.content": "hi"}],
        "attributes.metadata": {"a": [1]}, "attributes.session.id": "s-1", "attributes.input.value": "x",
        "attributes.tool.name": None,
    }  # fmt: skip
    return {
        **base, "context.trace_id": "d" * 32, "context.span_id": f"{n:016x}", **columns,
        "start_time": 1772359201500, "end_time": 1772359202000,
    }  # fmt: skip


def tau_try(trial: int = 0, reward: float = 1.0) -> dict[str, Any]:
    """One try of a task with one good and one failing tool call."""

    def asks(call: str, tool: str) -> dict[str, Any]:
        function = {"name": tool, "arguments": '{"a": 1}'}
        return {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call, "type": "function", "function": function}],
        }

    return {
        "task_id": 3, "trial": trial, "reward": reward,
        "info": {"task": {"instruction": "cancel it", "actions": [{"name": "SECRET_RIGHT_ACTION"}]}},
        "traj": [
            {"role": "system", "content": "be kind"}, {"role": "user", "content": f"hello {trial}"},
            asks("k1", "look"), {"role": "tool", "tool_call_id": "k1", "name": "look", "content": "found"},
            asks("k2", "cancel"), {"role": "tool", "tool_call_id": "k2", "name": "cancel", "content": "Error: no"},
            {"role": "assistant", "content": "sorry"}, {"role": "user", "content": "###STOP###"},
        ],
    }  # fmt: skip


def who_log(style: str = "ledger") -> dict[str, Any]:
    """A labelled log in one of its two notations."""
    labels = {
        "question_ID": "q-7", "ground_truth": "LABEL_TRUTH", "mistake_agent": "LABEL_AGENT", "mistake_step": "2",
        "mistake_reason": "LABEL_REASON", "is_corrected": False, "question": "LABEL_QUESTION",
    }  # fmt: skip
    if style == "ledger":
        roles = ["human", "Boss (thought)", "Boss (-> Finder)", "Finder", "human", "Boss (thought)",
                 "Boss (-> Writer)", "Writer", "Boss (termination condition)"]  # fmt: skip
        history = [{"role": role, "content": f"text {n}"} for n, role in enumerate(roles)]
    else:
        names = ["Planner", "Planner", "Terminal", "Checker"]
        history = [{"role": "user", "name": name, "content": f"text {n}"} for n, name in enumerate(names)]
    return {**labels, "history": history}


def survey_document() -> dict[str, Any]:
    """A trace in the survey's format, with what only this document has."""
    return {
        "trace_id": "t-1", "task_id": "task-1", "system": "illustrative", "topology": "centralized",
        "events": [
            {"id": "e1", "t": 0, "type": "orchestrator_decision", "agent": "lead", "role": "lead", "content_ref": "x"},
            {"id": "e2", "t": 1, "type": "spawn", "agent": "lead", "to": "planner"},
            {"id": "e3", "t": 4.25, "type": "tool_result", "agent": "search", "tool": "search", "trusted": False},
            {"id": "e4", "t": 5, "type": "return", "agent": "planner", "from": "planner", "to": "lead", "own": [1, {"a": None}]},
        ],
        "edges": [{"src": "e3", "dst": "e4", "type": "causal"}, {"src": "e1", "dst": "e2", "type": "spawn"}],
        "rewards": {"team": 1.0, "tool": 0.25}, "costs": {"tokens": 12000, "wall_clock_s": 420},
        "metrics": {"task_success": 1, "own_metric": 2.5},
    }  # fmt: skip


LINES: dict[str, list[dict[str, Any]]] = {
    "openai-agents": native() + native("cd"),
    "langfuse": [langfuse_trace()],
    "phoenix": [phoenix_span(1), phoenix_span(2), phoenix_span(3, flat=True)],
    "tau-bench": [tau_try(0), tau_try(1, 0.0)],
    "who-and-when": [who_log(), who_log("chat")],
    "survey": [survey_document()],
}
"""Records by format."""
