"""OpenTelemetry's GenAI semantic conventions, current and deprecated names, as any instrumentation may
write them.

Functions here are also the ground on which the dialects that extend GenAI stand.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from spanloop.pipeline.dialects.fields import (
    argument_hashes,
    base_fields,
    calls_hash,
    first,
    integer,
    messages,
    says_error,
    text,
    text_at,
    texts,
)
from spanloop.pipeline.dialects.histories import answer_in, heard_in, task_in
from spanloop.pipeline.dialects.operation import (
    AgentFacts,
    Asked,
    CallFacts,
    Handover,
    Operation,
    ToolFacts,
    text_hash,
)
from spanloop.schemas.spans import Span

__all__ = [
    "NAME",
    "TRANSFER_TOOLS",
    "call_facts",
    "matches",
    "read",
    "read_fields",
    "tool_name",
    "transfer_of",
    "transfer_to",
]

NAME = "genai"

_KIND_OF_OPERATION = {
    "chat": "model_call",
    "text_completion": "model_call",
    "completion": "model_call",
    "generate_content": "model_call",
    "decide": "model_call",
    "execute_tool": "tool_call",
    "invoke_agent": "agent_run",
    "create_agent": "build",
    "invoke_workflow": "workflow",
    "apply_guardrail": "guardrail",
    "guardrail_check": "guardrail",
    "agent_handoff": "handover",
    "handoff": "handover",
}
_MARKS = (
    "gen_ai.operation.name",
    "gen_ai.system",
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "gen_ai.tool.name",
    "gen_ai.agent.name",
    "llm.request.type",
)
_TRANSFER_TOOL = re.compile(r"(?:transfer|handoff|hand_off)_to_(.+)")
TRANSFER_TOOLS = frozenset({"transfer_to_agent", "handoff_to_agent"})
"""Tools that take the agent to hand over to as an argument."""
_CUT_CALL = re.compile(r'"type":\s*"tool_call",\s*"id":\s*"([^"\\]{1,200})",\s*"name":\s*"([^"\\]{1,200})"')
"""Tool calls in a JSON text that was cut in the middle."""
_OLD_CALL = re.compile(r"gen_ai\.completion\.\d+\.tool_calls\.(\d+)\.name")


def matches(span: Span) -> bool:
    """Any of the conventions' leading attributes."""
    attributes = span.attributes
    return any(mark in attributes for mark in _MARKS)


def read(span: Span) -> Operation:
    """A span as GenAI names it."""
    return Operation(**read_fields(span))


def read_fields(
    span: Span,
    tool_of: Callable[[Span], ToolFacts] | None = None,
    tasks: tuple[str, ...] = (),
) -> dict[str, Any]:
    """The fields of a span's operation.

    Args:
        span: as received.
        tool_of: reads a tool call in a dialect that extends GenAI.
        tasks: attributes of an agent run that such a dialect keeps its task in.
    """
    attributes = span.attributes
    kind = kind_of(span)
    fields = base_fields(span)
    fields["kind"] = kind
    if "error.type" in attributes and text(attributes["error.type"]):
        fields["status"] = "error"
    agent = attributes.get("gen_ai.agent.name")
    fields["agent"] = agent if type(agent) is str else text_at(attributes, "gen_ai.agent.name", "agent_name")
    if "gen_ai.agent.call.id" in attributes:
        fields["run_id"] = text(attributes["gen_ai.agent.call.id"])
    conversation = attributes.get("gen_ai.conversation.id")
    if type(conversation) is not str:
        conversation = text_at(attributes, "gen_ai.conversation.id", "session.id")
    fields["conversation"] = conversation
    if kind == "model_call":
        fields["call"], bad = call_facts(attributes)
        if bad:
            fields["flags"] = (*fields["flags"], "unparsed_messages")
    elif kind == "tool_call":
        tool = fields["tool"] = (tool_of or _tool_facts)(span)
        fields["handover"] = transfer_of(tool.tool, attributes)
        if says_error(attributes.get("gen_ai.tool.call.result")):
            fields["status"] = "error"
    elif kind == "agent_run":
        fields["run"] = agent_facts(attributes, *tasks)
        engine = engine_name(text(attributes.get("gen_ai.operation.name")))
        if engine:
            fields["run"] = msgspec.structs.replace(fields["run"], engine=True)
        fields["agent"] = engine or fields["agent"] or _name_after(span.name, "invoke_agent ")
    elif kind == "workflow":
        fields["name"] = text(attributes.get("gen_ai.workflow.name")) or span.name
    elif kind == "guardrail":
        fields["triggered"] = _triggered(attributes)
    elif kind == "handover":
        fields["handover"] = Handover(
            source=text(attributes.get("gen_ai.handoff.from_agent")),
            target=text(first(attributes, "gen_ai.handoff.to_agent", "gen_ai.transfer.target.name")),
            mode=text(attributes.get("gen_ai.transfer.mode")) or "pass_control",
        )
    return fields


def kind_of(span: Span) -> str:
    """Kind by operation name; where an old instrumentation writes none, by what it does write."""
    attributes = span.attributes
    operation = attributes.get("gen_ai.operation.name")
    if isinstance(operation, str) and operation:
        return _KIND_OF_OPERATION.get(operation) or ("agent_run" if engine_name(operation) else "unknown")
    if attributes.get("llm.request.type") in ("chat", "completion"):
        return "model_call"
    if "gen_ai.tool.name" in attributes:
        return "tool_call"
    if span.name.startswith("invoke_agent "):
        return "agent_run"
    if "gen_ai.request.model" in attributes or "gen_ai.usage.input_tokens" in attributes:
        return "model_call"
    return "unknown"


def engine_name(operation: str) -> str:
    """X of an operation ``invoke_X`` that starts an engine which runs agents as nodes; else empty.

    >>> engine_name("invoke_graph"), engine_name("invoke_agent"), engine_name("chat")
    ('graph', '', '')
    """
    name = operation.removeprefix("invoke_")
    return name if name != operation and name.isidentifier() and operation not in _KIND_OF_OPERATION else ""


@cache
def _usage_names(prefixes: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Attributes that count input and output, in order; the prefixes are the dialects' own."""
    return (
        tuple(f"{prefix}.{name}" for prefix in prefixes for name in ("input_tokens", "prompt_tokens")),
        tuple(f"{prefix}.{name}" for prefix in prefixes for name in ("output_tokens", "completion_tokens")),
    )


def usage(attributes: dict[str, Any], *prefixes: str) -> tuple[int | None, int | None]:
    """(input, output) tokens; the pair 0, 0 is what a default writes where nothing was counted: unknown."""
    names_in, names_out = _usage_names(prefixes)
    tokens_in, tokens_out = _count(attributes, names_in), _count(attributes, names_out)
    return (tokens_in, tokens_out) if tokens_in or tokens_out else (None, None)


def _count(attributes: dict[str, Any], names: tuple[str, ...]) -> int | None:
    """The first count; of two names of one convention the first that is there tells it."""
    value = attributes.get(names[0])
    if type(value) is int and value >= 0:
        return value
    for name, old_name in zip(names[::2], names[1::2], strict=True):
        value = attributes.get(name)
        if value is None:
            value = attributes.get(old_name)
        if value is not None and (counted := integer(value)) is not None:
            return counted
    return None


def call_facts(attributes: dict[str, Any]) -> tuple[CallFacts, bool]:
    """A model call's facts, and whether some message could not be read."""
    said = attributes.get("gen_ai.output.messages")
    answer, output_ok = answer_in(said)
    asked = answer.asked
    if not output_ok and isinstance(said, str):
        asked = tuple(Asked(i, n) for i, n in _CUT_CALL.findall(said))
    elif answer.is_empty:
        asked = _old_calls(attributes)
    told, history_ok = heard_in(attributes.get("gen_ai.input.messages"))
    tokens_in, tokens_out = usage(attributes, "gen_ai.usage", "llm.usage")
    model = attributes.get("gen_ai.response.model")
    facts = CallFacts(
        model=model
        if type(model) is str
        else text_at(attributes, "gen_ai.response.model", "gen_ai.request.model"),
        response_id=text(attributes.get("gen_ai.response.id")),
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        finish_reasons=texts(attributes.get("gen_ai.response.finish_reasons")),
        asked=asked,
        answered=told.answered,
        task_hash=told.task_hash,
        fresh=told.fresh,
        answer_hash=answer.text_hash
        or calls_hash(asked)
        or text_hash(attributes.get("gen_ai.completion.0.content")),
    )
    return facts, not (output_ok and history_ok)


def _old_calls(attributes: dict[str, Any]) -> tuple[Asked, ...]:
    """Tool calls under the deprecated flattened names gen_ai.completion.{i}.tool_calls.{j}."""
    found = []
    for key, value in attributes.items():
        if key.startswith("gen_ai.completion.") and _OLD_CALL.fullmatch(key):
            found.append((key, Asked(text(attributes.get(key[: -len("name")] + "id")), text(value))))
    return tuple(asked for _, asked in sorted(found, key=lambda item: item[0]))


def tool_name(span: Span) -> str:
    """Name of the tool that a span runs."""
    return (
        text(span.attributes.get("gen_ai.tool.name")) or _name_after(span.name, "execute_tool ") or span.name
    )


def _tool_facts(span: Span) -> ToolFacts:
    attributes = span.attributes
    name = tool_name(span)
    ghost = name == "(merged tools)" or span.name == "execute_tool (merged)"
    return ToolFacts(
        tool=name,
        call_id=text(attributes.get("gen_ai.tool.call.id")),
        role="ghost" if ghost else "",
        argument_hashes=argument_hashes(attributes.get("gen_ai.tool.call.arguments")),
    )


def agent_facts(attributes: dict[str, Any], *task_keys: str) -> AgentFacts:
    """An agent run's facts; the task stands in the first of ``task_keys`` that has a user message."""
    task = ""
    for key in (*task_keys, "gen_ai.input.messages"):
        if not task and key in attributes:
            task = task_in(attributes[key])
    tokens_in, tokens_out = usage(attributes, "gen_ai.aggregated_usage", "gen_ai.usage")
    return AgentFacts(task_hash=task, input_tokens=tokens_in, output_tokens=tokens_out)


def transfer_of(tool: str, attributes: dict[str, Any]) -> Handover | None:
    """The transfer that a tool call makes: by the conventions' keys, or by a tool named transfer_to_X."""
    target = text(attributes.get("gen_ai.transfer.target.name"))
    if target:
        return Handover(target=target, mode=text(attributes.get("gen_ai.transfer.mode")))
    return transfer_to(tool, attributes.get("gen_ai.tool.call.arguments"))


def named_transfer(arguments: Any) -> Handover:
    """The transfer of a tool that takes its target as an argument; without a target where that was not recorded."""
    given, _ = messages(arguments)
    target = text(first(given, "agent_name", "agent")) if isinstance(given, dict) else ""
    if not target:
        return Handover(mode="pass_control", confidence=0.7, rule="next_agent")
    return Handover(target=target, mode="pass_control", confidence=0.9, rule="transfer_tool")


def transfer_to(tool: str, arguments: Any) -> Handover | None:
    """The transfer that a tool makes which is named transfer_to_X, or takes its target as an argument."""
    if tool in TRANSFER_TOOLS:
        return named_transfer(arguments)
    match = _TRANSFER_TOOL.fullmatch(tool)
    if match is None:
        return None
    return Handover(target=match.group(1), mode="pass_control", confidence=0.9, rule="transfer_tool")


def _triggered(attributes: dict[str, Any]) -> bool | None:
    verdict = first(attributes, "gen_ai.guardrail.triggered", "gen_ai.guardrail.result.type")
    if isinstance(verdict, bool):
        return verdict
    if isinstance(verdict, str):
        return verdict.lower() in {
            "true",
            "block",
            "blocked",
            "deny",
            "denied",
            "triggered",
            "fail",
            "failed",
        }
    return None


def _name_after(name: str, prefix: str) -> str:
    return name.removeprefix(prefix) if name.startswith(prefix) else ""
