"""One partition of the partitioned runtime: joining, assembly, rewards and credit for the orchestrations that are at home here.

A trace belongs to the partition of its key, a piece of evidence to the partition of its own. Traces that are one orchestration
are found by a union-find whose parts live at their owners: each trace knows the trace that it was joined to (a smaller id, so
that there are no cycles), and whoever is asked about a joined trace passes the question on. What a trace's home holds moves
to the home that it was joined to. So the home of an orchestration is the owner of its smallest trace id, whatever the number
of partitions and the order of arrival; once all messages have arrived, its content is what one process would have made (ADR 7).

Place in the flow: ``operations`` of one partition (from ``NormaliseStage`` and from other shards) and ``models`` in; derived
events of this partition, lessons and messages out.

Invariants: pure; every message may come again, or late, without effect on the last content; what moves is in one place at a time,
or on its way. After ``observe`` nothing is published nor derived until the next ``tick`` behind what ``catch_up`` names: the runtime folds what was on
the log before it ticks, so that a restored stage makes only what is not on the log yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from spanloop.pipeline.assembly.join import Component, Emitted, Seen, evidence_of, match
from spanloop.pipeline.assembly.stage import AssemblyStage, refused_record
from spanloop.pipeline.credit.value import dead_letter
from spanloop.pipeline.dialects import decode_operation
from spanloop.pipeline.dialects.operation import Operation, encode_operation
from spanloop.pipeline.held import Held
from spanloop.pipeline.ports import LogRecord, StageOutput, alone, source_of
from spanloop.pipeline.samples import is_holdout
from spanloop.pipeline.shard_feedback import FeedbackRoutes
from spanloop.pipeline.shard_tables import FAR_NS, Evidence, Fold, Joined, Observed, Tables
from spanloop.pipeline.signal import SignalStage
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    CreditAssigned,
    Event,
    OrchestrationRevised,
    RewardsComputed,
    SamplesBuilt,
    ValueModelPublished,
    decode,
)
from spanloop.schemas.operations import (
    EvidenceSeen,
    FeedbackClaimed,
    FeedbackRouted,
    LessonReady,
    OperationsMoved,
    OperationsRead,
    OrchestrationPlaced,
    Published,
    TracesJoined,
)

if TYPE_CHECKING:
    from spanloop.pipeline.sealing.vault import Vault
    from spanloop.schemas.settings import Pipeline

__all__ = ["ShardStage"]

_REMEMBER = 31
"""A joined trace is remembered for so many retentions: as long as a forgotten orchestration refuses its late spans."""
_EVIDENCE = 2
"""Evidence is remembered for so many retentions after it was last added to: at least as long as the orchestration that it is in,
unless that goes on growing for longer."""
_PLACED = 2
"""It is remembered for so many retentions after the last revision, or the last feedback, where an orchestration is."""
_LIMITS = {"e": 16, "p": 4, "j": 16, "b": 1}
"""Entries of a kind for each orchestration that may be held; where there are more, the oldest are forgotten before their time."""
_MOVE_BYTES = 600_000
"""Operations in one message that moves them."""


class ShardStage:
    """``Stage`` of one partition; see the module.

    Args:
        settings: of the pipeline.
        partition: of the topic ``operations`` and of what is derived here.
        partitions: how many there are; part of the state's name, because another number means other owners.
        vault: of the signal stage.
    """

    def __init__(
        self, settings: Pipeline, partition: int, partitions: int, *, vault: Vault | None = None
    ) -> None:
        self._settings = settings
        self.partition = self.output_partition = partition
        self.name = f"shard-{partition}-of-{partitions}"
        self.topics: tuple[str, ...] = (alone(source_of(topics.OPERATIONS, partition)), topics.MODELS)
        self._retention_ns = round(settings.retention_s * 1e9)
        self._assembly = AssemblyStage(settings, by_evidence=False)
        self._signal = SignalStage(settings, vault=vault)
        self.restore({})

    # ------------------------------------------------------------ state

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Become the state that was committed as ``entries``."""
        parts: dict[str, dict[str, bytes]] = {"a": {}, "s": {}, "": {}}
        for key, value in entries.items():
            kind, _, rest = key.partition("/")
            if kind in ("a", "s"):
                parts[kind][rest] = value
            else:
                parts[""][key] = value
        self._tables = Tables()
        self._tables.restore(parts[""])
        self._ends: dict[str, list[Seen]] = {}
        self._assembly.restore(parts["a"])
        self._signal.restore(parts["s"])
        self._routes = FeedbackRoutes(
            self._tables, self._signal, self._parent, partition=self.partition,
            retention_ns=self._retention_ns, placed_ns=_PLACED * self._retention_ns,
        )  # fmt: skip
        seen: Mapping[str, Observed] = self._tables.all("w")
        self._assembly.floors = {key: item.emitted() for key, item in seen.items() if item.revision}
        self._recovering = self._signal.waiting = bool(seen)
        self._behind: dict[str, int] = {}

    def observe(self, record: LogRecord) -> None:
        """Take note of an output of this partition that is on the log and not in the state: of the stage before it was restored, or
        of a former owner. Any order, any number of times; until the next ``tick`` nothing is published."""
        event = decode(record.value)
        if isinstance(event, OrchestrationRevised | RewardsComputed):
            seen: Observed = self._tables.get("w", event.key) or Observed(FAR_NS)
            if isinstance(event, RewardsComputed):
                if seen.rewards is None or seen.rewards.revision <= event.revision:
                    seen.rewards = event if self._teaches(event) else None
            elif event.revision >= seen.revision:
                _see(seen, event)
                self._assembly.floors[event.key] = seen.emitted()
            self._tables.put("w", event.key, seen)
        if isinstance(event, OrchestrationRevised | RewardsComputed | CreditAssigned):
            self._recovering = self._signal.waiting = True
        if self._recovering or not isinstance(event, SamplesBuilt):
            self._signal.observe(event, record.appended_ns)

    def catch_up(self, ends: Mapping[str, int]) -> None:
        """Offsets, by source, up to which input was on the log when ``observe`` was called: only then may a ``tick`` go on."""
        self._behind = dict(ends)

    @property
    def caught_up(self) -> bool:
        """Whether the stage publishes again."""
        return not self._recovering

    # ------------------------------------------------------------ input

    def process(self, records: Iterable[LogRecord], now_ns: int) -> StageOutput:
        """Fold messages in order; orchestrations that changed are due anew."""
        fold = Fold(now_ns)
        for record in records:
            try:
                event = decode(record.value)
                handler = self._handlers.get(type(event))
                if handler is not None:
                    handler(self, event, fold)
            except SchemaError as exc:
                refused = dead_letter if record.topic == topics.MODELS else refused_record
                fold.events.append(refused(record, exc.message))
            if record.offset >= self._behind.get(record.source, record.offset + 1):
                del self._behind[record.source]
        self._assembly.settle(fold.touched, now_ns, fold.assembled)
        return self._finished(fold)

    def _finished(self, fold: Fold) -> StageOutput:
        """Carry what assembly published into rewards and credit, and collect everything."""
        published = [event for event in fold.assembled.events if isinstance(event, OrchestrationRevised)]
        store = self._signal.store
        for event in published:
            if event.content is not None:
                component = self._assembly.joiner.of_trace.get((event.tenant, min(event.content.trace_ids)))
                emitted = component.emitted if component is not None else ()
                store.inherit(event.key, [name for name in emitted if name != event.orchestration_id])
                fold.events.append(_placed(event.tenant, event.orchestration_id, event.content.trace_ids))
        fold.incoming += published
        fold.flush(self._signal)
        if not self._recovering and store.marked:
            fold.take(self._signal.resume(fold.now_ns))
        for event in published:
            held = store.held.get(event.key)
            self._routes.offer(held.targets if held is not None else (), fold)
        lessons = self._lessons(published, fold)
        writes = self._tables.take_writes()
        writes.update({f"a/{key}": value for key, value in fold.assembled.writes.items()})
        for parts in (fold.signalled.writes, store.take_writes()):
            writes.update({f"s/{key}": value for key, value in parts.items()})
        return StageOutput(
            events=[*fold.events, *lessons, *fold.assembled.events, *fold.signalled.events], writes=writes
        )

    # ------------------------------------------------------------ operations

    def _parent(self, tenant: str, trace_id: str, now_ns: int) -> str:
        """The trace that a trace was joined to; empty: it is at home here."""
        key = f"{tenant}/{trace_id}"
        joined: Joined | None = self._tables.get("j", key)
        if joined is None:
            return ""
        if joined.until_ns - now_ns < (_REMEMBER - 1) * self._retention_ns:
            self._tables.put("j", key, Joined(now_ns + _REMEMBER * self._retention_ns, joined.parent))
        return joined.parent

    def _operations(self, event: OperationsRead, fold: Fold) -> None:
        tenant, receiver = event.tenant, event.home or event.trace_id
        if self._refused(tenant, event.trace_id, event.operations, fold):
            return
        parent = self._parent(tenant, receiver, fold.now_ns)
        read = () if parent and event.home else [(decode_operation(o), o) for o in event.operations]
        if not event.home:
            self._tell(tenant, event.trace_id, read, fold, known=not parent)
        if parent:
            fold.events.append(msgspec.structs.replace(event, home=parent))
        else:
            self._take(tenant, receiver, read, fold)

    def _refused(self, tenant: str, trace_id: str, operations: tuple[bytes, ...], fold: Fold) -> bool:
        raw = b"".join(operations)
        return self._assembly.refuse_late(tenant, trace_id, len(operations), raw, fold.assembled)

    def _take(
        self, tenant: str, home: str, operations: Iterable[tuple[Operation, bytes]], fold: Fold
    ) -> None:
        """Fold operations into the component of ``home``."""
        joiner = self._assembly.joiner
        for operation, encoded in operations:
            trace_id = operation.trace_id
            if joiner.add(tenant, operation, encoded) is not None:
                fold.touched[(tenant, trace_id)] = None
            if (
                trace_id != home
                and joiner.of_trace.get((tenant, home)) is not joiner.of_trace[(tenant, trace_id)]
            ):
                joiner.join(tenant, home, trace_id)
                fold.touched[(tenant, trace_id)] = None

    def _tell(
        self,
        tenant: str,
        trace_id: str,
        operations: Iterable[tuple[Operation, bytes]],
        fold: Fold,
        *,
        known: bool,
    ) -> None:
        """Send the evidence of new operations to its owners. Of a trace at home here, what is held already was told."""
        component = self._assembly.joiner.of_trace.get((tenant, trace_id)) if known else None
        buffer = component.traces.get(trace_id) if component is not None else None
        for operation, encoded in operations:
            if buffer is not None and buffer.spans.get(operation.span_id) == encoded:
                continue
            for other in dict.fromkeys(name for name, _ in operation.links):
                if other != trace_id:
                    fold.events.append(_union(tenant, trace_id, other))
            for key, seen in evidence_of(operation):
                fold.events.append(
                    EvidenceSeen(
                        tenant=tenant, evidence=key, trace_id=trace_id, side=seen.side,
                        operation=_end_bytes(seen, operation, encoded),
                    )
                )  # fmt: skip

    # ------------------------------------------------------------ joining

    def _evidence(self, event: EvidenceSeen, fold: Fold) -> None:
        key = event.key
        entry: Evidence = self._tables.get("e", key) or Evidence(0)
        ends = self._ends.get(key)
        if ends is None:
            ends = self._ends[key] = [_seen(*end) for end in entry.ends]
        others, added = match(ends, _seen(event.trace_id, event.side, event.operation))
        for other in dict.fromkeys(others):
            fold.events.append(_union(event.tenant, event.trace_id, other))
        if added:
            entry.ends.append((event.trace_id, event.side, event.operation))
        if self._routes.flush_waiting(entry, event.trace_id, fold) or added:
            entry.until_ns = fold.now_ns + _EVIDENCE * self._retention_ns
            self._tables.put("e", key, entry)

    def _joined(self, event: TracesJoined, fold: Fold) -> None:
        tenant, one, other = event.tenant, event.trace_id, event.other
        parent = self._parent(tenant, one, fold.now_ns)
        if parent:
            if parent != other:
                fold.events.append(_union(tenant, parent, other))
        elif one < other:
            fold.events.append(_union(tenant, one, other))
        elif one > other:
            self._tables.put(
                "j", f"{tenant}/{one}", Joined(fold.now_ns + _REMEMBER * self._retention_ns, other)
            )
            self._give_away(tenant, one, other, fold)

    def _give_away(self, tenant: str, trace_id: str, to: str, fold: Fold) -> None:
        """Send everything of a trace's home to the home of ``to``."""
        component = self._assembly.release(tenant, trace_id, fold.assembled)
        traces = dict.fromkeys((trace_id, *(component.traces if component is not None else ())))
        for name in traces:
            fold.touched.pop((tenant, name), None)
        emitted = component.emitted if component is not None else {}
        fold.flush(self._signal)
        store = self._signal.store
        keys = [f"{tenant}/{name}" for name in emitted]
        models = store.models_of(keys)
        helds, feedback = store.give_away(keys, self._targets(tenant, traces, component))
        published = tuple(_published(name, item, helds) for name, item in sorted(emitted.items()))
        versions = [v for name in sorted(traces) for v in _versions(component, name)]
        if not (versions or published or feedback):
            return
        for n, chunk in enumerate(_chunks(versions) or [()]):
            message = OperationsMoved(tenant=tenant, trace_id=to, child=trace_id, operations=chunk)
            if n == 0:
                message = msgspec.structs.replace(
                    message, published=published, models=tuple(models), feedback=tuple(feedback),
                    overflow=component.overflow if component is not None else 0,
                )  # fmt: skip
            fold.events.append(message)

    def _targets(self, tenant: str, traces: Iterable[str], component: Component | None) -> list[str]:
        """What waiting feedback of a home may name."""
        if not self._signal.store.has_unclaimed:
            return []
        names = [f"trace/{name}" for name in traces]
        if component is not None:
            names += [f"orchestration/{name}" for name in component.emitted]
            for operation in component.operations():
                names.append(f"span/{operation.span_id}")
                if operation.call is not None and operation.call.response_id:
                    names.append(f"response/{operation.call.response_id}")
        return [f"{tenant}/{name}" for name in names]

    def _moved(self, event: OperationsMoved, fold: Fold) -> None:
        tenant, home = event.tenant, event.trace_id
        parent = self._parent(tenant, home, fold.now_ns)
        if parent:
            fold.events.append(msgspec.structs.replace(event, trace_id=parent))
            return
        by_trace: dict[str, list[tuple[Operation, bytes]]] = {}
        for encoded in event.operations:
            operation = decode_operation(encoded)
            by_trace.setdefault(operation.trace_id, []).append((operation, encoded))
        for trace_id, operations in by_trace.items():
            if not self._refused(tenant, trace_id, tuple(o for _, o in operations), fold):
                self._take(tenant, home, operations, fold)
        component = self._assembly.joiner.of_trace.get((tenant, home))
        if component is not None and component.traces:
            component.overflow = max(component.overflow, event.overflow)
            for item in event.published:
                self._adopt(tenant, item, component, fold)
            for model in event.models:
                self._signal.store.keep_model(model)
        fold.incoming += event.feedback

    def _adopt(self, tenant: str, item: Published, component: Component, fold: Fold) -> None:
        """Go on with an id where another home stopped. It is published anew here, unless it is lost."""
        name, store = item.orchestration_id, self._signal.store
        known, held = component.emitted.get(name), store.held.get(f"{tenant}/{name}")
        lacks_signal = held is None or held.revision < item.signal_revision
        if known is None or known.revision < item.revision:
            component.emitted[name] = Emitted(item.revision, "", item.complete, item.merged_into)
        elif known.revision == item.revision and (
            lacks_signal
            or (known.merged_into or known.content_hash) not in ("", item.merged_into or item.content_hash)
        ):
            known.content_hash = known.merged_into = ""
        else:
            return
        fold.touched[(tenant, component.first_trace)] = None
        store.adopt(
            Held(
                tenant=tenant, orchestration_id=name, orchestration_revision=0, complete=item.complete,
                touched_ns=store.touch_after(fold.now_ns), merged_into=item.merged_into, value_model=item.value_model,
                version_fixed=item.version_fixed, revision=item.signal_revision, rewards_hash=item.rewards_hash,
                credit_hash=item.credit_hash, samples_hash=item.samples_hash, dirty=True,
            )
        )  # fmt: skip

    # ------------------------------------------------------------ other messages

    def _feedback(self, event: FeedbackRouted, fold: Fold) -> None:
        self._routes.routed(event, fold)

    def _claimed(self, event: FeedbackClaimed, fold: Fold) -> None:
        self._routes.claimed(event, fold)

    def _placed(self, event: OrchestrationPlaced, fold: Fold) -> None:
        self._routes.placed(event, fold)

    def _model(self, event: ValueModelPublished, fold: Fold) -> None:
        fold.incoming.append(event)

    _handlers: Mapping[type[Event], Callable[[Any, Any, Fold], None]] = {
        OperationsRead: _operations,
        EvidenceSeen: _evidence,
        TracesJoined: _joined,
        OperationsMoved: _moved,
        FeedbackRouted: _feedback,
        FeedbackClaimed: _claimed,
        OrchestrationPlaced: _placed,
        ValueModelPublished: _model,
    }

    # ------------------------------------------------------------ lessons

    def _teaches(self, event: RewardsComputed) -> bool:
        """Whether the value stage would take something from rewards."""
        if is_holdout(event.orchestration_id, self._settings.holdout):
            return False
        return event.team is None or event.status in {"final", "corrected"}

    def _lessons(self, published: Iterable[OrchestrationRevised], fold: Fold) -> list[LessonReady]:
        revised = {event.key: event for event in published if event.content is not None}
        derived = [event for event in fold.signalled.events if isinstance(event, RewardsComputed)]
        lessons: list[LessonReady] = []
        for event in (*fold.lessons, *derived):
            if self._teaches(event):
                content = revised.pop(event.key, None) or self._as_held(event.key)
                lessons.append(LessonReady(tenant=event.tenant, orchestration=content, rewards=event))
        for key, event in revised.items():
            held = self._signal.store.held.get(key)
            known = held is not None and held.version_fixed
            if known and not is_holdout(event.orchestration_id, self._settings.holdout):
                lessons.append(LessonReady(tenant=event.tenant, orchestration=event))
        return lessons

    def _as_held(self, key: str) -> OrchestrationRevised | None:
        held = self._signal.store.held.get(key)
        if held is None or not held.content:
            return None
        return OrchestrationRevised(
            tenant=held.tenant, orchestration_id=held.orchestration_id, revision=held.orchestration_revision,
            complete=held.complete, content=self._signal.store.content(key),
        )  # fmt: skip

    # ------------------------------------------------------------ time

    def tick(self, now_ns: int) -> StageOutput:
        """Publish what is due, forget what is too old; feedback whose target never came becomes dead letters."""
        fold = Fold(now_ns)
        if self._recovering:
            if self._behind:
                return self._finished(fold)
            self._recover(fold)
        due = self._assembly.tick(now_ns)
        fold.assembled.events += due.events
        fold.assembled.writes.update(due.writes)
        fold.take(self._signal.tick(now_ns))
        old = self._tables.take_old(now_ns)
        for kind, share in _LIMITS.items():
            old += self._tables.take_excess(kind, share * self._settings.orchestrations_max)
        for kind, key, entry in old:
            if kind == "e":
                self._ends.pop(key, None)
            fold.events += self._routes.given_up(kind, key, entry)
        return self._finished(fold)

    def _recover(self, fold: Fold) -> None:
        """All that was on the log is folded: put what was observed where it belongs by now."""
        homeless = self._assembly.absorb_floors(fold.now_ns, fold.assembled)
        self._recovering = self._signal.waiting = False
        seen: Observed
        for key, seen in list(self._tables.all("w").items()):
            tenant, _, name = key.partition("/")
            if key in homeless and seen.trace_id:
                self._send_after(tenant, name, seen, fold)
            elif seen.trace_id and not seen.merged_into:
                fold.events.append(_placed(tenant, name, [seen.trace_id]))
            if seen.rewards is not None:
                fold.lessons.append(seen.rewards)
            self._tables.drop("w", key)
        self._routes.offer_all(fold)

    def _send_after(self, tenant: str, name: str, seen: Observed, fold: Fold) -> None:
        """Tell the new home of an orchestration that was given away what was published of it here nevertheless."""
        parent = self._parent(tenant, seen.trace_id, fold.now_ns)
        if parent:
            targets = [f"{tenant}/orchestration/{name}"]
            helds, feedback = self._signal.store.give_away([f"{tenant}/{name}"], targets)
            published = (_published(name, seen.emitted(), helds),)
            fold.events.append(
                OperationsMoved(
                    tenant=tenant, trace_id=parent, child=seen.trace_id, published=published, feedback=tuple(feedback)
                )
            )  # fmt: skip

    def next_timer_ns(self) -> int | None:
        """The earliest deadline of any part; at once after ``observe``."""
        if self._recovering:
            return None if self._behind else 0
        timers = (self._assembly.next_timer_ns(), self._signal.next_timer_ns(), self._tables.next_ns())
        return min((timer for timer in timers if timer is not None), default=None)


def _see(seen: Observed, event: OrchestrationRevised) -> None:
    told, before = event.merged_into or event.content_hash, seen.merged_into or seen.content_hash
    if event.content is not None:
        seen.trace_id = min(event.content.trace_ids)
    if event.revision == seen.revision and told != before:
        seen.content_hash, seen.merged_into = "two", ""
    else:
        seen.content_hash, seen.merged_into = event.content_hash, event.merged_into
    seen.revision, seen.complete = event.revision, event.complete


def _union(tenant: str, one: str, other: str) -> TracesJoined:
    """The message that joins two traces, to the larger: that one moves."""
    return TracesJoined(tenant=tenant, trace_id=max(one, other), other=min(one, other))


def _placed(tenant: str, name: str, trace_ids: Iterable[str]) -> OrchestrationPlaced:
    return OrchestrationPlaced(tenant=tenant, orchestration_id=name, trace_id=min(trace_ids))


def _end_bytes(seen: Seen, operation: Operation, encoded: bytes) -> bytes:
    """What the owner of a piece of evidence must know of an operation."""
    if seen.operation is None:
        return b""
    return encoded if seen.operation is operation else encode_operation(seen.operation)


def _seen(trace_id: str, side: int, operation: bytes) -> Seen:
    return Seen(trace_id, decode_operation(operation) if operation else None, side)


def _published(name: str, emitted: Emitted, helds: Iterable[Held]) -> Published:
    held = next((item for item in helds if item.orchestration_id == name), None)
    signal: dict[str, Any] = {}
    if held is not None:
        signal = {
            "signal_revision": held.revision,
            "rewards_hash": held.rewards_hash,
            "credit_hash": held.credit_hash,
            "samples_hash": held.samples_hash,
            "value_model": held.value_model,
            "version_fixed": held.version_fixed,
        }
    return Published(
        name, emitted.revision, emitted.content_hash, emitted.complete, emitted.merged_into, **signal
    )


def _versions(component: Component | None, trace_id: str) -> list[bytes]:
    buffer = component.traces.get(trace_id) if component is not None else None
    return buffer.versions() if buffer is not None else []


def _chunks(versions: list[bytes]) -> list[tuple[bytes, ...]]:
    chunks: list[tuple[bytes, ...]] = []
    part: list[bytes] = []
    size = 0
    for version in versions:
        if part and size + len(version) > _MOVE_BYTES:
            chunks.append(tuple(part))
            part, size = [], 0
        part.append(version)
        size += len(version)
    return [*chunks, tuple(part)] if part else chunks
