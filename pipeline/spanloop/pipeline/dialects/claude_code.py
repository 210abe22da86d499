"""Claude Code: its spans (traces in beta) and its log events, which repeat each other. Source: DIALECTS 6.

A turn is a span ``interaction`` or, where only log events or model spans arrive, everything that names one prompt
of one session. Sub-agents have an agent id on what they do and no span of their own. Numbers may be texts.
"""

from __future__ import annotations

from typing import Any

from spanloop.pipeline.dialects.coding_agents import begun_ns, failed, label, user_decided
from spanloop.pipeline.dialects.fields import base_fields, first, integer, text, texts
from spanloop.pipeline.dialects.operation import (
    AgentFacts,
    CallFacts,
    Member,
    Operation,
    ToolFacts,
    text_hash,
)
from spanloop.pipeline.otlp.log_ids import told_trace_id
from spanloop.schemas.spans import LOG, Span

__all__ = ["NAME", "matches", "read"]

NAME = "claude_code"

_PREFIX = "claude_code."
_STARTERS = frozenset({"Agent", "Task"})
"""Tools of Claude Code that start a sub-agent."""
_EVENTS = {
    "user_prompt": ("note", "prompt"),
    "api_request": ("model_call", "call"),
    "api_error": ("model_call", "call"),
    "tool_result": ("tool_call", "tool"),
    "tool_decision": ("note", "decision"),
}
_SPANS = {
    "interaction": "agent_run",
    "llm_request": "model_call",
    "tool": "tool_call",
    "tool.execution": "note",
    "tool.blocked_on_user": "human",
}


def matches(span: Span) -> bool:
    """Its span and event names, or its scope."""
    return span.name.startswith(_PREFIX) or NAME in span.scope


def read(span: Span) -> Operation:
    """A span or a log event as an operation."""
    attributes = span.attributes
    fields = base_fields(span)
    what = span.name.removeprefix(_PREFIX)
    if span.kind == LOG:
        kind, event = _EVENTS.get(what, ("note", "other"))
        if event == "decision" and user_decided(attributes):
            kind = "human"
    else:
        kind, event = _SPANS.get(_span_type(span, what), "unknown"), ""
        if (
            kind == "human"
            and label(attributes, "source", "decision_source")
            and not user_decided(attributes)
        ):
            kind = "note"
    member = _member(attributes)
    fields |= {
        "kind": kind,
        "event": event,
        "conversation": text(attributes.get("session.id")),
        "links": _links(span, fields.get("links", ())),
    }
    if failed(span) or what == "api_error":
        fields["status"] = "error"
    if kind == "agent_run":
        fields["agent"] = member.name if member else NAME
        fields["run_id"] = member.key if member else ""
        fields["run"] = AgentFacts(task_hash=_prompt(attributes))
        return Operation(**fields)
    fields["member"] = member
    if event == "prompt":
        fields["run"] = AgentFacts(task_hash=_prompt(attributes))
    elif kind == "model_call":
        fields["call"] = _call(attributes)
    elif kind in ("tool_call", "human") or event == "decision":
        tool = fields["tool"] = ToolFacts(
            tool=label(attributes, "tool_name", "gen_ai.tool.name") or what,
            call_id=label(attributes, "tool_use_id", "gen_ai.tool.call.id"),
        )
        if kind == "tool_call" and tool.tool in _STARTERS and member:
            fields["member"] = Member(member.key, member.name, member.parent, member.turns, starts=True)
    if event in ("call", "tool"):
        fields["start_ns"] = begun_ns(span)
    return Operation(**fields)


def _span_type(span: Span, what: str) -> str:
    return label(span.attributes, "span.type").removeprefix(_PREFIX) or what


def _prompt(attributes: dict[str, Any]) -> str:
    given = first(attributes, "user_prompt", "prompt")
    return "" if given in ("<REDACTED>", "[REDACTED]") else text_hash(given)


def _member(attributes: dict[str, Any]) -> Member | None:
    """The run of a sub-agent, else that of the prompt, else one of the session's turns."""
    session, prompt = text(attributes.get("session.id")), text(attributes.get("prompt.id"))
    if not session:
        return None
    entry = f"{session}/{prompt}" if prompt else session
    name, _, number = label(attributes, "subagent.id").rpartition(":")
    agent_id = label(attributes, "agent_id") or number
    if not agent_id:
        return Member(entry, NAME, turns=not prompt)
    parent = label(attributes, "parent_agent_id")
    known = name or label(attributes, "agent.name", "subagent_type") or "subagent"
    return Member(f"{session}/agent/{agent_id}", known, f"{session}/agent/{parent}" if parent else entry)


def _links(span: Span, links: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    """All of one prompt is one job, on whichever signal and in whichever trace it came."""
    if not text(span.attributes.get("prompt.id")):
        return links
    told = told_trace_id(span.attributes)
    return links if told in ("", span.trace_id) else tuple(sorted({*links, (told, "")}))


def _call(attributes: dict[str, Any]) -> CallFacts:
    """Tokens read from or written to a cache are not part of ``input_tokens`` and are not added."""
    return CallFacts(
        model=label(attributes, "gen_ai.response.model", "model", "gen_ai.request.model"),
        response_id=label(attributes, "gen_ai.response.id", "request_id"),
        input_tokens=integer(first(attributes, "input_tokens", "gen_ai.usage.input_tokens")),
        output_tokens=integer(first(attributes, "output_tokens", "gen_ai.usage.output_tokens")),
        finish_reasons=texts(first(attributes, "stop_reason", "gen_ai.response.finish_reasons")),
    )
