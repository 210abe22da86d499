"""A partition of a worker around a small stage: poison, brokers and stores that refuse, what it says of itself."""

from __future__ import annotations

import base64
import time

import pytest
from property.test_partition_laws import Broker
from property.test_snapshots import Medium

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.ports import NewRecord, StageOutput
from spanloop.pipeline.runtimes import partition as module
from spanloop.pipeline.runtimes.partition import Partition
from spanloop.pipeline.state.snapshots import Snapshots
from spanloop.schemas import topics
from spanloop.schemas.errors import TerminalError, TransientError
from spanloop.schemas.events import FeedbackReceived, decode, encode


class Counting:
    """Counts values and says each new count as feedback; raises on ``bad``."""

    name = "counting"
    topics = (topics.OPERATIONS,)

    def __init__(self):
        self.timer = None

    def restore(self, entries):
        self.count = int(entries.get("n", b"0"))

    def process(self, records, now_ns):
        events = []
        for record in records:
            if record.value == b"bad":
                raise ZeroDivisionError(record.value)
            self.count += 1
            events.append(
                FeedbackReceived(feedback_id=str(self.count), target_kind="trace", target_id="t", value=1.0)
            )
        return StageOutput(events=events, writes={"n": str(self.count).encode()})

    def tick(self, now_ns):
        self.timer = None
        return StageOutput(writes={"ticked": str(now_ns).encode()})

    def next_timer_ns(self):
        return self.timer


class World:
    def __init__(self):
        self.log, self.clock, self.medium = Broker(1), ManualClock(10**12), Medium()
        self.snapshots = Snapshots("", files=self.medium)

    def partition(self, **more):
        made = Partition(
            (topics.OPERATIONS,),
            Counting(),
            self.log,
            self.snapshots.open("counting"),
            self.clock,
            batch_max=8,
            **more,
        )
        made.recover()
        return made

    def put(self, *values):
        self.log.append(
            [NewRecord(topics.OPERATIONS, "acme/k", f"e{n}", value) for n, value in enumerate(values)]
        )

    def records(self, start=0):
        return self.log.records[topics.OPERATIONS][start:]

    def events(self, topic):
        return [decode(record.value) for record in self.log.all(topic)]


@pytest.fixture
def world():
    return World()


@pytest.mark.parametrize("keep", [True, False])
def test_poison_is_cornered_and_says_where_it_stands(world, keep):
    found = world.partition(keep_content=keep)
    world.put(b"a", b"b", b"bad", b"c", b"bad", b"d", b"e")
    found.offer(world.records())
    assert [event.feedback_id for event in world.events(topics.FEEDBACK)] == ["1", "2", "3", "4", "5"]
    (first, second) = world.events(topics.DEAD_LETTERS)
    assert first.event_id == second.event_id, "the same bytes refused for the same reason are one letter"
    assert (first.details["topic"], first.details["partition"], first.details["offset"]) == (
        "operations",
        0,
        2,
    )
    assert (first.tenant, first.size, first.source) == ("acme", 3, "stage:counting")
    assert base64.b64decode(first.data) == (b"bad" if keep else b"")
    assert "ZeroDivisionError" in first.reason
    assert "bad" not in first.reason
    assert (found.offsets, found.metrics.records, found.metrics.dead_letters) == ({"operations": 6}, 7, 2)
    found.flush()
    again = world.partition()
    assert (again.stage.count, again.metrics.records) == (5, 0)


def test_a_killed_partition_folds_what_no_snapshot_has(world):
    world.put(b"a", b"b")
    found = world.partition()
    assert found.flush()
    world.put(b"c")
    found.offer(world.records(2))
    again = world.partition()
    assert (again.stage.count, again.metrics.records) == (3, 1)
    assert again.committable() == {"operations": 1}


def test_gaps_are_filled_and_repeats_are_dropped(world):
    found = world.partition()
    world.put(*[b"x"] * 30)
    found.offer(world.records(20)[:3])
    found.offer(world.records(0)[:25])
    assert (found.stage.count, found.metrics.gaps, found.metrics.duplicates) == (25, 20, 23)
    found.sees(29)
    assert (found.metrics.lag, found.is_at_end()) == (5, False)
    assert found.catch_up() == 5
    assert found.is_at_end()


def test_brokers_that_refuse_are_waited_for(world, monkeypatch):
    monkeypatch.setattr(module, "RETRY_MAX_S", 0.0)
    monkeypatch.setattr(module.time, "sleep", lambda _: None)
    found, failures = world.partition(), [2]
    append = world.log.append

    def failing(records):
        if failures[0]:
            failures[0] -= 1
            raise TransientError("brokers are away")
        return append(records)

    monkeypatch.setattr(world.log, "append", failing)
    append([NewRecord(topics.OPERATIONS, "k", "e", b"a")])
    found.offer(world.records())
    assert (found.metrics.retries, len(world.events(topics.FEEDBACK))) == (2, 1)


def test_a_store_that_refuses_stops_nothing_and_commits_nothing(world, caplog):
    found = world.partition()
    world.put(b"a")
    found.offer(world.records())
    world.medium.failing = 1
    assert not found.flush()
    assert "no snapshot" in caplog.text
    assert found.committable() == {}
    assert found.flush()
    assert found.committable() == {"operations": 0}


def test_a_stage_that_recovers_writes_no_snapshot(world):
    found = world.partition()
    world.put(b"a")
    found.offer(world.records())
    found.stage.caught_up = False
    assert not found.flush()
    found.stage.caught_up = True
    assert found.flush()


def test_timers_wait_for_a_backlog(world):
    found = world.partition()
    world.put(b"a")
    found.offer(world.records())
    found.sees(5)
    found.stage.timer = 10**12 - 1
    found.tick()
    assert found.stage.timer is not None, "the input was folded up to a moment before the timer"
    world.put(*[b"b"] * 5)
    found.offer(world.records(1))
    found.tick()
    assert found.stage.timer is None


def test_a_timer_that_raises_is_a_bug_to_report(world, monkeypatch):
    found = world.partition()
    found.stage.timer = 0
    monkeypatch.setattr(found.stage, "tick", lambda _: 1 // 0)
    with pytest.raises(TerminalError, match="please report this bug"):
        found.tick()


def test_work_without_progress_has_a_beginning(world):
    found = world.partition()
    assert found.metrics.since == 0.0
    begin = time.monotonic()
    found.sees(3)
    assert found.metrics.since >= begin
    world.put(b"a", b"b", b"c", b"d")
    found.offer(world.records())
    assert (found.metrics.since, found.metrics.doing) == (0.0, "")


class Observing(Counting):
    """Takes note of what it published before."""

    output_partition = 0

    def restore(self, entries):
        super().restore(entries)
        self.seen = []

    def observe(self, record):
        self.seen.append(decode(record.value).event_id)


def test_what_somebody_else_wrote_among_the_outputs_does_not_stop_a_recovery(world, caplog):
    good = FeedbackReceived(feedback_id="1", target_kind="trace", target_id="t", value=1.0)
    values = [b"", b"\x00\xff", b"[" * 500, encode(good), b'{"type":"nope","version":1}']
    world.log.append(
        [NewRecord(topics.ORCHESTRATIONS, "acme/k", f"o{n}", v, 0) for n, v in enumerate(values)]
    )
    stage = Observing()
    found = Partition(
        (topics.OPERATIONS,), stage, world.log, world.snapshots.open("o"), world.clock, batch_max=8
    )
    found.recover()
    assert stage.seen == [good.event_id]
    assert caplog.text.count("orchestrations offset") == 4
