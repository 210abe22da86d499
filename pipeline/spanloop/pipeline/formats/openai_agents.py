"""Traces and spans as the openai-agents SDK's own exporter writes them: objects ``trace`` and ``trace.span``, one a line, in a
list, or under ``data`` as they go to its backend.

A span keeps GenAI's attribute names where these exist (model, usage, messages, tools) and ``openai_agents.*`` for the rest;
``dialects/openai_agents_native`` reads them. The trace's own record has no times: it becomes a span of 1 ns that carries the
group id. Source: openai-agents 0.24, ``tracing/span_data.py``.
"""

from __future__ import annotations

from typing import Any

from spanloop.pipeline.formats.values import (
    Read,
    flagged,
    json_text,
    plain,
    span_id,
    time_ns,
    trace_id,
    words,
)
from spanloop.pipeline.otlp.decoded import BadSpanError
from spanloop.schemas.spans import Span

__all__ = ["NAME", "SCOPE", "matches", "read"]

NAME = "openai-agents"
SCOPE = "openai.agents"
_OBJECTS = frozenset({"trace", "trace.span"})
_NO_TIME = 1


def matches(value: dict[str, Any]) -> bool:
    """An object of the SDK's exporter."""
    return words(value.get("object")) in _OBJECTS and "id" in value


def read(value: dict[str, Any]) -> Read:
    """The one span of a record. Raises BadSpanError."""
    flags: list[str] = []
    if value["object"] == "trace":
        return Read([_trace(value, flags)], [])
    data = value.get("span_data")
    if not isinstance(data, dict):
        raise BadSpanError("span_data is missing, expected an object")
    error = value.get("error")
    attributes = _attributes(data, flags)
    message = ""
    if error is not None:
        message = words(error.get("message")) if isinstance(error, dict) else words(error)
    span = Span(
        trace_id=trace_id(value.get("trace_id"), "trace_"),
        span_id=span_id(value.get("id"), "span_"),
        parent_span_id=span_id(value["parent_id"], "span_") if value.get("parent_id") else None,
        name=words(data.get("name")) or words(data.get("type")) or "span",
        start_ns=time_ns(value.get("started_at"), "started_at"),
        end_ns=time_ns(value.get("ended_at"), "ended_at"),
        status="unset" if error is None else "error",
        status_message=message,
        attributes=flagged(attributes, flags),
        scope=SCOPE,
    )
    return Read([span], [])


def _trace(value: dict[str, Any], flags: list[str]) -> Span:
    name = words(value.get("workflow_name"))
    attributes: dict[str, Any] = {"openai_agents.span_type": "trace", "openai_agents.name": name}
    if group := words(value.get("group_id")):
        attributes["gen_ai.conversation.id"] = group
    if value.get("metadata"):
        attributes["metadata"] = json_text(value["metadata"], flags, "metadata")
    trace = trace_id(value["id"], "trace_")
    return Span(
        trace_id=trace,
        span_id=span_id(f"trace record {trace}"),
        name=name or "trace",
        start_ns=_NO_TIME,
        end_ns=_NO_TIME,
        attributes=flagged(attributes, flags),
        scope=SCOPE,
    )


def _attributes(data: dict[str, Any], flags: list[str]) -> dict[str, Any]:
    kind = words(data.get("type"))
    found: dict[str, Any] = {"openai_agents.span_type": kind}

    def put(key: str, value: Any) -> None:
        if value not in (None, "", [], {}):
            found[key] = plain(value, flags, key)

    def put_json(key: str, value: Any) -> None:
        if value not in (None, "", [], {}):
            found[key] = json_text(value, flags, key)

    put("openai_agents.name", data.get("name"))
    if kind == "agent":
        put("openai_agents.tools", data.get("tools"))
        put("openai_agents.handoffs", data.get("handoffs"))
        put("openai_agents.output_type", data.get("output_type"))
    elif kind in ("generation", "response"):
        put("gen_ai.request.model", data.get("model"))
        put("gen_ai.response.id", data.get("response_id"))
        put_json("gen_ai.input.messages", data.get("input"))
        put_json("gen_ai.output.messages", data.get("output"))
        put_json("openai_agents.model_config", data.get("model_config"))
        _usage(data.get("usage"), put)
    elif kind in ("function", "mcp_tools"):
        put("gen_ai.tool.name", data.get("name"))
        put_json("gen_ai.tool.call.arguments", data.get("input"))
        put_json("gen_ai.tool.call.result", data.get("output", data.get("result")))
        put("openai_agents.server", data.get("server"))
    elif kind == "handoff":
        put("openai_agents.from_agent", data.get("from_agent"))
        put("openai_agents.to_agent", data.get("to_agent"))
    elif kind == "guardrail":
        put("openai_agents.triggered", data.get("triggered"))
    elif kind == "custom":
        _custom(data.get("data"), found, put, put_json)
    else:
        put_json("openai_agents.data", {k: v for k, v in data.items() if k not in ("type", "name")})
    return found


def _custom(data: Any, found: dict[str, Any], put: Any, put_json: Any) -> None:
    """The SDK's own custom spans (task, turn) by their keys; anybody else's as JSON."""
    if not isinstance(data, dict) or "sdk_span_type" not in data:
        put_json("openai_agents.data", data)
        return
    put("openai_agents.sdk_span_type", data.get("sdk_span_type"))
    put("openai_agents.agent_name", data.get("agent_name"))
    put("openai_agents.turn", data.get("turn"))
    if data.get("name"):
        found["openai_agents.name"] = words(data["name"])
    usage = data.get("usage")
    if isinstance(usage, dict):
        put("gen_ai.aggregated_usage.input_tokens", usage.get("input_tokens"))
        put("gen_ai.aggregated_usage.output_tokens", usage.get("output_tokens"))


def _usage(usage: Any, put: Any) -> None:
    if not isinstance(usage, dict):
        return
    put("gen_ai.usage.input_tokens", usage.get("input_tokens", usage.get("prompt_tokens")))
    put("gen_ai.usage.output_tokens", usage.get("output_tokens", usage.get("completion_tokens")))
    details = usage.get("input_tokens_details")
    if isinstance(details, dict):
        put("gen_ai.usage.cache_read.input_tokens", details.get("cached_tokens"))
