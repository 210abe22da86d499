"""Google ADK's own spans: GenAI names, and in older versions its own (``agent_run [x]``, ``call_llm``).

An agent used as a tool runs in a workflow of its own with a conversation of its own inside the tool's span. A
transfer is the tool ``transfer_to_agent``, whose target is seen only where content is captured; it is a sibling of
the agent that gave control away. Results like ``{"status": "error"}`` leave the span's status unset.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from spanloop.pipeline.dialects import genai
from spanloop.pipeline.dialects.fields import argument_hashes, first, integer, messages, says_error, text
from spanloop.pipeline.dialects.operation import AgentFacts, Asked, CallFacts, Operation, ToolFacts
from spanloop.schemas.spans import Span

__all__ = ["NAME", "matches", "read"]

NAME = "adk"

_PREFIX = "gcp.vertex.agent."
_ARGUMENTS = ("gen_ai.tool.call.arguments", _PREFIX + "tool_call_args")
_RESULT = ("gen_ai.tool.call.result", _PREFIX + "tool_response")
_OLD_RUN = re.compile(r"agent_run \[(.+)\]")


def matches(span: Span) -> bool:
    """The scope's name."""
    return span.scope == "gcp.vertex.agent"


def read(span: Span) -> Operation:
    """A GenAI operation, completed from ADK's own attributes."""
    attributes = span.attributes
    fields = genai.read_fields(span, _tool_facts)
    kind = fields["kind"]
    old_run = _OLD_RUN.fullmatch(span.name)
    if old_run and kind == "unknown":
        fields.update(kind="agent_run", agent=old_run.group(1), run=AgentFacts())
    elif span.name == "invocation" and kind == "unknown":
        fields["kind"] = "workflow"
    elif kind == "model_call" and (_PREFIX + "llm_response") in attributes:
        fields["call"] = _call_facts(fields["call"], attributes)
    elif kind == "tool_call":
        if fields["tool"].tool in genai.TRANSFER_TOOLS:
            fields["handover"] = genai.transfer_to(fields["tool"].tool, first(attributes, *_ARGUMENTS))
        if says_error(first(attributes, *_RESULT)):
            fields["status"] = "error"
    fields["conversation"] = fields["conversation"] or text(attributes.get(_PREFIX + "session_id"))
    return Operation(**fields)


def _tool_facts(span: Span) -> ToolFacts:
    attributes = span.attributes
    name = genai.tool_name(span)
    return ToolFacts(
        tool=name,
        call_id=text(attributes.get("gen_ai.tool.call.id")),
        role="ghost" if name.startswith("(merged") else "",
        argument_hashes=argument_hashes(first(attributes, *_ARGUMENTS)),
    )


def _call_facts(facts: CallFacts, attributes: dict[str, Any]) -> CallFacts:
    """A call with the answer that older versions keep as one JSON text."""
    answer, _ = messages(attributes.get(_PREFIX + "llm_response"))
    if not isinstance(answer, dict):
        return facts
    used = answer.get("usage_metadata")
    used = used if isinstance(used, dict) else {}
    return msgspec.structs.replace(
        facts,
        asked=facts.asked or _asked(answer.get("content")),
        input_tokens=_known(facts.input_tokens, used.get("prompt_token_count")),
        output_tokens=_known(facts.output_tokens, used.get("candidates_token_count")),
    )


def _known(one: int | None, other: Any) -> int | None:
    return one if one is not None else integer(other)


def _asked(content: Any) -> tuple[Asked, ...]:
    parts = content.get("parts") if isinstance(content, dict) else None
    found = []
    for part in parts if isinstance(parts, list) else ():
        call = part.get("function_call") if isinstance(part, dict) else None
        if isinstance(call, dict):
            found.append(Asked(text(call.get("id")), text(call.get("name"))))
    return tuple(found)
