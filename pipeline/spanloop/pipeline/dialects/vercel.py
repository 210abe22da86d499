"""Vercel's AI SDK (``ai.*``). Source: DIALECTS 1; its traces as Langfuse keeps them, ai 5.

``generateText``, ``streamText`` and their object forms are loops: each is an agent's run, named by the function id that
the application gave it, with model calls (``doGenerate``, ``doStream``) and tool calls inside. Usage on the loop is a
roll-up of its calls.
"""

from __future__ import annotations

from typing import Any

from spanloop.pipeline.dialects.fields import (
    answered_calls,
    argument_hashes,
    base_fields,
    first,
    first_user_hash,
    fresh_answers,
    integer,
    messages,
    text,
    texts,
)
from spanloop.pipeline.dialects.operation import AgentFacts, Asked, CallFacts, Operation, ToolFacts
from spanloop.pipeline.dialects.recorded import task_hash
from spanloop.schemas.spans import Span

__all__ = ["ALSO", "NAME", "matches", "read"]

NAME = "vercel"
ALSO = ("genai",)

_LOOPS = frozenset({"ai.generateText", "ai.streamText", "ai.generateObject", "ai.streamObject"})
_CALLS = (".doGenerate", ".doStream")
_CONVERSATIONS = tuple(
    f"ai.telemetry.metadata.{key}" for key in ("sessionId", "threadId", "conversationId", "chatId")
)


def matches(span: Span) -> bool:
    """An operation id of the SDK."""
    return isinstance(span.attributes.get("ai.operationId"), str)


def read(span: Span) -> Operation:
    """A span as an operation."""
    attributes = span.attributes
    operation = attributes["ai.operationId"]
    fields: dict[str, Any] = base_fields(span) | {
        "kind": "unknown",
        "conversation": text(first(attributes, "session.id", *_CONVERSATIONS)),
    }
    if operation in _LOOPS:
        fields["kind"] = "agent_run"
        fields["agent"] = text(attributes.get("ai.telemetry.functionId")) or operation.removeprefix("ai.")
        counted_in, counted_out = _usage(attributes)
        asked_for = first(attributes, "ai.prompt.messages", "ai.prompt")
        fields["run"] = AgentFacts(task_hash(asked_for), counted_in, counted_out)
    elif operation.endswith(_CALLS):
        fields["kind"] = "model_call"
        fields["call"] = _call(attributes)
    elif operation == "ai.toolCall":
        fields["kind"] = "tool_call"
        fields["tool"] = ToolFacts(
            tool=text(attributes.get("ai.toolCall.name")) or span.name,
            call_id=text(attributes.get("ai.toolCall.id")),
            argument_hashes=argument_hashes(attributes.get("ai.toolCall.args")),
        )
    return Operation(**fields)


def _usage(attributes: dict[str, Any]) -> tuple[int | None, int | None]:
    return (
        integer(
            first(attributes, "ai.usage.inputTokens", "ai.usage.promptTokens", "gen_ai.usage.input_tokens")
        ),
        integer(
            first(
                attributes, "ai.usage.outputTokens", "ai.usage.completionTokens", "gen_ai.usage.output_tokens"
            )
        ),
    )


def _call(attributes: dict[str, Any]) -> CallFacts:
    history, _ = messages(attributes.get("ai.prompt.messages"))
    before = [_message(item) for item in history] if isinstance(history, list) else []
    counted_in, counted_out = _usage(attributes)
    return CallFacts(
        model=text(first(attributes, "ai.response.model", "gen_ai.response.model", "ai.model.id")),
        response_id=text(first(attributes, "ai.response.id", "gen_ai.response.id")),
        input_tokens=counted_in,
        output_tokens=counted_out,
        finish_reasons=texts(first(attributes, "ai.response.finishReason", "gen_ai.response.finish_reasons")),
        asked=_asked(attributes.get("ai.response.toolCalls")),
        answered=answered_calls(before),
        task_hash=first_user_hash(before),
        fresh=fresh_answers(before),
    )


def _asked(value: Any) -> tuple[Asked, ...]:
    calls, _ = messages(value)
    return tuple(
        Asked(text(call.get("toolCallId")), text(call.get("toolName")))
        for call in (calls if isinstance(calls, list) else ())
        if isinstance(call, dict) and call.get("toolName")
    )


def _message(item: Any) -> Any:
    """A message of the SDK with its parts under the names of GenAI."""
    if not isinstance(item, dict) or not isinstance(item.get("content"), list):
        return item
    parts = [
        {**part, "type": "tool_call_response", "id": part.get("toolCallId")}
        if part.get("type") == "tool-result"
        else {**part, "content": part.get("text")}
        for part in item["content"]
        if isinstance(part, dict)
    ]
    return {"role": item.get("role"), "parts": parts}
