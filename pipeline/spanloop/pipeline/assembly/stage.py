"""The assembly stage: SpansReceived in, OrchestrationRevised out.

State entries, written only where something changed: ``o/`` versions of spans as they came (append only, a
batch each), ``c/`` one a component (when it is due, what was published), ``f/`` one a trace that was
forgotten, so that a span later than the retention is refused instead of starting its orchestration anew.
The union-find and all buffers are rebuilt from ``o/`` by the same code that built them, so a restored stage
goes on exactly as the old one would have.

A component is due ``quiet_s`` after its last new span when it is complete, else ``timeout_s`` after it;
published, it is kept for ``retention_s`` and at most ``orchestrations_max`` together, then forgotten.
"""

from __future__ import annotations

import base64
import hashlib
import heapq
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import msgspec

from spanloop.pipeline.assembly.join import Component, Emitted, Joiner
from spanloop.pipeline.assembly.revise import merged_events, next_revision
from spanloop.pipeline.dialects import decode_operation, encode_operation, operation_of
from spanloop.pipeline.ports import LogRecord, StageOutput
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import DeadLettered, SpansReceived, decode
from spanloop.schemas.ids import orchestration_id
from spanloop.schemas.spans import Span

__all__ = ["AssemblySettings", "AssemblyStage", "refused_record", "refused_span"]

_S = 1_000_000_000
_DATA_MAX = 64 * 1024
"""Bytes of an unreadable record that its dead letter keeps; the rest stays on the log, at the offset named."""
_TOMBSTONE_LIFE = 30
"""A forgotten trace is remembered as such for so many retentions."""


class AssemblySettings(Protocol):
    """What the stage reads of ``settings.Pipeline``."""

    @property
    def quiet_s(self) -> float: ...
    @property
    def timeout_s(self) -> float: ...
    @property
    def retention_s(self) -> float: ...
    @property
    def orchestrations_max(self) -> int: ...


class _Chunk(msgspec.Struct, frozen=True, array_like=True):
    tenant: str
    trace_id: str
    versions: list[bytes]


class _Meta(msgspec.Struct, frozen=True, array_like=True):
    tenant: str
    first_trace: str
    deadline_ns: int
    closed: bool
    overflow: int
    emitted: dict[str, Emitted]
    joined: list[str] = []
    """Traces of the component, where evidence does not tell them."""


class _Tombstone(msgspec.Struct, frozen=True, array_like=True):
    tenant: str
    trace_id: str
    orchestration_id: str
    revision: int
    expires_ns: int


_encode = msgspec.msgpack.Encoder().encode
_chunks = msgspec.msgpack.Decoder(_Chunk)
_metas = msgspec.msgpack.Decoder(_Meta)
_tombstones = msgspec.msgpack.Decoder(_Tombstone)


class _Timers:
    """Components by deadline; an entry counts only while its component still has that deadline."""

    def __init__(self, stage: AssemblyStage, *, closed: bool) -> None:
        self._stage, self._closed = stage, closed
        self._heap: list[tuple[int, str, str]] = []

    def push(self, component: Component) -> None:
        heapq.heappush(self._heap, (component.deadline_ns, component.tenant, component.first_trace))

    def peek(self) -> Component | None:
        """The component that is due first."""
        while self._heap:
            deadline, tenant, trace_id = self._heap[0]
            component = self._stage.joiner.of_trace.get((tenant, trace_id))
            if (
                component is not None
                and component.closed == self._closed
                and component.deadline_ns == deadline
                and component.first_trace == trace_id
            ):
                return component
            heapq.heappop(self._heap)
        return None

    def due(self, now_ns: int) -> Component | None:
        """The first component, if it is due."""
        component = self.peek()
        return component if component is not None and component.deadline_ns <= now_ns else None


class AssemblyStage:
    """Reducer from spans to orchestration revisions, for all tenants."""

    name = "assembly"
    topics = (topics.SPANS,)

    def __init__(self, settings: AssemblySettings, *, by_evidence: bool = True) -> None:
        self._by_evidence = by_evidence
        self._quiet_ns = round(settings.quiet_s * _S)
        self._timeout_ns = round(settings.timeout_s * _S)
        self._retention_ns = round(settings.retention_s * _S)
        self._max = settings.orchestrations_max
        self._reset()

    def _reset(self) -> None:
        self.joiner = Joiner(by_evidence=self._by_evidence)
        self._open = _Timers(self, closed=False)
        self._kept = _Timers(self, closed=True)
        self._num_kept = 0
        self._forgotten: dict[tuple[str, str], _Tombstone] = {}
        self.floors: dict[str, Emitted] = {}
        """Revisions that are on the log though the state does not know of them, by tenant/id."""

    # ------------------------------------------------------------ state

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Become the state that was committed as ``entries``."""
        self._reset()
        metas = []
        for key in sorted(entries):
            if key.startswith("o/"):
                self._restore_chunk(_chunks.decode(entries[key]))
            elif key.startswith("c/"):
                metas.append((key, _metas.decode(entries[key])))
            elif key.startswith("f/"):
                stone = _tombstones.decode(entries[key])
                self._forgotten[(stone.tenant, stone.trace_id)] = stone
        self._forgotten = dict(
            sorted(self._forgotten.items(), key=lambda item: (item[1].expires_ns, item[0]))
        )
        for _, meta in metas:
            for trace_id in meta.joined:
                self.joiner.join(meta.tenant, meta.first_trace, trace_id)
        self.joiner.absorbed.clear()
        for key, meta in metas:
            component = self.joiner.of_trace[(meta.tenant, meta.first_trace)]
            component.deadline_ns, component.closed = meta.deadline_ns, meta.closed
            component.overflow, component.emitted, component.meta_key = meta.overflow, meta.emitted, key
            (self._kept if meta.closed else self._open).push(component)
            self._num_kept += meta.closed

    def _restore_chunk(self, chunk: _Chunk) -> None:
        for encoded in chunk.versions:
            self.joiner.add(chunk.tenant, decode_operation(encoded), encoded)
        buffer = self.joiner.of_trace[(chunk.tenant, chunk.trace_id)].traces[chunk.trace_id]
        buffer.chunks += 1
        buffer.fresh.clear()

    def _write(self, output: StageOutput, component: Component) -> None:
        for trace_id, buffer in component.traces.items():
            if buffer.fresh:
                key = _chunk_key(component.tenant, trace_id, buffer.chunks)
                output.writes[key] = _encode(_Chunk(component.tenant, trace_id, buffer.fresh))
                buffer.chunks += 1
                buffer.fresh = []
        key = f"c/{component.tenant}/{component.first_trace}"
        if component.meta_key not in ("", key):
            output.writes.setdefault(component.meta_key, None)
        component.meta_key = key
        joined = [] if self._by_evidence else sorted((*component.traces, *component.linked))
        output.writes[key] = _encode(
            _Meta(component.tenant, component.first_trace, component.deadline_ns, component.closed,
                  component.overflow, component.emitted, joined)
        )  # fmt: skip

    # ------------------------------------------------------------ input

    def process(self, records: Iterable[LogRecord], now_ns: int) -> StageOutput:
        """Fold span batches; components that changed are due anew."""
        output = StageOutput()
        touched: dict[tuple[str, str], None] = {}
        for record in records:
            try:
                event = decode(record.value)
            except SchemaError as exc:
                output.events.append(refused_record(record, exc.message))
                continue
            if isinstance(event, SpansReceived):
                self._take(event, record.value, touched, output)
        self.settle(touched, now_ns, output)
        return output

    def settle(self, touched: Iterable[tuple[str, str]], now_ns: int, output: StageOutput) -> None:
        """Make the components of changed traces due anew, publish merges, write what changed."""
        for absorbed in self.joiner.absorbed:
            self._num_kept -= absorbed.closed
            if absorbed.meta_key:
                output.writes[absorbed.meta_key] = None
        self.joiner.absorbed.clear()
        found = (self.joiner.of_trace.get(key) for key in touched)
        changed = {id(c): c for c in found if c is not None and c.traces}
        for component in sorted(changed.values(), key=lambda c: (c.tenant, c.first_trace)):
            self._num_kept -= component.closed
            component.closed = False
            self._raise_to_floor(component)
            component.deadline_ns = now_ns + (self._quiet_ns if component.complete else self._timeout_ns)
            output.events.extend(merged_events(component))
            self._open.push(component)
            self._write(output, component)

    def _take(
        self, event: SpansReceived, raw: bytes, touched: dict[tuple[str, str], None], output: StageOutput
    ) -> None:
        if self.refuse_late(event.tenant, event.trace_id, len(event.spans), raw, output):
            return
        tenant, source, add = event.tenant, event.source, self.joiner.add
        for span in event.spans:
            try:
                operation = operation_of(span, source)
                encoded = encode_operation(operation)
            except Exception as exc:
                output.events.append(refused_span(tenant, span, exc))
                continue
            if add(tenant, operation, encoded) is not None:
                touched[(tenant, operation.trace_id)] = None

    # ------------------------------------------------------------ components that move

    def refuse_late(self, tenant: str, trace_id: str, spans: int, raw: bytes, output: StageOutput) -> bool:
        """Dead-letter spans of a trace whose orchestration was forgotten; False when it was not."""
        stone = self._forgotten.get((tenant, trace_id))
        if stone is not None:
            reason = f"later than the retention of orchestration {stone.orchestration_id}"
            output.events.append(_refused(tenant, reason, raw, trace_id=trace_id, spans=spans))
        return stone is not None

    def release(self, tenant: str, trace_id: str, output: StageOutput) -> Component | None:
        """Give a trace's component away: it leaves the state, without a trace of its own."""
        component = self.joiner.of_trace.get((tenant, trace_id))
        if component is None:
            return None
        if component.traces:
            self._raise_to_floor(component)
            self._num_kept -= component.closed
            for name, buffer in component.traces.items():
                for n in range(buffer.chunks):
                    output.writes[_chunk_key(tenant, name, n)] = None
            if component.meta_key:
                output.writes[component.meta_key] = None
        self.joiner.forget(component)
        return component

    def absorb_floors(self, now_ns: int, output: StageOutput) -> set[str]:
        """Put ``floors`` into the components that they belong to, which are due anew; returns the keys of those that have none."""
        left = set(self.floors)
        touched = []
        for component in self.joiner.components():
            known = self._raise_to_floor(component)
            if known:
                left -= known
                touched.append((component.tenant, component.first_trace))
        self.settle(touched, now_ns, output)
        self.floors = {}
        return left

    def _raise_to_floor(self, component: Component) -> set[str]:
        """Let a component's revisions go on behind ``floors``; returns the keys of those that are its own. An id belongs to its
        smallest trace: a component that has not got that one knows nothing of the id."""
        found: set[str] = set()
        for trace_id in component.traces if self.floors else ():
            name = orchestration_id(component.tenant, [trace_id])
            key = f"{component.tenant}/{name}"
            seen = self.floors.get(key)
            if seen is None:
                continue
            found.add(key)
            known = component.emitted.get(name)
            if known is None or known.revision < seen.revision:
                component.emitted[name] = msgspec.structs.replace(seen)
            elif known.revision == seen.revision and _told(known) != _told(seen):
                known.content_hash = known.merged_into = ""
        return found

    # ------------------------------------------------------------ time

    def tick(self, now_ns: int) -> StageOutput:
        """Publish components that are due, forget those past their retention."""
        output = StageOutput()
        while (component := self._open.due(now_ns)) is not None:
            revision = next_revision(component, output.written)
            if revision is not None:
                output.events.append(revision)
            component.closed = True
            component.deadline_ns = now_ns + self._retention_ns
            self._num_kept += 1
            self._kept.push(component)
            self._write(output, component)
        while (component := self._kept.due(now_ns)) is not None:
            self._forget(component, now_ns, output)
        while self._num_kept > self._max and (component := self._kept.peek()) is not None:
            self._forget(component, now_ns, output)
        while self._forgotten and (stone := next(iter(self._forgotten.values()))).expires_ns <= now_ns:
            del self._forgotten[(stone.tenant, stone.trace_id)]
            output.writes[f"f/{stone.tenant}/{stone.trace_id}"] = None
        return output

    def next_timer_ns(self) -> int | None:
        """Deadline of the component that is due first."""
        deadlines = [c.deadline_ns for timers in (self._open, self._kept) if (c := timers.peek()) is not None]
        return min(deadlines, default=None)

    def _forget(self, component: Component, now_ns: int, output: StageOutput) -> None:
        self.joiner.forget(component)
        self._num_kept -= 1
        last = component.emitted.get(component.orchestration_id)
        for trace_id, buffer in component.traces.items():
            for n in range(buffer.chunks):
                output.writes[_chunk_key(component.tenant, trace_id, n)] = None
            if last is not None:
                stone = _Tombstone(component.tenant, trace_id, component.orchestration_id, last.revision,
                                   now_ns + _TOMBSTONE_LIFE * self._retention_ns)  # fmt: skip
                self._forgotten[(component.tenant, trace_id)] = stone
                output.writes[f"f/{component.tenant}/{trace_id}"] = _encode(stone)
        output.writes[component.meta_key] = None


def _told(emitted: Emitted) -> str:
    return emitted.merged_into or emitted.content_hash


def _chunk_key(tenant: str, trace_id: str, number: int) -> str:
    return f"o/{tenant}/{trace_id}/{number:06d}"


def _refused(tenant: str, reason: str, raw: bytes, **details: Any) -> DeadLettered:
    return DeadLettered(
        tenant=tenant or "default", source="assembly", reason=reason, sha256=hashlib.sha256(raw).hexdigest(),
        size=len(raw), details=details,
    )  # fmt: skip


def refused_record(record: LogRecord, reason: str) -> DeadLettered:
    """The dead letter of a record of spans that cannot be read."""
    return DeadLettered(
        tenant=record.key.partition("/")[0] or "default",
        source="assembly",
        reason=reason,
        sha256=hashlib.sha256(record.value).hexdigest(),
        size=len(record.value),
        data=base64.b64encode(record.value[:_DATA_MAX]).decode(),
        details={
            "topic": record.topic,
            "partition": record.partition,
            "offset": record.offset,
            "event_id": record.event_id,
        },
    )


def refused_span(tenant: str, span: Span, problem: Exception) -> DeadLettered:
    """The dead letter of one span that no dialect can read."""
    raw = msgspec.json.encode(span)
    reason = f"a span cannot be read: {type(problem).__name__}"
    return _refused(tenant, reason, raw, trace_id=span.trace_id, span_id=span.span_id)
