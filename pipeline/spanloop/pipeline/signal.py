"""The signal stage: orchestrations + feedback + value models -> rewards, credit, samples.

For each orchestration it keeps the last content and all feedback on it, and recomputes from these two alone whenever one of them
changes; an output is written only when its content changed. Feedback may come long before or after the orchestration, and to
any of its names (orchestration, trace, span, response): it waits under its target for up to the retention and is then
dead-lettered. When two orchestrations merge, what was derived from the lost id is void and its feedback follows.

The version of the value model: the newest on ``models`` at the record with which the orchestration's reward first became final; it is
kept for all later revisions and recorded on the credit. It does not depend on how records were batched.
Invariants: the content of the last outputs is a function of (last content, set of feedback, recorded version); at most
``settings.orchestrations_max`` orchestrations are held, the longest untouched go first.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from spanloop.pipeline.credit.anchors import DEFAULT, Choice, Estimates
from spanloop.pipeline.credit.asking import Asking
from spanloop.pipeline.credit.cast import Cast, known_cast
from spanloop.pipeline.credit.estimates import estimate
from spanloop.pipeline.credit.ledger import Ledger, ledger_of
from spanloop.pipeline.credit.live import LIVE_FROM, LiveLedger
from spanloop.pipeline.credit.states import RAW, Encoder
from spanloop.pipeline.credit.trace import traces_of
from spanloop.pipeline.credit.value import dead_letter
from spanloop.pipeline.credit.value_model import ValueModel
from spanloop.pipeline.held import Held, Store
from spanloop.pipeline.ports import LogRecord, StageOutput, Written
from spanloop.pipeline.rewards.compose import Composite, RewardTerms, compose
from spanloop.pipeline.rewards.outcome import is_usable
from spanloop.pipeline.samples import build_samples
from spanloop.schemas import topics
from spanloop.schemas.canonical import bytes_hash, canonical_json, content_hash
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    CreditAssigned,
    Event,
    FeedbackReceived,
    OrchestrationRevised,
    RewardsComputed,
    SamplesBuilt,
    ValueModelPublished,
    decode,
    encode,
)
from spanloop.schemas.ids import version_number
from spanloop.schemas.orchestration import OrchestrationContent

if TYPE_CHECKING:
    from spanloop.pipeline.sealing.vault import Vault
    from spanloop.schemas.settings import Pipeline

__all__ = [
    "NO_MODEL",
    "Draft",
    "Signal",
    "SignalStage",
    "choice_of",
    "derive",
    "estimate_drafts",
    "finish_draft",
    "unusable",
]

_Numbered = TypeVar("_Numbered", RewardsComputed, CreditAssigned)
NO_MODEL = "none"
"""Version recorded where no value model existed."""
_FINAL = frozenset({"final", "corrected"})
LIVE_CALLS_MAX = 60_000
"""Model calls of the large orchestrations whose ledgers are kept; the longest untouched go first."""
_ANSWER_AT = frozenset({4, 32, 256})
"""After so many drafts that lack values, these are asked for."""
_OLD = "old"
"""In place of a credit's hash: there is one on the log, of an earlier revision than the rewards."""


class Signal(msgspec.Struct, frozen=True):
    """Everything derived from one orchestration."""

    rewards: RewardsComputed
    credit: CreditAssigned | None
    samples: SamplesBuilt | None
    """Only of complete orchestrations with a final reward."""


class Draft(msgspec.Struct):
    """An orchestration on its way through ``derive``."""

    content: OrchestrationContent
    composite: Composite
    version: str
    choice: Choice = DEFAULT
    live: LiveLedger | None = None
    """What is kept of its last revision; only of large ones."""
    cast: Cast | None = None
    estimates: Estimates | None = None


def derive(
    content: OrchestrationContent,
    feedback: Iterable[FeedbackReceived],
    *,
    complete: bool,
    settings: Pipeline,
    version: str = NO_MODEL,
    model: ValueModel | None = None,
) -> Signal:
    """Rewards, credit and samples of one orchestration, revision 1: the batch form of the stage.

    Args:
        content: What happened.
        feedback: All feedback on it, in any order.
        complete: Whether the orchestration is complete.
        settings: Weights, holdout, kind of credit.
        version: The value model's version to record.
        model: That model; None for ``NO_MODEL``.
    """
    composite = compose(
        content,
        list(feedback),
        complete=complete,
        terms=RewardTerms.of(settings),
        progress=version_number(version),
        indicators=model.indicators if model is not None else {},
    )
    draft = Draft(content, composite, version, choice_of(settings, content.orchestration_id))
    estimate_drafts([draft], {version: Asking(model)} if model is not None else {})
    return finish_draft(draft, complete, settings)


def choice_of(settings: Pipeline, orchestration_id: str) -> Choice:
    """Which estimators the ledger of an orchestration uses."""
    return Choice(settings.credit_agents, settings.credit_turns, settings.credit_lambda, orchestration_id)


def estimate_drafts(drafts: list[Draft], models: Mapping[str, Asking]) -> None:
    """Fill in casts and estimates; few predictions a model for all drafts. Neighbours pass through the same states, so what the
    first ones ask for is answered before the others ask."""
    credited = [draft for draft in drafts if draft.composite.team is not None]
    incomplete: list[Draft] = []
    for asking in models.values():
        asking.make_room()
    for draft in credited:
        draft.cast = known_cast(draft.content) if draft.live is None else draft.live.cast(draft.content)
        asking = models.get(draft.version)
        before = asking.misses if asking else 0
        encode = asking.encode if asking is not None else RAW
        draft.estimates = _estimated(draft, draft.cast, asking, encode)
        if asking is not None and asking.misses > before:
            incomplete.append(draft)
            if len(incomplete) in _ANSWER_AT:
                asking.answer()
    for asking in models.values():
        asking.answer()
    for draft in incomplete:
        if draft.cast is not None:
            asking = models[draft.version]
            draft.estimates = _estimated(draft, draft.cast, asking, asking.encode)


def _estimated(draft: Draft, cast: Cast, asking: Asking | None, encode: Encoder) -> Estimates:
    reward = draft.composite.team or 0
    if draft.live is not None:
        return draft.live.estimate(reward, asking, encode, choice=draft.choice)
    return estimate(cast, reward, asking, encode, choice=draft.choice)


def finish_draft(draft: Draft, complete: bool, settings: Pipeline) -> Signal:
    """Rewards, credit and samples of an estimated draft, revision 1."""
    content, composite = draft.content, draft.composite
    rewards = RewardsComputed(
        tenant=content.tenant,
        orchestration_id=content.orchestration_id,
        revision=1,
        orchestration_revision=1,
        rewards=composite.rewards,
        team=composite.team,
        status=composite.status,
        definitions=composite.definitions,
    )
    if draft.cast is None or draft.estimates is None or composite.team is None:
        return Signal(rewards, None, None)
    if draft.live is not None:
        ledger = draft.live.ledger(draft.estimates, composite.team)
    else:
        ledger = ledger_of(draft.cast, draft.estimates, composite.team)
    credit = CreditAssigned(
        tenant=content.tenant,
        orchestration_id=content.orchestration_id,
        revision=1,
        orchestration_revision=1,
        reward=ledger.reward,
        baseline=ledger.baseline,
        value_model=draft.version,
        nodes=ledger.nodes,
    )
    samples = None
    if complete and composite.status in _FINAL:
        samples = _samples(content, ledger, draft.cast, draft.version, settings)
    return Signal(rewards, credit, samples)


def _samples(
    content: OrchestrationContent, ledger: Ledger, cast: Cast, version: str, settings: Pipeline
) -> SamplesBuilt:
    return build_samples(
        content,
        ledger,
        revision=1,
        value_model=version,
        holdout=settings.holdout,
        credit=settings.credit,
        traces=traces_of(ledger, cast, settings.credit_trace) if settings.credit_trace > 0.0 else None,
    )


class SignalStage:
    """``Stage`` that turns orchestrations and feedback into rewards, credit and samples; see the module.

    Args:
        settings: of the pipeline.
        vault: opens token arrays while something is derived from them; what is held and written stays sealed.
    """

    name = "signal"
    topics = (topics.ORCHESTRATIONS, topics.FEEDBACK, topics.MODELS)

    def __init__(self, settings: Pipeline, *, vault: Vault | None = None) -> None:
        self._settings = settings
        self._vault = vault
        self._terms = RewardTerms.of(settings)
        self.waiting = False
        """Set: what is touched is derived by ``resume``, not yet."""
        self._store = self._fresh_store()
        self._asking: dict[str, Asking] = {}
        self._live: dict[str, LiveLedger] = {}
        self._contents: dict[str, OrchestrationContent] = {}
        self._written: Written = {}

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Become the committed state."""
        self._store = self._fresh_store()
        self._store.restore(entries)
        self._asking = {}
        self._live = {}
        self._written = {}

    def _fresh_store(self) -> Store:
        return Store(int(self._settings.retention_s * 1e9), self._settings.orchestrations_max)

    def process(self, records: Iterable[LogRecord], now_ns: int) -> StageOutput:
        """Fold records in order, then derive once for each orchestration that they touched."""
        events: list[Event] = []
        dirty: dict[str, None] = {}
        self._contents = {}
        for record in records:
            try:
                self._touch(record.event or decode(record.value), now_ns, dirty, record.value)
            except SchemaError as exc:
                events.append(dead_letter(record, exc.message))
        return self._finished(events, dirty, now_ns)

    def fold(self, incoming: Iterable[Event], now_ns: int) -> StageOutput:
        """``process`` for events that need no decoding; one that cannot be taken in is dead-lettered as it is."""
        events: list[Event] = []
        dirty: dict[str, None] = {}
        self._contents = {}
        for event in incoming:
            try:
                self._touch(event, now_ns, dirty)
            except SchemaError as exc:
                events.append(
                    dead_letter(LogRecord(event.TOPIC, -1, event.key, "", encode(event), 0), exc.message)
                )
        return self._finished(events, dirty, now_ns)

    def _touch(self, event: Event, now_ns: int, dirty: dict[str, None], raw: bytes | None = None) -> None:
        for key in self._apply(event, now_ns, raw):
            dirty.pop(key, None)
            dirty[key] = None

    def _finished(self, events: list[Event], dirty: dict[str, None], now_ns: int) -> StageOutput:
        if self.waiting:
            for key in dirty:
                self._store.mark(key)
        else:
            events += self._derive(list(dirty))
            events += self._store.evict(now_ns)
        self._forget_models()
        written, self._written = self._written, {}
        return StageOutput(events=events, writes=self._store.take_writes(), written=written)

    def resume(self, now_ns: int) -> StageOutput:
        """Derive what was touched since ``waiting`` was set, or by ``observe``."""
        self.waiting = False
        self._contents = {}
        keys = self._store.take_marked()
        for key in keys:
            self._store.choose_version(key, self._is_final(key))
        return self._finished([], dict.fromkeys(keys), now_ns)

    def tick(self, now_ns: int) -> StageOutput:
        """Forget what is older than the retention; feedback without a target becomes dead letters."""
        events: list[Event] = [*self._store.evict(now_ns)]
        self._forget_models()
        return StageOutput(events=events, writes=self._store.take_writes())

    def next_timer_ns(self) -> int | None:
        """When the first thing held is older than the retention."""
        return self._store.next_eviction_ns()

    # ------------------------------------------------------------ orchestrations that move

    @property
    def store(self) -> Store:
        """What the stage holds."""
        return self._store

    def observe(self, event: Event, now_ns: int) -> None:
        """Take note of an output that this stage, or a former owner of its partition, published: nothing equal is published again,
        revisions go on behind it, and what was made wrong is made anew by ``resume``."""
        touched_ns = self._store.touch_after(now_ns)
        if isinstance(event, OrchestrationRevised):
            self._store.put_orchestration(event, touched_ns)
            self._store.mark(event.key)
            return
        if not isinstance(event, RewardsComputed | CreditAssigned | SamplesBuilt):
            return
        held = self._store.held.get(event.key)
        if held is None:
            if isinstance(event, SamplesBuilt):
                return  # of another partition: all write to one topic
            held = Held(event.tenant, event.orchestration_id, 0, False, touched_ns)
        if event.revision < held.revision:
            if isinstance(event, CreditAssigned) and held.credit_hash in ("", _OLD):
                self._store.replace(
                    msgspec.structs.replace(held, credit_hash=_OLD if event.nodes else "", dirty=True)
                )
            return
        changes: dict[str, Any] = {"revision": event.revision, "dirty": True, "touched_ns": touched_ns}
        if event.revision > held.revision and not isinstance(event, SamplesBuilt):
            held = msgspec.structs.replace(
                held, rewards_hash="", credit_hash=_OLD if held.credit_hash else ""
            )
            changes["credit_hash"] = held.credit_hash
        if not isinstance(event, SamplesBuilt) and event.orchestration_revision > held.orchestration_revision:
            changes["ahead"] = max(held.ahead, event.orchestration_revision)
        if isinstance(event, RewardsComputed):
            changes["rewards_hash"] = _seen(held.rewards_hash, _content(event))
            if event.status in _FINAL:
                changes["version_fixed"] = True
        elif isinstance(event, CreditAssigned):
            changes["credit_hash"] = _seen(held.credit_hash, _content(event)) if event.nodes else ""
            changes["value_model"] = "" if event.value_model == NO_MODEL else event.value_model
        else:
            changes["samples_hash"] = content_hash(msgspec.structs.replace(event, revision=1))
        self._store.replace(msgspec.structs.replace(held, **changes))

    # ------------------------------------------------------------ one event

    def _apply(self, event: Event, now_ns: int, raw: bytes | None) -> list[str]:
        """Take in one event; returns the keys of the orchestrations that it touches."""
        if isinstance(event, OrchestrationRevised):
            touched = self._store.put_orchestration(event, now_ns, raw)
            if event.content is not None and touched:
                self._contents[touched[0]] = event.content
        elif isinstance(event, FeedbackReceived):
            if not is_usable(event.value):
                raise SchemaError(unusable(event))
            touched = self._store.put_feedback(event, now_ns)
        elif isinstance(event, ValueModelPublished):
            ValueModel.from_dict(event.parameters)
            self._store.put_model(event)
            touched = []
        else:
            touched = []
        for key in touched:
            self._store.choose_version(key, self._is_final(key))
        return touched

    def _is_final(self, key: str) -> bool:
        held = self._store.held[key]
        if not held.complete or held.merged_into:
            return False
        counted = self._store.latest_outcomes(key)
        return bool(counted) and all(item.final for item in counted)

    def _derive(self, keys: list[str]) -> list[Event]:
        drafts: dict[str, Draft] = {}
        for key in keys:
            held = self._store.held.get(key)
            if held is None or held.merged_into or not held.content or _is_behind(held):
                continue
            content = self._contents.get(key) or self._store.content(key)
            if self._vault is not None:
                content = self._vault.open_content(content)
            version = held.value_model or NO_MODEL
            composite = compose(
                content,
                self._store.feedback_on(key),
                complete=held.complete,
                terms=self._terms,
                progress=version_number(version),
                indicators=self._indicators(content.tenant, version),
            )
            choice = choice_of(self._settings, content.orchestration_id)
            drafts[key] = Draft(content, composite, version, choice, live=self._take_live(key, content))
        versions = {(draft.content.tenant, draft.version) for draft in drafts.values()}
        by_tenant: dict[str, list[Draft]] = {}
        for draft in drafts.values():
            by_tenant.setdefault(draft.content.tenant, []).append(draft)
        for tenant, items in sorted(by_tenant.items()):
            wanted = sorted(v for t, v in versions if t == tenant and v != NO_MODEL)
            estimate_drafts(items, {v: self._ask(tenant, v) for v in wanted})
        events: list[Event] = []
        for key in keys:
            held = self._store.held.get(key)
            if held is None or not (held.content or held.merged_into) or _is_behind(held):
                continue
            draft = drafts.get(key)
            signal = finish_draft(draft, held.complete, self._settings) if draft else _void(held)
            events += self._emit(held, signal)
            if draft is not None and draft.live is not None:
                self._keep_live(key, draft.live)
        return events

    def _take_live(self, key: str, content: OrchestrationContent) -> LiveLedger | None:
        """What is kept of a large orchestration's ledger; taken out, so that a failure leaves nothing half done. What was opened
        with a key is not kept."""
        known = self._live.pop(key, None)
        if len(content.calls) < LIVE_FROM or any(call.sealed for call in content.calls):
            return None
        return known or LiveLedger()

    def _keep_live(self, key: str, live: LiveLedger) -> None:
        self._live[key] = live
        while len(self._live) > 1 and sum(item.size for item in self._live.values()) > LIVE_CALLS_MAX:
            del self._live[next(iter(self._live))]

    def _emit(self, held: Held, signal: Signal) -> list[Event]:
        """Outputs whose content changed, under the orchestration's next revision."""
        if held.merged_into and not held.revision:
            return []
        hashes = [self._hash(part) if part is not None else "" for part in (signal.rewards, signal.credit)]
        samples = signal.samples
        if signal.rewards.team is None and held.samples_hash:
            samples = _void_samples(held)
        sample_hash = self._hash(samples) if samples is not None else held.samples_hash
        credit = signal.credit
        if held.credit_hash and credit is None:
            credit = _void_credit(held)
            hashes[1] = ""
        if hashes == [held.rewards_hash, held.credit_hash] and sample_hash == held.samples_hash:
            return []
        revision, of = held.revision + 1, held.orchestration_revision
        events: list[Event] = [_numbered(signal.rewards, revision, of)]
        if credit is not None:
            events.append(_numbered(credit, revision, of))
        if samples is not None and sample_hash != held.samples_hash:
            events.append(msgspec.structs.replace(samples, revision=revision) if revision > 1 else samples)
        self._store.replace(
            msgspec.structs.replace(
                held,
                revision=revision,
                rewards_hash=hashes[0],
                credit_hash=hashes[1],
                samples_hash=sample_hash,
            )
        )
        return events

    def _hash(self, event: Event) -> str:
        """Content hash of an event of revision 1, which is written as it is where that is its number."""
        data = canonical_json(event)
        if event.VERSION == 1:
            self._written[id(event)] = (event, data)
        return bytes_hash(data)

    def _indicators(self, tenant: str, version: str) -> Mapping[str, float]:
        if version == NO_MODEL or not self._terms.goes_by_indicators:
            return {}
        return self._ask(tenant, version).indicators

    def _ask(self, tenant: str, version: str) -> Asking:
        name = f"{tenant}/{version}"
        if name not in self._asking:
            self._asking[name] = Asking(ValueModel.from_dict(self._store.model(name).parameters))
        return self._asking[name]

    def _forget_models(self) -> None:
        """Keep decoded only the versions in recent use: the newest of each tenant and few others."""
        for name in list(self._asking)[:-8]:
            if name not in self._store.newest_names():
                del self._asking[name]


def _is_behind(held: Held) -> bool:
    """Whether what is on the log was derived from a revision that is still to come: then this one has nothing to say."""
    return held.ahead > held.orchestration_revision


def unusable(event: FeedbackReceived) -> str:
    """Why feedback whose value cannot enter a reward is refused."""
    return f"feedback {event.feedback_id}: value {event.value!r} is not a finite number in range"


def _numbered(event: _Numbered, revision: int, orchestration_revision: int) -> _Numbered:
    if revision == orchestration_revision == 1:
        return event
    return msgspec.structs.replace(event, revision=revision, orchestration_revision=orchestration_revision)


def _content(event: RewardsComputed | CreditAssigned) -> str:
    return content_hash(msgspec.structs.replace(event, revision=1, orchestration_revision=1))


def _seen(known: str, said: str) -> str:
    """Hash to go on from; where two were published under one number, neither."""
    return said if known in ("", _OLD, said) else "two"


def _void(held: Held) -> Signal:
    """What is left of an orchestration whose id was lost in a merge."""
    rewards = RewardsComputed(
        tenant=held.tenant,
        orchestration_id=held.orchestration_id,
        revision=1,
        orchestration_revision=1,
        rewards=(),
        team=None,
        status="missing",
    )
    return Signal(rewards, None, None)


def _void_credit(held: Held) -> CreditAssigned:
    return CreditAssigned(
        tenant=held.tenant,
        orchestration_id=held.orchestration_id,
        revision=1,
        orchestration_revision=1,
        reward=0,
        baseline=0,
        value_model=held.value_model or NO_MODEL,
        nodes=(),
    )


def _void_samples(held: Held) -> SamplesBuilt:
    return SamplesBuilt(
        tenant=held.tenant,
        orchestration_id=held.orchestration_id,
        revision=1,
        group=held.orchestration_id,
        harness="",
        reward=0,
        baseline=0,
        value_model=held.value_model or NO_MODEL,
        holdout=False,
        rows=(),
        excluded={"void": 1},
    )
