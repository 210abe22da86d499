"""`spanloop ingest` against a real broker: what the OpenTelemetry Collector's Kafka exporter writes, good and bad."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import otlp_requests as otlp
import pytest
from click.testing import CliRunner
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from spanloop.collectors.batches import Intake
from spanloop.collectors.ingest import Ingestor, read_request
from spanloop.collectors.ingest_cli import ingest
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.schemas.errors import ConfigError, TerminalError
from spanloop.schemas.events import decode
from spanloop.schemas.settings import Collector, Content, Settings

OTHER = "1bf7651916cd43dd8448eb211c80319d"


class Place:
    """A Collector's topic and the deployment that ingests it."""

    def __init__(self, servers, kafka, tmp_path):
        self.topic = kafka.prefix + "otlp_spans"
        self.settings = Settings(
            bootstrap_servers=servers, kafka=kafka.model_copy(update={"otlp_topics": (self.topic,)}), tenant="acme",
            workspace=tmp_path, content=Content(hmac_key="a long random text of this test"),
            collector=Collector(max_expanded_bytes=100_000),
        )  # fmt: skip
        admin = AdminClient({"bootstrap.servers": servers})
        next(iter(admin.create_topics([NewTopic(self.topic, 3, 1)]).values())).result()
        self.producer = Producer({"bootstrap.servers": servers, "log_level": 0})
        self.log = KafkaLog(servers, self.settings.kafka)

    def send(self, *values, key=None, partition=0):
        for value in values:
            self.producer.produce(self.topic, value, key=key, partition=partition)
        assert self.producer.flush(10) == 0

    def ingestor(self, **options):
        content = self.settings.content
        intake = Intake(Redactor(content, b"k" * 32), 65_536, keep_content=content.training)
        return Ingestor(self.settings, self.log, intake, topics=[self.topic], **options)

    def once(self, **options):
        import threading

        ingestor = self.ingestor(**options)
        try:
            ingestor.once(threading.Event())
        finally:
            ingestor.close()
        return ingestor.done

    def spans(self):
        records = self.log.read(["spans"], {}, 1_000)
        assert all(record.key == f"acme/{decode(record.value).trace_id}" for record in records)
        return sorted((s.trace_id, s.span_id) for record in records for s in decode(record.value).spans)

    def letters(self):
        return [decode(record.value) for record in self.log.read(["dead_letters"], {}, 1_000)]


@pytest.fixture
def place(bootstrap_servers, kafka_settings, tmp_path):
    place = Place(bootstrap_servers, kafka_settings, tmp_path)
    yield place
    place.log.close()


def test_proto_and_json_keyed_or_not_of_several_traces(place):
    place.send(otlp.as_protobuf([otlp.span(1), otlp.span(2, trace_id=OTHER)]))
    place.send(otlp.as_json([otlp.span(3), otlp.span(4, trace_id=OTHER)]), partition=1)
    place.send(otlp.as_protobuf([otlp.span(5)]), key=bytes.fromhex(otlp.TRACE), partition=2)
    place.send(b"\n " + otlp.as_json([otlp.span(6)]), key=otlp.TRACE, partition=2)
    done = place.once()
    assert (done.records, done.spans, done.refused) == (4, 6, 0)
    assert place.spans() == sorted((OTHER if n in (2, 4) else otlp.TRACE, f"{n:016x}") for n in range(1, 7))


def test_the_same_spans_in_both_encodings_are_one_event(place):
    place.send(otlp.as_protobuf([otlp.span(1)]), otlp.as_json([otlp.span(1)]))
    place.once()
    assert place.spans() == [(otlp.TRACE, f"{1:016x}")]


def test_what_was_read_is_not_read_again_and_another_group_reads_all(place):
    place.send(otlp.as_protobuf([otlp.span(1)]))
    assert place.once().records == 1
    assert place.once().records == 0
    place.send(otlp.as_protobuf([otlp.span(2)]))
    assert place.once().records == 1
    assert place.once(group="again").records == 2
    assert len(place.spans()) == 2


def test_a_kill_between_append_and_commit_repeats_and_loses_nothing(place, monkeypatch):
    place.send(*(otlp.as_protobuf([otlp.span(n)]) for n in range(1, 6)))

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ingestor, "_commit", killed)
        with pytest.raises(KeyboardInterrupt):
            place.once()
    assert place.once().records == 5
    assert len(place.spans()) == 5


def test_poison_is_a_dead_letter_with_its_place_and_the_neighbours_go_on(place):
    place.send(
        otlp.as_protobuf([otlp.span(1)]),
        b"\xff\xfe poison user@example.com",
        b'{"resourceSpans": [7]}',
        partition=1,
    )
    place.send(otlp.as_json([otlp.span(2), otlp.span(3, trace_id="00")]), b"x" * 100_001, b"", partition=1)
    done = place.once()
    assert (done.records, done.spans, done.refused) == (6, 2, 5)
    assert place.spans() == [(otlp.TRACE, f"{1:016x}"), (otlp.TRACE, f"{2:016x}")]
    letters = {letter.details["offset"]: letter for letter in place.letters()}
    assert {offset: letter.reason for offset, letter in letters.items()} == {
        1: "bad span: request", 2: "bad span: request", 3: "bad span: id", 4: "bad span: limit", 5: "bad span: request",
    }  # fmt: skip
    for letter in letters.values():
        assert (letter.source, letter.tenant, letter.data) == ("ingest", "acme", "")
        assert (letter.details["topic"], letter.details["partition"]) == (place.topic, 1)
        assert set(letter.details) == {"topic", "partition", "offset"}
    assert letters[4].size == 100_001


def test_content_rules_are_the_receivers(place):
    place.send(otlp.as_protobuf([otlp.span(1, attributes={"gen_ai.input.messages": "my secret prompt", "spanloop.policy.version": "v9"})]))  # fmt: skip
    place.once()
    (record,) = place.log.read(["spans"], {}, 10)
    assert b"secret" not in record.value
    assert b"spanloop.policy" not in record.value


@pytest.mark.parametrize("on_lost", ["raise", "skip"])
def test_records_deleted_before_they_were_read(place, monkeypatch, on_lost):
    place.send(otlp.as_protobuf([otlp.span(1)]))
    place.once()
    place.send(*(otlp.as_protobuf([otlp.span(n)]) for n in range(2, 6)))
    monkeypatch.setattr(Ingestor, "_watermarks", lambda _, p: (3, 5) if p.partition == 0 else (0, 0))
    if on_lost == "raise":
        with pytest.raises(TerminalError, match=r"records 1 to 2 were deleted"):
            place.once()
    else:
        done = place.once(on_lost="skip")
        assert (done.records, done.skipped) == (2, 2)


def test_a_topic_that_is_not_there_is_an_error_that_helps(place):
    place.topic = "nowhere"
    with pytest.raises(ConfigError, match=r"no topic nowhere .* kafka\.otlp_topics"):
        place.once()


def test_the_encoding_is_found_out():
    proto, text = otlp.as_protobuf([otlp.span(1)]), otlp.as_json([otlp.span(1)])
    for value in (proto, text, b"\n" + text + b"\n"):
        assert [s.span_id for s in read_request(value, "auto", 64).spans] == [f"{1:016x}"]
    odd = next(  # a request whose first group has the length of a brace
        value
        for n in range(200)
        if (value := otlp.as_protobuf([otlp.span(1, name="n" * n, attributes={})], {"service.name": ""}))[1:2]
        == b"{"
    )
    assert len(read_request(odd, "auto", 64).spans) == 1


def _environment(place):
    return {
        "SPANLOOP_BOOTSTRAP_SERVERS": place.settings.bootstrap_servers,
        "SPANLOOP_KAFKA__PREFIX": place.settings.kafka.prefix,
        "SPANLOOP_KAFKA__OTLP_TOPICS": json.dumps([place.topic]),
        "SPANLOOP_WORKSPACE": str(place.settings.workspace),
        "SPANLOOP_TENANT": "acme",
    }


def test_the_verb_once(place, monkeypatch):
    for name, value in _environment(place).items():
        monkeypatch.setenv(name, value)
    place.send(otlp.as_protobuf([otlp.span(1)]))
    result = CliRunner().invoke(ingest, ["--once", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "records": 1,
        "spans": 1,
        "refused": 0,
        "skipped": 0,
    }
    place.send(b"poison")
    result = CliRunner().invoke(ingest, ["--once"])
    assert result.exit_code == 3
    assert "0 spans of 1 records, 1 refused" in result.output


def test_the_process_follows_and_ends_gracefully(place):
    code = "from spanloop.collectors.ingest_cli import ingest; ingest()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--json"], env={**os.environ, **_environment(place)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert json.loads(process.stdout.readline())["ready"] == "ingest"
        place.send(*(otlp.as_protobuf([otlp.span(n)]) for n in range(1, 31)))
        deadline = time.monotonic() + 30
        while len(place.spans()) < 30 and time.monotonic() < deadline:
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[-1]) == {"records": 30, "spans": 30, "refused": 0, "skipped": 0}
    assert place.once().records == 0
