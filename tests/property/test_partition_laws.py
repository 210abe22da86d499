"""Partitions of workers whatever their engine does: gaps, repeats, kills, lost snapshots, former owners that go on for a while.

What remains on the log is what one process would have made, and no samples are built twice of one content.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from pathlib import Path

from forests import forests, seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kafka_deployment import contents, embedded, sources_of
from made_spans import hex32
from property.test_snapshots import Medium

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.normalise import NormaliseStage
from spanloop.pipeline.otlp.files import read_spans
from spanloop.pipeline.ports import Appended, LogRecord, new_record, source_of, topic_of
from spanloop.pipeline.runtimes.partition import Partition
from spanloop.pipeline.shard import ShardStage
from spanloop.pipeline.state.snapshots import Snapshots
from spanloop.schemas import topics
from spanloop.schemas.events import FeedbackReceived, decode
from spanloop.schemas.settings import load_settings

PIPELINE = load_settings(
    None, {"pipeline": {"value_every": 10_000, "quiet_s": 1.0, "timeout_s": 3.0}}
).pipeline
LAW = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

DESK = Path(__file__).resolve().parents[1] / "golden/assembly/desk.otlp.jsonl"


class Broker:
    """The log port with partitions, in memory; at least once, nothing deduplicated."""

    def __init__(self, partitions):
        self.partitions = partitions
        self.records: dict[str, list[LogRecord]] = {}
        self.appended = 0

    def append(self, records):
        done = []
        for record in records:
            if record.topic in topics.SINGLE:
                partition = 0
            elif record.partition is not None:
                partition = record.partition
            else:
                partition = zlib.crc32(record.key.encode()) % self.partitions
            held = self.records.setdefault(source_of(record.topic, partition), [])
            self.appended += 1
            held.append(
                LogRecord(
                    record.topic,
                    len(held),
                    record.key,
                    record.event_id,
                    record.value,
                    self.appended,
                    partition,
                )
            )
            done.append(Appended(len(held) - 1, duplicate=False, partition=partition))
        return done

    def sources(self, name):
        topic, partition = topic_of(name)
        if "/" in name or topic in topics.SINGLE:
            return (source_of(topic, partition),)
        return tuple(source_of(topic, n) for n in range(self.partitions))

    def read(self, names, after, limit):
        found = []
        for name in names:
            for source in self.sources(name):
                found += self.records.get(source, [])[after.get(source, -1) + 1 :]
        return sorted(found, key=lambda record: record.appended_ns)[:limit]

    def all(self, topic):
        return [record for source in self.sources(topic) for record in self.records.get(source, [])]

    def end(self, source):
        return len(self.records.get(source, ())) - 1


class World:
    """Owners of every source over one log, and a hand that disturbs them."""

    def __init__(self, partitions, seed):
        self.log = Broker(partitions)
        self.clock = ManualClock(0)
        self.random = random.Random(seed)
        self.snapshots = Snapshots("", files=Medium())
        self.names = {}
        for n in range(partitions):
            for topic in (topics.SPANS, topics.FEEDBACK):
                self.names[source_of(topic, n)] = f"normalise-{topic}-{n}"
            self.names[source_of(topics.OPERATIONS, n)] = f"shard-{n}"
        self.count = partitions
        self.everyone = []
        self.former = []
        """Owners that do not know yet that they are none."""
        self.delivered = dict.fromkeys(self.names, -1)
        self.owners = {source: self.take(source) for source in self.names}
        self.disturbances = 0

    def take(self, source):
        name, _, number = source.partition("/")
        if name == topics.OPERATIONS:
            stage, inputs = ShardStage(PIPELINE, int(number or 0), self.count), (source, topics.MODELS)
        else:
            stage, inputs = NormaliseStage(self.count), (source,)
        chain = self.snapshots.open(self.names[source])
        partition = Partition(
            inputs, stage, self.log, chain, self.clock, batch_max=self.random.choice([1, 3, 50])
        )
        partition.recover()
        self.everyone.append(partition)
        return partition

    def step(self):
        """Deliver something to somebody, rightly or not."""
        rng = self.random
        source = rng.choice(sorted(self.owners))
        owner = self.owners[source]
        chance = rng.random()
        if chance < 0.50:
            self.deliver(source, owner)
        elif chance < 0.66:
            owner.tick()
            owner.see_outputs({s: self.log.end(s) for s in owner.own})
        elif chance < 0.76:
            owner.flush()
        elif chance < 0.90:
            self.clock.advance(seconds=rng.choice([0.3, 1.1, 2.0]))
        elif self.disturbances < 24 and chance < 0.98:
            self.disturbances += 1
            if chance < 0.92:  # killed
                self.owners[source] = self.take(source)
            elif chance < 0.97:  # taken over while the former owner goes on
                self.former.append((source, owner, rng.randint(2, 12)))
                self.owners[source] = self.take(source)
            else:  # snapshots lost
                self.snapshots.files.data.clear()
                self.owners[source] = self.take(source)
        self.haunt()

    def haunt(self):
        still = []
        for source, owner, left in self.former:
            if self.random.random() < 0.5:
                still.append((source, owner, left))
                continue
            act = self.random.choice([self.deliver, self.deliver, _tick, _tick, lambda _, o: o.flush()])
            act(source, owner)
            if left > 1:
                still.append((source, owner, left - 1))
        self.former = still

    def deliver(self, source, owner):
        """A stretch of records: often the next ones, at times older or later ones."""
        records = self.log.records.get(source, [])
        if not records:
            return
        start = max(0, owner.offsets.get(source, -1) + 1 + self.random.choice([0, 0, 0, -2, 2]))
        part = records[start : start + self.random.randint(1, 6)]
        if part:
            owner.offer(part)

    def settle(self):
        """Former owners know by now; everything is delivered and time passes."""
        self.former = []
        for _ in range(3_000):
            moved = 0
            for owner in self.owners.values():
                owner.see_outputs({s: self.log.end(s) for s in owner.own})
                moved += owner.catch_up()
                before = self.log.appended
                owner.tick()
                moved += self.log.appended - before
            if moved:
                continue
            due = [
                t
                for o in self.owners.values()
                if (t := o.stage.next_timer_ns()) is not None and t < 80_000 * 10**9
            ]
            if not due:
                return
            self.clock.set(max(self.clock.now_ns() + 1, min(due)))
        raise AssertionError("timers without end")

    def contents(self):
        return contents(lambda topic: [record.value for record in self.log.all(topic)])


def _tick(_, owner):
    owner.tick()


@st.composite
def outcomes(draw):
    return [
        FeedbackReceived(
            feedback_id=f"f{n}", target_kind="trace", target_id=hex32(draw(st.integers(1, 5))),
            value=draw(st.integers(-4, 4)) / 4, scorer="desk", observed_ns=n,
        )
        for n in range(draw(st.integers(0, 3)))
    ]  # fmt: skip


def run(events, partitions, seed):
    world = World(partitions, seed)
    order = [new_record(event) for event in events]
    world.random.shuffle(order)
    for record in order:
        world.log.append([record])
        for _ in range(world.random.choice([0, 1, 5])):
            world.step()
    for _ in range(40):
        world.step()
    world.settle()
    return world


@LAW
@given(forests, outcomes(), st.sampled_from([1, 2, 3]), seeds)
def test_what_one_process_would_have_made_remains(spans, feedback, partitions, seed):
    events = [*sources_of(spans), *feedback]
    assert run(events, partitions, seed).contents() == embedded(PIPELINE, events)


@LAW
@given(forests, outcomes(), st.sampled_from([1, 2]), seeds)
def test_without_former_owners_no_revision_has_two_contents(spans, feedback, partitions, seed):
    world = World(partitions, seed)
    events = [*sources_of(spans), *feedback]
    for event in events:
        world.log.append([new_record(event)])
        for _ in range(3):
            if world.random.random() < 0.1:
                source = world.random.choice(sorted(world.owners))
                world.owners[source] = world.take(source)
            source = world.random.choice(sorted(world.owners))
            world.deliver(source, world.owners[source])
            world.owners[source].tick()
            if world.random.random() < 0.2:
                world.owners[source].flush()
            world.clock.advance(seconds=0.4)
    world.settle()
    for topic in topics.DERIVED:
        seen = {}
        for record in world.log.all(topic):
            event = decode(record.value)
            assert seen.setdefault((event.key, event.revision), record.value) == record.value
    assert world.contents() == embedded(PIPELINE, events)


def test_the_hand_disturbs():
    """The laws above are worth something only if their worlds have gaps, repeats, kills and former owners that write."""
    spans = [span for batch in read_spans(DESK) for span in batch.spans]
    counted = Counter()
    for seed in range(6):
        world = run(sources_of(spans), 2, seed)
        counted["disturbances"] += world.disturbances
        for owner in world.everyone:
            for name in ("gaps", "duplicates", "foreign"):
                counted[name] += getattr(owner.metrics, name)
    assert min(counted.values()) > 0, counted
    assert len(counted) == 4
