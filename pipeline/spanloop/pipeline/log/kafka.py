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

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.ports import Appended, Clock, LogRecord, NewRecord, source_of, topic_of
from spanloop.schemas import topics
from spanloop.schemas.canonical import bytes_hash
from spanloop.schemas.errors import ConfigError, SchemaError, SpanloopError, TerminalError, TransientError
from spanloop.schemas.settings import Kafka

__all__ = ["EXACT", "KafkaLog", "partitions_of"]

EXACT = (topics.POLICIES, topics.MODELS)
"""Topics on which an event id is one record: promotions are decided by who was first."""
RECORD_MAX = 32 * 2**20
"""Bytes of the largest record: an orchestration of many thousand spans."""
SEEN_MAX = 50_000
DELIVERY_S = 30.0
"""How long an append may wait for the brokers."""
FETCH_WAIT_MS = 10
IDLE_WAIT_S = 0.012
"""How long a read at the end waits for news."""
STUCK_S = 15.0
"""How long a read waits for records that are known to be there."""
METADATA_S = 30.0
READERS_MAX = 24

_log = logging.getLogger("spanloop.kafka")
_EVENT_ID, _APPENDED = "event_id", "appended_ns"


def partitions_of(topic: str, settings: Kafka) -> int:
    """How many partitions spanloop gives a topic."""
    return 1 if topic in topics.SINGLE else settings.partitions


class KafkaLog:
    """Log over a Kafka cluster. One instance may be used by several threads.

    Args:
        bootstrap_servers: ``host:port,...``.
        settings: prefix, partitions, retention, librdkafka properties.
        clock: stamps ``appended_ns``.
        create: make missing topics; False raises ConfigError when there are none yet.
        exact: topics on which an event id is one record.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        settings: Kafka,
        clock: Clock | None = None,
        *,
        create: bool = True,
        exact: Collection[str] = EXACT,
    ) -> None:
        self.settings = settings
        self._servers = bootstrap_servers
        self._clock: Clock = clock or SystemClock()
        self._exact = frozenset(exact)
        self._common: dict[str, Any] = {
            "bootstrap.servers": bootstrap_servers,
            "client.id": "spanloop",
            "log_level": 3,
            "socket.timeout.ms": 10_000,
            **settings.client,
        }
        self._lock = threading.RLock()
        self._closed = False
        self._partitions: dict[str, int] = {}
        self._partitions_at = -METADATA_S
        self._written: dict[str, int] = {}
        """Last offset that this instance appended, by source: a read must not end before it."""
        self._readers: OrderedDict[tuple[str, ...], _Reader] = OrderedDict()
        self._indexes: dict[str, _Index] = {}
        self._groups: dict[str, Consumer] = {}
        self._admin = AdminClient(dict(self._common), logger=_log)
        self._producer: Producer | None = None
        self._prepare(create=create)

    # ------------------------------------------------------------ topics

    def _prepare(self, *, create: bool) -> None:
        known = self._metadata()
        wanted = [*topics.ALL_TOPICS, *topics.INTERNAL]
        missing = [topic for topic in wanted if topic not in known]
        for topic in wanted:
            if topic in known and topic in topics.SINGLE and known[topic] != 1:
                raise ConfigError(
                    f"topic {self.name(topic)} has {known[topic]} partitions and must have one, because its readers need "
                    "one order: give spanloop another kafka.prefix, or make the topic anew"
                )
        if not missing:
            return
        if not create and len(missing) == len(wanted):
            raise ConfigError(
                f"no topics {self.settings.prefix}* on {self._servers}: nothing was recorded there yet; is kafka.prefix right?"
            )
        retention = str(int(self.settings.retention_hours * 3_600_000))
        new = [
            NewTopic(
                self.name(topic),
                num_partitions=partitions_of(topic, self.settings),
                replication_factor=self.settings.replication,
                config={
                    "retention.ms": retention,
                    "cleanup.policy": "delete",
                    "max.message.bytes": str(RECORD_MAX),
                },
            )
            for topic in missing
        ]
        for name, future in self._admin.create_topics(new, operation_timeout=20).items():
            try:
                future.result(timeout=30)
            except KafkaException as exc:
                error = exc.args[0]
                if error.code() != KafkaError.TOPIC_ALREADY_EXISTS:  # another process was quicker
                    raise ConfigError(
                        f"topic {name} cannot be made on {self._servers}: {error.str()}; make it by hand "
                        "(docs/kafka.md has the table) or allow this client to create topics"
                    ) from exc
        deadline = time.monotonic() + 20
        while any(topic not in self._metadata() for topic in wanted):
            if time.monotonic() > deadline:
                raise TransientError(f"topics {self.settings.prefix}* are slow to appear on {self._servers}")
            time.sleep(0.1)

    def _metadata(self) -> dict[str, int]:
        """Partitions of our topics, by topic."""
        try:
            listed = self._admin.list_topics(timeout=10).topics
        except KafkaException as exc:
            raise self._translated(exc) from exc
        prefix = self.settings.prefix
        found = {
            name.removeprefix(prefix): len(meta.partitions)
            for name, meta in listed.items()
            if name.startswith(prefix) and meta.error is None and meta.partitions
        }
        self._partitions, self._partitions_at = found, time.monotonic()
        return found

    def name(self, topic: str) -> str:
        """The topic's name on the brokers."""
        return self.settings.prefix + topic

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has."""
        with self._lock:
            if topic not in self._partitions or time.monotonic() - self._partitions_at > METADATA_S:
                self._metadata()
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
        with self._lock:
            results: list[Appended | None] = [None] * len(records)
            fresh: list[int] = []
            inside: dict[tuple[str, str], int] = {}
            for i, record in enumerate(records):
                if record.topic not in self._exact:
                    fresh.append(i)
                    continue
                known = self._index(record.topic).first(record.event_id)
                before = inside.get((record.topic, record.event_id))
                if known is not None:
                    results[i] = Appended(known[1], duplicate=True, partition=known[0])
                elif before is None:
                    inside[(record.topic, record.event_id)] = i
                    fresh.append(i)
            for i, done in zip(fresh, self._produce([records[i] for i in fresh]), strict=True):
                results[i] = done
            for i, record in enumerate(records):
                if record.topic not in self._exact:
                    continue
                done = results[i] or results[inside[(record.topic, record.event_id)]]
                if done is None or (done.duplicate and results[i] is not None):
                    continue
                index = self._index(record.topic)
                index.upto(done.partition, done.offset)
                partition, offset = index.first(record.event_id) or (done.partition, done.offset)
                repeated = results[i] is None or (partition, offset) != (done.partition, done.offset)
                results[i] = Appended(offset, duplicate=repeated, partition=partition)
            return [result for result in results if result is not None]

    def _produce(self, records: Sequence[NewRecord]) -> list[Appended]:
        if not records:
            return []
        producer = self._open_producer()
        stamp = str(self._clock.now_ns()).encode()
        ticket = _Ticket(len(records))
        for i, record in enumerate(records):
            self._hand_over(producer, record, stamp, ticket, i)
        deadline = time.monotonic() + DELIVERY_S + 10
        while ticket.waiting and time.monotonic() < deadline:
            producer.poll(0.05)
        if ticket.error is not None:
            raise self._translated(KafkaException(ticket.error))
        if ticket.waiting:
            raise TransientError(
                f"Kafka at {self._servers} did not acknowledge {ticket.waiting} of {len(records)} records"
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
        deadline = time.monotonic() + DELIVERY_S
        while True:
            try:
                producer.produce(
                    self.name(record.topic),
                    value=record.value,
                    key=record.key.encode("utf-8"),
                    headers=[(_EVENT_ID, record.event_id.encode()), (_APPENDED, stamp)],
                    on_delivery=ticket.taker(i),
                    **more,
                )
            except BufferError:
                if time.monotonic() > deadline:
                    raise TransientError(f"Kafka at {self._servers} takes no more records") from None
                producer.poll(0.05)
            except UnicodeEncodeError as exc:
                raise SchemaError(f"the key of a record on {record.topic} is not valid text: {exc}") from exc
            except KafkaException as exc:
                raise self._translated(exc) from exc
            else:
                return

    def _open_producer(self) -> Producer:
        with self._lock:
            if self._closed:
                raise TerminalError("the log is closed; nothing was appended")
            if self._producer is None:
                configuration = {
                    "acks": "all",
                    "enable.idempotence": True,
                    "compression.type": "lz4",
                    "linger.ms": 1,
                    "partitioner": "murmur2_random",
                    "message.max.bytes": RECORD_MAX,
                    "delivery.timeout.ms": int(DELIVERY_S * 1000),
                    "queue.buffering.max.kbytes": 256 * 1024,
                    **self._common,
                }
                self._producer = Producer(configuration, logger=_log)
            return self._producer

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
        with self._lock:
            if self._closed:
                raise TerminalError("the log is closed; nothing can be read")
            reader = self._readers.pop(names, None)
            if reader is None:
                reader = _Reader(self, names)
            self._readers[names] = reader
            while len(self._readers) > READERS_MAX:
                self._readers.popitem(last=False)[1].close()
            try:
                return reader.read(after, limit)
            except KafkaException as exc:
                raise self._translated(exc) from exc

    def end(self, source: str) -> int:
        """Offset of the last record of a source, -1 when empty."""
        with self._lock:
            if self._closed:
                raise TerminalError("the log is closed; nothing can be read")
            topic, partition = topic_of(source)
            try:
                if topic in self._exact:  # the last that counts: a later copy of a known event is none
                    index = self._index(topic)
                    index.catch_up()
                    return index.end(partition)
                return self._end(source)
            except KafkaException as exc:
                raise self._translated(exc) from exc

    def _end(self, source: str) -> int:
        consumer = self._consumer("spanloop-ends", eof=True)
        try:
            return max(_fetch_end(consumer, self._at(source, 0)), self._written.get(source, -1))
        finally:
            consumer.close()

    def _index(self, topic: str) -> _Index:
        """What is known of an exact topic: all of it at first, later what has arrived meanwhile."""
        index = self._indexes.get(topic)
        if index is None:
            index = self._indexes[topic] = _Index(self, topic)
            index.catch_up()
        else:
            index.drain()
        return index

    def copy_of(self, record: LogRecord) -> bool:
        """Whether an exact topic has the same event earlier."""
        if record.topic not in self._exact:
            return False
        index = self._indexes.get(record.topic)
        if index is None:
            index = self._indexes[record.topic] = _Index(self, record.topic)
        index.upto(record.partition, record.offset)
        first = index.first(record.event_id)
        return first is not None and first != (record.partition, record.offset)

    def written(self, source: str) -> int:
        """Last offset that this instance appended to a source, -1 for none."""
        return self._written.get(source, -1)

    def _at(self, source: str, offset: int) -> TopicPartition:
        topic, partition = topic_of(source)
        return TopicPartition(self.name(topic), partition, offset)

    def _consumer(self, group: str, *, eof: bool) -> Consumer:
        configuration = {
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": eof,
            "fetch.wait.max.ms": FETCH_WAIT_MS,
            "fetch.message.max.bytes": RECORD_MAX,
            "fetch.max.bytes": 2 * RECORD_MAX,
            "receive.message.max.bytes": 4 * RECORD_MAX,
            "queued.max.messages.kbytes": 16 * 1024,
            "queued.min.messages": 20_000,
            "fetch.queue.backoff.ms": 5,
            **self._common,
        }
        return Consumer(configuration, logger=_log)

    def _record(self, message: Message) -> LogRecord:
        headers = dict(message.headers() or ())
        value = message.value() or b""
        event_id = headers.get(_EVENT_ID)
        stamp = headers.get(_APPENDED)
        topic = (message.topic() or "").removeprefix(self.settings.prefix)
        return LogRecord(
            topic=topic,
            offset=message.offset() or 0,
            key=(message.key() or b"").decode("utf-8", "replace"),
            event_id=event_id.decode("utf-8", "replace")
            if isinstance(event_id, bytes)
            else bytes_hash(value),
            value=value,
            appended_ns=int(stamp)
            if isinstance(stamp, bytes) and stamp.isdigit()
            else message.timestamp()[1] * 1_000_000,
            partition=message.partition() or 0,
        )

    # ------------------------------------------------------------ consumer groups

    def commit(self, group: str, offsets: Mapping[str, int]) -> None:
        """Remember how far ``group`` has read, in Kafka."""
        positions = [self._at(source, offset + 1) for source, offset in offsets.items()]
        if not positions:
            return
        with self._lock:
            try:
                done = self._group(group).commit(offsets=positions, asynchronous=False)
            except KafkaException as exc:
                raise self._translated(exc) from exc
        for position in done or ():
            if position.error is not None:
                raise TransientError(f"offsets of group {group} were not committed: {position.error.str()}")

    def committed(self, group: str) -> dict[str, int]:
        """Offsets last committed by ``group``."""
        known = [s for topic in (*topics.ALL_TOPICS, *topics.INTERNAL) for s in self.sources(topic)]
        with self._lock:
            try:
                found = self._group(group).committed([self._at(source, 0) for source in known], timeout=10)
            except KafkaException as exc:
                raise self._translated(exc) from exc
        return {source: p.offset - 1 for source, p in zip(known, found, strict=True) if p.offset >= 0}

    def _group(self, group: str) -> Consumer:
        if group not in self._groups:
            self._groups[group] = self._consumer(self.settings.prefix + group, eof=False)
        return self._groups[group]

    def close(self) -> None:
        """Send what waits and close every connection."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            if self._producer is not None:
                self._producer.flush(DELIVERY_S)
            for reader in self._readers.values():
                reader.close()
            for index in self._indexes.values():
                index.close()
            for consumer in self._groups.values():
                consumer.close()

    def _translated(self, exc: KafkaException) -> SpanloopError:
        error = exc.args[0]
        if not isinstance(error, KafkaError):
            return TransientError(f"Kafka at {self._servers}: {exc}")
        code = error.code()
        if code == KafkaError.MSG_SIZE_TOO_LARGE:
            return SchemaError(
                f"a record is larger than Kafka takes: raise max.message.bytes of its topic ({error.str()})"
            )
        if code in (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED,
                    KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError._AUTHENTICATION):  # fmt: skip
            return ConfigError(
                f"Kafka at {self._servers} refuses these credentials: {error.str()}; see kafka.client"
            )
        if error.fatal():
            with self._lock:
                self._producer = None  # an idempotent producer that lost its place starts anew
        return TransientError(f"Kafka at {self._servers}: {error.str()}; is it running?")


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


class _Reader:
    """A consumer of some sources that keeps its place between reads."""

    def __init__(self, log: KafkaLog, names: tuple[str, ...]) -> None:
        self._log = log
        self._sources = tuple(dict.fromkeys(source for name in names for source in log.sources(name)))
        self._consumer = log._consumer("spanloop-reader", eof=True)
        self._next: dict[str, int | None] = {}
        """Offset that comes next, by source; None: from the earliest there is."""
        self._buffers: dict[str, deque[LogRecord]] = {source: deque() for source in self._sources}
        self._at_end: set[str] = set()
        self._fetched: dict[str, int] = {}
        """Offset behind the last that arrived, kept or skipped."""
        self._seen: OrderedDict[tuple[str, str], tuple[int, int]] = OrderedDict()

    def read(self, after: Mapping[str, int], limit: int) -> list[LogRecord]:
        self._seek(after)
        self._fill(limit)
        taken = self._merged(limit)
        for record in taken:
            self._next[record.source] = record.offset + 1
        return taken

    def _merged(self, limit: int) -> list[LogRecord]:
        """The next records of all buffers, roughly by time of append, each source in its order."""
        heads: list[tuple[int, str, int, LogRecord]] = []
        for source, buffer in self._buffers.items():
            latest = 0
            for record in islice(buffer, limit):
                latest = max(latest, record.appended_ns)
                heads.append((latest, source, record.offset, record))
        heads.sort(key=itemgetter(0, 1, 2))
        taken = [record for _, _, _, record in heads[:limit]]
        for record in taken:
            self._buffers[record.source].popleft()
        return taken

    def _seek(self, after: Mapping[str, int]) -> None:
        moved = False
        for source in self._sources:
            wanted = after[source] + 1 if after.get(source, -1) >= 0 else None
            known = self._next.get(source, -1)
            buffer = self._buffers[source]
            if source in self._next and (known == wanted or (wanted is None and known == 0)):
                continue
            while buffer and wanted is not None and buffer[0].offset < wanted:
                buffer.popleft()
            if not (source in self._next and wanted is not None and buffer and buffer[0].offset == wanted):
                moved = True
                buffer.clear()
                self._at_end.discard(source)
            self._next[source] = wanted
        if moved:
            self._assign()

    def _assign(self) -> None:
        places = []
        for source in self._sources:
            buffer, wanted = self._buffers[source], self._next[source]
            self._at_end.discard(source)
            if buffer:
                start = buffer[-1].offset + 1
            elif wanted is None:
                start = -2  # OFFSET_BEGINNING
            else:
                start = wanted
                self._check(source, wanted)
            places.append(self._log._at(source, start))
        self._consumer.assign(places)

    def _check(self, source: str, wanted: int) -> None:
        """Refuse to go on where records are gone."""
        low, high = self._consumer.get_watermark_offsets(self._log._at(source, 0), timeout=10)
        if wanted > high and wanted > self._log._end(source) + 1:
            self._next.pop(source, None)
            raise _lost(source, wanted)
        if wanted < low:
            raise TerminalError(
                f"{source}: records {wanted} to {low - 1} are no longer on Kafka (retention), and they were not read yet: "
                "rebuild from the archive (docs/kafka.md), then start behind them",
                source=source, wanted=wanted, first=low,
            )  # fmt: skip

    def _fill(self, limit: int) -> None:
        """Fetch until there is enough, or every source is read to its end."""
        deadline = time.monotonic() + STUCK_S
        idle = time.monotonic() + IDLE_WAIT_S
        while True:
            have = sum(map(len, self._buffers.values()))
            if have >= limit and all(self._buffers[s] or s in self._at_end for s in self._sources):
                return
            ended = self._ended()
            if have and (ended or have >= limit):
                got = self._take(limit, 0.0)
                if not got:
                    return
                continue
            got = self._take(limit, 0.002 if ended else 0.02)
            if not got and ended and time.monotonic() > idle:
                return
            if time.monotonic() > deadline:
                if have:
                    return
                lacking = [s for s in self._sources if s not in self._at_end]
                raise TransientError(f"Kafka gives no records of {', '.join(lacking)}; is it running?")

    def _ended(self) -> bool:
        return all(
            s in self._at_end and self._fetched.get(s, 0) > self._log.written(s) for s in self._sources
        )

    def _take(self, limit: int, wait_s: float) -> bool:
        messages = self._consumer.consume(max(limit, 500), wait_s) or []
        for message in messages:
            error = message.error()
            topic = (message.topic() or "").removeprefix(self._log.settings.prefix)
            source = source_of(topic, message.partition() or 0)
            if error is None:
                self._fetched[source] = (message.offset() or 0) + 1
                self._keep(self._log._record(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                self._at_end.add(source)
                self._fetched[source] = message.offset() or 0
            elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
                wanted = self._wanted(source) or 0
                self._next.pop(source, None)
                raise _lost(source, wanted)
            elif not error.retriable() and error.fatal():
                raise KafkaException(error)
        return bool(messages)

    def _wanted(self, source: str) -> int | None:
        buffer = self._buffers[source]
        return buffer[-1].offset + 1 if buffer else self._next.get(source)

    def _keep(self, record: LogRecord) -> None:
        source, wanted = record.source, self._next.get(record.source)
        self._at_end.discard(source)
        buffer = self._buffers[source]
        if (wanted is not None and record.offset < wanted) or (buffer and record.offset <= buffer[-1].offset):
            return
        identity = (record.topic, record.event_id)
        place = (record.partition, record.offset)
        first = self._seen.setdefault(identity, place)
        if len(self._seen) > SEEN_MAX:
            self._seen.popitem(last=False)
        repeated = first[0] == place[0] and first[1] < place[1]
        if repeated or self._log.copy_of(record):
            if not buffer:
                self._next[source] = record.offset + 1
            return
        buffer.append(record)

    def close(self) -> None:
        self._consumer.close()


class _Index:
    """Where each event id of an exact topic stands first."""

    def __init__(self, log: KafkaLog, topic: str) -> None:
        self._log = log
        self._topic = topic
        self._sources = log.sources(topic)
        self._consumer = log._consumer("spanloop-index", eof=True)
        self._consumer.assign([log._at(source, -2) for source in self._sources])
        self._first: dict[str, tuple[int, int]] = {}
        self._next = dict.fromkeys(self._sources, 0)
        self._end = dict.fromkeys(self._sources, -1)
        self._eof: set[str] = set()

    def first(self, event_id: str) -> tuple[int, int] | None:
        """Partition and offset of the first record with an event id."""
        return self._first.get(event_id)

    def end(self, partition: int) -> int:
        """Offset of the last record that counts, after ``catch_up``."""
        return self._end.get(source_of(self._topic, partition), -1)

    def upto(self, partition: int, offset: int) -> None:
        """Read on until ``offset`` of a partition is in the index."""
        source = source_of(self._topic, partition)
        self._read(lambda: self._next[source] > offset)

    def drain(self) -> None:
        """Take in what has arrived."""
        while self._consume(0.0):
            pass

    def catch_up(self) -> None:
        """Read on to the end as of now."""
        ends = {source: self._log._end(source) for source in self._sources}
        self._read(lambda: all(self._next[s] > end for s, end in ends.items()))

    def _read(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + STUCK_S
        while not done():
            self._consume(0.005)
            if time.monotonic() > deadline:
                raise TransientError(f"Kafka gives no records of {self._topic}; is it running?")

    def _consume(self, wait_s: float) -> int:
        messages = self._consumer.consume(500, wait_s) or []
        for message in messages:
            error = message.error()
            if error is not None:
                if error.code() != KafkaError._PARTITION_EOF and error.fatal():
                    raise KafkaException(error)
                continue
            record = self._log._record(message)
            self._next[record.source] = record.offset + 1
            place = (record.partition, record.offset)
            if self._first.setdefault(record.event_id, place) == place:
                self._end[record.source] = record.offset
        return len(messages)

    def close(self) -> None:
        self._consumer.close()


def _lost(source: str, wanted: int) -> TerminalError:
    return TerminalError(
        f"{source}: the log ends before offset {wanted - 1}, which was read already: did Kafka lose its data? Nothing is read "
        "from the start again by itself; see docs/kafka.md, 'A broker that came back empty'",
        source=source,
    )


def _fetch_end(consumer: Consumer, place: TopicPartition) -> int:
    """Last offset by fetching: some brokers list an end that lags behind what can be read."""
    low, high = consumer.get_watermark_offsets(place, timeout=10)
    start = max(low, high - 1)
    consumer.assign([TopicPartition(place.topic, place.partition, start)])
    last = start - 1
    deadline = time.monotonic() + STUCK_S
    while time.monotonic() < deadline:
        for message in _flat(consumer.consume(1_000, 0.005)):
            error = message.error()
            if error is None:
                last = message.offset() or 0
            elif error.code() == KafkaError._PARTITION_EOF:
                return max(last, (message.offset() or 0) - 1)
            elif error.fatal():
                raise KafkaException(error)
    raise TransientError(f"Kafka does not say where {place.topic} ends; is it running?")


def _flat(messages: Iterable[Message] | None) -> Iterable[Message]:
    return messages or ()
