"""The orchestration trace: the temporal graph of one job done by agents.

``Orchestration`` is *content*: for any order, duplication, batching and delay of the same spans it is
the same canonical JSON. Revision numbers, completeness and processing times live outside, on the event
that carries it (``events.OrchestrationRevised``). The structs are trees of texts and numbers, so that the garbage collector need not
look at them (``gc=False``).
"""

from __future__ import annotations

from typing import Any

import msgspec

__all__ = [
    "EDGE_TYPES",
    "EVENT_TYPES",
    "Agent",
    "Decision",
    "Edge",
    "MenuOption",
    "ModelCall",
    "OrchestrationContent",
    "OrchestrationEvent",
    "TokenUsage",
    "ToolCall",
]

EVENT_TYPES = (
    "orchestrator_decision", "spawn", "despawn", "delegate", "message", "tool_call", "tool_result",
    "return", "aggregate", "stop", "human_intervention", "safety_event",
)  # fmt: skip
EDGE_TYPES = (
    "temporal",
    "causal",
    "spawn",
    "message",
    "tool_dependency",
    "return",
    "aggregate",
    "safety_flow",
)


class Decision(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What was decided, among what, and how likely each option was when it was drawn."""

    kind: str
    """spawn, delegate, message, aggregate or stop (O1 to O5)."""
    chosen: str = ""
    options: tuple[str, ...] = ()
    """The options that were open, each once; empty: not told."""
    propensities: tuple[float, ...] = ()
    """Probability of each option under whatever drew it, exploration included; sums to 1. Empty: not told or unusable."""
    by_policy: bool | None = None
    """Whether the policy chose, and not a rule, an exploration draw or a person; None: not told."""
    state: tuple[tuple[str, float], ...] = ()
    """What the decider saw, as (name, number), sorted by name: vote_margin, verifier_score, budget_left, ..."""


class OrchestrationEvent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One thing that happened, with the evidence and the rule that inferred it."""

    id: str
    """Deterministic: a digest of type, evidence and parties; stable over revisions."""
    type: str
    """One of EVENT_TYPES."""
    agent: str
    """Name of the acting agent (for a return: who returns)."""
    t_ns: int
    """Raw wall-clock time of the evidence, ns since the epoch."""
    confidence: float
    """0..1, of the rule that fired."""
    rule: str
    """Name of the inference rule (DIALECTS 3), e.g. "agent_under_tool"."""
    evidence: tuple[str, ...]
    """Span ids."""
    agent_id: str = ""
    """Agent instance id (Agent.id)."""
    to: str = ""
    """The other party: delegatee, spawned agent, receiver of a return or message, "user"."""
    to_id: str = ""
    tool: str = ""
    status: str = ""
    """"ok" or "error" on tool_result, return and stop; empty elsewhere."""
    triggered: bool | None = None
    """Verdict of a safety_event."""
    mode: str = ""
    """return_to_caller or pass_control on delegate."""
    call_id: str = ""
    """ModelCall.id of the model call that took this decision, where one did."""
    decision: Decision | None = None
    """Told outright by the program: on the event of the act that was chosen; on an orchestrator_decision where the decision
    was told apart from its act, or was not to act."""


class Edge(msgspec.Struct, frozen=True, gc=False):
    """Directed edge between two events; ``type`` is one of EDGE_TYPES."""

    src: str
    dst: str
    type: str


class Agent(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One agent instance (a run), not an agent's name: two runs of ``researcher`` are two agents."""

    id: str
    name: str
    role: str = ""
    """The agent's name in the deployment, lower case; instances of one role share it."""
    parent_id: str = ""
    """Agent instance that spawned it; empty for the entry agent."""
    span_id: str = ""
    started_ns: int = 0
    ended_ns: int = 0
    status: str = "ok"
    virtual: bool = False
    """No span of its own; inferred from a delegation tool."""
    harness: str = ""
    """Fingerprint of the run's harness as its own process tells it."""


class MenuOption(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One option that was open at a response token, with its behaviour log-probability (float32, nats)."""

    token_id: int
    logprob: float


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A tool call that a model asked for. The span that executed it is found by ``id``."""

    id: str
    name: str
    status: str = ""
    """What became of it: ok, error (it ran and failed), rejected (invalid arguments, it never ran), deferred (put off
    for approval); empty: no span says."""


class ModelCall(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One model call (a turn): the framework's span and the gateway's span of it are one call.

    Token arrays have one entry for each response token. They are content: present only where the
    deployment opted in to training.
    """

    id: str
    """Response id where known, else the span id."""
    agent_id: str
    span_ids: tuple[str, ...]
    start_ns: int
    end_ns: int
    model: str = ""
    response_id: str = ""
    input_tokens: int | None = None
    """None: unknown, which is not zero."""
    output_tokens: int | None = None
    finish_reasons: tuple[str, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()
    policy_version: str = ""
    """The immutable name that served it, e.g. "policy@v12"; from the gateway only."""
    harness: str = ""
    """Fingerprint of model, tool registry, system prompts and runtime."""
    task_key: str = ""
    """Same task key and harness make a group; empty: singleton."""
    sampling: dict[str, Any] = {}
    prompt_token_ids: tuple[int, ...] = ()
    response_token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    """Behaviour log-probabilities of the sampled tokens under the sampled (masked, mixed) distribution."""
    menus: tuple[tuple[MenuOption, ...], ...] = ()
    """For each response token the options that were open (logits mask), sampled one included."""
    status: str = "ok"
    sealed: str = ""
    """The token arrays under the key of their trace (``pipeline.sealing``), where the deployment has subject keys; the arrays
    themselves are then filled in only while rewards and samples are derived."""


class TokenUsage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Sums over innermost model calls, each response id once. ``unknown_calls`` had no usage."""

    input: int = 0
    output: int = 0
    calls: int = 0
    unknown_calls: int = 0


class OrchestrationContent(msgspec.Struct, frozen=True, omit_defaults=True, weakref=True):
    """What happened in one orchestration. Everything is sorted: events by (t_ns, rank, id), edges by value."""

    orchestration_id: str
    tenant: str
    trace_ids: tuple[str, ...]
    events: tuple[OrchestrationEvent, ...]
    edges: tuple[Edge, ...]
    agents: tuple[Agent, ...]
    calls: tuple[ModelCall, ...]
    tokens: TokenUsage
    started_ns: int
    ended_ns: int
    flags: tuple[str, ...] = ()
    """Sorted reasons for doubt: "orphan_spans:2", "cycle", "missing_root", "truncated_attributes", ..."""
