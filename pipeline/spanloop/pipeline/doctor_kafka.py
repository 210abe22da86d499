"""What ``spanloop doctor`` says of a Kafka deployment: brokers, topics, what is on them, who has read how far.

Works on an empty cluster and while everything runs; makes no topic and commits nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from spanloop.pipeline.doctor import EXAMINED, RECORDS_MAX, Check, Diagnosis, dead_letter_checks
from spanloop.pipeline.learnable import examine
from spanloop.pipeline.log.scan import scan
from spanloop.schemas import topics
from spanloop.schemas.errors import SpanloopError
from spanloop.schemas.settings import Settings

if TYPE_CHECKING:
    from spanloop.pipeline.log.kafka import KafkaLog

__all__ = ["kafka_checks"]

RETENTION_LOW_H = 24.0


def kafka_checks(settings: Settings, found: Diagnosis) -> Iterator[Check]:
    """Checks of the brokers and their topics; fills in what was found on them."""
    try:
        from spanloop.pipeline.log.kafka import TOPICS, KafkaLog
        from spanloop.pipeline.log.kafka_cluster import Cluster, partitions_of
    except ModuleNotFoundError as exc:
        yield Check("kafka", "fail", f"{exc.name} is not installed: pip install 'spanloop[kafka]'")
        return
    cluster = Cluster(settings.bootstrap_servers, settings.kafka)
    try:
        known = cluster.partitions(timeout_s=5)
        brokers = cluster.admin().list_topics(timeout=10).brokers
        yield Check("kafka", "ok", f"{settings.bootstrap_servers}: {len(brokers)} brokers")
        yield from _replication(settings, len(brokers))
        missing = [topic for topic in TOPICS if topic not in known]
        if len(missing) == len(TOPICS):
            yield Check(
                "topics", "ok", f"no {settings.kafka.prefix}* yet; the first process of spanloop makes them"
            )
            return
        cluster.check(known, TOPICS)
        partitions = ", ".join(
            f"{topic} {known.get(topic, partitions_of(topic, settings.kafka))}" for topic in TOPICS
        )
        note = f"; missing, made at the next start: {', '.join(missing)}" if missing else ""
        yield Check("topics", "ok", f"{settings.kafka.prefix}*, partitions: {partitions}{note}")
        log = KafkaLog(settings.bootstrap_servers, settings.kafka, create=False)
        try:
            yield from _content(settings, log, found)
        finally:
            log.close()
    except SpanloopError as exc:
        yield Check("kafka", "fail", exc.message)


def _replication(settings: Settings, num_brokers: int) -> Iterator[Check]:
    kafka = settings.kafka
    if kafka.replication > num_brokers:
        yield Check(
            "replication", "fail",
            f"kafka.replication = {kafka.replication}, but there are {num_brokers} brokers: topics cannot be made",
        )  # fmt: skip
    elif kafka.replication == 1 and num_brokers > 1:
        yield Check(
            "replication", "warn",
            "kafka.replication = 1: topics that spanloop makes are lost with one broker; 3 is usual",
        )  # fmt: skip
    if kafka.retention_hours < RETENTION_LOW_H:
        yield Check(
            "retention", "warn",
            f"kafka.retention_hours = {kafka.retention_hours:g}: what is down for longer loses records; 168 is the default",
        )  # fmt: skip


def _content(settings: Settings, log: KafkaLog, found: Diagnosis) -> Iterator[Check]:
    found.records = log.counts()
    wanted = [topic for topic in EXAMINED if topic in found.records]
    after = {source: offset for topic in wanted for source, offset in log.newest(topic, RECORDS_MAX).items()}
    found.cut = any(offset >= log.first(source) for source, offset in after.items())
    found.deployments = examine(scan(log, wanted, after=after), settings)
    counts = ", ".join(f"{topic} {count}" for topic, count in found.records.items()) or "empty"
    yield Check("log", "ok", f"records: {counts}")
    yield from dead_letter_checks(found)
    group = settings.process.group
    committed = log.committed(group)
    lag = sum(
        max(0, log.last(source) - committed.get(source, log.first(source) - 1))
        for topic in (topics.SPANS, topics.FEEDBACK)
        if topic in found.records
        for source in log.sources(topic)
    )
    if committed and lag:
        yield Check(
            "workers", "ok", f"group {settings.kafka.prefix}{group} has {lag} records of spans and feedback to fold"
        )  # fmt: skip
    elif committed:
        yield Check("workers", "ok", f"group {settings.kafka.prefix}{group} has folded everything")
    elif found.records.get(topics.SPANS):
        yield Check(
            "workers", "warn", f"no worker of group {settings.kafka.prefix}{group} has committed yet: run `spanloop process`"
        )  # fmt: skip
