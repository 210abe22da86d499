"""Spans that no dialect knows, read by the words in their names: an agent, a tool or a model by best evidence.

``x.subagent.NAME``, ``agent NAME``, ``NAME_agent``, ``tool:NAME``, ``llm.call``: a span counts only where its name has
such a word. What is so read is flagged ``unknown_dialect``, and what is not keeps its place in the tree and says nothing.
"""

from __future__ import annotations

import re

from spanloop.pipeline.dialects.fields import base_fields, first, integer, text
from spanloop.pipeline.dialects.operation import AgentFacts, CallFacts, Operation, ToolFacts
from spanloop.schemas.spans import Span

__all__ = ["FLAG", "NAME", "read"]

NAME = "unknown"
FLAG = "unknown_dialect"

_SEPARATORS = re.compile(r"[./:\s|>\[\]()#]+")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_AGENT = frozenset({"agent", "subagent"})
_TOOL = frozenset({"tool", "tools", "toolcall"})
_MODEL = frozenset({"llm", "completion", "completions", "inference"})
_VERBS = frozenset(
    {
        "run",
        "invoke",
        "call",
        "execute",
        "start",
        "step",
        "task",
        "request",
        "span",
        "session",
        "handle",
        "process",
        "sub",
    }
)
_SERVER, _CLIENT = 2, 3
_NAMED = ("agent.name", "agent_name", "agent")
"""Attributes that name an agent in most home-made instrumentations."""


def read(span: Span) -> Operation:
    """The span by its name; kind ``unknown`` where the name says nothing."""
    fields = base_fields(span)
    kind, name = _kind(span.name)
    if kind == "unknown":
        return Operation(**fields, kind=kind)
    fields["flags"] = (*fields["flags"], FLAG)
    attributes = span.attributes
    if kind == "agent_run":
        told = text(first(attributes, *_NAMED))
        return Operation(**fields, kind=kind, agent=told or name or _service(span), run=AgentFacts())
    if kind == "tool_call":
        return Operation(
            **fields,
            kind=kind,
            tool=ToolFacts(text(first(attributes, "tool.name", "tool_name")) or name or span.name),
        )
    call = CallFacts(
        model=text(first(attributes, "model", "llm.model", "model_name")),
        input_tokens=integer(first(attributes, "input_tokens", "prompt_tokens", "usage.input_tokens")),
        output_tokens=integer(first(attributes, "output_tokens", "completion_tokens", "usage.output_tokens")),
    )
    return Operation(**fields, kind=kind, call=call)


def _kind(name: str) -> tuple[str, str]:
    """(kind, name of the agent or tool) that the words of a span's name tell. A class may be called SomethingAgent;
    functions called somethingTool or somethingLLM mostly surround what does the work.

    >>> _kind("app.subagent.research"), _kind("WriterAgent.run"), _kind("tool/get_weather"), _kind("GET /users")
    (('agent_run', 'research'), ('agent_run', 'WriterAgent'), ('tool_call', 'get_weather'), ('unknown', ''))
    """
    pieces = [piece for piece in _SEPARATORS.split(name) if piece]
    for place in range(len(pieces) - 1, -1, -1):
        apart = re.split(r"[_-]", pieces[place].lower())
        camel = [word.lower() for word in _WORDS.findall(pieces[place])]
        for kind, marks, words in (
            ("agent_run", _AGENT, camel), ("tool_call", _TOOL, apart), ("model_call", _MODEL, apart),
        ):  # fmt: skip
            if marks.isdisjoint(words):
                continue
            rest = [piece for piece in pieces[place + 1 :] if piece.lower() not in _VERBS]
            if rest:
                return kind, rest[-1] if kind != "tool_call" else ".".join(rest)
            own = [word for word in words if word not in marks | _VERBS]
            return kind, pieces[place] if own else ""
    return "unknown", ""


def _service(span: Span) -> str:
    return text(span.resource.get("service.name")) or "agent"
