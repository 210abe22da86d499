"""Traceloop's OpenLLMetry: GenAI names on spans whose kind and place are Traceloop's own.

``traceloop.span.kind`` says workflow, agent, tool, task or handoff, and names stand in ``traceloop.entity.name``
or before the suffix of the span's name (``planner.agent``). A sub-agent of the OpenAI Agents SDK hangs off the
root, not off the tool that runs it, and a hand-over does not say to whom (``planner -> unknown.handoff``): assembly
joins both by text and by who comes next.
"""

from __future__ import annotations

import re
from typing import Any

from spanloop.pipeline.dialects import genai
from spanloop.pipeline.dialects.fields import (
    argument_hashes,
    first,
    first_user_hash,
    messages,
    says_error,
    text,
    texts,
)
from spanloop.pipeline.dialects.operation import AgentFacts, Handover, NodeFacts, Operation, ToolFacts
from spanloop.schemas.spans import Span

__all__ = ["NAME", "matches", "read"]

NAME = "traceloop"

_KINDS = {"workflow": "workflow", "agent": "agent_run", "tool": "tool_call", "handoff": "handover"}
_SESSION = ("traceloop.association.properties.session_id", "traceloop.association.properties.thread_id")
_HANDOFF = re.compile(r"(.+?)\s*(?:→|->)\s*(.+?)(?:\.handoff)?")
_LANGCHAIN = "opentelemetry.instrumentation.langchain"
_AGENT_NAME = "traceloop.association.properties.lc_agent_name"
"""LangChain's own name of the agent, on everything that it does."""
_CREW = "crewai.crew.id"
"""A crew, which runs agents and is called by its kind; its tasks are structure between it and them."""
_NOBODY = frozenset({"", "unknown"})


def matches(span: Span) -> bool:
    """Any of Traceloop's leading attributes."""
    attributes = span.attributes
    return (
        "traceloop.span.kind" in attributes
        or "traceloop.entity.name" in attributes
        or span.scope == _LANGCHAIN
        or _CREW in attributes
    )


def read(span: Span) -> Operation:
    """A span of OpenLLMetry; where the GenAI names say nothing, by Traceloop's."""
    attributes = span.attributes
    fields = genai.read_fields(span, _tool_facts)
    told = text(attributes.get("traceloop.span.kind"))
    kind = fields["kind"]
    if span.scope == _LANGCHAIN and (kind == "agent_run" or told == "task"):
        kind = fields["kind"] = _graph_kind(span, fields, told)
    elif kind == "agent_run" and _CREW in attributes:
        fields.update(kind="workflow", agent="crew", run=AgentFacts(engine=True))
        return Operation(**fields)
    elif kind == "agent_run" and "crewai.task.id" in attributes:
        fields.update(kind="unknown", agent="", run=None)
        return Operation(**fields)
    elif kind == "unknown" or told in ("workflow", "handoff"):
        kind = fields["kind"] = _KINDS.get(told, kind)
    fields["conversation"] = fields["conversation"] or text(first(attributes, *_SESSION))
    if kind == "workflow":
        fields["name"] = text(attributes.get("traceloop.workflow.name")) or _entity(span, ".workflow")
    elif kind == "agent_run":
        fields["agent"] = fields["agent"] or _entity(span, ".agent")
        fields["run"] = _run(fields.get("run") or AgentFacts(), attributes)
    elif kind == "tool_call":
        tool = fields["tool"] = _tool_facts(span)
        fields["handover"] = genai.transfer_of(tool.tool, attributes)
        if says_error(_result(first(attributes, "gen_ai.tool.call.result", "traceloop.entity.output"))):
            fields["status"] = "error"
    elif kind == "handover":
        fields["handover"] = _handover(span)
    elif "gen_ai.task.name" in attributes:
        fields["node"] = NodeFacts(
            name=text(attributes["gen_ai.task.name"]),
            instance=text(attributes.get("gen_ai.task.id")),
            goto=texts(first(attributes, "langgraph.command.goto_nodes", "langgraph.command.goto_node")),
        )
    return Operation(**fields)


def _graph_kind(span: Span, fields: dict[str, Any], told: str) -> str:
    """LangGraph calls one run twice: ``invoke_agent X`` around ``X.workflow``, and beside ``execute_task X`` where
    another agent's tool started it. Those inside bear Traceloop's names and have the children; the other is structure."""
    if not told and fields["kind"] == "agent_run":
        return "unknown" if "gen_ai.workflow.nodes" in span.attributes else "agent_run"
    named = text(span.attributes.get(_AGENT_NAME))
    if told == "task" and named and named == text(span.attributes.get("gen_ai.task.name")):
        fields["agent"] = named
        return "agent_run"
    return fields["kind"]


def _result(result: Any) -> Any:
    """A tool's result, taken out of LangChain's constructor of a message where it is one."""
    if not isinstance(result, str) or not result.startswith('{"output":'):
        return result
    value, _ = messages(result)
    message = value.get("output") if isinstance(value, dict) else None
    inner = message.get("kwargs") if isinstance(message, dict) else None
    return inner if isinstance(inner, dict) else result


def _entity(span: Span, suffix: str) -> str:
    return text(span.attributes.get("traceloop.entity.name")) or span.name.removesuffix(suffix)


def _run(run: AgentFacts, attributes: dict[str, Any]) -> AgentFacts:
    task = run.task_hash
    if not task and "traceloop.entity.input" in attributes:
        task = first_user_hash(messages(attributes["traceloop.entity.input"])[0])
    return AgentFacts(
        task_hash=task,
        input_tokens=run.input_tokens,
        output_tokens=run.output_tokens,
        engine=run.engine,
        handed_by=text(attributes.get("gen_ai.agent.handoff_parent")),
    )


def _tool_facts(span: Span) -> ToolFacts:
    attributes = span.attributes
    arguments = first(attributes, "gen_ai.tool.call.arguments", "traceloop.entity.input")
    return ToolFacts(
        tool=text(attributes.get("gen_ai.tool.name")) or _entity(span, ".tool"),
        call_id=text(attributes.get("gen_ai.tool.call.id")),
        argument_hashes=argument_hashes(arguments),
    )


def _handover(span: Span) -> Handover:
    """Attributes first, then the span's name; "unknown" is how the instrumentation writes nobody."""
    attributes = span.attributes
    named = _HANDOFF.fullmatch(span.name)
    source = text(attributes.get("gen_ai.handoff.from_agent"))
    target = text(attributes.get("gen_ai.handoff.to_agent"))
    if target in _NOBODY:
        target = named.group(2) if named else ""
    if target in _NOBODY:
        return Handover(source=source, mode="pass_control", confidence=0.7)
    return Handover(source=source or (named.group(1) if named else ""), target=target, mode="pass_control")
