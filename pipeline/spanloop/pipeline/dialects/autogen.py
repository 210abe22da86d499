"""AutoGen's own spans: agents by the GenAI conventions, their runtime by the messaging ones.

A team's run is many traces: each publish is a root that links to the create span of its message. An agent lives on
over its turns under one id (``name_team/team``), which names the sender and the receiver of a message too. There
are no spans of model calls; their usage stands on the messages that they made.
"""

from __future__ import annotations

import re
from typing import Any

from spanloop.pipeline.dialects import genai
from spanloop.pipeline.dialects.fields import base_fields, integer, messages, text
from spanloop.pipeline.dialects.operation import CallFacts, MessageFacts, Operation
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
        told = _told(attributes)
        asks = told.get("type") == "UserInputRequestedEvent"
        fields.update(
            kind="human" if asks else "message", message=_message_facts(span), call=_call_facts(told)
        )
    return Operation(**fields)


def _told(attributes: dict[str, Any]) -> dict[str, Any]:
    """What a member tells its team: each of its messages goes there once, before the team's topic repeats it."""
    body, _ = messages(attributes.get("message"))
    told = body.get("message") if isinstance(body, dict) else None
    return told if isinstance(told, dict) else {}


def _call_facts(told: dict[str, Any]) -> CallFacts | None:
    """The usage of the model call that made a message; the only trace that the call leaves."""
    used = told.get("models_usage")
    if not isinstance(used, dict):
        return None
    tokens_in, tokens_out = integer(used.get("prompt_tokens")), integer(used.get("completion_tokens"))
    return CallFacts(input_tokens=tokens_in, output_tokens=tokens_out) if tokens_in or tokens_out else None


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
