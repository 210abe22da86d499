"""OpenTelemetry's contributed instrumentation of the OpenAI Agents SDK (``openai-agents-v2``).

The trace's root is an ``invoke_agent`` of kind SERVER that no agent runs, and every span but an agent's own carries
a constant agent name: neither is believed. Guardrails and hand-overs are operations of their own.
"""

from __future__ import annotations

from spanloop.pipeline.dialects import genai
from spanloop.pipeline.dialects.operation import Operation
from spanloop.schemas.spans import Span

__all__ = ["NAME", "matches", "read"]

NAME = "otel_openai_agents"

_SCOPE = "opentelemetry.instrumentation.openai_agents"
_SERVER = 2


def matches(span: Span) -> bool:
    """The scope's name; OpenLLMetry, which shares it, is recognised before by its own attributes."""
    return span.scope == _SCOPE


def read(span: Span) -> Operation:
    """A GenAI operation without the constant agent name; the SERVER root is a workflow."""
    fields = genai.read_fields(span)
    if fields["kind"] == "agent_run" and span.kind == _SERVER and not span.parent_span_id:
        fields.update(kind="workflow", run=None, agent="", name=span.name)
    elif fields["kind"] != "agent_run":
        fields["agent"] = ""
    return Operation(**fields)
