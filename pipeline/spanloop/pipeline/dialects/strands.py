"""Strands Agents: GenAI names, with the messages in span events by default.

``invoke_graph`` and ``invoke_swarm`` run agents as nodes. A node's input repeats the answers of the nodes before
it; the graph's edges are not exported, so that assembly finds them by these texts. Agent spans repeat the usage of
their calls. Event-loop cycles are structure.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spanloop.pipeline.dialects import genai
from spanloop.pipeline.dialects.echoes import answer_echoes, input_echoes
from spanloop.pipeline.dialects.fields import (
    answered_calls,
    argument_hashes,
    asked_calls,
    first_user_hash,
    fresh_answers,
    messages,
    says_error,
    text,
)
from spanloop.pipeline.dialects.operation import Operation, ToolFacts
from spanloop.schemas.spans import Span

__all__ = ["NAME", "matches", "read"]

NAME = "strands"

_SCOPE = "strands.telemetry.tracer"
_ROLES = {
    "gen_ai.system.message": "system",
    "gen_ai.user.message": "user",
    "gen_ai.assistant.message": "assistant",
    "gen_ai.tool.message": "tool",
}
_DETAILS = "gen_ai.client.inference.operation.details"


def matches(span: Span) -> bool:
    """The scope's name, or the system where a pipeline lost the scope."""
    return span.scope == _SCOPE or span.attributes.get("gen_ai.system") == "strands-agents"


def read(span: Span) -> Operation:
    """A GenAI operation with the messages that its events hold."""
    fields = genai.read_fields(span, _tool_facts)
    kind = fields["kind"]
    if kind == "tool_call":
        arguments, result = _tool_messages(span)
        if fields["tool"].tool in genai.TRANSFER_TOOLS:
            fields["handover"] = genai.transfer_to(fields["tool"].tool, arguments)
        if span.attributes.get("gen_ai.tool.status") == "error" or says_error(result):
            fields["status"] = "error"
    elif kind in ("model_call", "agent_run"):
        heard, said, readable = _conversation(span)
        if not readable:
            fields["flags"] = (*fields["flags"], "unparsed_messages")
        if kind == "model_call":
            fields["call"] = msgspec.structs.replace(
                fields["call"],
                asked=fields["call"].asked or asked_calls(said),
                answered=fields["call"].answered or answered_calls(heard),
                task_hash=fields["call"].task_hash or first_user_hash(heard),
                fresh=fields["call"].fresh or fresh_answers(heard),
            )
        else:
            fields["run"] = msgspec.structs.replace(
                fields["run"],
                task_hash=fields["run"].task_hash or first_user_hash(heard),
                heard=input_echoes(_texts(heard, "user")),
                said=answer_echoes(_texts(said, "assistant")),
            )
    return Operation(**fields)


def _tool_facts(span: Span) -> ToolFacts:
    arguments, _ = _tool_messages(span)
    return ToolFacts(
        tool=genai.tool_name(span),
        call_id=text(span.attributes.get("gen_ai.tool.call.id")),
        argument_hashes=argument_hashes(arguments),
    )


def _tool_messages(span: Span) -> tuple[Any, Any]:
    """(arguments, result) of a tool call: attributes, else the events of its own two messages."""
    arguments = span.attributes.get("gen_ai.tool.call.arguments")
    result = span.attributes.get("gen_ai.tool.call.result")
    for event in span.events:
        if event.name == "gen_ai.tool.message" and arguments is None:
            arguments = event.attributes.get("content")
        elif event.name == "gen_ai.choice" and result is None:
            result = event.attributes.get("message")
    return arguments, result


def _conversation(span: Span) -> tuple[list[Any], list[Any], bool]:
    """(messages in, messages out, whether all could be read) in the conventions' shape."""
    heard: list[Any] = []
    said: list[Any] = []
    readable = True
    for event in span.events:
        if event.name == _DETAILS:
            for key, into in (("gen_ai.input.messages", heard), ("gen_ai.output.messages", said)):
                value, ok = messages(event.attributes.get(key))
                into.extend(value if isinstance(value, list) else [value])
                readable = readable and ok
        elif event.name in _ROLES:
            heard.append(_message(_ROLES[event.name], event.attributes.get("content")))
        elif event.name == "gen_ai.choice":
            said.append(_message("assistant", event.attributes.get("message")))
    for key, into in (("gen_ai.input.messages", heard), ("gen_ai.output.messages", said)):
        if not into and key in span.attributes:
            value, _ = messages(span.attributes[key])
            into.extend(value if isinstance(value, list) else [value])
    return heard, said, readable


def _message(role: str, content: Any) -> dict[str, Any]:
    """A message from an event's content: JSON of Strands' own parts, or a plain text."""
    parts = content
    if isinstance(content, str) and content.startswith("["):
        read, ok = messages(content)
        parts = read if ok else content
    if not isinstance(parts, list):
        return {"role": role, "parts": [{"type": "text", "content": parts}]}
    return {"role": role, "parts": [_part(part) for part in parts if isinstance(part, dict)]}


def _part(part: dict[str, Any]) -> dict[str, Any]:
    use, result = part.get("toolUse"), part.get("toolResult")
    if isinstance(use, dict):
        return {"type": "tool_call", "id": use.get("toolUseId"), "name": use.get("name")}
    if isinstance(result, dict):
        return {"type": "tool_call_response", "id": result.get("toolUseId")}
    if "text" in part:
        return {"type": "text", "content": part["text"]}
    return part


def _texts(conversation: list[Any], role: str) -> list[Any]:
    """The texts of one role's messages."""
    found = []
    for message in conversation:
        parts = message.get("parts") if isinstance(message, dict) and message.get("role") == role else None
        for part in parts if isinstance(parts, list) else ():
            if isinstance(part, dict) and part.get("type", "text") == "text":
                found.append(part.get("content"))
    return found
