"""The Kafka log beyond the port: partitions, lost offsets, repeated ids, a broker that goes away."""

from __future__ import annotations

import contextlib
import time
import uuid

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kafka_broker import Broker

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.kafka import KafkaLog, partition_of
from spanloop.pipeline.log.kafka_read import Reader
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


@pytest.mark.parametrize(
    ("topic", "match"), [("policies", "must have one"), ("spans", r"set kafka\.partitions = 3")]
)
def test_a_topic_with_the_wrong_number_of_partitions_is_refused(
    bootstrap_servers, kafka_settings, topic, match
):
    admin = AdminClient({"bootstrap.servers": bootstrap_servers})
    made = admin.create_topics([NewTopic(kafka_settings.prefix + topic, 3, 1)])
    next(iter(made.values())).result()
    with pytest.raises(ConfigError, match=match):
        KafkaLog(bootstrap_servers, kafka_settings)


@given(keys=st.lists(st.text(max_size=40), max_size=50))
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_our_partitioner_is_the_clients(log, keys):
    keys = [key.encode("utf-8", "ignore").decode() for key in keys] + [
        "default/" + "ab" * n for n in range(20)
    ]
    keys = [key for key in keys if key]  # librdkafka takes an empty key for none
    done = log.append([NewRecord("feedback", key, uuid.uuid4().hex, b"{}") for key in keys])
    assert [a.partition for a in done] == [partition_of(key, 4) for key in keys]


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


@pytest.mark.parametrize("on_lost", ["raise", "skip"])
def test_what_retention_deleted_is_never_skipped_in_silence(
    bootstrap_servers, kafka_settings, monkeypatch, caplog, on_lost
):
    log = KafkaLog(bootstrap_servers, kafka_settings, on_lost=on_lost)
    log.append([NewRecord("samples", "k", f"e{n}", b"{}") for n in range(10)])
    monkeypatch.setattr(KafkaLog, "watermarks", lambda *_: (6, 10))  # as if 0 to 5 were deleted
    try:
        if on_lost == "raise":
            for _ in range(2):
                with pytest.raises(TerminalError, match="records 3 to 5 are no longer on Kafka") as caught:
                    log.read(["samples"], {"samples": 2}, 100)
            assert (caught.value.attributes["wanted"], caught.value.attributes["first"]) == (3, 6)
        else:
            read = log.read(["samples"], {"samples": 2}, 100)
            assert [r.offset for r in read] == [6, 7, 8, 9]
            assert log.lost == 3
            assert "records 3 to 5 are no longer on Kafka" in caplog.text
        assert [r.offset for r in log.read(["samples"], {}, 100)] == [6, 7, 8, 9]
        assert log.first("samples") == 6
        assert log.newest("samples", 2) == {"samples": 7}
        assert log.counts()["samples"] == 4
    finally:
        log.close()


def test_readers_at_two_places_of_one_topic_do_not_disturb_each_other(log, monkeypatch):
    log.append(_records(200, "samples"))
    assigned = []
    original = Reader._assign
    monkeypatch.setattr(Reader, "_assign", lambda self: (assigned.append(1), original(self)))
    at = [-1, 99]
    for _ in range(10):
        for n in range(2):
            for record in log.read(["samples"], {"samples": at[n]}, 10):
                assert record.offset == at[n] + 1
                at[n] = record.offset
    assert at == [99, 199]
    assert len(assigned) == 2


def test_a_large_record_goes_through(log):
    (done,) = log.append([NewRecord("orchestrations", "t/o", "big", b"x" * 8_000_000)])
    (read,) = log.read(["orchestrations"], {}, 10)
    assert (read.offset, len(read.value)) == (done.offset, 8_000_000)


@pytest.fixture
def own_broker():
    own = Broker()
    own.start()
    yield own
    own.resume()
    own.stop()


def test_a_broker_that_hangs_is_waited_for_and_the_same_log_goes_on(own_broker):
    log = KafkaLog(
        own_broker.bootstrap,
        Kafka(prefix="p.", partitions=2, client={"socket.timeout.ms": "2000"}),
        delivery_s=2.0,
    )
    try:
        log.append(_records(3))
        own_broker.pause()
        with pytest.raises(TransientError, match="Kafka at"):
            log.append(_records(6))
        own_broker.resume()
        log.append(_records(6))
        read = log.read(["spans"], {}, 100)
        assert sorted(r.event_id for r in read) == [f"e{n}" for n in range(6)]
    finally:
        log.close()


def test_a_broker_that_came_back_empty_stops_its_readers(own_broker):
    of_kafka = Kafka(prefix="p.", partitions=2)
    log = KafkaLog(own_broker.bootstrap, of_kafka, delivery_s=2.0)
    try:
        log.append(_records(40))
        position = {r.source: r.offset for r in log.read(["spans"], {}, 100)}
        own_broker.stop()
        with pytest.raises(TransientError, match="Kafka at"):
            log.append(_records(3))
        own_broker.start()
        again = KafkaLog(own_broker.bootstrap, of_kafka)
        again.append(_records(3))
        assert len(again.read(["spans"], {}, 10)) == 3
        again.close()

        def poll():
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                with contextlib.suppress(TransientError):
                    assert log.read(["spans"], position, 100) == []
                time.sleep(0.1)

        with pytest.raises(TerminalError, match="ends before"):
            poll()
    finally:
        log.close()
