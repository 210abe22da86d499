"""Workers of ``spanloop process`` killed again and again under load: nothing acknowledged is lost, nothing is credited twice.

SPANLOOP_TEST_KILLS (30) kills with SIGKILL, each of a random one of two workers, which is then started again. The session
time-out is 6 s. A kill's recovery is the time until every partition that the victim had has derived something that was appended
after the kill. SPANLOOP_RESULTS=FILE keeps the figures.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path

import msgspec
import pytest
from kafka_deployment import Deployment, contents, embedded
from made_spans import hex16, hex32

from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.ports import new_record
from spanloop.schemas import topics
from spanloop.schemas.canonical import content_hash
from spanloop.schemas.errors import TransientError
from spanloop.schemas.events import FeedbackReceived, OrchestrationRevised, SpansReceived, decode
from spanloop.schemas.spans import Span

KILLS = int(os.environ.get("SPANLOOP_TEST_KILLS", "30"))
SEED = int(os.environ.get("SPANLOOP_TEST_SEED", "20261201"))
RATE = 15.0
"""Orchestrations a second."""
RECOVERY_MAX_S = 30.0


class Load(threading.Thread):
    """Appends orchestrations, each in two records and an outcome, and remembers what was acknowledged."""

    def __init__(self, log):
        super().__init__(daemon=True)
        self.log = log
        self.acknowledged: list = []
        self.made_at: dict[str, float] = {}
        self.stopping = threading.Event()
        self.refused = 0

    def run(self):
        rng = random.Random(SEED)
        number = 0
        while not self.stopping.wait(1 / RATE):
            number += 1
            trace = hex32(rng.getrandbits(120) + 1)
            start = 1_790_000_000_000_000_000 + number
            names = ("orchestrator", "researcher", "writer", "checker")
            spans = [
                Span(
                    trace, hex16(10 * number + n), "run" if n == 0 else "work", start + n, start + 1_000 - n,
                    parent_span_id=None if n == 0 else hex16(10 * number),
                    attributes={"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name},
                )
                for n, name in enumerate(names)
            ]  # fmt: skip
            outcome = FeedbackReceived(
                feedback_id=f"f{number}", target_kind="trace", target_id=trace, value=(number % 5) / 5
            )
            events = [
                SpansReceived(trace_id=trace, spans=tuple(spans[:2]), source="import"),
                SpansReceived(trace_id=trace, spans=tuple(spans[2:]), source="import"),
                outcome,
            ]
            for event in events:
                try:
                    self.log.append([new_record(event)])
                except TransientError:
                    self.refused += 1
                else:
                    self.acknowledged.append(event)
            self.made_at[trace] = time.monotonic()


class Watch(threading.Thread):
    """Follows orchestrations: when each partition last derived one, and when the newest of them was appended."""

    def __init__(self, log, load):
        super().__init__(daemon=True)
        self.log, self.load = log, load
        self.newest: dict[str, float] = defaultdict(float)
        self.stopping = threading.Event()

    def run(self):
        after: dict[str, int] = {}
        while not self.stopping.is_set():
            records = self.log.read([topics.ORCHESTRATIONS], after, 500)
            for record in records:
                after[record.source] = record.offset
                event = decode(record.value)
                if isinstance(event, OrchestrationRevised) and event.content is not None:
                    made = max(self.load.made_at.get(trace, 0.0) for trace in event.content.trace_ids)
                    self.newest[record.source] = max(self.newest[record.source], made)
            if not records:
                time.sleep(0.05)


@pytest.mark.full
@pytest.mark.timeout(3_000)
@pytest.mark.parametrize("engine", [os.environ.get("SPANLOOP_TEST_ENGINE", "faust")])
def test_kills_lose_nothing_and_repeat_nothing(bootstrap_servers, kafka_settings, tmp_path, engine):
    deployment = Deployment(
        bootstrap_servers, tmp_path, kafka_settings, process__session_timeout_s=6, process__snapshot_every_s=2
    )
    rng = random.Random(SEED)
    names = ["1", "2"]
    recoveries = []
    load = Load(deployment.log)
    from spanloop.pipeline.log.kafka import KafkaLog

    watching = KafkaLog(bootstrap_servers, deployment.settings.kafka)
    watch = Watch(watching, load)
    try:
        for name in names:
            deployment.start(name, engine)
        deployment.wait_shared(90)
        load.start()
        watch.start()
        for _ in range(KILLS):
            time.sleep(rng.uniform(0.5, 4.0))
            victim = rng.choice(names)
            lost = {s for s in deployment.owned().get(victim, ()) if s.startswith(topics.OPERATIONS)}
            deployment.kill(victim)
            killed = time.monotonic()
            deployment.start(victim, engine)
            sources = [s.replace(topics.OPERATIONS, topics.ORCHESTRATIONS) for s in lost]
            deployment.wait(
                lambda sources=sources, killed=killed: all(watch.newest[s] > killed for s in sources),
                4 * RECOVERY_MAX_S, f"{sources} to go on",
            )  # fmt: skip
            if lost:
                recoveries.append(round(time.monotonic() - killed, 2))
        load.stopping.set()
        load.join(30)
        wanted = embedded(deployment.settings.pipeline, load.acknowledged)
        deployment.wait_contents(wanted, 180)
        for name in names:
            assert deployment.stop(name) == 0, deployment.words()
        figures = _check(deployment, load)
    finally:
        load.stopping.set()
        watch.stopping.set()
        watch.join(10)
        deployment.close()
        watching.close()
    figures |= {
        "engine": engine, "kills": KILLS, "seed": SEED, "session_timeout_s": 6, "refused_appends": load.refused,
        "recovery_s": {
            "median": statistics.median(recoveries), "max": max(recoveries), "all": recoveries, "counted": len(recoveries),
        },
    }  # fmt: skip
    print(json.dumps(figures))
    if target := os.environ.get("SPANLOOP_RESULTS"):
        Path(target).write_text(json.dumps(figures, indent=1) + "\n")
    assert max(recoveries) < RECOVERY_MAX_S


def _check(deployment, load):
    """What is on the log at the end."""
    sent = {span.span_id for e in load.acknowledged if isinstance(e, SpansReceived) for span in e.spans}
    last = {}
    for event in map(decode, deployment.values(topics.ORCHESTRATIONS)):
        assert isinstance(event, OrchestrationRevised)
        if event.key not in last or event.revision > last[event.key].revision:
            last[event.key] = event
    assert sent, "no load, no proof"
    counts = {}
    for topic in topics.DERIVED:
        revisions = {}
        values = deployment.values(topic)
        for value in values:
            event = decode(value)
            known = revisions.setdefault((event.key, event.revision), value)
            assert known == value, f"two contents of one revision on {topic}: {event.key} {event.revision}"
        counts[topic] = len(values)
    credits_ = Counter(key for key, made in contents(deployment.values).items() if made[4])
    assert credits_
    assert max(credits_.values()) == 1
    samples = Counter()
    for value in deployment.values(topics.SAMPLES):
        event = decode(value)
        samples[(event.key, content_hash(msgspec.structs.replace(event, revision=1)))] += 1
    twice = {key for (key, _), count in samples.items() if count > 1}
    assert not twice, _story(deployment, min(twice))
    return {
        "acknowledged_records": len(load.acknowledged), "acknowledged_spans": len(sent), "orchestrations": len(last),
        "credited": len(credits_), "records": counts,
    }  # fmt: skip


def _story(deployment, key):
    """Everything that was derived of one orchestration, for a failure's message."""
    lines = [f"samples of one content were built twice: {key}"]
    for topic in topics.DERIVED:
        for record in scan(deployment.log, [topic]):
            event = decode(record.value)
            if event.key == key:
                alone = msgspec.structs.replace(event, revision=1)
                more = {
                    name: getattr(event, name)
                    for name in ("status", "complete", "orchestration_revision")
                    if hasattr(event, name)
                }
                lines.append(
                    f"{record.appended_ns / 1e9:.3f} {record.source}@{record.offset} revision {event.revision} {content_hash(alone)[:8]} {more}"
                )
    return "\n".join(lines)
