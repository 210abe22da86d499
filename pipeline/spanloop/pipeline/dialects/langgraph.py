"""LangGraph's metadata, as OpenInference and others carry it: which node of which graph a span belongs to.

Every span inside a node repeats the node's metadata; the checkpoint namespace (``outer:<uuid>|inner:<uuid>``) is
one execution of it, also when it goes on after an interrupt in another run. Where the graph goes next stands in the result: ``{"goto": "billing"}``, or
``{"goto": ["Send(node='billing', ...)"]}`` as Python writes it, or, of a routing function, just the name.
"""

from __future__ import annotations

import re
from typing import Any

from spanloop.pipeline.dialects.fields import integer, messages, text
from spanloop.pipeline.dialects.operation import NodeFacts
from spanloop.schemas.spans import Span

__all__ = ["is_interrupted", "metadata_of", "node_of"]

_SEND = re.compile(r"Send\(node=(['\"])(.{1,200}?)\1")
_LABEL = re.compile(r"[^\s\"'{}\[\]()<>]{1,120}( [^\s\"'{}\[\]()<>]{1,60}){0,4}\Z")
_MIDDLEWARE = re.compile(r".+\.(?:before|after)_(?:model|agent)\Z")
_TARGETS = 64
_INTERRUPTS = ("langgraph.errors.GraphInterrupt", "langgraph.errors.NodeInterrupt")
_END = "__end__"


def metadata_of(attributes: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a span, empty where there is none that can be read."""
    found, _ = messages(attributes.get("metadata"))
    return found if isinstance(found, dict) else {}


def is_interrupted(span: Span) -> bool:
    """Whether ``interrupt()`` stopped what the span is of: LangGraph raises it, and the span, which did not fail, notes it."""
    return any(
        event.name == "exception" and event.attributes.get("exception.type") in _INTERRUPTS
        for event in span.events
    )


def node_of(metadata: dict[str, Any], result: Any, *, paused: bool = False) -> NodeFacts | None:
    """The node that a span belongs to, None outside of any.

    Args:
        metadata: of the span.
        result: what it returned (``output.value``).
        paused: an interrupt stopped it.
    """
    name = text(metadata.get("langgraph_node"))
    if not name or _MIDDLEWARE.match(name):
        return None
    instance = text(metadata.get("langgraph_checkpoint_ns")) or text(metadata.get("checkpoint_ns"))
    return NodeFacts(
        name=name,
        instance=instance,
        step=integer(metadata.get("langgraph_step")),
        goto=goto_of(result),
        paused=paused,
    )


def goto_of(result: Any) -> tuple[str, ...]:
    """Nodes that a result sends the graph to.

    >>> goto_of('{"goto": ["Send(node=\\'a\\', arg={})", "b"]}'), goto_of("b"), goto_of("__end__")
    (('a', 'b'), ('b',), ())
    """
    if isinstance(result, str) and result[:1] not in ("{", "["):
        return _targets(result) if len(result) <= 256 else ()
    value, _ = messages(result)
    if isinstance(value, dict):
        return _targets(value.get("goto"))
    found: list[str] = []
    for item in value[:_TARGETS]:
        found += _targets(item.get("goto") if isinstance(item, dict) else item)
    return tuple(dict.fromkeys(found))


def _targets(value: Any) -> tuple[str, ...]:
    """Names in a ``goto``: a name, a Send, a list of them; a dropped text is a target without a name."""
    if isinstance(value, str):
        if sends := _SEND.findall(value):
            return tuple(dict.fromkeys(name for _, name in sends))
        return (value,) if _LABEL.match(value) and value != _END else ()
    if isinstance(value, dict):
        return _targets(value["node"]) if "node" in value else ("",) if "$redacted" in value else ()
    if isinstance(value, list):
        return tuple(dict.fromkeys(name for item in value[:_TARGETS] for name in _targets(item)))
    return ()
