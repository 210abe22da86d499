"""Shards and the stage before them, one rule at a time; the laws are in tests/property/test_shard_laws.py."""

from __future__ import annotations

import msgspec
import pytest
from made_spans import S, agent, chat, gateway, hex16, hex32
from partitioned_log import Partitions
from synthetic_orchestrations import make_model

from spanloop.pipeline.assembly import join
from spanloop.pipeline.normalise import NormaliseStage
from spanloop.pipeline.ports import LogRecord, new_record, output_records
from spanloop.pipeline.shard import ShardStage
from spanloop.schemas import topics
from spanloop.schemas.events import (
    CreditAssigned,
    DeadLettered,
    FeedbackReceived,
    OrchestrationRevised,
    RewardsComputed,
    SamplesBuilt,
    SpansReceived,
    decode,
)
from spanloop.schemas.ids import orchestration_id
from spanloop.schemas.operations import FeedbackRouted, LessonReady, OperationsMoved, OperationsRead
from spanloop.schemas.settings import load_settings
from spanloop.schemas.spans import Span, SpanLink

PIPELINE = load_settings(
    None, {"pipeline": {"value_every": 10_000, "quiet_s": 1.0, "timeout_s": 50.0, "retention_s": 1000.0}}
).pipeline
PARTITIONS = 5
DERIVED = (OrchestrationRevised, RewardsComputed, CreditAssigned, SamplesBuilt)


class World(Partitions):
    """Spans and feedback in, events out."""

    def __init__(self, partitions: int = PARTITIONS, seed: int = 0) -> None:
        super().__init__(PIPELINE, partitions, seed)

    def send(self, *events, pass_s: float = 60.0):
        self.log.append([new_record(event) for event in events])
        self.settle(int(pass_s * S))
        return self

    def spans(self, *spans: Span, **kwargs):
        return self.send(
            *(SpansReceived(trace_id=s.trace_id, spans=(s,), source="gateway") for s in spans), **kwargs
        )

    def of(self, topic):
        return [decode(record.value) for record in self.log.all(topic)]

    def last(self, topic, orchestration):
        found = [e for e in self.of(topic) if e.orchestration_id == orchestration]
        return max(found, key=lambda e: e.revision, default=None)


def feedback(kind, target, n=0, **more):
    return FeedbackReceived(
        feedback_id=f"f{n}", target_kind=kind, target_id=target, value=0.25, scorer="desk", **more
    )


def linked(span: Span, trace: int) -> Span:
    return msgspec.structs.replace(span, links=(SpanLink(hex32(trace), hex16("x")),))


def oid(trace: int) -> str:
    return orchestration_id("default", [hex32(trace)])


class TestFeedback:
    def test_it_follows_an_orchestration_that_was_published_and_merged(self):
        """The id that the scorer saw is lost; its feedback counts for the one that it became part of."""
        world = World()
        world.spans(agent("b", None, 1, 5, trace=7))
        assert world.last(topics.ORCHESTRATIONS, oid(7)).content is not None
        world.send(feedback("orchestration", oid(7), 0))
        assert world.last(topics.REWARDS, oid(7)).team == 250_000
        world.spans(agent("a", None, 0, 9, trace=3), linked(agent("c", "b", 2, 3, trace=7), 3))
        world.spans(agent("z", None, 0, 9, trace=1), linked(agent("y", "z", 2, 3, trace=3), 1))
        lost = world.last(topics.ORCHESTRATIONS, oid(7))
        assert lost.content is None
        while lost.merged_into != oid(1):
            lost = world.last(topics.ORCHESTRATIONS, lost.merged_into)
            assert lost.merged_into
        assert world.last(topics.REWARDS, oid(7)).team is None
        assert world.last(topics.REWARDS, oid(1)).team == 250_000
        world.send(feedback("orchestration", oid(7), 1, observed_ns=9), feedback("trace", hex32(7), 2))
        evidence = world.last(topics.REWARDS, oid(1)).rewards[0].evidence
        assert set(evidence) >= {"f1", "f2"}

    @pytest.mark.parametrize("partitions", [1, 5])
    def test_on_a_span_of_an_unknown_trace_it_counts_once(self, partitions):
        world = World(partitions)
        world.send(feedback("span", hex16("b")))
        world.spans(agent("a", None, 0, 9, trace=3), agent("b", "a", 1, 5, trace=3))
        before = world.last(topics.REWARDS, oid(3))
        assert before.team == 250_000
        world.send(feedback("span", hex16("a"), 1, observed_ns=5))
        assert world.last(topics.REWARDS, oid(3)).revision == before.revision + 1
        world.settle(5000 * S)
        assert world.of(topics.DEAD_LETTERS) == []

    @pytest.mark.parametrize(
        ("kind", "target"), [("span", "ab"), ("response", "r"), ("trace", "cd"), ("orchestration", "e")]
    )
    def test_whose_target_never_comes_it_is_one_dead_letter(self, kind, target):
        world = World()
        world.send(feedback(kind, target), pass_s=5000)
        (letter,) = world.of(topics.DEAD_LETTERS)
        assert isinstance(letter, DeadLettered)
        assert letter.details["feedback_id"] == "f0"
        assert [w.entries for w in world.workers] == [{}] * (PARTITIONS + 1)


class TestMoving:
    def test_an_orchestration_whose_id_stays_goes_on_with_its_numbers_and_its_value_model(self):
        """A link to a smaller trace without spans moves the home and changes nothing else."""
        world = World()
        first, second = make_model(1), make_model(2)
        world.send(first)
        world.spans(agent("a", None, 0, 9, trace=7), chat("m", "a", 1, 2, trace=7))
        world.send(feedback("trace", hex32(7)))
        before = world.last(topics.CREDITS, oid(7))
        assert before.value_model == first.version
        world.send(second)
        world.spans(linked(agent("b", "a", 1, 5, trace=7), 2))
        moved = [e for e in world.of(topics.OPERATIONS) if isinstance(e, OperationsMoved)]
        assert moved
        assert moved[0].published[0].version_fixed
        world.send(feedback("trace", hex32(7), 1, observed_ns=4))
        after = world.last(topics.CREDITS, oid(7))
        assert after.revision > before.revision
        assert after.value_model == first.version
        partitions = [
            [r.partition for r in world.log.all(t)] for t in (topics.ORCHESTRATIONS, topics.REWARDS)
        ]
        assert all(len(set(found)) == 2 for found in partitions), "it moved"

    def test_what_was_too_much_is_still_said_after_a_move(self, monkeypatch):
        monkeypatch.setattr(join, "MAX_SPANS", 3)
        world = World()
        world.spans(agent("a", None, 0, 9, trace=7), *(chat(f"m{n}", "a", 1, 2, trace=7) for n in range(4)))
        assert "truncated_spans:2" in world.last(topics.ORCHESTRATIONS, oid(7)).content.flags
        world.spans(linked(agent("a", None, 0, 10, trace=7), 2))
        assert any(isinstance(e, OperationsMoved) and e.overflow == 2 for e in world.of(topics.OPERATIONS))
        assert "truncated_spans:2" in world.last(topics.ORCHESTRATIONS, oid(7)).content.flags

    def test_the_gateways_traces_move_and_not_the_agents(self):
        world = World()
        world.spans(
            agent("a", None, 0, 9, trace=3),
            *(chat(f"m{n}", "a", n, n + 1, trace=3, response=f"r{n}") for n in range(4)),
            *(gateway(f"r{n}", n, n + 1) for n in range(4)),
        )
        (alive,) = [e for e in world.of(topics.ORCHESTRATIONS) if e.content is not None and e.revision == 1]
        assert alive.orchestration_id == oid(3)
        moved = [e for e in world.of(topics.OPERATIONS) if isinstance(e, OperationsMoved)]
        assert {e.trace_id for e in moved} <= {hex32(3)}

    def test_late_spans_of_a_forgotten_orchestration_are_refused_also_after_a_join(self):
        """A link that names a forgotten trace does not open a way around its tombstone."""
        world = World()
        world.spans(agent("a", None, 0, 9, trace=7), pass_s=60)
        world.settle(2000 * S)
        world.spans(linked(agent("b", None, 0, 9, trace=2), 7))
        world.spans(agent("late", None, 0, 9, trace=7))
        assert world.last(topics.ORCHESTRATIONS, oid(7)).revision == 1
        assert world.last(topics.ORCHESTRATIONS, oid(2)).content.trace_ids == (hex32(2),)
        (letter,) = world.of(topics.DEAD_LETTERS)
        assert "later than the retention" in letter.reason


class TestRecovery:
    def feed(self, stage, *events, now=0):
        records = [
            LogRecord(topics.OPERATIONS, n, e.key, e.event_id, new_record(e).value, 0)
            for n, e in enumerate(events)
        ]
        return stage.process(records, now)

    def prepared(self):
        normalise = NormaliseStage(1)
        received = SpansReceived(trace_id=hex32(3), spans=(agent("a", None, 0, 9, trace=3),), source="import")
        sent = normalise.process([LogRecord(topics.SPANS, 0, "", "", new_record(received).value, 0)], 0)
        routed = FeedbackRouted(to=hex32(3), feedback=feedback("trace", hex32(3)))
        return [*sent.events, routed]

    def outputs(self):
        stage = ShardStage(PIPELINE, 0, 1)
        self.feed(stage, *self.prepared())
        return stage.tick(5 * S).events

    def observed(self, events, *kinds):
        stage = ShardStage(PIPELINE, 0, 1)
        for record in output_records(stage, [e for e in events if isinstance(e, kinds)]):
            stage.observe(LogRecord(record.topic, 0, record.key, record.event_id, record.value, 5 * S))
        return stage

    def test_what_is_on_the_log_is_not_published_again(self):
        events = self.outputs()
        stage = self.observed(events, *DERIVED)
        assert stage.caught_up is False
        stage.catch_up({topics.OPERATIONS: 1})
        assert stage.next_timer_ns() is None
        assert stage.tick(5 * S).events == []
        self.feed(stage, *self.prepared(), now=5 * S)
        assert stage.next_timer_ns() == 0
        again = [*stage.tick(6 * S).events, *stage.tick(20 * S).events]
        assert stage.caught_up
        assert not any(isinstance(e, DERIVED) for e in again)
        assert any(isinstance(e, LessonReady) for e in again), "the lesson may have been lost with the worker"

    @pytest.mark.parametrize("missing", DERIVED)
    def test_what_a_dying_worker_did_not_get_to_the_log_is_made_again(self, missing):
        events = self.outputs()
        kinds = set(DERIVED) - {missing}
        stage = self.observed(events, *kinds)
        self.feed(stage, *self.prepared(), now=5 * S)
        again = [*stage.tick(6 * S).events, *stage.tick(20 * S).events]
        (made,) = [e for e in again if isinstance(e, missing)]
        was = next(e for e in events if isinstance(e, missing))
        assert made.revision == was.revision + (missing is not OrchestrationRevised)
        plain = {"revision": 0} | (
            {"orchestration_revision": 0} if hasattr(was, "orchestration_revision") else {}
        )
        assert msgspec.structs.replace(made, **plain) == msgspec.structs.replace(was, **plain)

    def test_it_is_part_of_the_state(self):
        events = self.outputs()
        stage = self.observed(events, *DERIVED)
        entries = {k: v for k, v in stage.process([], 5 * S).writes.items() if v is not None}
        stage = ShardStage(PIPELINE, 0, 1)
        stage.restore(entries)
        assert stage.caught_up is False
        self.feed(stage, *self.prepared(), now=5 * S)
        again = [*stage.tick(6 * S).events, *stage.tick(20 * S).events]
        assert not any(isinstance(e, DERIVED) for e in again)


class TestNormalise:
    def test_spans_go_to_the_owner_of_their_own_trace(self):
        received = SpansReceived(
            trace_id=hex32(1), spans=(agent("a", None, 0, 1, trace=1), agent("b", None, 0, 1, trace=2)), source="otlp"
        )  # fmt: skip
        output = NormaliseStage(3).process(
            [LogRecord(topics.SPANS, 0, "", "", new_record(received).value, 0)], 0
        )
        assert [(type(e), e.trace_id, len(e.operations)) for e in output.events] == [
            (OperationsRead, hex32(1), 1),
            (OperationsRead, hex32(2), 1),
        ]

    def test_feedback_on_a_span_of_an_unknown_trace_goes_to_all(self):
        event = feedback("span", hex16("a"))
        output = NormaliseStage(3).process(
            [LogRecord(topics.FEEDBACK, 0, "", "", new_record(event).value, 0)], 0
        )
        records = output_records(NormaliseStage(3), output.events)
        assert [r.partition for r in records] == [0, 1, 2]
        assert len({r.event_id for r in records}) == 3
        assert len({e.answers for e in output.events}) == 1
