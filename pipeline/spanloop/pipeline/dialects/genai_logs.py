"""GenAI events on the log signal: messages and details of a model call, evaluations, guardrail results.

Message events add to the model call of the span in which they were logged. An evaluation is what somebody said, never
a reward: rewards come from feedback only (``collectors/evaluations.py``).
"""

from __future__ import annotations

from typing import Any

from spanloop.pipeline.dialects import genai
from spanloop.pipeline.dialects.fields import asked_calls, base_fields, first, messages, text, texts
from spanloop.pipeline.dialects.operation import CallFacts, Operation, text_hash
from spanloop.schemas.spans import Span

__all__ = ["NAME", "matches", "read"]

NAME = "genai_logs"

_DETAILS = "gen_ai.client.inference.operation.details"
_STOPPED = frozenset(
    {"deny", "denied", "block", "blocked", "fail", "failed", "triggered", "modify", "redact", "true"}
)


def matches(span: Span) -> bool:
    """An event of GenAI, or a record with its attributes."""
    return span.name.startswith("gen_ai.") or any(key.startswith("gen_ai.") for key in span.attributes)


def read(span: Span) -> Operation:
    """A log record as an operation; what is not known is a note."""
    attributes = _with_body(span.attributes)
    fields = base_fields(span)
    fields |= {
        "kind": "note",
        "event": "details",
        "agent": text(attributes.get("gen_ai.agent.name")),
        "run_id": text(attributes.get("gen_ai.agent.call.id")),
        "conversation": text(first(attributes, "gen_ai.conversation.id", "session.id")),
    }
    response = text(attributes.get("gen_ai.response.id"))
    match span.name:
        case "gen_ai.evaluation.result":
            fields["kind"], fields["event"] = "evaluation", "other"
            fields["call"] = CallFacts(response_id=response) if response else None
        case "gen_ai.guardrail.result":
            fields["kind"], fields["event"] = "guardrail", "other"
            fields["triggered"] = _verdict(attributes)
        case name if name == _DETAILS or "gen_ai.output.messages" in attributes:
            fields["call"], bad = genai.call_facts(attributes)
            if not span.parent_span_id and response:
                fields["kind"], fields["event"] = "model_call", "call"
            if bad:
                fields["flags"] = (*fields["flags"], "unparsed_messages")
        case name:
            fields["call"] = _said(name, attributes, response)
    return Operation(**fields)


def _with_body(attributes: dict[str, Any]) -> dict[str, Any]:
    """Attributes with those of a body that is a map, which older events have instead; attributes count first."""
    body, _ = messages(attributes.get("log.body"))
    return {**body, **attributes} if isinstance(body, dict) else attributes


def _said(name: str, attributes: dict[str, Any], response: str) -> CallFacts | None:
    """What one message says of the call: an answer's tool calls, the result that came in, the task."""
    match name:
        case "gen_ai.choice":
            message, _ = messages(attributes.get("message"))
            return CallFacts(
                response_id=response,
                finish_reasons=texts(attributes.get("finish_reason")),
                asked=asked_calls([message if isinstance(message, dict) and message else attributes]),
            )
        case "gen_ai.tool.message":
            answered = text(first(attributes, "id", "tool_call_id"))
            return CallFacts(answered=(answered,), fresh=(answered,)) if answered else None
        case "gen_ai.user.message":
            task = text_hash(attributes.get("content"))
            return CallFacts(task_hash=task) if task else None
    return None


def _verdict(attributes: dict[str, Any]) -> bool | None:
    """Whether the guardrail stopped something; None where the record does not say."""
    keys = (
        "gen_ai.guardrail.triggered",
        "gen_ai.guardrail.result.type",
        "guardrail.result.type",
        "result.type",
    )
    told = first(attributes, *keys)
    if isinstance(told, bool):
        return told
    return told.lower() in _STOPPED if isinstance(told, str) else None
