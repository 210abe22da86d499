"""Langfuse's SDK: observations with a type, inputs and outputs as JSON. The name of an agent or a tool is the span's.
Source: DIALECTS 1; langfuse 5.0.

A span that another instrumentation wrote and Langfuse only exported has no observation type and is read as what it is.
"""

from __future__ import annotations

from typing import Any

from spanloop.pipeline.dialects.fields import base_fields, first, text, texts
from spanloop.pipeline.dialects.operation import AgentFacts, Operation, ToolFacts
from spanloop.pipeline.dialects.recorded import argument_texts, call_facts, task_hash, tokens
from spanloop.schemas.spans import Span

__all__ = ["ALSO", "NAME", "matches", "read"]

NAME = "langfuse"
ALSO = ("genai",)

_OWN = "langfuse.observation."
_KINDS = {
    "agent": "agent_run",
    "generation": "model_call",
    "tool": "tool_call",
    "guardrail": "guardrail",
    "evaluator": "evaluation",
}
"""chain, span, event, retriever and embedding keep their place in the tree and are nothing else."""


def matches(span: Span) -> bool:
    """An observation's type."""
    return isinstance(span.attributes.get(_OWN + "type"), str)


def read(span: Span) -> Operation:
    """An observation as an operation."""
    attributes = span.attributes
    kind = _KINDS.get(attributes[_OWN + "type"].lower(), "unknown")
    given, answer = attributes.get(_OWN + "input"), attributes.get(_OWN + "output")
    fields: dict[str, Any] = base_fields(span) | {
        "kind": kind,
        "conversation": text(first(attributes, "session.id", "langfuse.session.id")),
    }
    if text(attributes.get(_OWN + "level")).upper() == "ERROR":
        fields["status"] = "error"
    if kind == "model_call":
        counted_in, counted_out = tokens(attributes.get(_OWN + "usage_details"))
        fields["call"], readable = call_facts(
            given,
            answer,
            model=text(attributes.get(_OWN + "model.name")),
            response_id=text(attributes.get("gen_ai.response.id")),
            input_tokens=counted_in,
            output_tokens=counted_out,
            finish_reasons=texts(attributes.get("gen_ai.response.finish_reasons")),
        )
        if not readable and not _is_text(given, answer):
            fields["flags"] = (*fields["flags"], "unparsed_messages")
    elif kind == "tool_call":
        fields["tool"] = ToolFacts(
            tool=text(attributes.get("gen_ai.tool.name")) or span.name,
            call_id=text(attributes.get("gen_ai.tool.call.id")),
            argument_hashes=argument_texts(given),
        )
    elif kind == "agent_run":
        fields["agent"] = text(attributes.get("gen_ai.agent.name")) or span.name
        fields["run"] = AgentFacts(task_hash=task_hash(given))
    return Operation(**fields)


def _is_text(*values: object) -> bool:
    """Whether what is no JSON is no broken JSON either: an answer may be a plain text."""
    return all(
        value is None
        or (isinstance(value, str) and value[:1] not in ("[", "{"))
        or isinstance(value, dict | list)
        for value in values
    )
