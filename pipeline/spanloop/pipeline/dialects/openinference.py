"""OpenInference, the conventions of Arize's instrumentations (openai-agents, LangChain and LangGraph, CrewAI,
Google ADK, AutoGen AgentChat, smolagents, agno, ...), told apart by what stands on the span.

What its kinds hide: AGENT is also the root of an openai-agents run, which bears the workflow's name; LangChain
guesses it from the word "agent" in a name; CHAIN is anything; a hand-over is a TOOL named "handoff to X"; over
ADK a model call is written onto the span of the agent's run, each call over the one before.
Source: DIALECTS 1 and 2.5-2.11, openinference-semantic-conventions 0.1.42.
"""

from __future__ import annotations

import re
from typing import Any

from spanloop.pipeline.dialects.fields import (
    argument_hashes,
    base_fields,
    first,
    integer,
    messages,
    text,
    texts,
)
from spanloop.pipeline.dialects.flattened import Conversation, asked_in, read_conversation
from spanloop.pipeline.dialects.genai import transfer_to
from spanloop.pipeline.dialects.langgraph import is_interrupted, metadata_of, node_of
from spanloop.pipeline.dialects.operation import (
    AgentFacts,
    CallFacts,
    Handover,
    MessageFacts,
    Operation,
    ToolFacts,
)
from spanloop.schemas.spans import Span

__all__ = ["ALSO", "NAME", "matches", "read"]

NAME = "openinference"
ALSO = ("genai",)

_KIND = "openinference.span.kind"
_KINDS = {
    "AGENT": "agent_run",
    "LLM": "model_call",
    "TOOL": "tool_call",
    "GUARDRAIL": "guardrail",
    "EVALUATOR": "evaluation",
}
_RUN_NAME = re.compile(
    r"(?:agent_run \[(?P<a>.+)\]|invoke_agent (?P<b>.+)"
    r"|(?P<c>.+?)\.(?:_execute_core|a?run(?:_stream)?|on_messages(?:_stream)?|kickoff(?:_async)?))\Z"
)
"""How frameworks name the span of an agent's run."""
_CREW_KICKOFF = re.compile(r".+\.kickoff(?:_async)?\Z")
_TEAM_RUN = re.compile(r".+\.run(?:_stream)?\Z")
_HANDOFF = "handoff to "
_TRIPPED = re.compile(
    r"Guardrail tripwire triggered: .{0,40}?['\"]guardrail['\"]: ['\"](.{1,200}?)['\"]\}?\Z"
)
_TRIPPED_AT_ALL = "Guardrail tripwire triggered"
_TOOL_FAILED = "An error occurred while running the tool"
"""The OpenAI Agents SDK's result for a tool that raised."""
_RESPONSE_ID = re.compile(r'"id":\s*"((?:chatcmpl|resp)[-_][A-Za-z0-9_-]{1,200})"')
_COWORKER_KEYS = ("coworker", "co-worker", "subagent_type")
"""Arguments that name an agent, whatever the tool is called."""
_MEMBER_KEYS = ("agent_name", "agent", "member_id", "assistant", "recipient")
_DELEGATION = re.compile(r"delegat|co-?worker|sub_?agent|assign_|_to_member", re.IGNORECASE)
"""Tools of whose arguments one of ``_MEMBER_KEYS`` names an agent."""


def matches(span: Span) -> bool:
    """The one attribute that every OpenInference span has."""
    return _KIND in span.attributes


def read(span: Span) -> Operation:
    """A span as OpenInference names it; what only GenAI names on it say is left open."""
    attributes = span.attributes
    said = text(attributes[_KIND]).upper()
    fields = base_fields(span)
    kind = _KINDS.get(said, "unknown")
    metadata = metadata_of(attributes) if "metadata" in attributes else {}
    fields["conversation"] = text(attributes.get("session.id")) or text(
        first(metadata, "session_id", "thread_id")
    )
    if kind == "model_call":
        _read_call(span, fields)
    elif kind == "tool_call":
        _read_tool(span, fields)
    elif kind == "agent_run":
        _read_run(span, fields)
    else:
        fields["kind"] = kind
        if said == "CHAIN":
            _read_chain(span, fields)
    if metadata and fields["kind"] in ("unknown", "agent_run"):
        paused = bool(span.events) and is_interrupted(span)
        fields["node"] = node_of(metadata, attributes.get("output.value"), paused=paused)
    return Operation(**fields)


def _read_call(span: Span, fields: dict[str, Any]) -> None:
    """A model call; one that was written onto an agent's run is the last of several, and the span is the run."""
    attributes = span.attributes
    talk = read_conversation(attributes)
    run = _RUN_NAME.match(span.name) if span.name.startswith("invoke_agent ") else None
    fields["kind"] = "agent_run" if run else "model_call"
    fields["call"] = _call_facts(span, talk, overwritten=run is not None)
    if run:
        fields["agent"] = run["b"]
        fields["run"] = AgentFacts(task_hash=talk.task_hash)
        fields["flags"] = (*fields["flags"], "overwritten_calls")


def _call_facts(span: Span, talk: Conversation, *, overwritten: bool) -> CallFacts:
    attributes = span.attributes
    answer = attributes.get("output.value")
    asked = talk.asked
    if overwritten or (not asked and span.dropped_attributes):
        asked = asked_in(answer)
    response_id = ""
    if isinstance(answer, str) and "generations" in answer[:20] and (found := _RESPONSE_ID.search(answer)):
        response_id = found[1]
    tokens_in, tokens_out = _usage(attributes)
    return CallFacts(
        model=text(first(attributes, "llm.response.model_name", "llm.model_name", "llm.request.model_name")),
        response_id=response_id,
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        finish_reasons=texts(attributes.get("llm.finish_reason")),
        asked=asked,
        answered=talk.answered,
        lost=talk.turns if overwritten else 0,
        task_hash=talk.task_hash,
        fresh=talk.fresh,
        answer_hash="" if overwritten else talk.answer_hash,
    )


def _usage(attributes: dict[str, Any]) -> tuple[int | None, int | None]:
    """(input, output) tokens; the pair 0, 0 is a default: unknown."""
    tokens_in = integer(attributes.get("llm.token_count.prompt"))
    tokens_out = integer(attributes.get("llm.token_count.completion"))
    return (tokens_in, tokens_out) if tokens_in or tokens_out else (None, None)


def _read_tool(span: Span, fields: dict[str, Any]) -> None:
    attributes = span.attributes
    name = text(attributes.get("tool.name"))
    if not name and span.name.startswith(_HANDOFF):
        fields["kind"] = "handover"
        target = span.name.removeprefix(_HANDOFF)
        fields["handover"] = Handover(
            source=text(attributes.get("input.value")),
            target=target if not target.startswith("redacted:") else text(attributes.get("output.value")),
            mode="pass_control",
        )
        return
    fields["kind"] = "tool_call"
    arguments = attributes.get("input.value")
    result = attributes.get("output.value")
    name = name or span.name
    call_id, failed = _result(result)
    fields["tool"] = ToolFacts(
        tool=name,
        call_id=text(first(attributes, "tool_call.id", "tool.id")) or call_id,
        role=_role(span, name),
        argument_hashes=argument_hashes(arguments),
    )
    if failed:
        fields["status"] = "error"
    fields["handover"] = transfer_to(name, arguments) or _member(name, arguments)


def _role(span: Span, tool: str) -> str:
    if tool in ("final_answer", "FinalAnswerTool"):
        return "output"
    return "deferred" if span.events and is_interrupted(span) else ""


def _result(result: Any) -> tuple[str, bool]:
    """(tool call id, whether the tool failed) as the result itself tells, though the span says it went well."""
    if not isinstance(result, str):
        return "", False
    if result.startswith(_TOOL_FAILED):
        return "", True
    if result[:1] != "{":
        return "", False
    value, _ = messages(result)
    if not isinstance(value, dict):
        return "", False
    inner = first(value, "data", "kwargs", "response")
    if isinstance(inner, dict):
        failed = inner.get("status") == "error" or inner.get("isError") is True
        return text(inner.get("tool_call_id")), failed
    return text(value.get("tool_call_id")), value.get("isError") is True


def _member(tool: str, arguments: Any) -> Handover | None:
    """The agent that a delegation tool's arguments name."""
    if not isinstance(arguments, str) or arguments[:1] != "{":
        return None
    keys = _COWORKER_KEYS if not _DELEGATION.search(tool) else (*_COWORKER_KEYS, *_MEMBER_KEYS)
    if not any(f'"{key}"' in arguments for key in keys):
        return None
    value, _ = messages(arguments)
    target = text(first(value, *keys)) if isinstance(value, dict) else ""
    if not target:
        return None
    return Handover(target=target, mode="return_to_caller", confidence=0.8, rule="delegation_tool")


def _read_run(span: Span, fields: dict[str, Any]) -> None:
    """An agent's run, or the workflow that the root of an openai-agents trace is."""
    attributes = span.attributes
    name = text(first(attributes, "agent.name", "graph.node.name", "graph.node.id"))
    if not name and _is_workflow(span):
        fields["kind"] = "workflow"
        return
    found = None if name else _RUN_NAME.match(span.name)
    if found:
        name = found["a"] or found["b"] or found["c"]
    fields["kind"] = "agent_run"
    fields["agent"] = name
    tokens_in, tokens_out = _usage(attributes)
    before = text(attributes.get("graph.node.parent_id"))
    by_edge = span.scope.endswith((".crewai", ".autogen_agentchat"))
    fields["run"] = AgentFacts(
        task_hash=read_conversation(attributes).task_hash,
        input_tokens=tokens_in,
        output_tokens=tokens_out,
        guessed=not name or (found is not None and "on_messages" in span.name),
        handed_by="" if by_edge else before,
    )
    if by_edge and before:
        fields["message"] = MessageFacts(sender=before)


def _is_workflow(span: Span) -> bool:
    """The root of an openai-agents trace: a bare AGENT span without an agent."""
    attributes = span.attributes
    if span.scope.endswith("openai_agents"):
        return True
    return (
        not span.scope
        and not span.parent_span_id
        and "input.value" not in attributes
        and not _RUN_NAME.match(span.name)
    )


def _read_chain(span: Span, fields: dict[str, Any]) -> None:
    """What a CHAIN is beside a ghost: an engine that runs agents, or a turn that a guardrail ended."""
    attributes = span.attributes
    if "crew_key" in attributes and _CREW_KICKOFF.match(span.name):
        _engine(fields, "crew")
    elif span.scope.endswith("autogen_agentchat") and _TEAM_RUN.match(span.name):
        _engine(fields, "team")
    elif span.status == "error" and span.status_message.startswith(_TRIPPED_AT_ALL):
        found = _TRIPPED.match(span.status_message)
        fields["guardrail"] = found[1] if found else ""


def _engine(fields: dict[str, Any], kind: str) -> None:
    fields["kind"] = "workflow"
    fields["agent"] = kind
    fields["run"] = AgentFacts(engine=True)
