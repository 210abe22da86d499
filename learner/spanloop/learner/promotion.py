"""Which version serves: a fold over the policies topic, and the rules that say what is to be done next.

Place: ``promoter`` folds what is on the log, asks ``decide`` and ``desired_routing``, and does it by appending events.
The log is the truth: MLflow's alias and the gateway's routing are repaired from this state after a crash.

Invariants: pure; folding an event twice, or any prefix and then the rest, gives the same state; epochs strictly increase and
one record holds each (its event id is the epoch's, so of two promoters one wins); a version that was rejected or rolled
back is never promoted again; there is at most one canary.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import msgspec

from spanloop.learner.canary import Verdict
from spanloop.learner.gate import ORCHESTRATIONS_MIN
from spanloop.schemas.canonical import MICRO
from spanloop.schemas.events import (
    BatchCommitted,
    CanaryFinished,
    CanaryStarted,
    CandidateRegistered,
    Event,
    GateEvaluated,
    PolicyCommand,
    PolicyCommandFinished,
    PolicyPromoted,
    PolicyRolledBack,
    RoutingChanged,
    SentinelRaised,
)
from spanloop.schemas.settings import Learner

__all__ = [
    "Action",
    "EvaluateGate",
    "Facts",
    "FinishCanary",
    "Promote",
    "PromotionState",
    "StartCanary",
    "Withdraw",
    "apply",
    "decide",
    "desired_routing",
    "exploration_floor",
    "fold",
]


class PromotionState(msgspec.Struct, frozen=True):
    """What the policies topic says."""

    versions: dict[int, CandidateRegistered] = {}
    champion: int = -1
    epoch: int = 0
    champions: tuple[int, ...] = ()
    """Champions so far, oldest first; one that was rolled back is taken out."""
    retired: frozenset[int] = frozenset()
    """Rejected by a canary, rolled back, or injected and not passed: never promoted again."""
    last_batch: BatchCommitted | None = None
    canary: CanaryStarted | None = None
    """The running one."""
    canary_started_ns: int = 0
    num_canaries: int = 0
    verdict: CanaryFinished | None = None
    """A verdict that has not been carried out yet."""
    attempts: dict[int, int] = {}
    """Version -> gate evaluations."""
    gates: dict[int, GateEvaluated] = {}
    """Version -> its last evaluation."""
    ready: int = -1
    """The learner's own version that passed the last gate, against the present champion, and has had no canary."""
    gated_batch: int = -1
    """Batch of the own version that was evaluated last."""
    routing: RoutingChanged | None = None
    frozen: bool = False
    sentinels: tuple[SentinelRaised, ...] = ()
    """What froze it, since it was unfrozen last."""
    commands: tuple[PolicyCommand, ...] = ()
    """Not finished yet, in order."""
    commanded: dict[str, int] = {}
    """Command id -> version, for commands whose effect is on the log."""

    @property
    def next_version(self) -> int:
        return max(self.versions, default=-1) + 1

    @property
    def newest(self) -> int:
        """Newest of the learner's own versions that is not retired; -1: none."""
        return max(
            (v for v, c in self.versions.items() if not c.injected and v not in self.retired), default=-1
        )

    def evidence(self, version: int) -> tuple[bool, str]:
        """Whether a version's last gate speaks for it against the present champion, and what the gate said."""
        gate = self.gates.get(version)
        if gate is None:
            return False, "no gate has evaluated it"
        told = (
            f"gate against v{gate.against} {'passed' if gate.passed else 'failed'}: {gate.estimate / MICRO:+.4f}, lower bound "
            f"{gate.lower / MICRO:+.4f}, {gate.n} orchestrations, effective {gate.ess:.0f}"
        )
        if gate.reason:
            told += f" ({gate.reason})"
        if gate.against != self.champion:
            told += f"; the champion is v{self.champion} now"
        return gate.passed and gate.against == self.champion, told

    @property
    def challenger(self) -> int:
        """The version in its canary, else the one that passed its gate and has had none; -1: none."""
        return self.ready if self.canary is None else self.canary.version

    @property
    def queue(self) -> tuple[int, ...]:
        """Injected versions that passed the gate against the present champion and wait for their canary."""
        running = -1 if self.canary is None else self.canary.version
        return tuple(v for v in self._injected if v != running and not self._needs_gate(v))

    @property
    def ungated(self) -> tuple[int, ...]:
        """Injected versions without an evaluation against the present champion."""
        running = -1 if self.canary is None else self.canary.version
        return tuple(v for v in self._injected if v != running and self._needs_gate(v))

    @property
    def _injected(self) -> list[int]:
        spent = self.retired | set(self.champions)
        return sorted(v for v, c in self.versions.items() if c.injected and v not in spent)

    def _needs_gate(self, version: int) -> bool:
        gate = self.gates.get(version)
        return gate is None or gate.against != self.champion

    @property
    def previous_champion(self) -> int:
        """The champion before this one; -1: none."""
        return self.champions[-2] if len(self.champions) > 1 else -1

    def batch_of(self, version: int) -> int | None:
        """Number of updates behind a version; None when it is not registered."""
        found = self.versions.get(version)
        return None if found is None else found.batch

    def candidate_of_batch(self, batch: int) -> CandidateRegistered | None:
        """The learner's own version that batch ``batch`` made."""
        return next((c for c in self.versions.values() if c.batch == batch and not c.injected), None)


def fold(events: Iterable[tuple[Event, int]], state: PromotionState | None = None) -> PromotionState:
    """Fold (event, append time in ns) pairs in offset order."""
    state = state or PromotionState()
    for event, appended_ns in events:
        state = apply(state, event, appended_ns)
    return state


def apply(state: PromotionState, event: Event, appended_ns: int = 0) -> PromotionState:
    """One event later. Events of no interest, and events that this state already contains, change nothing."""
    change = msgspec.structs.replace
    match event:
        case BatchCommitted():
            if state.last_batch is not None and state.last_batch.batch >= event.batch:
                return state
            return change(state, last_batch=event)
        case CandidateRegistered():
            if event.version in state.versions:
                return state
            versions = {**state.versions, event.version: event}
            return _commanded(change(state, versions=versions), event.command, event.version)
        case GateEvaluated():
            return _gated(state, event)
        case CanaryStarted():
            if event.canary < state.num_canaries:
                return state
            ready = -1 if state.ready == event.version else state.ready
            return change(
                state, canary=event, canary_started_ns=appended_ns, num_canaries=event.canary + 1, ready=ready
            )
        case CanaryFinished():
            if state.canary is None or state.canary.canary != event.canary:
                return state
            injected = (
                bool(state.versions[event.version].injected) if event.version in state.versions else False
            )
            retired = (
                state.retired | {event.version} if injected and event.verdict != "promote" else state.retired
            )
            pending = event if event.verdict in ("promote", "reject") else None
            return change(state, canary=None, verdict=pending, retired=retired)
        case PolicyPromoted():
            if event.epoch <= state.epoch:
                return state
            promoted = change(
                state,
                epoch=event.epoch,
                champion=event.version,
                champions=(*(v for v in state.champions if v != event.version), event.version),
                verdict=None,
                ready=-1,
            )
            return _commanded(promoted, event.command, event.version)
        case PolicyRolledBack():
            return _rolled_back(state, event)
        case RoutingChanged():
            if state.routing is not None and state.routing.sequence >= event.sequence:
                return state
            return change(state, routing=event)
        case PolicyCommand():
            known = {c.command_id for c in state.commands} | state.commanded.keys()
            return state if event.command_id in known else change(state, commands=(*state.commands, event))
        case PolicyCommandFinished():
            return _command_finished(state, event)
        case SentinelRaised():
            return change(state, frozen=True, sentinels=(*state.sentinels, event))
        case _:
            return state


def _commanded(state: PromotionState, command: str, version: int) -> PromotionState:
    if not command:
        return state
    return msgspec.structs.replace(state, commanded={**state.commanded, command: version})


def _gated(state: PromotionState, event: GateEvaluated) -> PromotionState:
    if event.attempt < state.attempts.get(event.version, 0):
        return state
    changed = msgspec.structs.replace(
        state,
        attempts={**state.attempts, event.version: event.attempt + 1},
        gates={**state.gates, event.version: event},
    )
    candidate = state.versions.get(event.version)
    if candidate is None:
        return changed
    if candidate.injected:
        retired = state.retired if event.passed else state.retired | {event.version}
        return msgspec.structs.replace(changed, retired=retired)
    usable = event.passed and event.against == state.champion and event.version not in state.retired
    return msgspec.structs.replace(
        changed, ready=event.version if usable else -1, gated_batch=candidate.batch
    )


def _rolled_back(state: PromotionState, event: PolicyRolledBack) -> PromotionState:
    if event.epoch <= state.epoch:
        return state
    champions = tuple(v for v in state.champions if v not in (event.version, event.to))
    rolled = msgspec.structs.replace(
        state,
        epoch=event.epoch,
        champion=event.to,
        champions=(*champions, event.to),
        retired=state.retired | {event.version},
        verdict=None,
        ready=state.ready if state.champion == event.to and state.ready != event.version else -1,
    )
    return _commanded(rolled, event.command, event.to)


def _command_finished(state: PromotionState, event: PolicyCommandFinished) -> PromotionState:
    command = next((c for c in state.commands if c.command_id == event.command_id), None)
    if command is None:
        return state
    frozen, sentinels = state.frozen, state.sentinels
    if event.status == "done" and command.kind in ("freeze", "unfreeze"):
        frozen = command.kind == "freeze"
        sentinels = sentinels if frozen else ()
    left = tuple(c for c in state.commands if c.command_id != event.command_id)
    finished = msgspec.structs.replace(state, commands=left, frozen=frozen, sentinels=sentinels)
    return _commanded(finished, event.command_id, event.version)


# ---------------------------------------------------------------- what to do next


class Facts(msgspec.Struct, frozen=True):
    """What the shell measured; the rest is on the log."""

    heldout: int = 0
    """Held-out orchestrations at hand for the gate."""
    canary: Verdict | None = None
    """What the running canary's test says now."""
    unroutable: frozenset[int] = frozenset()
    """Versions that serving refused to load or that did not pass their probe."""


class EvaluateGate(msgspec.Struct, frozen=True):
    version: int
    attempt: int


class StartCanary(msgspec.Struct, frozen=True):
    version: int


class FinishCanary(msgspec.Struct, frozen=True):
    verdict: Verdict


class Promote(msgspec.Struct, frozen=True):
    version: int
    reason: str


class Withdraw(msgspec.Struct, frozen=True):
    """A canary that lost: the champion stays, the version is retired."""

    version: int
    reason: str


Action = EvaluateGate | StartCanary | FinishCanary | Promote | Withdraw


def decide(state: PromotionState, facts: Facts, settings: Learner) -> Action | None:
    """The next thing to do, or None. Doing it appends events that change the state, then ask again."""
    if state.champion < 0:
        first = min(state.versions, default=-1)
        return Promote(first, "bootstrap") if first >= 0 else None
    if state.verdict is not None:
        version, why = state.verdict.version, f"canary {state.verdict.canary}: {state.verdict.reason}"
        return Promote(version, why) if state.verdict.verdict == "promote" else Withdraw(version, why)
    if state.canary is not None:
        return _canary_action(state, state.canary, facts, settings)
    if state.frozen:
        return None
    if not settings.gate:
        barred = state.retired | facts.unroutable
        newest = max((v for v in state.versions if v not in barred), default=-1)
        return Promote(newest, "gate is off") if newest > state.champion else None
    for version in state.queue:
        if version not in facts.unroutable:
            return StartCanary(version)
    waiting = _gate_action(state, facts, settings)
    if isinstance(waiting, EvaluateGate) and waiting.version in state.ungated:
        return waiting  # put there by hand: its gate comes before the canary of an own version
    if state.ready >= 0 and state.ready not in facts.unroutable:
        return StartCanary(state.ready)
    return waiting


def _canary_action(
    state: PromotionState, canary: CanaryStarted, facts: Facts, settings: Learner
) -> Action | None:
    now = facts.canary or Verdict("", 0.0, 0.0, 0.0, 0, 0)
    ended = ""
    if state.frozen:
        ended = "frozen"
    elif canary.against != state.champion:
        ended = "the champion changed"
    elif canary.version in facts.unroutable:
        ended = "serving refused the version"
    elif now.verdict:
        return FinishCanary(now)
    elif _superseded(state, canary, now, settings):
        ended = f"version {state.ready} is better by its gate"
    if ended:
        return FinishCanary(msgspec.structs.replace(now, verdict="inconclusive", reason=ended))
    return _gate_action(state, facts, settings)


def _superseded(state: PromotionState, canary: CanaryStarted, now: Verdict, settings: Learner) -> bool:
    """Whether the newest candidate's lower bound against the champion is above what the running canary of an older own
    version promises: the estimate of its gate, or, once both arms are large enough, the canary's upper bound. Waiting
    for that one's verdict would only keep the better one from serving. An injected version always gets its verdict."""
    gate, own = state.gates.get(state.ready), state.versions.get(canary.version)
    if gate is None or own is None or own.injected or state.ready == canary.version:
        return False
    before = state.gates.get(canary.version)
    promised = before.estimate if before is not None else 0
    if min(now.n_version, now.n_against) >= settings.canary_min:
        promised = max(promised, min(10**9, round(now.upper * 1e6)))
    return gate.lower > max(0, promised)


def _gate_action(state: PromotionState, facts: Facts, settings: Learner) -> Action | None:
    """Injected versions first, oldest first; else the newest own one, every ``gate_every`` batches."""
    if facts.heldout < ORCHESTRATIONS_MIN:
        return None
    for version in state.ungated:
        if version not in facts.unroutable:
            return EvaluateGate(version, state.attempts.get(version, 0))
    newest = state.newest
    running = -1 if state.canary is None else state.canary.version
    if newest < 0 or newest in {state.champion, running, *facts.unroutable} or not settings.gate:
        return None
    since = state.versions[newest].batch - max(0, state.gated_batch)
    return EvaluateGate(newest, state.attempts.get(newest, 0)) if since >= settings.gate_every else None


def exploration_floor(settings: Learner, batch: int) -> float:
    """Exploration floor of the calls that the version of batch ``batch`` (1, 2, ...) answers as the learning share.

    >>> from spanloop.schemas.settings import Learner
    >>> made = Learner(exploration_start=0.3, exploration_end=0.1, exploration_updates=11)
    >>> [round(exploration_floor(made, batch), 3) for batch in (0, 1, 6, 11, 99)]
    [0.3, 0.3, 0.2, 0.1, 0.1]
    """
    done = min(1.0, max(0, batch - 1) / max(1, settings.exploration_updates - 1))
    return round(
        settings.exploration_start + (settings.exploration_end - settings.exploration_start) * done, 6
    )


def desired_routing(
    state: PromotionState, settings: Learner, *, tenant: str, policy: str, unroutable: Collection[int] = ()
) -> RoutingChanged | None:
    """What the gateway should serve in this state; the sequence is the next one if anything differs from the last
    RoutingChanged, else None."""
    if state.champion < 0:
        return None
    canary = state.canary.version if state.canary is not None and not state.frozen else -1
    canary_share = state.canary.share if state.canary is not None and canary >= 0 else 0.0
    own = (v for v, c in state.versions.items() if not c.injected and v not in state.retired)
    learner = max((v for v in own if v not in unroutable), default=-1)
    if state.frozen or not settings.gate or learner <= 0 or learner == state.champion:
        learner = -1
    learning_share = min(settings.learning_share, max(0.0, 1.0 - 2.0 * canary_share)) if learner >= 0 else 0.0
    wanted = RoutingChanged(
        tenant=tenant,
        policy=policy,
        sequence=0 if state.routing is None else state.routing.sequence + 1,
        champion=state.champion,
        learner=learner if learning_share > 0.0 else -1,
        learning_share=learning_share,
        exploration=exploration_floor(settings, state.versions[learner].batch)
        if learning_share > 0.0
        else 0.0,
        canary=canary,
        canary_share=canary_share,
        champion_share_min=round(1.0 - learning_share - canary_share, 6),
    )
    if state.routing is None:
        return wanted
    same = msgspec.structs.replace(wanted, sequence=state.routing.sequence) == state.routing
    return None if same else wanted
