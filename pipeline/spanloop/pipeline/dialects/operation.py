"""One normalised operation: what a dialect makes of a span, and all that assembly ever sees of it.

Operations are small (no texts, only keyed or plain hashes of them), so they are what the stage keeps in its
state. Invariant: equal spans give equal operations and equal ``encode_operation`` bytes, whatever their
attribute order. Fields are only ever appended: the encoding is an array, and old state must stay readable.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spanloop.schemas.canonical import digest

__all__ = [
    "KINDS",
    "AgentFacts",
    "Asked",
    "CallFacts",
    "GatewayFacts",
    "Handover",
    "Operation",
    "ToolFacts",
    "decode_operation",
    "encode_operation",
    "text_hash",
]

KINDS = (
    "agent_run", "model_call", "tool_call", "handover", "guardrail", "workflow", "message", "evaluation", "build",
    "unknown",
)  # fmt: skip


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """A tool call in a model's answer."""

    id: str
    name: str


class GatewayFacts(msgspec.Struct, frozen=True, array_like=True):
    """What only the gateway knows of a model call. Token fields are empty unless the deployment opted in."""

    policy_version: str = ""
    route: str = ""
    harness: str = ""
    task_key: str = ""
    sampling: dict[str, Any] = {}
    """Keys sorted."""
    prompt_token_ids: tuple[int, ...] = ()
    response_token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    menus: tuple[tuple[tuple[int, float], ...], ...] = ()


class CallFacts(msgspec.Struct, frozen=True, array_like=True):
    """A model call."""

    model: str = ""
    response_id: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    finish_reasons: tuple[str, ...] = ()
    asked: tuple[Asked, ...] = ()
    """Tool calls in the answer."""
    answered: tuple[str, ...] = ()
    """Ids of the tool calls whose results stand in the input."""
    gateway: GatewayFacts | None = None


class ToolFacts(msgspec.Struct, frozen=True, array_like=True):
    """A tool's execution."""

    tool: str
    call_id: str = ""
    role: str = ""
    """Empty: an ordinary tool. output: the framework's way to end a run. rejected: arguments invalid, it
    never ran. deferred: put off for approval, it has not run. ghost: a span that stands for other spans."""
    argument_hashes: tuple[str, ...] = ()
    """``text_hash`` of each text among the arguments."""


class AgentFacts(msgspec.Struct, frozen=True, array_like=True):
    """An agent's run."""

    task_hash: str = ""
    """``text_hash`` of the first user message."""
    input_tokens: int | None = None
    """Roll-up over its model calls: a cross-check, used only where there are no calls."""
    output_tokens: int | None = None
    engine: bool = False
    """It runs agents as nodes and decides nothing itself."""


class Handover(msgspec.Struct, frozen=True, array_like=True):
    """A transfer to another agent that is told in so many words."""

    source: str = ""
    target: str = ""
    mode: str = ""
    """pass_control, return_to_caller, or empty: unknown."""
    confidence: float = 1.0
    rule: str = "handover_keys"


class Operation(msgspec.Struct, frozen=True, array_like=True):
    """One span, understood."""

    trace_id: str
    span_id: str
    parent_id: str
    """Empty: a root."""
    kind: str
    """One of KINDS."""
    start_ns: int
    end_ns: int
    """As sent: 0 means that the span is unfinished, and it may precede the start."""
    name: str = ""
    """Span name, or the workflow's name."""
    status: str = ""
    """Empty or "error"."""
    layer: str = ""
    """Which instrumentation wrote it: the scope's name."""
    agent: str = ""
    """Agent name on the span; for an agent's run its own name."""
    run_id: str = ""
    """The framework's id of the agent run that the span belongs to."""
    conversation: str = ""
    links: tuple[tuple[str, str], ...] = ()
    """(trace id, span id)."""
    flags: tuple[str, ...] = ()
    """Doubts: truncated_attributes, unparsed_messages, ..."""
    call: CallFacts | None = None
    tool: ToolFacts | None = None
    run: AgentFacts | None = None
    handover: Handover | None = None
    triggered: bool | None = None
    """Verdict of a guardrail."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Operation)


def encode_operation(operation: Operation) -> bytes:
    """Bytes of an operation; equal operations are equal bytes."""
    return _encoder.encode(operation)


def decode_operation(data: bytes) -> Operation:
    """The operation of ``encode_operation``."""
    return _decoder.decode(data)


def text_hash(value: Any) -> str:
    """Hash of a text, or the keyed hash left where it was dropped; empty for anything else and for empty
    texts.

    Texts compare equal only within one deployment, where either all or none of them are dropped.

    >>> text_hash({"$redacted": 12, "$hmac": "ab12"})
    'hmac:ab12'
    >>> text_hash("  "), text_hash(7)
    ('', '')
    """
    if isinstance(value, str):
        text = value.strip()
        return digest(text)[:16] if text else ""
    if isinstance(value, dict) and isinstance(value.get("$hmac"), str):
        return "hmac:" + value["$hmac"]
    return ""
