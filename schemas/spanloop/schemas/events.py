"""Events on the log. Each struct is one type; ``type`` and ``schema_version`` are in its JSON.

Write with ``encode(event)``, read with ``decode(bytes)``: old versions are upcast (``upcast.py``), a type
or version that this build does not know raises SchemaError (the reader dead-letters it). Event ids are
deterministic (``event_id``): writing the same fact twice is one record.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from spanloop.schemas import topics
from spanloop.schemas.canonical import bytes_hash, canonical_json, decode_json, digest
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.orchestration import OrchestrationContent
from spanloop.schemas.spans import Span, span_hash, spans_event_id
from spanloop.schemas.upcast import upcast

__all__ = [
    "EVENTS",
    "NO_VARIANCE",
    "BatchCommitted",
    "CanaryFinished",
    "CanaryStarted",
    "CandidateRegistered",
    "CreditAssigned",
    "CreditNode",
    "DeadLettered",
    "DecisionModelPublished",
    "Event",
    "FeedbackReceived",
    "GateEvaluated",
    "OrchestrationRevised",
    "PolicyCommand",
    "PolicyCommandFinished",
    "PolicyPromoted",
    "PolicyRolledBack",
    "Reward",
    "RewardsComputed",
    "RoutingChanged",
    "Sample",
    "SamplesBuilt",
    "SentinelRaised",
    "SpansReceived",
    "SubjectErased",
    "ValueModelPublished",
    "decode",
    "encode",
    "encode_spans",
    "event_key",
    "register",
]


class Event(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="type", kw_only=True):
    """Base of all events: tenant and topic. ``event_id`` identifies the fact, ``key`` partitions it."""

    TOPIC: ClassVar[str] = ""
    VERSION: ClassVar[int] = 1

    tenant: str = "default"

    @property
    def event_id(self) -> str:
        """By default every different content is a fact of its own."""
        return digest(self.TOPIC, canonical_json(self))

    @property
    def key(self) -> str:
        return self.tenant


# ---------------------------------------------------------------- sources


class SpansReceived(Event, frozen=True, omit_defaults=True, tag="spans_received", kw_only=True):
    """A batch of spans of one trace, as accepted by a collector."""

    TOPIC: ClassVar[str] = topics.SPANS
    trace_id: str
    spans: tuple[Span, ...]
    source: str = "otlp"
    """otlp, gateway or import."""

    @property
    def event_id(self) -> str:
        return spans_event_id(self.tenant, self.trace_id, map(span_hash, self.spans))

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.trace_id}"


class FeedbackReceived(Event, frozen=True, omit_defaults=True, tag="feedback_received", kw_only=True):
    """A score or outcome from a scorer's credential. Of several for one (target, name, scorer) the one with
    the largest (observed_ns, feedback_id) counts, whatever the order of arrival."""

    TOPIC: ClassVar[str] = topics.FEEDBACK
    feedback_id: str
    target_kind: str
    """orchestration, trace, span or response."""
    target_id: str
    trace_id: str = ""
    """Of a span target: the trace that the scorer says it is in; feedback falls back to it when the span is unknown."""
    value: float
    name: str = "outcome"
    """"outcome" is the team's reward R1; other names are kept as channels."""
    label: str = ""
    comment: Any = None
    """Text, or its redacted stand-in."""
    scorer: str = ""
    observed_ns: int = 0
    final: bool = True

    @property
    def event_id(self) -> str:
        return digest("feedback", self.tenant, self.feedback_id)

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.target_kind}/{self.target_id}"


class DeadLettered(Event, frozen=True, omit_defaults=True, tag="dead_lettered", kw_only=True):
    """Something that was refused: nothing is dropped without a trace. Content obeys the redaction rules:
    ``data`` (base64) is kept only where the deployment keeps content, ``sha256`` and ``size`` always."""

    TOPIC: ClassVar[str] = topics.DEAD_LETTERS
    source: str
    reason: str
    sha256: str
    size: int
    data: str = ""
    details: dict[str, Any] = {}

    @property
    def event_id(self) -> str:
        return digest("dead", self.tenant, self.source, self.reason, self.sha256)


# ---------------------------------------------------------------- derived


class OrchestrationRevised(Event, frozen=True, omit_defaults=True, tag="orchestration_revised", kw_only=True):
    """Revision ``revision`` (1, 2, ...) of an orchestration. ``merged_into`` set: the last revision of an id
    that was lost in a join; ``content`` is then None and everything derived from it is void."""

    TOPIC: ClassVar[str] = topics.ORCHESTRATIONS
    orchestration_id: str
    revision: int
    complete: bool
    """Root ended and no parent missing; False: closed by time-out, provisional."""
    content_hash: str = ""
    content: OrchestrationContent | None = None
    merged_into: str = ""

    @property
    def event_id(self) -> str:
        return digest("orchestration", self.tenant, self.orchestration_id, self.revision)

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.orchestration_id}"


class Reward(msgspec.Struct, frozen=True, omit_defaults=True):
    """One reward channel on one unit. Missing is not zero: ``value`` is then None."""

    family: str
    """R1..R8 (METHODS 1.2)."""
    name: str
    """Channel: outcome, tool_validity, parl_parallel, parl_finish, critical_steps, ..."""
    unit: str
    """team, orchestrator, role, agent, turn, message, tool_call or token."""
    unit_id: str
    value: int | None
    """Micro-units."""
    status: str
    """missing, provisional, final or corrected."""
    estimator: str
    """Name and version of the definition, e.g. "parl/1"."""
    weight: int = 0
    """Micro-weight in the team's composite; 0: reported, not paid."""
    scaffold: bool = False
    """Annealed shaping term, not the objective."""
    evidence: tuple[str, ...] = ()
    """Feedback ids or event ids."""
    inputs_hash: str = ""
    """16 hex digits of what the value was made from; under equal definitions equal inputs give an equal value. Empty: missing, or
    written before this was recorded."""


class RewardsComputed(Event, frozen=True, omit_defaults=True, tag="rewards_computed", kw_only=True):
    """All rewards of one orchestration. ``team`` is the composite in micro-units, None while missing."""

    TOPIC: ClassVar[str] = topics.REWARDS
    orchestration_id: str
    revision: int
    orchestration_revision: int
    rewards: tuple[Reward, ...]
    team: int | None
    status: str
    definitions: str = ""
    """16 hex digits of what the deployment declared: weights, gates, prices, schedules, options and versions of every reward. Empty:
    void, or written before this was recorded."""

    @property
    def event_id(self) -> str:
        return digest("rewards", self.tenant, self.orchestration_id, self.revision)

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.orchestration_id}"


NO_VARIANCE = 0.0
"""Of an exact account. The default's own object: what has it is written without a look at whether it equals the default."""


class CreditNode(msgspec.Struct, frozen=True, omit_defaults=True):
    """An account of the ledger. The children's ``credit`` sum exactly to their parent's."""

    id: str
    unit: str
    """team, orchestrator, role, agent, turn, message, tool_call or token."""
    parent: str
    """Empty for the team."""
    label: str
    credit: int
    """Conserved micro-credits c."""
    raw: int | None = None
    """The estimator's own value before reconciliation, micro; None: unknown."""
    variance: float = NO_VARIANCE
    """sigma^2 of ``raw`` in squared units; the weight with which the residual falls on this child."""
    estimator: str = ""
    subject: str = ""
    """Event id, agent id, call id or "call_id/index" of a token."""


class CreditAssigned(Event, frozen=True, omit_defaults=True, tag="credit_assigned", kw_only=True):
    """The conserved ledger: sum(leaves) + baseline == reward, exactly, in micro-credits."""

    TOPIC: ClassVar[str] = topics.CREDITS
    orchestration_id: str
    revision: int
    """Equal to the rewards' revision it was computed from."""
    orchestration_revision: int
    reward: int
    baseline: int
    value_model: str
    """Version of the value model used ("none" before the first); an event on ``models``."""
    nodes: tuple[CreditNode, ...]

    @property
    def event_id(self) -> str:
        return digest("credits", self.tenant, self.orchestration_id, self.revision)

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.orchestration_id}"


class Sample(msgspec.Struct, frozen=True, omit_defaults=True):
    """One model call as a training row. Arrays have one entry for each response token; every token is
    trained from one account only."""

    call_id: str
    agent_id: str
    role: str
    policy_version: str
    prompt_token_ids: tuple[int, ...]
    response_token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Behaviour log-probabilities, float32, nats."""
    advantages: tuple[int, ...]
    """Micro-credits of the token's account."""
    accounts: tuple[str, ...]
    """CreditNode ids."""
    menu_ids: tuple[tuple[int, ...], ...] = ()
    menu_logprobs: tuple[tuple[float, ...], ...] = ()
    menu_values: tuple[tuple[int, ...], ...] = ()
    """Counterfactual value of each open option under the value model, micro-units; empty without one."""
    weight: float = 1.0
    """Rows of one rollout sum to 1."""
    sealed: str = ""
    """The call's token arrays under the key of their trace (``pipeline.sealing``); they are then empty here."""
    cut: bool = False
    """The request asked for truncated sampling (top_p, top_k, min_p): log-probabilities are of what was left of the options."""


class SamplesBuilt(Event, frozen=True, omit_defaults=True, tag="samples_built", kw_only=True):
    """Training rows of one orchestration, or the reasons why it gives none."""

    TOPIC: ClassVar[str] = topics.SAMPLES
    orchestration_id: str
    revision: int
    group: str
    """Digest of task key and harness; a singleton's is its own id."""
    harness: str
    reward: int
    baseline: int
    value_model: str
    holdout: bool
    """Kept for the gate, never trained on: decided by a hash of the orchestration id."""
    rows: tuple[Sample, ...]
    excluded: dict[str, int] = {}
    """Reason -> number of calls that gave no row."""

    @property
    def event_id(self) -> str:
        return digest("samples", self.tenant, self.orchestration_id, self.revision)

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.orchestration_id}"


class ValueModelPublished(Event, frozen=True, omit_defaults=True, tag="value_model_published", kw_only=True):
    """A version of a value model. Credit names the version it used; replay uses the recorded one."""

    TOPIC: ClassVar[str] = topics.MODELS
    version: str
    kind: str
    trained_on: int
    """Number of orchestrations."""
    parameters: dict[str, Any]

    @property
    def event_id(self) -> str:
        return digest("value_model", self.tenant, self.version)


class DecisionModelPublished(
    Event, frozen=True, omit_defaults=True, tag="decision_model_published", kw_only=True
):
    """A version of a tenant's decision models, published with a value model: what told decisions brought, and when to stop. The version
    that counts for an orchestration is the one whose ``value_model`` its credit names."""

    TOPIC: ClassVar[str] = topics.MODELS
    version: str
    value_model: str
    kind: str
    trained_on: int
    """Number of orchestrations with a told decision."""
    parameters: dict[str, Any]

    @property
    def event_id(self) -> str:
        return digest("decision_model", self.tenant, self.version)


# ---------------------------------------------------------------- policies


class PolicyEvent(Event, frozen=True, omit_defaults=True, kw_only=True):
    """Base of the events about one policy (a name such as "policy")."""

    TOPIC: ClassVar[str] = topics.POLICIES
    policy: str = "policy"

    @property
    def key(self) -> str:
        return f"{self.tenant}/{self.policy}"


class BatchCommitted(PolicyEvent, frozen=True, omit_defaults=True, tag="batch_committed", kw_only=True):
    """The boundary of one learner batch, written before the update: replay trains on the same batches."""

    batch: int
    from_offset: int
    """Exclusive: samples records after it ..."""
    to_offset: int
    """... up to and including this one."""
    parent_version: int
    parameters: dict[str, Any] = {}
    """Hyper-parameters of the update, so that a replay under other settings still trains the same."""

    @property
    def event_id(self) -> str:
        return digest("batch", self.tenant, self.policy, self.batch)


class CandidateRegistered(
    PolicyEvent, frozen=True, omit_defaults=True, tag="candidate_registered", kw_only=True
):
    """Update ``version`` is an MLflow model version and an immutable artifact."""

    version: int
    parent: int
    batch: int
    mlflow_version: str
    path: str
    """Artifact folder, relative to the workspace."""
    sha256: str
    """Of the weights file."""
    orchestrations: int
    """Taught this version in its batch (new ones)."""
    dropped: dict[str, int] = {}
    metrics: dict[str, float] = {}
    injected: str = ""
    """Why somebody put it there by hand; empty for the learner's own."""
    command: str = ""
    """PolicyCommand that asked for it."""

    @property
    def event_id(self) -> str:
        return digest("candidate", self.tenant, self.policy, self.version)


class GateEvaluated(PolicyEvent, frozen=True, omit_defaults=True, tag="gate_evaluated", kw_only=True):
    """Off-policy evaluation of ``version`` against the serving champion on held-out orchestrations (micro)."""

    version: int
    against: int
    attempt: int
    estimate: int
    lower: int
    ess: float
    n: int
    passed: bool
    reason: str = ""

    @property
    def event_id(self) -> str:
        return digest("gate", self.tenant, self.policy, self.version, self.against, self.attempt)


class CanaryStarted(PolicyEvent, frozen=True, omit_defaults=True, tag="canary_started", kw_only=True):
    """``version`` serves ``share`` of the traffic beside the champion ``against``."""

    canary: int
    version: int
    against: int
    share: float
    from_offset: int
    """Rewards after this offset count."""

    @property
    def event_id(self) -> str:
        return digest("canary_started", self.tenant, self.policy, self.canary)


class CanaryFinished(PolicyEvent, frozen=True, omit_defaults=True, tag="canary_finished", kw_only=True):
    """The sequential test's verdict: promote, reject or inconclusive (time or budget ran out)."""

    canary: int
    version: int
    against: int
    verdict: str
    n_version: int
    n_against: int
    difference: int
    lower: int
    upper: int
    reason: str = ""

    @property
    def event_id(self) -> str:
        return digest("canary_finished", self.tenant, self.policy, self.canary)


class PolicyPromoted(PolicyEvent, frozen=True, omit_defaults=True, tag="policy_promoted", kw_only=True):
    """``version`` is champion from here on. Epochs strictly increase; one record an epoch."""

    epoch: int
    version: int
    previous: int
    reason: str
    command: str = ""
    """PolicyCommand that asked for it."""

    @property
    def event_id(self) -> str:
        return digest("epoch", self.tenant, self.policy, self.epoch)


class PolicyRolledBack(PolicyEvent, frozen=True, omit_defaults=True, tag="policy_rolled_back", kw_only=True):
    """The champion ``version`` was replaced by the older ``to``, or (``epoch`` unchanged champion) a canary was
    withdrawn: then ``version`` is the canary and ``to`` the champion that stayed."""

    epoch: int
    version: int
    to: int
    reason: str
    command: str = ""
    """PolicyCommand that asked for it."""

    @property
    def event_id(self) -> str:
        return digest("epoch", self.tenant, self.policy, self.epoch)


class RoutingChanged(PolicyEvent, frozen=True, omit_defaults=True, tag="routing_changed", kw_only=True):
    """What the gateway serves from now on; every version named here is loaded and probe-verified in serving."""

    sequence: int
    champion: int
    learner: int = -1
    """Newest candidate serving the learning share; -1: none."""
    learning_share: float = 0.0
    exploration: float = 0.0
    """Floor that the learning share's calls ask for."""
    canary: int = -1
    canary_share: float = 0.0
    champion_share_min: float = 0.0

    @property
    def event_id(self) -> str:
        return digest("routing", self.tenant, self.policy, self.sequence)


class PolicyCommand(PolicyEvent, frozen=True, omit_defaults=True, tag="policy_command", kw_only=True):
    """A person's request to the learner; durable, taken once, in order."""

    command_id: str
    kind: str
    """inject, promote, rollback, freeze or unfreeze."""
    argument: str = ""
    """inject: folder of an artifact; promote: version number; rollback: the same, empty: the previous champion."""
    reason: str = ""

    @property
    def event_id(self) -> str:
        return digest("command", self.tenant, self.policy, self.command_id)


class PolicyCommandFinished(
    PolicyEvent, frozen=True, omit_defaults=True, tag="policy_command_finished", kw_only=True
):
    """What became of a command: done or refused, and why."""

    command_id: str
    status: str
    message: str = ""
    version: int = -1
    """The version that the command made or put into serving."""

    @property
    def event_id(self) -> str:
        return digest("command_finished", self.tenant, self.policy, self.command_id)


class SentinelRaised(PolicyEvent, frozen=True, omit_defaults=True, tag="sentinel_raised", kw_only=True):
    """What agents do changed in a way that the outcome does not pay for: learning and promotion are frozen until somebody
    unfreezes."""

    sentinel: str
    """length_drift, spawn_spam, ... (learner/sentinels/signals.py), or served_version (learner/audit.py)."""
    version: int
    """Newest version among the orchestrations that it is about."""
    epoch: int
    """In which champion's time."""
    value: float
    reference: float
    limit: float
    orchestrations: tuple[str, ...]
    """Some that moved it most."""
    reason: str
    attempt: int = 0
    """Raised so many times before in this champion's time, and accepted."""

    @property
    def event_id(self) -> str:
        again = (self.attempt,) if self.attempt else ()
        return digest("sentinel", self.tenant, self.policy, self.sentinel, self.version, self.epoch, *again)


class SubjectErased(PolicyEvent, frozen=True, omit_defaults=True, tag="subject_erased", kw_only=True):
    """The keys of a subject's content were destroyed: nobody can read it again. It stands among the policies' events because it says
    which versions had learned from that content."""

    erasure_id: str
    subject: str
    """Keyed hash of who it was about: the name itself is not kept."""
    trace_ids: tuple[str, ...] = ()
    """Traces whose content is gone: structure, hashes, rewards and credit of their orchestrations stay."""
    orchestration_ids: tuple[str, ...] = ()
    keys: int = 0
    """How many keys were destroyed."""
    versions: tuple[int, ...] = ()
    """Policy versions that were trained on it or descend from one that was."""
    value_models: tuple[str, ...] = ()
    """Value models that may have been."""
    erased_ns: int = 0

    @property
    def event_id(self) -> str:
        return digest("erased", self.tenant, self.erasure_id)


EVENTS: tuple[type[Event], ...] = (
    SpansReceived, FeedbackReceived, DeadLettered, OrchestrationRevised, RewardsComputed, CreditAssigned,
    SamplesBuilt, ValueModelPublished, DecisionModelPublished, BatchCommitted, CandidateRegistered, GateEvaluated, CanaryStarted,
    CanaryFinished, PolicyPromoted, PolicyRolledBack, RoutingChanged, PolicyCommand, PolicyCommandFinished,
    SubjectErased, SentinelRaised,
)  # fmt: skip
_BY_TYPE: dict[str, type[Event]] = {str(cls.__struct_config__.tag): cls for cls in EVENTS}


class _Head(msgspec.Struct):
    type: str = ""
    schema_version: int = 1


_head = msgspec.json.Decoder(_Head)
_decoders = {name: msgspec.json.Decoder(cls) for name, cls in _BY_TYPE.items()}


def register(*classes: type[Event]) -> None:
    """Let ``decode`` read further types: those of internal topics, which no other version has to read (operations.py)."""
    for cls in classes:
        name = str(cls.__struct_config__.tag)
        _BY_TYPE[name] = cls
        _decoders[name] = msgspec.json.Decoder(cls)


def event_key(event: Event) -> str:
    """Partition key of an event."""
    return event.key


def encode(event: Event) -> bytes:
    """Canonical JSON of an event, with its type (first version: no schema_version written means 1)."""
    if event.VERSION == 1:
        return canonical_json(event)
    fields = msgspec.to_builtins(event)
    fields["schema_version"] = event.VERSION
    return canonical_json(fields)


_LAST_TYPE = re.compile(rb'[,{]"type":"([a-z_]+)"}\Z')
_UNVERSIONED = (b'{"source":', b'{"spans":')
"""How records of spans begin that tell no version: keys are sorted, so that it would stand first. They are long, and to look all
through them costs as much as half of their reading does."""


def _plain(data: bytes) -> msgspec.json.Decoder[Any] | None:
    """The decoder of an event whose type can be read off the end of its canonical JSON and that names no version; None: look
    properly. The pattern cannot stand inside a text, where quotes are escaped, nor in an inner object, where another brace
    follows."""
    found = _LAST_TYPE.search(data, max(0, len(data) - 80))
    if found is None or (not data.startswith(_UNVERSIONED) and b'"schema_version"' in data):
        return None
    name = found.group(1).decode()
    cls = _BY_TYPE.get(name)
    return _decoders[name] if cls is not None and cls.VERSION == 1 else None


def encode_spans(tenant: str, trace_id: str, spans: Sequence[bytes], source: str) -> tuple[str, bytes]:
    """Event id and bytes of the SpansReceived whose spans have these canonical JSON texts; the same as of the event itself,
    without encoding each span twice.

    >>> event = SpansReceived(trace_id="ab", spans=(Span("ab", "cd", "n", 1, 2),), tenant="t")
    >>> encode_spans("t", "ab", [canonical_json(event.spans[0])], "otlp") == (event.event_id, encode(event))
    True
    """
    empty = encode(SpansReceived(tenant=tenant, trace_id=trace_id, spans=(), source=source))
    joined = empty.replace(b'"spans":[]', b'"spans":[' + b",".join(spans) + b"]", 1)
    return spans_event_id(tenant, trace_id, map(bytes_hash, spans)), joined


def decode(data: bytes) -> Event:
    """An event from its bytes. Raises SchemaError for malformed bytes, unknown types and newer versions."""
    decoder = _plain(data)
    if decoder is not None:
        try:
            return decoder.decode(data)
        except (msgspec.ValidationError, msgspec.DecodeError, RecursionError):
            pass  # the long way says what is wrong
    try:
        head = _head.decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as exc:
        raise SchemaError(f"not an event: {exc}") from exc
    cls = _BY_TYPE.get(head.type)
    if cls is None:
        raise SchemaError(
            f"unknown event type {head.type!r}; this build knows {sorted(_BY_TYPE)}. Was it written by a newer spanloop?",
            event_type=head.type,
        )
    if head.schema_version > cls.VERSION:
        raise SchemaError(
            f"{head.type} has schema_version {head.schema_version}, this build reads up to {cls.VERSION}: upgrade spanloop",
            event_type=head.type,
        )
    if head.schema_version < cls.VERSION:
        raw = upcast(head.type, head.schema_version, cls.VERSION, decode_json(data, dict))
        try:
            return msgspec.convert(raw, cls)
        except msgspec.ValidationError as exc:
            raise SchemaError(f"{head.type} v{head.schema_version} cannot be upcast: {exc}") from exc
    try:
        return _decoders[head.type].decode(data)
    except (msgspec.ValidationError, msgspec.DecodeError, RecursionError) as exc:
        raise SchemaError(f"malformed {head.type}: {exc}", event_type=head.type) from exc
