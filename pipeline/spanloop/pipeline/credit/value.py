"""The value stage: learns V from outcomes online and publishes versions on ``models``.

Inputs: orchestrations (for the decisions they went through) and rewards (for what came of them). After every
``settings.value_every`` new final outcomes (or a share of all so far, if more: ``value_growth``) it trains on a bounded
memory of past orchestrations and publishes a version; that happens at the record that completes the count, so it does not depend on batching. Held-out orchestrations are never
learned from: the gate stays honest. A corrected reward corrects the memory; a void one leaves it. Where programs told decisions, a
version of the decision models (``decisions.learner``) is published just before each version of the value model and names it. A version
carries how far reward schedules that go by a measured number have come (``rewards.indicators``).
Invariants: deterministic; restoring from the committed entries goes on exactly as if nothing had happened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from spanloop.pipeline.credit.cast import known_cast
from spanloop.pipeline.credit.estimates import Lesson, lessons
from spanloop.pipeline.credit.repeats import table_of
from spanloop.pipeline.credit.states import Encoder
from spanloop.pipeline.credit.value_model import ValueModel
from spanloop.pipeline.credit.value_training import Example, ValueTrainer
from spanloop.pipeline.decisions.learner import KIND as DECISIONS
from spanloop.pipeline.decisions.learner import DecisionLearner, grades_of, lesson_of
from spanloop.pipeline.decisions.learner import Lesson as DecisionLesson
from spanloop.pipeline.decisions.told import Prices, has_told
from spanloop.pipeline.ports import LogRecord, StageOutput
from spanloop.pipeline.rewards.indicators import advanced, as_json, watched_of
from spanloop.pipeline.rewards.shaping import Indicator
from spanloop.pipeline.samples import is_holdout
from spanloop.pipeline.sealing.entries import ENTRY, sealed_by
from spanloop.schemas import topics
from spanloop.schemas.canonical import content_hash
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    DeadLettered,
    DecisionModelPublished,
    OrchestrationRevised,
    RewardsComputed,
    ValueModelPublished,
    decode,
)
from spanloop.schemas.operations import LessonReady

if TYPE_CHECKING:
    from spanloop.pipeline.sealing.vault import Vault
    from spanloop.schemas.settings import Pipeline

__all__ = ["MEMORY", "PENDING_MAX", "ValueModel", "ValueStage", "dead_letter"]

MEMORY = 6144
"""Orchestrations remembered for training, a tenant."""
PENDING_MAX = 20_000
"""Orchestrations that wait for their reward, a tenant; the oldest is forgotten first."""


def dead_letter(record: LogRecord, reason: str) -> DeadLettered:
    """The dead letter of a record that a stage cannot read. Its bytes stay on the log, at the offset named."""
    tenant = record.key.partition("/")[0] or "default"
    return DeadLettered(
        tenant=tenant,
        source=record.topic,
        reason=reason,
        sha256=hashlib.sha256(record.value).hexdigest(),
        size=len(record.value),
        details={"offset": record.offset},
    )


class _Counters(msgspec.Struct):
    new: int = 0
    """Final outcomes since the last version."""
    total: int = 0
    next_slot: int = 0
    sequence: int = 0


class _Waiting(msgspec.Struct, frozen=True, array_like=True):
    sequence: int
    lessons: tuple[Lesson, ...]


_pack = msgspec.msgpack.encode


class _Tenant:
    """What one tenant's value model has seen."""

    def __init__(self, rows_max: int, encoder: Encoder) -> None:
        self.trainer = ValueTrainer.fresh(rows_max, encoder)
        self.counters = _Counters()
        self.waiting: dict[str, _Waiting] = {}
        self.memory: dict[int, Example] = {}
        self.slots: dict[str, int] = {}
        self.sealed: dict[str, str] = {}
        """Trace whose key closes the lessons of an orchestration."""
        self.decisions = DecisionLearner()
        self.indicators: dict[str, Indicator] = {}


class ValueStage:
    """``Stage`` that publishes value models; see the module.

    Args:
        settings: of the pipeline.
        lessons: sources of ``LessonReady`` in the partitioned runtime; empty: orchestrations and rewards themselves.
        vault: opens token arrays; lessons made of them are kept sealed, and forgotten at the next start when erased.
    """

    name = "value"

    def __init__(
        self, settings: Pipeline, *, lessons: tuple[str, ...] = (), vault: Vault | None = None
    ) -> None:
        self._vault = vault
        self.topics: tuple[str, ...] = lessons or (topics.ORCHESTRATIONS, topics.REWARDS)
        self._settings = settings
        self._encoder = Encoder(settings.value_units, settings.value_words)
        self._tenants: dict[str, _Tenant] = {}
        self._writes: dict[str, bytes | None] = {}
        self._watched = watched_of(settings)
        self._prices = Prices(settings.token_price, settings.second_price, settings.round_price)

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Become the committed state."""
        self._tenants = {}
        self._writes = {}
        told: list[tuple[str, str, DecisionLesson]] = []
        for key in sorted(entries):
            kind, _, rest = key.partition("/")
            name, _, tail = rest.partition("/")
            tenant = self._tenant(name)
            if kind == "trainer":
                tenant.trainer = ValueTrainer.from_dict(msgspec.msgpack.decode(entries[key]))
                tenant.trainer.model.encoder = self._encoder
            elif kind == "counters":
                tenant.counters = msgspec.msgpack.decode(entries[key], type=_Counters)
            elif kind == "waiting":
                value = self._opened(name, tail, entries[key])
                if value is not None:
                    tenant.waiting[tail] = msgspec.msgpack.decode(value, type=_Waiting)
            elif kind == "memory":
                value = self._opened(name, "", entries[key])
                if value is None:
                    continue
                item = msgspec.msgpack.decode(value, type=Example)
                if entries[key][:1] == ENTRY:
                    tenant.sealed[item.orchestration_id] = sealed_by(entries[key])
                tenant.memory[int(tail)] = item
                tenant.slots[item.orchestration_id] = int(tail)
            elif kind == "indicators":
                tenant.indicators = msgspec.msgpack.decode(entries[key], type=dict[str, Indicator])
            elif kind == "decisions":
                told.append((name, tail, msgspec.msgpack.decode(entries[key], type=DecisionLesson)))
        for name, oid, lesson in sorted(told, key=lambda item: item[2].sequence):
            self._tenant(name).decisions.restore(oid, lesson)
        for tenant in self._tenants.values():
            tenant.waiting = dict(sorted(tenant.waiting.items(), key=lambda pair: pair[1].sequence))

    def process(self, records: Iterable[LogRecord], now_ns: int) -> StageOutput:
        """Fold records; publishes at the record that completes a count."""
        events: list[Any] = []
        for record in records:
            try:
                event = record.event or decode(record.value)
            except SchemaError as exc:
                events.append(dead_letter(record, exc.message))
                continue
            if isinstance(event, OrchestrationRevised):
                self._on_orchestration(event)
            elif isinstance(event, RewardsComputed):
                events += self._on_rewards(event)
            elif isinstance(event, LessonReady):
                if event.orchestration is not None:
                    self._on_orchestration(event.orchestration)
                if event.rewards is not None:
                    events += self._on_rewards(event.rewards)
        writes, self._writes = self._writes, {}
        return StageOutput(events=events, writes=writes)

    def tick(self, now_ns: int) -> StageOutput:
        """No timers."""
        return StageOutput()

    def next_timer_ns(self) -> int | None:
        """No timers."""
        return None

    def _opened(self, name: str, oid: str, entry: bytes) -> bytes | None:
        """An entry made of lessons; None: erased."""
        if entry[:1] != ENTRY:
            return entry
        value = self._vault.open_entry(name, entry) if self._vault is not None else None
        if value is not None and oid:
            self._tenant(name).sealed[oid] = sealed_by(entry)
        return value

    def _closed(self, name: str, oid: str, value: Any) -> bytes:
        """The entry of lessons of an orchestration."""
        data = _pack(value)
        trace_id = self._tenants[name].sealed.get(oid)
        return (
            data if trace_id is None or self._vault is None else self._vault.seal_entry(name, trace_id, data)
        )

    def _forget_erased(self, name: str, tenant: _Tenant) -> None:
        if self._vault is None:
            return
        gone = [oid for oid, trace in tenant.sealed.items() if self._vault.keys.find(name, trace) is None]
        for oid in gone:
            del tenant.sealed[oid]
            slot = tenant.slots.pop(oid, None)
            if slot is not None:
                del tenant.memory[slot]
                self._writes[f"memory/{name}/{slot}"] = None
            if tenant.waiting.pop(oid, None) is not None:
                self._writes[f"waiting/{name}/{oid}"] = None
            self._keep_decisions(name, tenant, tenant.decisions.observe(oid, None))

    def _tenant(self, name: str) -> _Tenant:
        if name not in self._tenants:
            self._tenants[name] = _Tenant(self._settings.value_features, self._encoder)
        return self._tenants[name]

    def _on_orchestration(self, event: OrchestrationRevised) -> None:
        name, oid = event.tenant, event.orchestration_id
        if is_holdout(oid, self._settings.holdout):
            return
        tenant = self._tenant(name)
        self._observe_decisions(tenant, event)
        if event.content is None:
            if tenant.waiting.pop(oid, None) is not None:
                self._writes[f"waiting/{name}/{oid}"] = None
            return
        content = event.content
        closed = next((call.sealed for call in content.calls if call.sealed), "")
        if closed and self._vault is not None:
            content = self._vault.open_content(content)
            tenant.sealed[oid] = closed.partition("/")[0]
        learned = lessons(known_cast(content), self._encoder)
        slot = tenant.slots.get(oid)
        if slot is not None:
            self._remember(name, tenant, slot, Example(oid, learned, tenant.memory[slot].reward))
            return
        tenant.waiting.pop(oid, None)
        tenant.counters.sequence += 1
        tenant.waiting[oid] = _Waiting(tenant.counters.sequence, learned)
        self._writes[f"waiting/{name}/{oid}"] = self._closed(name, oid, tenant.waiting[oid])
        self._writes[f"counters/{name}"] = _pack(tenant.counters)
        if len(tenant.waiting) > PENDING_MAX:
            oldest = next(iter(tenant.waiting))
            del tenant.waiting[oldest]
            tenant.sealed.pop(oldest, None)
            self._writes[f"waiting/{name}/{oldest}"] = None

    def _observe_decisions(self, tenant: _Tenant, event: OrchestrationRevised) -> None:
        content, oid = event.content, event.orchestration_id
        if content is not None and has_told(content):
            lesson = lesson_of(content, self._prices)
        elif oid in tenant.decisions.lessons:
            lesson = None
        else:
            return
        self._keep_decisions(event.tenant, tenant, tenant.decisions.observe(oid, lesson))

    def _keep_decisions(self, name: str, tenant: _Tenant, changed: Iterable[str]) -> None:
        for oid in changed:
            lesson = tenant.decisions.lessons.get(oid)
            self._writes[f"decisions/{name}/{oid}"] = None if lesson is None else _pack(lesson)

    def _reward_decisions(self, tenant: _Tenant, event: RewardsComputed) -> None:
        oid = event.orchestration_id
        known = tenant.decisions.lessons.get(oid)
        if known is None or (known.reward is None and event.status not in {"final", "corrected"}):
            return
        if tenant.decisions.reward(oid, event.team, grades_of(event.rewards)):
            self._keep_decisions(event.tenant, tenant, (oid,))

    def _remember(self, name: str, tenant: _Tenant, slot: int, item: Example) -> None:
        tenant.memory[slot] = item
        tenant.slots[item.orchestration_id] = slot
        self._writes[f"memory/{name}/{slot}"] = self._closed(name, item.orchestration_id, item)

    def _on_rewards(self, event: RewardsComputed) -> list[ValueModelPublished | DecisionModelPublished]:
        name, oid = event.tenant, event.orchestration_id
        if is_holdout(oid, self._settings.holdout):
            return []
        tenant = self._tenant(name)
        slot = tenant.slots.get(oid)
        self._reward_decisions(tenant, event)
        if event.team is None:
            if slot is not None:
                del tenant.memory[slot], tenant.slots[oid]
                self._writes[f"memory/{name}/{slot}"] = None
            return []
        if slot is not None:
            old = tenant.memory[slot]
            self._remember(name, tenant, slot, Example(oid, old.lessons, event.team))
            return []
        if event.status not in {"final", "corrected"}:
            return []
        waiting = tenant.waiting.pop(oid, None)
        if waiting is None:
            return []
        self._writes[f"waiting/{name}/{oid}"] = None
        counters = tenant.counters
        slot = counters.next_slot
        counters.next_slot = (slot + 1) % MEMORY
        evicted = tenant.memory.get(slot)
        if evicted is not None:
            del tenant.slots[evicted.orchestration_id]
            tenant.sealed.pop(evicted.orchestration_id, None)
        self._remember(name, tenant, slot, Example(oid, waiting.lessons, event.team))
        counters.new += 1
        counters.total += 1
        if self._watched:
            tenant.indicators = advanced(tenant.indicators, self._watched, event.rewards)
            self._writes[f"indicators/{name}"] = _pack(tenant.indicators)
        share = min(int(counters.total * self._settings.value_growth), MEMORY // 4)
        due = max(self._settings.value_every, share)
        published = self._publish(name, tenant) if counters.new >= due else []
        self._writes[f"counters/{name}"] = _pack(counters)
        return published

    def _publish(self, name: str, tenant: _Tenant) -> list[ValueModelPublished | DecisionModelPublished]:
        tenant.counters.new = 0
        self._forget_erased(name, tenant)
        tenant.trainer.update([item for _, item in sorted(tenant.memory.items())])
        self._writes[f"trainer/{name}"] = _pack(tenant.trainer.to_dict())
        model = tenant.trainer.model
        parameters = model.to_dict()
        if tenant.indicators:
            parameters["indicators"] = as_json(tenant.indicators)
        if self._settings.value_table:
            parameters["table"] = table_of(
                ([lesson.state for lesson in item.lessons], item.reward) for item in tenant.memory.values()
            )
        version = f"value@v{tenant.trainer.updates}-{content_hash(parameters)[:8]}"
        return [
            *self._decision_model(name, tenant, version),
            ValueModelPublished(
                tenant=name,
                version=version,
                kind=model.kind,
                trained_on=tenant.counters.total,
                parameters=parameters,
            ),
        ]

    def _decision_model(
        self, name: str, tenant: _Tenant, value_model: str
    ) -> list[ValueModelPublished | DecisionModelPublished]:
        """The decision models as of now; none where no program told a decision that was rewarded."""
        if tenant.decisions.is_empty:
            return []
        parameters = tenant.decisions.parameters()
        return [
            DecisionModelPublished(
                tenant=name,
                version=f"decisions@v{tenant.trainer.updates}-{content_hash(parameters)[:8]}",
                value_model=value_model,
                kind=DECISIONS,
                trained_on=len(tenant.decisions.lessons),
                parameters=parameters,
            )
        ]
