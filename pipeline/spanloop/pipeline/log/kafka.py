"""The Log over Kafka, on confluent-kafka: topics with partitions, at-least-once, nothing that rests on transactions.

Place in the flow: the log of a deployment with ``bootstrap_servers``. A record's key decides its partition (murmur2, as Java
clients do), its event id and time of append travel as headers.

What is promised beside the port's text:

- ``append`` returns after every in-sync replica has the records (acks=all); what it appended before an error stays, and
  appending all again is harmless.
- On *exact* topics (``policies``, ``models``) an event id is one record, as in the embedded log: after producing, the topic
  is read up to the new record, and the first one with the id wins. On other topics a repeated id may be two records; a
  reader skips ids that it has seen within its last ``SEEN_MAX``. Reducers are idempotent, so a copy costs time, not truth.
- Nothing is skipped in silence: an offset that retention has deleted, or a topic that ends before what was read already
  (a broker that came back empty), raises.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer

from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.log.kafka_cluster import Cluster, headers_of, partition_of, partitions_of
from spanloop.pipeline.log.kafka_read import Index, Reader, fetched_end
from spanloop.pipeline.ports import Appended, Clock, LogRecord, NewRecord, source_of, topic_of
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError, SchemaError, SpanloopError, TerminalError, TransientError
from spanloop.schemas.settings import Kafka

__all__ = ["EXACT", "TOPICS", "KafkaLog", "partition_of", "partitions_of"]

EXACT = (topics.POLICIES, topics.MODELS)
"""Topics on which an event id is one record: promotions are decided by who was first."""
DELIVERY_S = 30.0
METADATA_S = 30.0
READERS_MAX = 24
READERS_SAME_MAX = 3
"""Readers of the same topics at different places."""
TOPICS = (*topics.ALL_TOPICS, *topics.INTERNAL)


class KafkaLog:
    """Log over a Kafka cluster. One instance may be used by several threads.

    Args:
        bootstrap_servers: ``host:port,...``.
        settings: prefix, partitions, retention, librdkafka properties.
        clock: stamps ``appended_ns``.
        create: make missing topics; False raises ConfigError when there are none yet.
        exact: topics on which an event id is one record.
        on_lost: what a read does where retention has deleted what comes next: "raise", or "skip" with a warning.
        delivery_s: how long an append may wait for the brokers.
        needs: topics that must be there; a client that may only write needs few.

    Raises:
        ConfigError: topics cannot be made or have another number of partitions, or credentials are refused.
        TransientError: no broker answers.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        settings: Kafka,
        clock: Clock | None = None,
        *,
        create: bool = True,
        exact: Collection[str] = EXACT,
        on_lost: str = "raise",
        delivery_s: float = DELIVERY_S,
        needs: Sequence[str] = TOPICS,
    ) -> None:
        self.settings = settings
        self.cluster = Cluster(bootstrap_servers, settings)
        self.lost = 0
        """Records that reads have skipped because they were gone (``on_lost="skip"``)."""
        self._clock: Clock = clock or SystemClock()
        self._exact = frozenset(exact)
        self._skip = on_lost == "skip"
        self._delivery_s = delivery_s
        self._lock = threading.RLock()
        """Of producer, metadata and what was written. Never held while waiting for readers."""
        self._reading = threading.RLock()
        """Of everything that consumes. Taken before ``_lock``."""
        self._closed = False
        self._partitions: dict[str, int] = {}
        self._partitions_at = -METADATA_S
        self._written: dict[str, int] = {}
        self._readers: list[Reader] = []
        """The one used last stands last."""
        self._indexes: dict[str, Index] = {}
        self._groups: dict[str, Consumer] = {}
        self._ends: Consumer | None = None
        self._producer: Producer | None = None
        self._prepare(needs, create=create)

    # ------------------------------------------------------------ topics

    def _prepare(self, needs: Sequence[str], *, create: bool) -> None:
        known = self.cluster.partitions()
        self.cluster.check(known, needs)
        missing = [topic for topic in needs if topic not in known]
        if missing and not create and len(missing) == len(needs):
            raise ConfigError(
                f"no topics {self.settings.prefix}* on {self.cluster.servers}: nothing was recorded there yet; is "
                "kafka.prefix right?"
            )
        if missing and create:
            self.cluster.create(missing)

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has; 1 for one that does not exist."""
        with self._lock:
            if topic not in self._partitions or time.monotonic() - self._partitions_at > METADATA_S:
                self._partitions, self._partitions_at = self.cluster.partitions(), time.monotonic()
            return self._partitions.get(topic, 1)

    def sources(self, topic: str) -> tuple[str, ...]:
        """Sources of a topic; a source is its own only source."""
        name, partition = topic_of(topic)
        if name != topic:
            return (source_of(name, partition),)
        return tuple(source_of(topic, p) for p in range(self.partitions(topic)))

    # ------------------------------------------------------------ append

    def append(self, records: Sequence[NewRecord]) -> list[Appended]:
        """Append in order, acknowledged by all in-sync replicas when it returns.

        Raises:
            TransientError: the brokers did not acknowledge in time; some records may be there.
            SchemaError: a record is larger than the brokers take.
            TerminalError: the log is closed.
        """
        if not records:
            return []
        if any(record.topic in self._exact for record in records):
            return self._append_exactly(records)
        return self._produce(records)

    def _append_exactly(self, records: Sequence[NewRecord]) -> list[Appended]:
        """One by one in effect: what is there already is not produced, and of two writers the first counts."""
        with self._reading:
            results: list[Appended | None] = [None] * len(records)
            fresh: list[int] = []
            inside: dict[tuple[str, str], int] = {}
            for i, record in enumerate(records):
                if record.topic not in self._exact:
                    fresh.append(i)
                    continue
                known = self._index(record.topic).first(record.event_id)
                if known is not None:
                    results[i] = Appended(known[1], duplicate=True, partition=known[0])
                elif inside.setdefault((record.topic, record.event_id), i) == i:
                    fresh.append(i)
            for i, done in zip(fresh, self._produce([records[i] for i in fresh]), strict=True):
                results[i] = done
            for i, record in enumerate(records):
                done = results[i]
                if record.topic not in self._exact or (done is not None and done.duplicate):
                    continue
                if done is None:  # the same id earlier in this append
                    done = results[inside[record.topic, record.event_id]]
                results[i] = self._confirmed(record, done, repeated=results[i] is None)
            return [result for result in results if result is not None]

    def _confirmed(self, record: NewRecord, done: Appended | None, *, repeated: bool) -> Appended:
        """What became of a record once the topic is known up to it: perhaps another writer was first."""
        if done is None:
            raise AssertionError("an append without a result")
        index = self._index(record.topic)
        index.upto(source_of(record.topic, done.partition), done.offset)
        first = index.first(record.event_id) or (done.partition, done.offset)
        return Appended(
            first[1], duplicate=repeated or first != (done.partition, done.offset), partition=first[0]
        )

    def _produce(self, records: Sequence[NewRecord]) -> list[Appended]:
        if not records:
            return []
        producer = self._open_producer()
        stamp = str(self._clock.now_ns()).encode()
        ticket = _Ticket(len(records))
        for i, record in enumerate(records):
            self._hand_over(producer, record, stamp, ticket, i)
        deadline = time.monotonic() + self._delivery_s + 10
        while ticket.waiting and time.monotonic() < deadline:
            producer.poll(0.01)  # it may be another thread that hears of our records
        if ticket.error is not None:
            raise self._failed(KafkaException(ticket.error))
        if ticket.waiting:
            raise TransientError(
                f"Kafka at {self.cluster.servers} did not acknowledge {ticket.waiting} of {len(records)} records"
            )
        with self._lock:
            for record, done in zip(records, ticket.results, strict=True):
                source = source_of(record.topic, done.partition)
                self._written[source] = max(self._written.get(source, -1), done.offset)
        return ticket.results

    def _hand_over(
        self, producer: Producer, record: NewRecord, stamp: bytes, ticket: _Ticket, i: int
    ) -> None:
        more: dict[str, Any] = {} if record.partition is None else {"partition": record.partition}
        deadline = time.monotonic() + self._delivery_s
        while True:
            try:
                producer.produce(
                    self.cluster.name(record.topic),
                    value=record.value,
                    key=record.key.encode(),
                    headers=headers_of(record, stamp),
                    on_delivery=ticket.taker(i),
                    **more,
                )
            except BufferError:
                if time.monotonic() > deadline:
                    raise TransientError(f"Kafka at {self.cluster.servers} takes no more records") from None
                producer.poll(0.05)
            except UnicodeEncodeError as exc:
                raise SchemaError(f"the key of a record on {record.topic} is not valid text: {exc}") from exc
            except KafkaException as exc:
                raise self._failed(exc) from exc
            else:
                return

    def _open_producer(self) -> Producer:
        with self._lock:
            if self._closed:
                raise TerminalError("the log is closed; nothing was appended")
            if self._producer is None:
                self._producer = self.cluster.producer(self._delivery_s)
            return self._producer

    def _failed(self, exc: KafkaException) -> SpanloopError:
        found = self.cluster.translated(exc)
        if isinstance(found, TransientError):
            with self._lock:
                self._producer = None  # an idempotent producer that lost its place may be fenced: start anew
        return found

    # ------------------------------------------------------------ read

    def read(self, topic_names: Sequence[str], after: Mapping[str, int], limit: int) -> list[LogRecord]:
        """Up to ``limit`` records behind ``after`` (by source), each source in offset order, roughly in time between them.

        Raises:
            TerminalError: records behind ``after`` are no longer there, or the topic ends before it.
            TransientError: the brokers cannot be reached.
        """
        names = tuple(dict.fromkeys(topic_names))
        if not names or limit <= 0:
            return []
        with self._reading:
            self._check_open()
            try:
                return self._reader(names, after).read(after, limit)
            except KafkaException as exc:
                raise self.cluster.translated(exc) from exc

    def _reader(self, names: tuple[str, ...], after: Mapping[str, int]) -> Reader:
        """A reader that is where ``after`` ends, or one that may go there."""
        same = [reader for reader in self._readers if reader.names == names]
        chosen = next((reader for reader in same if reader.holds(after)), None)
        if chosen is None and len(same) >= READERS_SAME_MAX:
            chosen = same[0]
        if chosen is None:
            chosen = Reader(self, names, skip=self._skip)
        else:
            self._readers.remove(chosen)
        self._readers.append(chosen)
        while len(self._readers) > READERS_MAX:
            self._readers.pop(0).close()
        return chosen

    def end(self, source: str) -> int:
        """Offset of the last record of a source, -1 when empty."""
        topic, _ = topic_of(source)
        with self._reading:
            self._check_open()
            try:
                if topic not in self._exact:
                    return self.last(source)
                index = self._index(topic)  # the last that counts: a later copy of a known event is none
                index.catch_up()
                return index.end(source)
            except KafkaException as exc:
                raise self.cluster.translated(exc) from exc

    def last(self, source: str) -> int:
        """Offset of the last record of a source, copies included, -1 when empty."""
        return max(self.fetched_last(source), self.written(source))

    def fetched_last(self, source: str) -> int:
        """The same as the brokers have it now, which is less than ``last`` when they have lost data."""
        with self._reading:
            return fetched_end(self._ends_consumer(), self.cluster.at(source, 0))

    def first(self, source: str) -> int:
        """Offset of the first record of a source that retention has left; where the next will be, when there is none."""
        with self._reading:
            try:
                return self.watermarks(self._ends_consumer(), source)[0]
            except KafkaException as exc:
                raise self.cluster.translated(exc) from exc

    def _ends_consumer(self) -> Consumer:
        self._check_open()
        if self._ends is None:
            self._ends = self.cluster.consumer("spanloop-ends", **{"enable.partition.eof": True})
        return self._ends

    def watermarks(self, consumer: Consumer, source: str) -> tuple[int, int]:
        """First offset and the one behind the last, as the broker lists them."""
        low, high = consumer.get_watermark_offsets(self.cluster.at(source, 0), timeout=10)
        return low, high

    def newest(self, topic: str, count: int) -> dict[str, int]:
        """Offsets behind which about the newest ``count`` records of a topic lie, by source."""
        sources = self.sources(topic)
        share = -(-count // len(sources))
        ends = {source: self.end(source) for source in sources}
        return {source: max(end - share, self.first(source) - 1) for source, end in ends.items()}

    def counts(self) -> dict[str, int]:
        """Number of records by topic, copies included."""
        found = {
            topic: sum(self.last(source) - self.first(source) + 1 for source in self.sources(topic))
            for topic in sorted(self.cluster.partitions())
            if topic in TOPICS
        }
        return {topic: count for topic, count in found.items() if count}

    def _index(self, topic: str) -> Index:
        """What is known of an exact topic: all of it at first, later what has arrived meanwhile."""
        self._check_open()
        index = self._indexes.get(topic)
        if index is None:
            index = self._indexes[topic] = Index(self, topic)
            index.catch_up()
        else:
            index.drain()
        return index

    def is_copy(self, record: LogRecord) -> bool:
        """Whether an exact topic has the same event earlier."""
        if record.topic not in self._exact:
            return False
        index = self._indexes.get(record.topic)
        if index is None:
            index = self._indexes[record.topic] = Index(self, record.topic)
        index.upto(record.source, record.offset)
        first = index.first(record.event_id)
        return first is not None and first != (record.partition, record.offset)

    def written(self, source: str) -> int:
        """Last offset that this instance appended to a source, -1 for none: a read must not end before it."""
        return self._written.get(source, -1)

    def _check_open(self) -> None:
        if self._closed:
            raise TerminalError("the log is closed; nothing can be read")

    # ------------------------------------------------------------ consumer groups

    def commit(self, group: str, offsets: Mapping[str, int]) -> None:
        """Remember how far ``group`` has read, in Kafka."""
        positions = [self.cluster.at(source, offset + 1) for source, offset in offsets.items()]
        if not positions:
            return
        with self._reading:
            try:
                done = self._group(group).commit(offsets=positions, asynchronous=False)
            except KafkaException as exc:
                raise self.cluster.translated(exc) from exc
        for position in done or ():
            if position.error is not None:
                raise TransientError(f"offsets of group {group} were not committed: {position.error.str()}")

    def committed(self, group: str) -> dict[str, int]:
        """Offsets last committed by ``group``."""
        known = [source for topic in TOPICS for source in self.sources(topic)]
        with self._reading:
            try:
                found = self._group(group).committed(
                    [self.cluster.at(source, 0) for source in known], timeout=10
                )
            except KafkaException as exc:
                raise self.cluster.translated(exc) from exc
        return {source: p.offset - 1 for source, p in zip(known, found, strict=True) if p.offset >= 0}

    def _group(self, group: str) -> Consumer:
        self._check_open()
        if group not in self._groups:
            self._groups[group] = self.cluster.consumer(self.settings.prefix + group)
        return self._groups[group]

    def close(self) -> None:
        """Send what waits and close every connection."""
        with self._reading, self._lock:
            if self._closed:
                return
            self._closed = True
            if self._producer is not None:
                self._producer.flush(self._delivery_s)
            ends = () if self._ends is None else (self._ends,)
            for part in (*self._readers, *self._indexes.values(), *self._groups.values(), *ends):
                part.close()


class _Ticket:
    """Delivery of the records of one append."""

    def __init__(self, count: int) -> None:
        self.waiting = count
        self.results = [Appended(-1, duplicate=False)] * count
        self.error: KafkaError | None = None
        self._lock = threading.Lock()

    def taker(self, i: int) -> Any:
        """The delivery callback of record ``i``; it may run in another thread's poll."""

        def take(error: KafkaError | None, message: Message) -> None:
            with self._lock:
                self.waiting -= 1
                if error is not None:
                    self.error = error
                else:
                    self.results[i] = Appended(
                        message.offset() or 0, duplicate=False, partition=message.partition() or 0
                    )

        return take
