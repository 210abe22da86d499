"""The plain engine: one confluent-kafka consumer group in a loop. What Faust is measured against, and ``--engine loop``."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.pipeline.ports import LogRecord, source_of, topic_of
from spanloop.pipeline.runtimes.workers import DELIVERED, Workers
from spanloop.schemas.errors import TransientError
from spanloop.schemas.settings import Settings

__all__ = ["run_loop"]

WAIT_S = 0.02
COMMIT_EVERY = 25
"""Rounds between two looks at what may be committed, and at where the sources end."""
POLL_MAX_MS = 600_000
"""Other workers wait for so long for one that folds or recovers while partitions are shared anew."""

_log = logging.getLogger("spanloop.process")


def run_loop(
    settings: Settings, log: KafkaLog, workers: Workers, *, stop: threading.Event, ready: Callable[[], None]
) -> None:
    """Consume, fold, tick, commit, until ``stop``."""
    prefix, process = settings.kafka.prefix, settings.process
    consumer = Consumer(
        {
            "bootstrap.servers": settings.bootstrap_servers,
            "group.id": prefix + process.group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "session.timeout.ms": int(process.session_timeout_s * 1000),
            "heartbeat.interval.ms": int(process.session_timeout_s * 333),
            "max.poll.interval.ms": POLL_MAX_MS,
            "fetch.message.max.bytes": 32 * 2**20,
            "fetch.wait.max.ms": 10,
            "fetch.queue.backoff.ms": 5,
            "log_level": 3,
            **settings.kafka.client,
        }
    )

    def sources(partitions: Iterable[TopicPartition]) -> list[str]:
        return [source_of(p.topic.removeprefix(prefix), p.partition) for p in partitions]

    consumer.subscribe(
        [prefix + topic for topic in DELIVERED],
        on_assign=lambda _, partitions: workers.expect(sources(partitions)),
        on_revoke=lambda _, partitions: workers.give_up(sources(partitions)),
        on_lost=lambda _, partitions: workers.give_up(sources(partitions)),
    )
    ready()
    rounds = 0
    committed: dict[str, int] = {}
    try:
        while not stop.is_set():
            messages = consumer.consume(process.batch_max * 4, WAIT_S) or []
            for source, records in _grouped(messages, prefix, log).items():
                workers.offer(source, records)
            workers.tick()
            rounds += 1
            if rounds % COMMIT_EVERY == 0:
                workers.ends(_ends(consumer, prefix))
                _commit(consumer, prefix, workers, committed)
    finally:
        workers.stop()
        workers.close()
        consumer.close()


def _grouped(messages: Iterable[Message], prefix: str, log: KafkaLog) -> dict[str, list[LogRecord]]:
    by_source: dict[str, list[LogRecord]] = {}
    for message in messages:
        error = message.error()
        if error is not None:
            if error.fatal():
                raise KafkaException(error)
            if error.code() != KafkaError._PARTITION_EOF:
                _log.warning("Kafka: %s", error.str())
            continue
        record = log.cluster.record(message)
        by_source.setdefault(record.source, []).append(record)
    return by_source


def _ends(consumer: Consumer, prefix: str) -> dict[str, int]:
    """Last offsets as the client knows them from what it fetched."""
    found: dict[str, int] = {}
    for place in consumer.assignment():
        known = consumer.get_watermark_offsets(place, cached=True)
        if known is not None and known[1] >= 0:
            found[source_of(place.topic.removeprefix(prefix), place.partition)] = known[1] - 1
    return found


def _commit(consumer: Consumer, prefix: str, workers: Workers, committed: dict[str, int]) -> None:
    places = []
    for source, offset in workers.committable().items():
        if committed.get(source) != offset:
            topic, partition = topic_of(source)
            places.append(TopicPartition(prefix + topic, partition, offset + 1))
            committed[source] = offset
    if places:
        try:
            consumer.commit(offsets=places, asynchronous=True)
        except KafkaException as exc:
            committed.clear()
            raise TransientError(f"offsets were not committed: {exc}") from exc
