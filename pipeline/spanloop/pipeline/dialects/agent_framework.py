"""Microsoft's agent-framework: GenAI names on agents, calls and tools; its workflows by span names.

A workflow's run is an engine. Its executors are siblings below it, each linked to the ``message.send`` spans that it
was given; the agent of an executor stands inside it, and an executor without an agent passes messages on. Building a
workflow is a trace of its own and no orchestration. Agent spans repeat the usage of their calls.
"""

from __future__ import annotations

from spanloop.pipeline.dialects import genai
from spanloop.pipeline.dialects.fields import base_fields, text
from spanloop.pipeline.dialects.operation import AgentFacts, Operation
from spanloop.schemas.spans import Span

__all__ = ["NAME", "matches", "read"]

NAME = "agent_framework"

_RUN, _BUILD, _PROCESS = "workflow.run", "workflow.build", "executor.process"
_ENGINE = "workflow"


def matches(span: Span) -> bool:
    """The scope's name; the workflow's own attributes where a pipeline lost the scope."""
    if span.scope == "agent_framework":
        return True
    attributes = span.attributes
    return ("workflow.id" in attributes and span.name.startswith("workflow.")) or (
        "executor.id" in attributes and span.name.startswith(_PROCESS)
    )


def read(span: Span) -> Operation:
    """A GenAI operation, or a part of a workflow."""
    if "gen_ai.operation.name" in span.attributes:
        return genai.read(span)
    fields = base_fields(span)
    fields["kind"] = "unknown"
    if text(span.attributes.get("error.type")):
        fields["status"] = "error"
    if span.name.startswith(_RUN):
        fields.update(kind="agent_run", agent=_ENGINE, run=AgentFacts(engine=True))
    elif span.name.startswith(_BUILD):
        fields["kind"] = "build"
    elif span.name.startswith(_PROCESS):
        fields["kind"] = "message"
    return Operation(**fields)
