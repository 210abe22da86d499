"""Verbs, collectors and learner of a deployment whose log is Kafka: the same as over a workspace's own log."""

from __future__ import annotations

import json
import threading
import time
from contextlib import closing

import otlp_requests as otlp
import pytest
from click.testing import CliRunner
from learner_world import World, drive, learner
from simulation.small_system import append, job, outcome, run

from spanloop.collectors.cli import feedback, import_
from spanloop.collectors.gateway_follow import Follower
from spanloop.collectors.receiver import Receiver
from spanloop.learner.cli import policies
from spanloop.pipeline.assembly.cli import traces
from spanloop.pipeline.cli import doctor
from spanloop.pipeline.credit.cli import explain
from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import NewRecord, new_record
from spanloop.schemas import topics
from spanloop.schemas.events import RoutingChanged
from spanloop.schemas.settings import Settings, load_settings


@pytest.fixture
def deployed(bootstrap_servers, kafka_settings, tmp_path, monkeypatch):
    """Environment of a deployment on Kafka, and its settings."""
    for name, value in {
        "SPANLOOP_BOOTSTRAP_SERVERS": bootstrap_servers, "SPANLOOP_KAFKA__PREFIX": kafka_settings.prefix,
        "SPANLOOP_WORKSPACE": str(tmp_path / "w"), "SPANLOOP_COLLECTOR__PORT": "0", "SPANLOOP_GATEWAY__PORT": "0",
        "SPANLOOP_SERVING__PORT": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    return load_settings()


@pytest.fixture
def log(deployed):
    log = KafkaLog(deployed.bootstrap_servers, deployed.kafka)
    yield log
    log.close()


def invoke(verb, *arguments, code=0):
    result = CliRunner().invoke(verb, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.output + repr(result.exception)
    return result.output


def test_doctor_on_nothing_on_spans_and_on_no_broker(deployed, monkeypatch, bootstrap_servers):
    assert "the first process of spanloop makes them" in invoke(doctor)
    with closing(KafkaLog(deployed.bootstrap_servers, deployed.kafka)) as log:
        log.append([new_record(event) for number in range(3) for event in job(number)])
    text = invoke(doctor)
    assert "desk: 3 traces" in text
    assert "partitions: spans 4, feedback 4, policies 1, models 1" in text
    assert "run `spanloop process`" in text
    found = json.loads(invoke(doctor, "--json"))
    assert found["records"] == {"spans": 9}
    monkeypatch.setenv("SPANLOOP_KAFKA__PARTITIONS", "8")
    assert "set kafka.partitions = 4" in invoke(doctor, code=1)
    monkeypatch.setenv("SPANLOOP_BOOTSTRAP_SERVERS", "127.0.0.1:1")
    assert "is it running?" in invoke(doctor, code=1)


def test_import_feedback_traces_and_explain(deployed, log, tmp_path):
    (tmp_path / "spans.jsonl").write_bytes(otlp.as_json([otlp.span(1), otlp.span(2)]) + b"\n")
    assert "2 spans from 1 files: 1 new events" in invoke(import_, tmp_path / "spans.jsonl")
    assert "accepted" in invoke(feedback, "--trace", otlp.TRACE, "--value", 1)
    assert [r.key for r in log.read(["spans", "feedback"], {}, 10)] == [
        f"default/{otlp.TRACE}", f"default/trace/{otlp.TRACE}",
    ]  # fmt: skip

    database = tmp_path / "embedded" / "spanloop.db"  # what the stages make of some jobs, carried over
    append(database, [event for number in range(4) for event in job(number)])
    append(database, [outcome(number, number % 2) for number in range(4)])
    run(database, Settings().pipeline)
    with closing(SqliteLog(database)) as embedded:
        for record in scan(embedded, (topics.ORCHESTRATIONS, topics.REWARDS, topics.CREDITS)):
            log.append([NewRecord(record.topic, record.key, record.event_id, record.value)])
    rows = [json.loads(line) for line in invoke(traces, "--ndjson").splitlines()]
    assert len(rows) == 4
    assert sorted(row["reward"] for row in rows) == [0.0, 0.0, 1.0, 1.0]
    shown = json.loads(invoke(explain, "credit", rows[0]["orchestration_id"], "--json"))
    assert shown["problems"] == []


def test_the_learner_learns_and_promotes_over_kafka(deployed, log, tmp_path):
    system = learner(log, tmp_path / "w", gate=False)
    drive(system, log, World(), 2, per_round=30)
    while system.step():
        pass
    state = system.promoter.state
    assert len(state.versions) > 1
    listed = json.loads(invoke(policies, "--json", "list"))
    assert listed["champion"] == state.champion
    assert [v["version"] for v in listed["versions"]] == sorted(state.versions)


class Routes:
    """Takes what a router would."""

    def __init__(self):
        self.seen = []
        self.arrived = threading.Event()

    def apply(self, events, *, afresh=False):
        self.seen += [event for event in events if isinstance(event, RoutingChanged)]
        if self.seen:
            self.arrived.set()


def test_a_promotion_reaches_the_gateway_soon(log, deployed):
    other = KafkaLog(deployed.bootstrap_servers, deployed.kafka)
    router = Routes()
    follower = Follower(other, router)  # type: ignore[arg-type]
    follower.start()
    try:
        began = time.monotonic()
        log.append([new_record(RoutingChanged(policy="policy", sequence=1, champion=1))])
        assert router.arrived.wait(5)
        assert time.monotonic() - began < 2
    finally:
        follower.close()
        other.close()


async def test_the_receiver_acknowledges_after_kafka_has_the_spans(log, deployed):
    import aiohttp
    from aiohttp import web
    from receiver_harness import Running

    receiver = Receiver(deployed, log, b"k" * 32)
    runner = web.AppRunner(receiver.app(), auto_decompress=False)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    async with aiohttp.ClientSession() as client:
        running = Running(f"http://127.0.0.1:{runner.addresses[0][1]}", log, receiver, client)
        status, _ = await running.post_json(otlp.as_json([otlp.span(1)]), Content_Type="application/json")
        assert status == 200
        assert [r.key for r in log.read(["spans"], {}, 10)] == [f"default/{otlp.TRACE}"]
    await runner.cleanup()
