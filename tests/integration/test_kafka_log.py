"""The Kafka log beyond the port: partitions, lost offsets, repeated ids, a broker that goes away."""

from __future__ import annotations

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from kafka_broker import Broker

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.ports import NewRecord
from spanloop.schemas.errors import ConfigError, TerminalError, TransientError
from spanloop.schemas.settings import Kafka


@pytest.fixture
def log(bootstrap_servers, kafka_settings):
    log = KafkaLog(bootstrap_servers, kafka_settings, ManualClock(1_000))
    yield log
    log.close()


def _records(count, topic="spans"):
    return [NewRecord(topic, f"t/{n % 40}", f"e{n}", str(n).encode()) for n in range(count)]


def test_a_key_has_one_partition_and_every_partition_is_read(log):
    appended = log.append(_records(200))
    assert {a.partition for a in appended} == {0, 1, 2, 3}
    read = log.read(["spans"], {}, 1_000)
    assert sorted(r.event_id for r in read) == sorted(f"e{n}" for n in range(200))
    by_key = {}
    for record in read:
        by_key.setdefault(record.key, set()).add(record.partition)
    assert all(len(partitions) == 1 for partitions in by_key.values())
    for source in log.sources("spans"):
        offsets = [r.offset for r in read if r.source == source]
        assert offsets == list(range(len(offsets)))
        assert log.end(source) == offsets[-1]


def test_the_writer_may_own_a_partition_and_a_reader_one_source(log):
    log.append([NewRecord("rewards", f"k{n}", f"e{n}", b"{}", partition=n % 4) for n in range(12)])
    read = log.read(["rewards/2"], {}, 100)
    assert [r.event_id for r in read] == ["e2", "e6", "e10"]
    assert log.read(["rewards/2"], {"rewards/2": read[0].offset}, 100) == read[1:]
    assert [r.event_id for r in scan(log, ["rewards/2"])] == ["e2", "e6", "e10"]


def test_single_topics_have_one_partition(log):
    for topic in ("policies", "models", "samples", "dead_letters"):
        assert log.sources(topic) == (topic,)


def test_a_topic_with_the_wrong_number_of_partitions_is_refused(bootstrap_servers, kafka_settings):
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    made = admin.create_topics([NewTopic(kafka_settings.prefix + "policies", 3, 1)])
    next(iter(made.values())).result()
    with pytest.raises(ConfigError, match="must have one"):
        KafkaLog(bootstrap_servers, kafka_settings)


def test_without_create_an_empty_cluster_is_an_error_that_helps(bootstrap_servers, kafka_settings):
    with pytest.raises(ConfigError, match=r"kafka\.prefix"):
        KafkaLog(bootstrap_servers, kafka_settings, create=False)


def test_of_two_writers_of_one_promotion_the_first_wins(bootstrap_servers, kafka_settings):
    logs = [KafkaLog(bootstrap_servers, kafka_settings) for _ in range(2)]
    try:
        first = [
            log.append([NewRecord("policies", "k", "epoch-1", bytes([n]))])[0] for n, log in enumerate(logs)
        ]
        assert [a.duplicate for a in first] == [False, True]
        assert first[0].offset == first[1].offset
        for log in logs:
            assert [r.value for r in log.read(["policies"], {}, 10)] == [b"\0"]
    finally:
        for log in logs:
            log.close()


def test_a_repeated_id_on_another_topic_is_read_once(log):
    log.append(_records(5))
    log.append(_records(5))
    read = log.read(["spans"], {}, 100)
    assert sorted(r.event_id for r in read) == [f"e{n}" for n in range(5)]


def test_positions_may_go_back(log):
    log.append(_records(50))
    everything = log.read(["spans"], {}, 100)
    assert log.read(["spans"], {}, 100) == everything
    half = {r.source: r.offset for r in everything[:25]}
    rest = log.read(["spans"], half, 100)
    assert {r.event_id for r in rest} == {r.event_id for r in everything if r.offset > half.get(r.source, -1)}


def test_a_log_that_ends_before_what_was_read_raises(log):
    log.append([NewRecord("samples", "k", "e0", b"{}")])
    with pytest.raises(TerminalError, match="ends before"):
        log.read(["samples"], {"samples": 900}, 10)


def test_a_large_record_goes_through(log):
    (done,) = log.append([NewRecord("orchestrations", "t/o", "big", b"x" * 8_000_000)])
    (read,) = log.read(["orchestrations"], {}, 10)
    assert (read.offset, len(read.value)) == (done.offset, 8_000_000)


def test_a_broker_that_is_away_is_waited_for(monkeypatch):
    monkeypatch.setattr("spanloop.pipeline.log.kafka.DELIVERY_S", 2.0)
    own = Broker()
    own.start()
    settings = Kafka(prefix="p.", partitions=2)
    log = KafkaLog(own.bootstrap, settings)
    try:
        log.append(_records(3))
        own.stop()
        with pytest.raises(TransientError, match="Kafka at"):
            log.append(_records(3))
        own.start()
        again = KafkaLog(own.bootstrap, settings)
        again.append(_records(3))
        assert len(again.read(["spans"], {}, 10)) == 3
        again.close()
    finally:
        log.close()
        own.stop()
