"""Workers as processes on a real broker: cases 29, 30 and 31 under Faust and under the plain loop."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
from collections import Counter

import pytest
from click.testing import CliRunner
from confluent_kafka.admin import AdminClient
from kafka_deployment import Deployment, embedded, feedback_of, sources_of
from made_spans import load_case

from spanloop.collectors.deadletters_cli import deadletters
from spanloop.pipeline.ports import NewRecord
from spanloop.schemas import topics
from spanloop.schemas.events import decode


@pytest.fixture
def deployment(bootstrap_servers, kafka_settings, tmp_path):
    kafka = kafka_settings.model_copy(update={"partitions": 2})
    made = Deployment(bootstrap_servers, tmp_path, kafka, content__training="true")
    yield made
    made.close()


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("engine", ["faust", pytest.param("loop", marks=pytest.mark.full)])
def test_killed_poisoned_and_read_again(deployment, engine):
    """One deployment through all three cases, because starting workers is what takes time."""
    pipeline = deployment.settings.pipeline
    deployment.start("1", engine)
    deployment.start("2", engine)
    deployment.wait_shared()

    # case 29: killed between the halves of a trace
    case, spans = load_case(29)
    events = sources_of(spans)
    deployment.put(events[:3])
    deployment.wait(lambda: len(deployment.values(topics.OPERATIONS)) >= 3, 20, "three operations")
    home = next(r.source for r in deployment.log.read([topics.OPERATIONS], {}, 100))
    victim = next(name for name, sources in deployment.owned().items() if home in sources)
    deployment.kill(victim)
    deployment.put(events[3:])
    feedback = feedback_of(case)
    deployment.put(feedback)
    wanted = embedded(pipeline, [*events, *feedback])
    (key,) = wanted
    assert deployment.wait_contents(wanted) < 30
    calls = decode(deployment.values(topics.ORCHESTRATIONS)[-1]).content.calls
    assert (sum(c.input_tokens or 0 for c in calls), sum(c.output_tokens or 0 for c in calls)) == (300, 100)

    # case 30: five poison records between good spans of one partition
    case, spans = load_case(30)
    events = sources_of(spans)
    raw = [base64.b64decode(text) for text in case["raw_messages_base64"]]
    deployment.put(events[:2], partition=1)
    deployment.log.append(
        [NewRecord(topics.SPANS, "default/x", f"raw-{n}", value, 1) for n, value in enumerate(raw)]
    )
    deployment.put(events[2:], partition=1)
    wanted |= embedded(pipeline, events)
    assert deployment.wait_contents(wanted) < 30
    letters = [decode(value) for value in deployment.values(topics.DEAD_LETTERS)]
    assert len(letters) == 5
    for value in raw:
        (letter,) = [x for x in letters if x.sha256 == hashlib.sha256(value).hexdigest()]
        assert (letter.size, base64.b64decode(letter.data)) == (len(value), value)
        assert letter.reason
        place = letter.details
        (found,) = deployment.log.read(["spans/1"], {"spans/1": place["offset"] - 1}, 1)
        assert (place["topic"], place["partition"], found.value) == ("spans", 1, value)
    _look_at_letters(deployment)

    # case 31: offsets lost, everything is delivered again
    case, spans = load_case(31)
    events, feedback = sources_of(spans), feedback_of(case)
    deployment.put([*events, *feedback])
    wanted |= embedded(pipeline, [*events, *feedback])
    deployment.wait_contents(wanted)
    for name in list(deployment.workers):
        assert deployment.stop(name) == 0
    before = _records_of(deployment, wanted)
    for with_snapshots in (True, False):
        _forget_offsets(deployment)
        if not with_snapshots:
            shutil.rmtree(deployment.folder / "snapshots")
        name = "3" if with_snapshots else "4"
        deployment.start(name, engine)
        late = sources_of(load_case(1 if with_snapshots else 2)[1])
        deployment.put(late)
        now = wanted | embedded(pipeline, late)
        deployment.wait(lambda wanted=now: set(deployment.contents()) >= set(wanted), 40, "a new trace")
        assert deployment.stop(name) == 0
        assert _records_of(deployment, wanted) == before, f"published again, snapshots: {with_snapshots}"
        wanted, before = now, _records_of(deployment, now)
    assert deployment.contents() == wanted
    assert key in wanted


def _records_of(deployment, keys):
    """How many records of each derived topic there are of these orchestrations."""
    found = {}
    for topic in topics.DERIVED:
        events = map(decode, deployment.values(topic))
        found[topic] = Counter(event.key for event in events if event.key in keys)
    return found


def _look_at_letters(deployment):
    """The verb works on Kafka as on SQLite."""
    environment = {
        name: value for name, value in deployment.environment.items() if name.startswith("SPANLOOP_")
    }
    listed = CliRunner().invoke(deadletters, ["list", "--json"], env=environment)
    rows = [json.loads(line) for line in listed.stdout.splitlines()]
    assert len(rows) == 5
    assert all(row["origin"].startswith("spans/1@") and row["bytes_kept"] for row in rows)
    dry = CliRunner().invoke(deadletters, ["replay", "--all", "--json"], env=environment)
    assert json.loads(dry.stdout)["refused"] == 5


def _forget_offsets(deployment):
    admin = AdminClient({"bootstrap.servers": deployment.settings.bootstrap_servers})
    group = deployment.settings.kafka.prefix + deployment.settings.process.group
    for future in admin.delete_consumer_groups([group]).values():
        future.result(20)
