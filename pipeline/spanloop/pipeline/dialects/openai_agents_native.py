"""The openai-agents SDK's own spans, as ``formats/openai_agents`` writes them from its exporter's JSON.

A ``task`` is one run of the runner, a workflow; a ``turn`` groups one model call with its tools and says which agent had it.
A hand-over names both sides; a guardrail has its verdict; tool spans have no call id. The trace's own record says the group
(conversation) and nothing else.
"""

from __future__ import annotations

from typing import Any

from spanloop.pipeline.dialects import genai
from spanloop.pipeline.dialects.fields import argument_hashes, base_fields, integer, text
from spanloop.pipeline.dialects.operation import AgentFacts, Handover, Operation, ToolFacts
from spanloop.schemas.spans import Span

__all__ = ["NAME", "matches", "read"]

NAME = "openai_agents_native"

_MARK = "openai_agents.span_type"
_KINDS = {
    "agent": "agent_run",
    "generation": "model_call",
    "response": "model_call",
    "function": "tool_call",
    "handoff": "handover",
    "guardrail": "guardrail",
    "trace": "unknown",
}


def matches(span: Span) -> bool:
    """The mark that the format's reader leaves on every span."""
    return _MARK in span.attributes


def read(span: Span) -> Operation:
    """A span by its ``span_data`` type."""
    attributes = span.attributes
    fields = base_fields(span)
    named = text(attributes.get("openai_agents.name"))
    kind = _KINDS.get(text(attributes.get(_MARK)), "unknown")
    if text(attributes.get("openai_agents.sdk_span_type")) == "task":
        kind = "workflow"
    fields["kind"] = kind
    fields["name"] = named or span.name
    fields["conversation"] = text(attributes.get("gen_ai.conversation.id"))
    fields["agent"] = text(attributes.get("openai_agents.agent_name"))
    if kind == "agent_run":
        fields["agent"] = named
        fields["run"] = AgentFacts(
            input_tokens=integer(attributes.get("gen_ai.aggregated_usage.input_tokens")),
            output_tokens=integer(attributes.get("gen_ai.aggregated_usage.output_tokens")),
        )
    elif kind == "model_call":
        fields["call"], unparsed = genai.call_facts(attributes)
        if unparsed:
            fields["flags"] = (*fields["flags"], "unparsed_messages")
    elif kind == "tool_call":
        fields["tool"] = ToolFacts(
            tool=text(attributes.get("gen_ai.tool.name")) or span.name,
            argument_hashes=argument_hashes(attributes.get("gen_ai.tool.call.arguments")),
        )
    elif kind == "handover":
        fields["handover"] = Handover(
            source=text(attributes.get("openai_agents.from_agent")),
            target=text(attributes.get("openai_agents.to_agent")),
            mode="pass_control",
        )
    elif kind == "guardrail":
        fields["triggered"] = _verdict(attributes.get("openai_agents.triggered"))
    return Operation(**fields)


def _verdict(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None
