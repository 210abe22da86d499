"""pydantic-ai's own instrumentation, conventions 2 to 6 (pydantic-ai 1 and 2): GenAI with its own names
beside.

Read by attributes, not by span names, which changed from version to version (``agent run`` / ``invoke_agent
X``, ``running tool`` / ``execute_tool X``). A hand-over is an output function, a tool span that is named
like the output tool (``final_result``) and marked only by the message "running output function".
"""

from __future__ import annotations

from typing import Any

import msgspec

from spanloop.pipeline.dialects import genai
from spanloop.pipeline.dialects.fields import argument_hashes, integer, messages, text
from spanloop.pipeline.dialects.operation import AgentFacts, Operation, ToolFacts
from spanloop.pipeline.dialects.pauses import open_calls, resumed_calls
from spanloop.schemas.spans import Span

__all__ = ["NAME", "matches", "read"]

NAME = "pydantic_ai"

_TASKS = ("pydantic_ai.all_messages", "all_messages_events")
_RUN_MARKS = frozenset({*_TASKS, "final_result"})
"""Attributes of an agent's run, which had no operation name before convention 3."""
_DEFERRED = frozenset({"approvals", "calls"})
"""Keys of the result of a run that put tool calls off."""
_OUTPUT_MESSAGE = "running output function"
_DEFAULT_OUTPUT_TOOL = "final_result"


def matches(span: Span) -> bool:
    """The scope's name; attributes of its own where a pipeline lost the scope."""
    return span.scope == "pydantic-ai" or (
        not span.scope and any(key.startswith("pydantic_ai.") for key in span.attributes)
    )


def read(span: Span) -> Operation:
    """A GenAI operation with pydantic-ai's tool roles and agent tasks."""
    if "gen_ai.operation.name" not in span.attributes and not _RUN_MARKS.isdisjoint(span.attributes):
        run = {**span.attributes, "gen_ai.operation.name": "invoke_agent"}
        span = msgspec.structs.replace(span, attributes=run)
    fields = genai.read_fields(span, _tool_facts, _TASKS)
    if fields["kind"] == "agent_run":
        fields["run"] = _with_pause(fields["run"], span.attributes)
    return Operation(**fields)


def _with_pause(run: AgentFacts, attributes: dict[str, Any]) -> AgentFacts:
    """A run with the tool calls that it put off, or was resumed with. Ids come from the messages, which keep them
    where content is dropped."""
    result, _ = messages(attributes.get("final_result"))
    deferred = isinstance(result, dict) and result.keys() >= _DEFERRED
    waits = deferred and bool(result["approvals"] or result["calls"])
    begin = integer(attributes.get("pydantic_ai.new_message_index"))
    if not waits and not begin:
        return run
    conversation, _ = messages(attributes.get("pydantic_ai.all_messages"))
    return msgspec.structs.replace(
        run,
        pending=open_calls(conversation) if waits else (),
        asks_human=waits and bool(result["approvals"]),
        resumed=resumed_calls(conversation, begin) if begin else (),
    )


def _tool_facts(span: Span) -> ToolFacts:
    attributes = span.attributes
    name = genai.tool_name(span)
    arguments: Any = attributes.get("gen_ai.tool.call.arguments", attributes.get("tool_arguments"))
    return ToolFacts(
        tool=name,
        call_id=text(attributes.get("gen_ai.tool.call.id")),
        role=_role(span, name),
        argument_hashes=argument_hashes(arguments),
    )


def _role(span: Span, name: str) -> str:
    attributes = span.attributes
    if attributes.get("pydantic_ai.tool.failure_stage") == "validation":
        return "rejected"
    if "pydantic_ai.tool.deferral.name" in attributes:
        return "deferred"
    message = text(attributes.get("logfire.msg"))
    if message.startswith(_OUTPUT_MESSAGE) or span.name.startswith(_OUTPUT_MESSAGE):
        return "output"
    return "output" if name == _DEFAULT_OUTPUT_TOOL or name.startswith(_DEFAULT_OUTPUT_TOOL + "_") else ""
