"""One partition of the partitioned runtime: joining, assembly, rewards and credit for the orchestrations that are at home here.

A trace belongs to the partition of its key, a piece of evidence to the partition of its own. Traces that are one orchestration
are found by a union-find whose parts live at their owners: each trace knows the trace that it was joined to (a smaller id, so
that there are no cycles), and whoever is asked about a joined trace passes the question on. What a trace's home holds moves
to the home that it was joined to. So the home of an orchestration is the owner of its smallest trace id, whatever the number
of partitions and the order of arrival; once all messages have arrived, its content is what one process would have made.

Place in the flow: ``operations`` of one partition (from ``NormaliseStage`` and from other shards) and ``models`` in; derived
events of this partition, lessons and messages out. Invariants: pure; every message may come again, or late, without effect on
the last content; what moves is in one place at a time, or on its way.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from spanloop.pipeline.assembly.join import Component, Emitted, Seen, evidence_of, match
from spanloop.pipeline.assembly.stage import AssemblyStage, refused_record
from spanloop.pipeline.dialects import decode_operation
from spanloop.pipeline.held import Held, expired
from spanloop.pipeline.ports import LogRecord, StageOutput
from spanloop.pipeline.samples import is_holdout
from spanloop.pipeline.signal import SignalStage
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    Event,
    FeedbackReceived,
    OrchestrationRevised,
    RewardsComputed,
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
    from spanloop.schemas.settings import Pipeline

__all__ = ["ShardStage"]

_REMEMBER = 31
"""A joined trace is remembered for so many retentions: as long as a forgotten orchestration refuses its late spans."""
_PENDING_MAX = 256
"""Feedback that waits for one response or orchestration id."""
_MOVE_BYTES = 600_000
"""Operations in one message that moves them."""


class _Joined(msgspec.Struct, frozen=True, array_like=True):
    """A trace that was joined to another: everything about it goes there."""

    parent: str
    until_ns: int


_End = tuple[str, int, bytes]
"""Trace, side, operation as one end of a piece of evidence."""


class _Evidence(msgspec.Struct, array_like=True):
    """A piece of evidence with the ends that were seen; for a response also the feedback that waits for its trace."""

    until_ns: int
    ends: list[_End] = []
    waiting: list[FeedbackReceived] = []


class _Place(msgspec.Struct, array_like=True):
    """Where an orchestration id is at home, and feedback that waits to know."""

    until_ns: int
    trace_id: str = ""
    waiting: list[FeedbackReceived] = []


class _Broadcast(msgspec.Struct, array_like=True):
    """Feedback on a span of an unknown trace."""

    until_ns: int
    feedback: FeedbackReceived
    responsible: bool
    claimed: bool = False


_KINDS: dict[str, type[Any]] = {"j": _Joined, "e": _Evidence, "p": _Place, "b": _Broadcast}
_pack = msgspec.msgpack.encode


class ShardStage:
    """``Stage`` of one partition; see the module.

    Args:
        settings: of the pipeline.
        partition: of the topic ``operations`` and of what is derived here.
        partitions: how many there are; part of the state's name, because another number means other owners.
    """

    def __init__(self, settings: Pipeline, partition: int, partitions: int) -> None:
        self._settings = settings
        self.partition = self.output_partition = partition
        self.name = f"shard-{partition}-of-{partitions}"
        self.topics: tuple[str, ...] = (f"{topics.OPERATIONS}/{partition}", topics.MODELS)
        self._retention_ns = round(settings.retention_s * 1e9)
        self._assembly = AssemblyStage(settings, by_evidence=False)
        self._signal = SignalStage(settings)
        self._reset()

    def _reset(self) -> None:
        self._tables: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
        self._writes: dict[str, bytes | None] = {}
        self._ends: dict[str, list[Seen]] = {}
        self._timers: list[tuple[int, str, str]] = []

    # ------------------------------------------------------------ state

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Become the state that was committed as ``entries``."""
        self._reset()
        parts: dict[str, dict[str, bytes]] = {"a": {}, "s": {}}
        for key, value in entries.items():
            kind, _, rest = key.partition("/")
            if kind in parts:
                parts[kind][rest] = value
            else:
                entry = self._tables[kind][rest] = msgspec.msgpack.decode(value, type=_KINDS[kind])
                self._timers.append((entry.until_ns, kind, rest))
        heapq.heapify(self._timers)
        self._assembly.restore(parts["a"])
        self._signal.restore(parts["s"])

    def _put(self, kind: str, key: str, value: Any) -> None:
        self._tables[kind][key] = value
        heapq.heappush(self._timers, (value.until_ns, kind, key))
        self._writes[f"{kind}/{key}"] = _pack(value)

    def _drop(self, kind: str, key: str) -> None:
        if self._tables[kind].pop(key, None) is not None:
            self._writes[f"{kind}/{key}"] = None

    def observe(self, record: LogRecord) -> None:
        """Take note of an output of this partition that is on the log behind the state that was restored."""
        event = decode(record.value)
        if isinstance(event, OrchestrationRevised):
            self._assembly.observe(event)
        self._signal.observe(event)

    # ------------------------------------------------------------ input

    def process(self, records: Iterable[LogRecord], now_ns: int) -> StageOutput:
        """Fold messages in order; orchestrations that changed are due anew."""
        fold = _Fold(now_ns)
        for record in records:
            try:
                event = decode(record.value)
                handler = self._handlers.get(type(event))
                if handler is not None:
                    handler(self, event, fold)
            except SchemaError as exc:
                fold.events.append(refused_record(record, exc.message))
        return self._settled(fold)

    def _settled(self, fold: _Fold) -> StageOutput:
        assembled = fold.assembled
        self._assembly.settle(fold.touched, fold.now_ns, assembled)
        return self._derived(fold, assembled)

    def _derived(self, fold: _Fold, assembled: StageOutput) -> StageOutput:
        """Carry what assembly published into rewards and credit, and collect everything."""
        published = [event for event in assembled.events if isinstance(event, OrchestrationRevised)]
        fold.signal += published
        fold.flush(self._signal)
        for event in published:
            self._place(event, fold)
        self._claim_broadcasts(fold)
        fold.flush(self._signal)
        signalled = fold.signalled
        lessons = [
            self._lesson(event, published)
            for event in signalled.events
            if isinstance(event, RewardsComputed) and self._teaches(event)
        ]
        return StageOutput(
            events=[*assembled.events, *signalled.events, *lessons, *fold.events],
            writes=self._collect(assembled.writes, signalled.writes),
        )

    def _collect(
        self, assembly: Mapping[str, bytes | None], signal: Mapping[str, bytes | None]
    ) -> dict[str, bytes | None]:
        own, self._writes = self._writes, {}
        own.update({f"a/{key}": value for key, value in assembly.items()})
        own.update({f"s/{key}": value for key, value in signal.items()})
        return own

    # ------------------------------------------------------------ operations

    def _parent(self, tenant: str, trace_id: str, now_ns: int) -> str:
        """The trace that a trace was joined to; empty: it is at home here."""
        key = f"{tenant}/{trace_id}"
        joined = self._tables["j"].get(key)
        if joined is None:
            return ""
        if joined.until_ns - now_ns < (_REMEMBER - 1) * self._retention_ns:
            self._put("j", key, _Joined(joined.parent, now_ns + _REMEMBER * self._retention_ns))
        return joined.parent

    def _operations(self, event: OperationsRead, fold: _Fold) -> None:
        receiver = event.home or event.trace_id
        parent = self._parent(event.tenant, receiver, fold.now_ns)
        if not event.home:
            self._tell(event, fold, known=not parent)
        if parent:
            fold.events.append(msgspec.structs.replace(event, home=parent))
            return
        self._take(event.tenant, receiver, event.operations, fold)

    def _take(self, tenant: str, home: str, operations: Iterable[bytes], fold: _Fold) -> None:
        """Fold operations into the component of ``home``."""
        refused: dict[str, bool] = {}
        for encoded in operations:
            operation = decode_operation(encoded)
            trace_id = operation.trace_id
            if trace_id not in refused:
                refused[trace_id] = self._assembly.refuse_late(
                    tenant, trace_id, len(tuple(operations)), encoded, fold.assembled
                )
            if refused[trace_id]:
                continue
            changed = self._assembly.joiner.add(tenant, operation, encoded)
            if trace_id != home:
                self._assembly.joiner.join(tenant, home, trace_id)
            if changed is not None:
                fold.touched[(tenant, trace_id)] = None

    def _tell(self, event: OperationsRead, fold: _Fold, *, known: bool) -> None:
        """Send the evidence of new operations to its owners. Of a trace at home here, what is held already was told."""
        component = self._assembly.joiner.of_trace.get((event.tenant, event.trace_id)) if known else None
        buffer = component.traces.get(event.trace_id) if component is not None else None
        for encoded in event.operations:
            operation = decode_operation(encoded)
            if buffer is not None and buffer.spans.get(operation.span_id) == encoded:
                continue
            for other in dict.fromkeys(trace_id for trace_id, _ in operation.links):
                if other != operation.trace_id:
                    fold.events.append(_union(event.tenant, operation.trace_id, other))
            for key, seen in evidence_of(operation):
                fold.events.append(
                    EvidenceSeen(
                        tenant=event.tenant, evidence=key, trace_id=seen.trace_id, side=seen.side,
                        operation=encoded if seen.operation is not None else b"",
                    )
                )  # fmt: skip

    # ------------------------------------------------------------ joining

    def _evidence(self, event: EvidenceSeen, fold: _Fold) -> None:
        key = event.key
        entry = self._tables["e"].get(key) or _Evidence(0)
        ends = self._ends.get(key)
        if ends is None:
            ends = self._ends[key] = [_seen(trace, side, operation) for trace, side, operation in entry.ends]
        others, added = match(ends, _seen(event.trace_id, event.side, event.operation))
        for other in dict.fromkeys(others):
            fold.events.append(_union(event.tenant, event.trace_id, other))
        for item in entry.waiting:
            fold.events.append(FeedbackRouted(tenant=event.tenant, feedback=item, to=event.trace_id))
        if added or entry.waiting:
            if added:
                entry.ends.append((event.trace_id, event.side, event.operation))
            entry.waiting = []
            entry.until_ns = fold.now_ns + 2 * self._retention_ns
            self._put("e", key, entry)

    def _union(self, event: TracesJoined, fold: _Fold) -> None:
        tenant, one, other = event.tenant, event.trace_id, event.other
        if one == other:
            return
        parent = self._parent(tenant, one, fold.now_ns)
        if parent:
            if parent != other:
                fold.events.append(_union(tenant, parent, other))
        elif one < other:
            fold.events.append(TracesJoined(tenant=tenant, trace_id=other, other=one))
        else:
            self._put("j", f"{tenant}/{one}", _Joined(other, fold.now_ns + _REMEMBER * self._retention_ns))
            fold.events += self._give_away(tenant, one, other, fold)

    def _give_away(self, tenant: str, trace_id: str, to: str, fold: _Fold) -> list[OperationsMoved]:
        """Everything of a trace's home, to the home of ``to``."""
        component = self._assembly.release(tenant, trace_id, fold.assembled)
        traces = [trace_id, *(component.traces if component is not None else ())]
        for name in traces:
            fold.touched.pop((tenant, name), None)
        emitted = component.emitted if component is not None else {}
        keys = [f"{tenant}/{name}" for name in emitted]
        targets = [f"{tenant}/trace/{name}" for name in traces]
        targets += [f"{tenant}/orchestration/{name}" for name in emitted]
        if component is not None:
            answers = (op.call.response_id for op in component.operations() if op.call is not None)
            targets += [f"{tenant}/response/{name}" for name in sorted(set(answers) - {""})]
        fold.flush(self._signal)
        helds, feedback = self._signal.store.give_away(keys, targets)
        published = tuple(_published(name, item, helds) for name, item in sorted(emitted.items()))
        versions = [v for b in (component.traces.values() if component else ()) for v in b.versions()]
        if not (versions or published or feedback):
            return []
        chunks = _chunks(versions) or [()]
        return [
            OperationsMoved(
                tenant=tenant, trace_id=to, child=trace_id, operations=chunk,
                published=published if n == 0 else (), feedback=tuple(feedback) if n == 0 else (),
            )
            for n, chunk in enumerate(chunks)
        ]  # fmt: skip

    def _moved(self, event: OperationsMoved, fold: _Fold) -> None:
        tenant, home = event.tenant, event.trace_id
        parent = self._parent(tenant, home, fold.now_ns)
        if parent:
            fold.events.append(msgspec.structs.replace(event, trace_id=parent))
            return
        self._take(tenant, home, event.operations, fold)
        if event.published:
            component = self._assembly.joiner.of_trace.get((tenant, home))
            if component is None:
                component = self._assembly.joiner.join(tenant, home, event.child)
            for item in event.published:
                self._adopt(tenant, item, component, fold)
            for name in component.traces:
                fold.touched.setdefault((tenant, name), None)
        fold.signal += event.feedback

    def _adopt(self, tenant: str, item: Published, component: Component, fold: _Fold) -> None:
        known = component.emitted.get(item.orchestration_id)
        if known is None or known.revision < item.revision:
            component.emitted[item.orchestration_id] = Emitted(
                item.revision, item.content_hash, item.complete, item.merged_into
            )
        if item.signal_revision:
            self._signal.store.adopt(
                Held(
                    tenant=tenant, orchestration_id=item.orchestration_id, orchestration_revision=0,
                    complete=item.complete, touched_ns=fold.now_ns, revision=item.signal_revision,
                    rewards_hash=item.rewards_hash, credit_hash=item.credit_hash, samples_hash=item.samples_hash,
                )
            )  # fmt: skip

    # ------------------------------------------------------------ feedback

    def _feedback(self, event: FeedbackRouted, fold: _Fold) -> None:
        tenant, item, until = event.tenant, event.feedback, fold.now_ns + self._retention_ns
        if event.to.startswith("span/"):
            self._put("b", f"{tenant}/{item.feedback_id}", _Broadcast(until, item, event.responsible))
        elif event.to.startswith("r/"):
            entry = self._tables["e"].get(event.key) or _Evidence(until)
            if entry.ends:
                trace_id = min(trace for trace, _, _ in entry.ends)
                fold.events.append(FeedbackRouted(tenant=tenant, feedback=item, to=trace_id))
            elif _add(entry.waiting, item):
                self._put("e", event.key, entry)
        elif event.to.startswith("orchestration/"):
            place = self._tables["p"].get(event.key) or _Place(until)
            if place.trace_id:
                fold.events.append(FeedbackRouted(tenant=tenant, feedback=item, to=place.trace_id))
            elif _add(place.waiting, item):
                self._put("p", event.key, place)
        else:
            parent = self._parent(tenant, event.to, fold.now_ns)
            if parent:
                fold.events.append(msgspec.structs.replace(event, to=parent))
            else:
                fold.signal.append(item)

    def _placed(self, event: OrchestrationPlaced, fold: _Fold) -> None:
        place = self._tables["p"].get(event.key) or _Place(0)
        for item in place.waiting:
            fold.events.append(FeedbackRouted(tenant=event.tenant, feedback=item, to=event.trace_id))
        place.trace_id, place.waiting = event.trace_id, []
        place.until_ns = fold.now_ns + _REMEMBER * self._retention_ns
        self._put("p", event.key, place)

    def _place(self, event: OrchestrationRevised, fold: _Fold) -> None:
        """Tell the owner of an id where it is at home, when it is published for the first time."""
        if event.revision == 1 and event.content is not None:
            fold.events.append(
                OrchestrationPlaced(
                    tenant=event.tenant, orchestration_id=event.orchestration_id,
                    trace_id=min(event.content.trace_ids),
                )
            )  # fmt: skip

    def _claim_broadcasts(self, fold: _Fold) -> None:
        """Deliver broadcast feedback whose span is in an orchestration here."""
        for key, entry in list(self._tables["b"].items()):
            item = entry.feedback
            target = f"{item.tenant}/span/{item.target_id}"
            if not entry.claimed and self._signal.store.has_target(target):
                fold.signal.append(item)
                if not entry.responsible:
                    fold.events.append(
                        FeedbackClaimed(
                            tenant=item.tenant,
                            feedback_id=item.feedback_id,
                            to=f"span/{item.target_id}",
                            partition=0,
                        )
                    )
                self._put("b", key, _Broadcast(entry.until_ns, item, entry.responsible, claimed=True))

    def _claimed(self, event: FeedbackClaimed, fold: _Fold) -> None:
        key = f"{event.tenant}/{event.feedback_id}"
        entry = self._tables["b"].get(key)
        if entry is not None and not entry.claimed:
            self._put("b", key, _Broadcast(entry.until_ns, entry.feedback, entry.responsible, claimed=True))

    def _model(self, event: ValueModelPublished, fold: _Fold) -> None:
        fold.signal.append(event)

    _handlers: Mapping[type[Event], Callable[[Any, Any, _Fold], None]] = {
        OperationsRead: _operations,
        EvidenceSeen: _evidence,
        TracesJoined: _union,
        OperationsMoved: _moved,
        FeedbackRouted: _feedback,
        FeedbackClaimed: _claimed,
        OrchestrationPlaced: _placed,
        ValueModelPublished: _model,
    }

    # ------------------------------------------------------------ lessons

    def _teaches(self, event: RewardsComputed) -> bool:
        """What the value stage would take from ``orchestrations`` and ``rewards``."""
        if is_holdout(event.orchestration_id, self._settings.holdout):
            return False
        return event.team is None or event.status in {"final", "corrected"}

    def _lesson(self, event: RewardsComputed, published: Iterable[OrchestrationRevised]) -> LessonReady:
        for revised in published:
            if revised.key == event.key and revised.content is not None:
                return LessonReady(tenant=event.tenant, rewards=event, orchestration=revised)
        held = self._signal.store.held.get(event.key)
        revised = None
        if held is not None and held.content:
            revised = OrchestrationRevised(
                tenant=held.tenant, orchestration_id=held.orchestration_id, revision=held.orchestration_revision,
                complete=held.complete, content=self._signal.store.content(event.key),
            )  # fmt: skip
        return LessonReady(tenant=event.tenant, rewards=event, orchestration=revised)

    # ------------------------------------------------------------ time

    def tick(self, now_ns: int) -> StageOutput:
        """Publish what is due, forget what is too old; feedback whose target never came becomes dead letters."""
        fold = _Fold(now_ns)
        assembled = self._assembly.tick(now_ns)
        output = self._derived(fold, assembled)
        signalled = self._signal.tick(now_ns)
        output.events += [*signalled.events, *self._expire(now_ns)]
        output.writes.update(self._collect({}, signalled.writes))
        return output

    def _expire(self, now_ns: int) -> list[Event]:
        letters: list[Event] = []
        while (timer := self._next_expiry()) is not None and timer <= now_ns:
            _, kind, key = heapq.heappop(self._timers)
            entry = self._tables[kind][key]
            letters += [expired(item) for item in getattr(entry, "waiting", ())]
            if kind == "b" and entry.responsible and not entry.claimed:
                letters.append(expired(entry.feedback))
            self._ends.pop(key, None)
            self._drop(kind, key)
        return letters

    def _next_expiry(self) -> int | None:
        """When the first entry of any table is too old; timers of entries that changed since are dropped."""
        while self._timers:
            until_ns, kind, key = self._timers[0]
            entry = self._tables[kind].get(key)
            if entry is not None and entry.until_ns == until_ns:
                return until_ns
            heapq.heappop(self._timers)
        return None

    def next_timer_ns(self) -> int | None:
        """The earliest deadline of any part."""
        timers = (self._assembly.next_timer_ns(), self._signal.next_timer_ns(), self._next_expiry())
        return min((timer for timer in timers if timer is not None), default=None)


class _Fold:
    """What one call of the stage collects."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.events: list[Event] = []
        """Messages and dead letters."""
        self.touched: dict[tuple[str, str], None] = {}
        self.assembled = StageOutput([], {})
        self.signal: list[Event] = []
        """What the signal stage has still to fold."""
        self.signalled = StageOutput([], {})

    def flush(self, stage: SignalStage) -> None:
        """Let the signal stage fold what waits for it."""
        if self.signal:
            output = stage.fold(self.signal, self.now_ns)
            self.signal = []
            self.signalled.events += output.events
            self.signalled.writes.update(output.writes)


def _union(tenant: str, one: str, other: str) -> TracesJoined:
    """The message that joins two traces, to the larger: that one moves."""
    return TracesJoined(tenant=tenant, trace_id=max(one, other), other=min(one, other))


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
        }
    return Published(
        name, emitted.revision, emitted.content_hash, emitted.complete, emitted.merged_into, **signal
    )


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


def _add(waiting: list[FeedbackReceived], item: FeedbackReceived) -> bool:
    if any(known.feedback_id == item.feedback_id for known in waiting) or len(waiting) >= _PENDING_MAX:
        return False
    waiting.append(item)
    return True
