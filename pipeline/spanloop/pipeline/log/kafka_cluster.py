"""A Kafka cluster as spanloop uses it: names of topics, clients, errors, and records on the wire.

Place in the flow: under ``kafka.KafkaLog``, the exporter and `spanloop ingest`, so that all of them speak alike. Invariants: a
record's key decides its partition (murmur2, as Java clients do); its event id and the time of its append travel as headers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from spanloop.pipeline.ports import LogRecord, NewRecord, source_of, topic_of
from spanloop.schemas import topics
from spanloop.schemas.canonical import bytes_hash
from spanloop.schemas.errors import ConfigError, SchemaError, SpanloopError, TransientError
from spanloop.schemas.settings import Kafka

__all__ = ["RECORD_MAX", "Cluster", "headers_of", "partition_of", "partitions_of", "topic_config"]

RECORD_MAX = 32 * 2**20
"""Bytes of the largest record: an orchestration of many thousand spans."""
FETCH_WAIT_MS = 10
CREATE_S = 20.0
_EVENT_ID, _APPENDED = "event_id", "appended_ns"

_log = logging.getLogger("spanloop.kafka")


def partitions_of(topic: str, settings: Kafka) -> int:
    """How many partitions spanloop gives a topic."""
    return 1 if topic in topics.SINGLE else settings.partitions


def partition_of(key: str, partitions: int) -> int:
    """The partition of a key: murmur2, as the default of Java clients and ours.

    >>> [partition_of(key, 4) for key in ("default/a", "default/b", "default/c")]
    [2, 0, 1]
    """
    return (_murmur2(key.encode()) & 0x7FFFFFFF) % partitions


def _murmur2(data: bytes) -> int:
    """Kafka's murmur2 (org.apache.kafka.common.utils.Utils), 32 bits."""
    m, mask = 0x5BD1E995, 0xFFFFFFFF
    h = 0x9747B28C ^ len(data)
    whole = len(data) & ~3
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * m & mask
        k = (k ^ k >> 24) * m & mask
        h = (h * m & mask) ^ k
    if whole < len(data):
        h = (h ^ int.from_bytes(data[whole:], "little")) * m & mask
    h = (h ^ h >> 13) * m & mask
    return h ^ h >> 15


def topic_config(settings: Kafka) -> dict[str, str]:
    """Configuration of the topics that spanloop makes."""
    return {
        "retention.ms": str(int(settings.retention_hours * 3_600_000)),
        "cleanup.policy": "delete",
        "max.message.bytes": str(RECORD_MAX),
    }


def headers_of(record: NewRecord, stamp: bytes) -> list[tuple[str, str | bytes | None]]:
    """Headers that carry what a record is beside key and value; ``stamp``: nanoseconds of the append, in digits."""
    return [(_EVENT_ID, record.event_id.encode()), (_APPENDED, stamp)]


class Cluster:
    """Clients of one cluster and the names of our topics on it. Connects when first used.

    Args:
        bootstrap_servers: ``host:port,...``.
        settings: prefix, partitions, retention, librdkafka properties.
    """

    def __init__(self, bootstrap_servers: str, settings: Kafka) -> None:
        self.settings = settings
        self.servers = bootstrap_servers
        self._common: dict[str, Any] = {
            "bootstrap.servers": bootstrap_servers,
            "client.id": "spanloop",
            "log_level": 3,
            "socket.timeout.ms": 10_000,
            **settings.client,
        }
        self._admin: AdminClient | None = None

    # ------------------------------------------------------------ topics

    def name(self, topic: str) -> str:
        """The topic's name on the brokers."""
        return self.settings.prefix + topic

    def at(self, source: str, offset: int) -> TopicPartition:
        """A place in a source."""
        topic, partition = topic_of(source)
        return TopicPartition(self.name(topic), partition, offset)

    def admin(self) -> AdminClient:
        """The client that makes topics.

        Raises:
            ConfigError: a property of ``kafka.client`` is unknown or wrong.
        """
        admin = self._admin or self._made(AdminClient, self._common)
        self._admin = admin
        return admin

    def partitions(self, timeout_s: float = 10.0) -> dict[str, int]:
        """Partitions of our topics that exist, by topic.

        Raises:
            TransientError: no broker answers.
        """
        try:
            listed = self.admin().list_topics(timeout=timeout_s).topics
        except KafkaException as exc:
            raise self.translated(exc) from exc
        prefix = self.settings.prefix
        return {
            name.removeprefix(prefix): len(meta.partitions)
            for name, meta in listed.items()
            if name.startswith(prefix) and meta.error is None and meta.partitions
        }

    def check(self, known: dict[str, int], wanted: Sequence[str]) -> None:
        """Refuse topics with another number of partitions than the settings say: keys would be elsewhere.

        Raises:
            ConfigError: the first such topic.
        """
        for topic in wanted:
            expected = partitions_of(topic, self.settings)
            if known.get(topic, expected) == expected:
                continue
            why = (
                "must have one, because its readers need one order: give spanloop another kafka.prefix, or make the topic anew"
                if topic in topics.SINGLE
                else f"kafka.partitions says {expected}: set kafka.partitions = {known[topic]}, or give spanloop another "
                "kafka.prefix and rebuild (docs/kafka.md, 'Another number of partitions')"
            )
            raise ConfigError(
                f"topic {self.name(topic)} on {self.servers} has {known[topic]} partitions and {why}"
            )

    def create(self, missing: Sequence[str]) -> None:
        """Make topics and wait until they can be used.

        Raises:
            ConfigError: the brokers refuse.
            TransientError: they are too slow.
        """
        new = [
            NewTopic(
                self.name(topic),
                num_partitions=partitions_of(topic, self.settings),
                replication_factor=self.settings.replication,
                config=topic_config(self.settings),
            )
            for topic in missing
        ]
        for name, future in self.admin().create_topics(new, operation_timeout=CREATE_S).items():
            try:
                future.result(timeout=CREATE_S + 10)
            except KafkaException as exc:
                error = exc.args[0]
                if error.code() == KafkaError.TOPIC_ALREADY_EXISTS:  # another process was quicker
                    continue
                if error.retriable():
                    raise self.translated(exc) from exc
                raise ConfigError(
                    f"topic {name} cannot be made on {self.servers}: {error.str()}; make it by hand "
                    "(docs/kafka.md has the table) or allow this client to create topics"
                ) from exc
        deadline = time.monotonic() + CREATE_S
        while not self.partitions().keys() >= set(missing):
            if time.monotonic() > deadline:
                raise TransientError(f"topics {self.settings.prefix}* are slow to appear on {self.servers}")
            time.sleep(0.1)

    # ------------------------------------------------------------ clients

    def producer(self, delivery_s: float, **more: Any) -> Producer:
        """A producer that is acknowledged by all in-sync replicas and repeats nothing by itself."""
        return self._made(
            Producer,
            {
                "acks": "all",
                "enable.idempotence": True,
                "compression.type": "lz4",
                "linger.ms": 1,
                "partitioner": "murmur2_random",
                "message.max.bytes": RECORD_MAX,
                "delivery.timeout.ms": int(delivery_s * 1000),
                "queue.buffering.max.kbytes": 256 * 1024,
                **more,
                **self._common,
            },
        )

    def consumer(self, group: str, **more: Any) -> Consumer:
        """A consumer that commits, stores and resets nothing by itself."""
        return self._made(
            Consumer,
            {
                "group.id": group,
                "enable.auto.commit": False,
                "enable.auto.offset.store": False,
                "auto.offset.reset": "error",
                "fetch.wait.max.ms": FETCH_WAIT_MS,
                "fetch.message.max.bytes": 2**20,
                "fetch.max.bytes": 16 * 2**20,
                "receive.message.max.bytes": 4 * RECORD_MAX,
                "queued.max.messages.kbytes": 32 * 1024,
                "queued.min.messages": 20_000,
                "fetch.queue.backoff.ms": 5,
                **more,
                **self._common,
            },
        )

    def _made(self, kind: Any, configuration: dict[str, Any]) -> Any:
        try:
            return kind(configuration, logger=_log)
        except (KafkaException, ValueError, TypeError) as exc:
            reason = exc.args[0].str() if isinstance(exc, KafkaException) else exc
            raise ConfigError(f"librdkafka refuses kafka.client or bootstrap_servers: {reason}") from exc

    # ------------------------------------------------------------ records and errors

    def record(self, message: Message) -> LogRecord:
        """A record as it was fetched. Foreign records without our headers are named by their content."""
        event_id = stamp = None
        for name, header in message.headers() or ():
            if name == _EVENT_ID:
                event_id = header
            elif name == _APPENDED:
                stamp = header
        value, key = message.value() or b"", message.key()
        return LogRecord(
            (message.topic() or "").removeprefix(self.settings.prefix),
            message.offset() or 0,
            key.decode("utf-8", "replace") if isinstance(key, bytes) else key or "",
            event_id.decode("utf-8", "replace") if isinstance(event_id, bytes) else bytes_hash(value),
            value if isinstance(value, bytes) else value.encode(),
            int(stamp)
            if isinstance(stamp, bytes) and stamp.isdigit()
            else message.timestamp()[1] * 1_000_000,
            message.partition() or 0,
        )

    def source(self, message: Message) -> str:
        """The source that a message or an error is about."""
        return source_of((message.topic() or "").removeprefix(self.settings.prefix), message.partition() or 0)

    def translated(self, exc: KafkaException) -> SpanloopError:
        """Kafka's error as ours, with what to do."""
        error = exc.args[0]
        if not isinstance(error, KafkaError):
            return TransientError(f"Kafka at {self.servers}: {exc}")
        code = error.code()
        if code == KafkaError.MSG_SIZE_TOO_LARGE:
            return SchemaError(
                f"a record is larger than Kafka takes: raise max.message.bytes of its topic ({error.str()})"
            )
        if code in _UNAUTHORISED:
            return ConfigError(
                f"Kafka at {self.servers} refuses these credentials: {error.str()}; see kafka.client"
            )
        return TransientError(f"Kafka at {self.servers}: {error.str()}; is it running?")


_UNAUTHORISED = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError._AUTHENTICATION,
    }
)  # fmt: skip
