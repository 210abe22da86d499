"""AutoGen's own spans: agents by the GenAI conventions, their runtime by the messaging ones.

A team's run is many traces: each publish is a root that links to the create span of its message. An agent lives on
over its turns under one id (``name_team/team``), which names the sender and the receiver of a message too. There
are no spans of model calls.
"""

from __future__ import annotations

import re

from spanloop.pipeline.dialects import genai
from spanloop.pipeline.dialects.fields import base_fields, text
from spanloop.pipeline.dialects.operation import MessageFacts, Operation
from spanloop.schemas.spans import Span

__all__ = ["NAME", "matches", "read"]

NAME = "autogen"

_DESTINATION = re.compile(r"(.+)\.\((.*)\)-([AT])")
"""Type and key of an agent (A) or topic (T)."""


def matches(span: Span) -> bool:
    """One of AutoGen's scopes, or its messaging spans where a pipeline lost the scope."""
    return span.scope.startswith("autogen") or span.attributes.get("gen_ai.system") == "autogen"


def read(span: Span) -> Operation:
    """An agent's operation with the agent's id, or a message on its way."""
    attributes = span.attributes
    if "messaging.operation" not in attributes:
        fields = genai.read_fields(span)
        if fields["kind"] == "agent_run":
            instance = text(attributes.get("gen_ai.agent.id"))
            fields["instance"] = instance if "/" in instance else ""
        return Operation(**fields)
    fields = base_fields(span)
    fields["kind"] = "unknown"
    if attributes["messaging.operation"] == "process":
        fields["kind"] = "message"
        fields["message"] = _message_facts(span)
    return Operation(**fields)


def _message_facts(span: Span) -> MessageFacts:
    """Sender and receiver by agent id; of the sender only the type is told, its key is the receiver's."""
    attributes = span.attributes
    address = _DESTINATION.fullmatch(text(attributes.get("messaging.destination")))
    if address is None or address.group(3) != "A":
        return MessageFacts()
    sender = text(attributes.get("sender_agent_type"))
    return MessageFacts(
        sender=f"{sender}/{address.group(2)}" if sender else "",
        receiver=f"{address.group(1)}/{address.group(2)}",
    )
