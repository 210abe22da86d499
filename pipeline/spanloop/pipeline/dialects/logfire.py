"""Logfire's spans of the OpenAI Agents SDK and of model clients: their names are templates.

What a span is stands in ``logfire.msg_template`` ("Agent run: {name!r}"), the values in attributes named like the
template's fields. A task repeats the workflow's name inside each sub-run and a turn groups a model call with its
tools: both are structure and say nothing.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spanloop.pipeline.dialects import genai
from spanloop.pipeline.dialects.fields import (
    answered_calls,
    argument_hashes,
    asked_calls,
    base_fields,
    first,
    first_user_hash,
    fresh_answers,
    messages,
    text,
)
from spanloop.pipeline.dialects.operation import AgentFacts, CallFacts, Handover, Operation, ToolFacts
from spanloop.schemas.spans import Span

__all__ = ["NAME", "matches", "read"]

NAME = "logfire"

_TEMPLATE = "logfire.msg_template"
_KINDS = (
    ("OpenAI Agents trace:", "workflow"),
    ("Agent run:", "agent_run"),
    ("Function:", "tool_call"),
    ("Handoff:", "handover"),
    ("Guardrail ", "guardrail"),
    ("Chat completion with ", "model_call"),
    ("Responses API with ", "model_call"),
    ("Chat Completion with ", "model_call"),
    ("Message with ", "model_call"),
)
"""Kind by the beginning of the template, which is part of the program and never holds content."""


def matches(span: Span) -> bool:
    """A template of Logfire that is known here, from one of its own scopes."""
    return span.scope.startswith("logfire") and _kind(span) != ""


def _kind(span: Span) -> str:
    template = text(span.attributes.get(_TEMPLATE)) or span.name
    for beginning, kind in _KINDS:
        if template.startswith(beginning):
            return kind
    return "unknown" if "sdk_span_type" in span.attributes else ""


def read(span: Span) -> Operation:
    """A span by its template."""
    attributes = span.attributes
    fields = base_fields(span)
    kind = fields["kind"] = _kind(span)
    fields["conversation"] = text(first(attributes, "group_id", "gen_ai.conversation.id"))
    if _is_error(attributes):
        fields["status"] = "error"
    if kind == "workflow":
        fields["name"] = text(attributes.get("name")) or span.name
    elif kind == "agent_run":
        fields["agent"] = text(attributes.get("name"))
        fields["run"] = AgentFacts()
    elif kind == "tool_call":
        fields["tool"] = ToolFacts(
            tool=text(attributes.get("name")) or span.name,
            call_id=text(first(attributes, "gen_ai.tool.call.id", "call_id")),
            argument_hashes=argument_hashes(attributes.get("input")),
        )
    elif kind == "handover":
        fields["handover"] = _handover(attributes)
    elif kind == "guardrail":
        verdict = attributes.get("triggered")
        fields["triggered"] = verdict if isinstance(verdict, bool) else None
    elif kind == "model_call":
        fields["call"], bad = _call_facts(attributes)
        if bad:
            fields["flags"] = (*fields["flags"], "unparsed_messages")
    return Operation(**fields)


def _is_error(attributes: dict[str, Any]) -> bool:
    level = attributes.get("logfire.level_num")
    return isinstance(level, int) and level >= 17


def _handover(attributes: dict[str, Any]) -> Handover:
    source, target = text(attributes.get("from_agent")), text(attributes.get("to_agent"))
    if not target:
        return Handover(source=source, mode="pass_control", confidence=0.7)
    return Handover(source=source, target=target, mode="pass_control")


def _call_facts(attributes: dict[str, Any]) -> tuple[CallFacts, bool]:
    """The conventions' facts, with messages from ``input`` and ``output``, or from the Responses API's ``events``.

    ``request_data`` is no input: the SDK appends the answer to it before the span ends.
    """
    facts, bad = genai.call_facts(attributes)
    said, said_ok = messages(first(attributes, "output", "response_data", "events"))
    asked = facts.asked or asked_calls(said.get("message") if isinstance(said, dict) else said)
    history, history_ok = messages(first(attributes, "input", "raw_input"))
    if not history:
        return msgspec.structs.replace(facts, asked=asked), bad or not said_ok
    filled = msgspec.structs.replace(
        facts,
        asked=asked,
        answered=facts.answered or answered_calls(history),
        task_hash=facts.task_hash or first_user_hash(history),
        fresh=facts.fresh or fresh_answers(history),
    )
    return filled, bad or not (said_ok and history_ok)
