"""MLflow Tracing as OTLP: every attribute is JSON, texts in quotes. The name of an agent or a tool is the span's.
Source: DIALECTS 1; mlflow 3.17."""

from __future__ import annotations

from typing import Any

from spanloop.pipeline.dialects.fields import base_fields
from spanloop.pipeline.dialects.operation import AgentFacts, Operation, ToolFacts
from spanloop.pipeline.dialects.recorded import argument_texts, call_facts, task_hash, tokens, unquoted
from spanloop.schemas.spans import Span

__all__ = ["ALSO", "NAME", "matches", "read"]

NAME = "mlflow"
ALSO = ("genai",)

_KINDS = {
    "AGENT": "agent_run",
    "LLM": "model_call",
    "CHAT_MODEL": "model_call",
    "TOOL": "tool_call",
    "GUARDRAIL": "guardrail",
    "EVALUATOR": "evaluation",
    "WORKFLOW": "workflow",
}
"""CHAIN, TASK, RETRIEVER, MEMORY, PARSER, EMBEDDING and RERANKER keep their place in the tree and are nothing else."""


def matches(span: Span) -> bool:
    """A span type of MLflow, or its request id where there is none."""
    return "mlflow.spanType" in span.attributes or "mlflow.traceRequestId" in span.attributes


def read(span: Span) -> Operation:
    """A span as an operation."""
    attributes = span.attributes
    kind = _KINDS.get(unquoted(attributes.get("mlflow.spanType")).upper(), "unknown")
    given, answer = attributes.get("mlflow.spanInputs"), attributes.get("mlflow.spanOutputs")
    fields: dict[str, Any] = base_fields(span) | {
        "kind": kind,
        "conversation": unquoted(attributes.get("mlflow.trace.session")),
    }
    if kind == "model_call":
        counted_in, counted_out = tokens(attributes.get("mlflow.chat.tokenUsage"))
        fields["call"], readable = call_facts(
            given,
            answer,
            model=unquoted(attributes.get("mlflow.llm.model")),
            response_id=unquoted(attributes.get("gen_ai.response.id")),
            input_tokens=counted_in,
            output_tokens=counted_out,
        )
        if not readable and (unquoted(answer)[:1] in ("{", "[") or unquoted(given)[:1] in ("{", "[")):
            fields["flags"] = (*fields["flags"], "unparsed_messages")
    elif kind == "tool_call":
        fields["tool"] = ToolFacts(
            tool=span.name,
            call_id=unquoted(attributes.get("gen_ai.tool.call.id")),
            argument_hashes=argument_texts(given),
        )
    elif kind == "agent_run":
        fields["agent"] = span.name
        fields["run"] = AgentFacts(task_hash=task_hash(given))
    return Operation(**fields)
