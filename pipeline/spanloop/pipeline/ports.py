"""Ports of the functional core: Log, StateStore, Clock, and the Stage that they carry.

One adapter a file: ``log/memory.py``, ``log/sqlite.py``, ``log/kafka.py``, ``state/memory.py``, ``state/sqlite.py``.
Any adapter must pass ``tests/contract``.

A topic may have partitions. A *source* is one partition of a topic, written ``topic`` for partition 0 and ``topic/3`` for
the others, so that a log without partitions knows only topics. Offsets are counted and remembered by source.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import msgspec

from spanloop.schemas import topics
from spanloop.schemas.events import Event, encode

__all__ = [
    "Appended",
    "Clock",
    "Log",
    "LogRecord",
    "NewRecord",
    "Stage",
    "StageOutput",
    "StateStore",
    "Written",
    "alone",
    "new_record",
    "output_records",
    "source_of",
    "topic_of",
]


Written = dict[int, tuple[Event, bytes]]
"""Events with their canonical JSON, by ``id`` of the event."""
_OWNED = frozenset(topics.DERIVED) - frozenset(topics.SINGLE)
"""Topics whose partitions a partitioned stage owns."""


class NewRecord(msgspec.Struct, frozen=True, gc=False):
    """A record to append. ``event_id`` is unique within its topic: appending it again changes nothing."""

    topic: str
    key: str
    event_id: str
    value: bytes
    partition: int | None = None
    """Where the writer owns a partition; None: by key. Ignored by logs without partitions."""


class LogRecord(msgspec.Struct, frozen=True, gc=False):
    """A record as read. Offsets increase within a topic in commit order; gaps are allowed, reuse is not."""

    topic: str
    offset: int
    key: str
    event_id: str
    value: bytes
    appended_ns: int
    """Processing time of the append; never part of any content."""
    partition: int = 0
    event: Event | None = None
    """What ``value`` decodes to, where the reader knows it already."""

    @property
    def source(self) -> str:
        """The partition that it came from, by the name that offsets are kept under."""
        return source_of(self.topic, self.partition)


class Appended(msgspec.Struct, frozen=True, gc=False):
    """What became of one appended record: its offset (the old one where ``duplicate``)."""

    offset: int
    duplicate: bool
    partition: int = 0


def source_of(topic: str, partition: int) -> str:
    """Name of a partition: the topic itself for the first.

    >>> source_of("spans", 0), source_of("spans", 3)
    ('spans', 'spans/3')
    """
    return f"{topic}/{partition}" if partition else topic


def alone(source: str) -> str:
    """The name that asks for one source only: a topic's plain name asks for all its partitions.

    >>> alone("spans"), alone("spans/3")
    ('spans/0', 'spans/3')
    """
    return "{}/{}".format(*topic_of(source))


def topic_of(source: str) -> tuple[str, int]:
    """Topic and partition of a source.

    >>> topic_of("spans"), topic_of("spans/3")
    (('spans', 0), ('spans', 3))
    """
    topic, _, partition = source.partition("/")
    return topic, int(partition or 0)


def new_record(event: Event, partition: int | None = None) -> NewRecord:
    """The record that carries an event; ``partition`` where its writer owns one."""
    return NewRecord(event.TOPIC, event.key, event.event_id, encode(event), partition)


def output_records(stage: Stage, events: Sequence[Event], written: Written | None = None) -> list[NewRecord]:
    """Records of a stage's outputs: what it derives goes to its own partition, where it has one. ``written``: their bytes, where
    the stage made them already."""
    own: int | None = getattr(stage, "output_partition", None)
    if not written:
        return [new_record(event, _partition(event, own)) for event in events]
    records = []
    for event in events:
        known = written.get(id(event))
        value = known[1] if known is not None and known[0] is event else encode(event)
        records.append(NewRecord(event.TOPIC, event.key, event.event_id, value, _partition(event, own)))
    return records


def _partition(event: Event, own: int | None) -> int | None:
    if own is not None and event.TOPIC in _OWNED:
        return own
    wanted: int = getattr(event, "partition", -1)
    return wanted if wanted >= 0 else None


class Log(Protocol):
    """Append-only, durable, idempotent by (topic, event id)."""

    def append(self, records: Sequence[NewRecord]) -> list[Appended]:
        """Append in order; durable when it returns. Without partitions all or none; over Kafka what is already appended when
        it raises stays, and appending all again is harmless. Raises TransientError when disk or broker refuse."""
        ...

    def read(self, topic_names: Sequence[str], after: Mapping[str, int], limit: int) -> list[LogRecord]:
        """Up to ``limit`` records with offset > ``after[source]`` (absent: -1), each source in offset order; a log without
        partitions merges topics in append order. A topic's name asks for all its partitions, ``topic/0`` or ``topic/3`` for one (``alone``)."""
        ...

    def end(self, source: str) -> int:
        """Offset of the last record of one source, -1 when empty."""
        ...

    def sources(self, topic: str) -> tuple[str, ...]:
        """Sources of a topic, in order: only itself where there are no partitions."""
        ...

    def commit(self, group: str, offsets: Mapping[str, int]) -> None:
        """Remember how far consumer ``group`` has read, for consumers without a StateStore."""
        ...

    def committed(self, group: str) -> dict[str, int]:
        """Offsets last committed by ``group``; a topic never committed is absent."""
        ...

    def close(self) -> None:
        """Release files; appends after it raise TerminalError."""
        ...


class StateStore(Protocol):
    """Key-value state of a stage. State, the offsets it contains and the stage's outputs are one transaction:
    after a crash either all three are there or none, so that every record takes effect once."""

    def load(self, stage: str) -> dict[str, bytes]:
        """All entries of a stage."""
        ...

    def offsets(self, stage: str) -> dict[str, int]:
        """Input offsets contained in the state, by topic."""
        ...

    def commit(
        self,
        stage: str,
        *,
        writes: Mapping[str, bytes | None],
        offsets: Mapping[str, int],
        outputs: Sequence[NewRecord] = (),
    ) -> None:
        """Write entries (None deletes), offsets and outputs atomically and durably. Outputs reach the Log exactly
        once: an adapter on another medium keeps an outbox in the same transaction and drains it idempotently."""
        ...

    def close(self) -> None:
        """Release files."""
        ...


class Clock(Protocol):
    """Processing time. Event time comes from spans only."""

    def now_ns(self) -> int:
        """Nanoseconds since the epoch."""
        ...


class StageOutput(msgspec.Struct):
    """What a stage made of a batch."""

    events: list[Event] = []
    writes: dict[str, bytes | None] = {}
    """Changed state entries since the last output; None deletes."""
    written: Written = {}
    """What ``encode`` gives for some of ``events``, where the stage needed it anyway (to hash it)."""


class Stage(Protocol):
    """A reducer with its state: ``state, batch, now -> state, outputs``. Deterministic; no clock, I/O or randomness
    inside. The runtime owns reading, committing and time."""

    @property
    def name(self) -> str:
        """Names its state and offsets in the StateStore: never changes."""
        ...

    @property
    def topics(self) -> tuple[str, ...]:
        """Input topics."""
        ...

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Become the state that was committed as ``entries`` (empty: initial)."""
        ...

    def process(self, records: Iterable[LogRecord], now_ns: int) -> StageOutput:
        """Fold records in order. A record that cannot be read becomes a DeadLettered output, never an exception."""
        ...

    def tick(self, now_ns: int) -> StageOutput:
        """Fire timers that are due (close quiet orchestrations)."""
        ...

    def next_timer_ns(self) -> int | None:
        """When ``tick`` has something to do at the earliest; None: nothing pending."""
        ...
