"""One normalised operation: what a dialect makes of a span, and all that assembly ever sees of it.

Operations are small (no texts, only keyed or plain hashes of them), so they are what the stage keeps in its
state. Invariant: equal spans give equal operations and equal ``encode_operation`` bytes, whatever their
attribute order. Fields are only ever appended: the encoding is an array, and old state must stay readable. The garbage collector
does not look at them (``gc=False``): they are frozen trees of texts and numbers, and there are very many.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spanloop.schemas.canonical import digest
from spanloop.schemas.orchestration import Decision

__all__ = [
    "KINDS",
    "AgentFacts",
    "Asked",
    "CallFacts",
    "GatewayFacts",
    "Handover",
    "Logged",
    "Member",
    "MessageFacts",
    "NodeFacts",
    "Operation",
    "Said",
    "ToolFacts",
    "decode_operation",
    "encode_operation",
    "text_hash",
]

KINDS = (
    "agent_run", "model_call", "tool_call", "handover", "guardrail", "workflow", "message", "evaluation", "build",
    "unknown", "act", "note", "human", "logged",
)  # fmt: skip
"""note: says something of the operation that it stands under, and is nothing itself. human: a person took part."""


class Asked(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tool call in a model's answer."""

    id: str
    name: str


class GatewayFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
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
    asked_model: str = ""
    """What the client put in ``model``: the policy's alias, where a version answered."""
    sealed: str = ""
    """The token arrays under the key of their trace; they are then empty."""


class CallFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
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
    lost: int = 0
    """Earlier calls of the same run that wrote on this span too and were overwritten. More than zero, or a call
    on an agent's run: when the call began is not known."""
    task_hash: str = ""
    """``text_hash`` of the first user message in the input."""
    fresh: tuple[str, ...] = ()
    """Ids of the tool calls whose results stand at the end of the input, behind the last answer."""
    answer_hash: str = ""
    """``text_hash`` of the answer's first text; of an answer that only asks for tool calls, a hash of their ids."""


class ToolFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A tool's execution."""

    tool: str
    call_id: str = ""
    role: str = ""
    """Empty: an ordinary tool. output: the framework's way to end a run. rejected: arguments invalid, it
    never ran. deferred: put off for approval, it has not run. ghost: a span that stands for other spans."""
    argument_hashes: tuple[str, ...] = ()
    """``text_hash`` of each text among the arguments."""


class AgentFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An agent's run."""

    task_hash: str = ""
    """``text_hash`` of the first user message."""
    input_tokens: int | None = None
    """Roll-up over its model calls: a cross-check, used only where there are no calls."""
    output_tokens: int | None = None
    engine: bool = False
    """It runs agents as nodes and decides nothing itself."""
    guessed: bool = False
    """An instrumentation that goes by names took it for an agent: inside another run it is a part of that one."""
    handed_by: str = ""
    """Name of the agent that the span says came before it."""
    said: tuple[str, ...] = ()
    """``answer_echoes`` of the run's last answer."""
    heard: tuple[str, ...] = ()
    """``input_echoes`` of the pieces of the run's input."""
    pending: tuple[str, ...] = ()
    """Ids of the tool calls that the run ended without: somebody else is to approve or to execute them."""
    resumed: tuple[str, ...] = ()
    """Ids of the tool calls whose results the run was started with."""
    asks_human: bool = False
    """It ended to have tool calls approved."""


class Handover(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A transfer to another agent that is told in so many words."""

    source: str = ""
    target: str = ""
    """Empty: the span does not show to whom."""
    mode: str = ""
    """pass_control, return_to_caller, or empty: unknown."""
    confidence: float = 1.0
    rule: str = "handover_keys"


class NodeFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A span of an engine's node: its execution, or something inside it that repeats the instance. Whether the
    node is an agent, a step of one or neither shows only in the tree."""

    name: str
    instance: str = ""
    """Id of the execution; the outermost operation that carries it is the execution."""
    step: int | None = None
    """Superstep of the engine: nodes of one step run side by side, then the engine waits for all."""
    goto: tuple[str, ...] = ()
    """Nodes that its result sends the engine to; an empty text: one that the span does not show."""
    paused: bool = False
    """It was interrupted to ask a person; the execution that goes on has the same instance."""


class MessageFacts(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A message on its way between participants, by their instances or names; empty: not told."""

    sender: str = ""
    receiver: str = ""
    broadcast: bool = False
    """To everybody on a topic."""


class Said(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the agent's own program says outright of an act, without any inference."""

    act: str
    """One of sdk_attributes.ACTS; a span of kind ``act`` is an aggregate, a stop or a decision."""
    target_id: str = ""
    """Span id of the other party's run, or of the act that made it."""
    sources: tuple[str, ...] = ()
    """Span ids of the runs or delegations whose results an aggregate uses."""
    decided_by: str = ""
    """Span id of the decision that this act carries out."""
    call: str = ""
    """Response id or span id of the model call that decided."""
    decision: Decision | None = None
    harness: str = ""


class Member(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The agent run that an operation says it belongs to, by a key of its own and not by its place in the tree."""

    key: str
    """Equal for all operations of the run."""
    name: str = ""
    parent: str = ""
    """Key of the run that started it; empty: nobody did."""
    turns: bool = False
    """The key is a whole conversation's: each prompt in it begins a run."""
    starts: bool = False
    """The operation is a tool call that starts another run."""


class Logged(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An event that an imported log states as such: nothing is inferred from it and nothing beside it."""

    type: str = ""
    """One of EVENT_TYPES; empty: the log itself, or a bundle of its edges."""
    agent: str = ""
    to: str = ""
    tool: str = ""
    status: str = ""
    mode: str = ""
    triggered: bool | None = None
    key: str = ""
    """The log's own id of the event, where it tells edges."""
    edges: tuple[tuple[str, str, str], ...] = ()
    """(key, key, type) that the log tells."""


class Operation(msgspec.Struct, frozen=True, array_like=True, gc=False):
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
    node: NodeFacts | None = None
    guardrail: str = ""
    """Name of the guardrail that, by the span's own words, ended it."""
    instance: str = ""
    """Id of the agent that lives on over several runs: its runs are turns of one agent."""
    resource: str = ""
    """Process that wrote the span, empty: unknown. Clocks order spans of one process only."""
    message: MessageFacts | None = None
    said: Said | None = None
    event: str = ""
    """Empty: a span. Otherwise it was a log record: prompt (a user's), attempt (of a model call), call, tool, decision
    (somebody's, on a tool call), details (of the span that it stands under) or other."""
    member: Member | None = None
    parent_trace: str = ""
    """Trace of the parent where it is another one; assembly alone sets it."""
    logged: Logged | None = None


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
