"""Events that are passed from stage to stage in one process mean what their bytes mean, whatever spans they come from."""

from __future__ import annotations

import pytest
from forests import forests
from hypothesis import given, settings

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.ports import LogRecord, new_record
from spanloop.pipeline.runtimes.embedded import EmbeddedRuntime
from spanloop.pipeline.runtimes.passing import PASSED_MAX, Passing
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.state.memory import MemoryState
from spanloop.schemas import topics
from spanloop.schemas.events import FeedbackReceived, SpansReceived, decode, encode
from spanloop.schemas.settings import Pipeline

QUICK = settings(max_examples=30, deadline=None)
SETTINGS = Pipeline(value_every=1, holdout=0.0)  # type: ignore[call-arg]


def written(spans, *, passing: bool) -> tuple[list[LogRecord], int]:
    """All records that the stages make of spans with an outcome each, and how many came with their events."""
    clock = ManualClock()
    log = MemoryLog(clock)
    by_trace: dict[str, list] = {}
    for span in spans:
        by_trace.setdefault(span.trace_id, []).append(span)
    log.append([new_record(SpansReceived(trace_id=t, spans=tuple(own))) for t, own in by_trace.items()])
    log.append(
        [
            new_record(FeedbackReceived(feedback_id=t, target_kind="trace", target_id=t, value=0.25))
            for t in by_trace
        ]
    )
    runtime = EmbeddedRuntime(build_stages(SETTINGS), log, MemoryState(log), clock)
    given_away = 0
    attach = runtime._passing.attach

    def counted(records):
        nonlocal given_away
        found = attach(records) if passing else list(records)
        given_away += sum(record.event is not None for record in found)
        assert all(decode(record.value) == record.event for record in found if record.event is not None)
        return found

    runtime._passing.attach = counted
    runtime.restore()
    for _ in range(3):
        while runtime.step():
            pass
        clock.advance(seconds=10_000.0)
    records = log.read([*topics.DERIVED, topics.MODELS, topics.DEAD_LETTERS], {}, 10_000)
    return [record for record in records if record.topic not in (topics.SPANS, topics.FEEDBACK)], given_away


@given(forests)
@QUICK
def test_events_passed_on_are_what_their_bytes_decode_to(spans):
    with_events, given_away = written(spans, passing=True)
    without, none = written(spans, passing=False)
    assert none == 0
    assert [(r.topic, r.event_id, r.value) for r in with_events] == [
        (r.topic, r.event_id, r.value) for r in without
    ]
    assert all(encode(decode(r.value)) == r.value for r in with_events), (
        "bytes made beside a hash are those of encode"
    )
    assert given_away >= sum(r.topic == topics.ORCHESTRATIONS for r in with_events)


def one(value: float = 1.0):
    event = FeedbackReceived(feedback_id="f", target_kind="trace", target_id="t", value=value)
    return event, new_record(event)


def stored(record, value: bytes | None = None) -> LogRecord:
    return LogRecord(record.topic, 1, record.key, record.event_id, value or record.value, 0)


def test_each_reader_gets_it_once():
    passing = Passing([(topics.FEEDBACK,), (topics.FEEDBACK, topics.SPANS), ()])
    event, record = one()
    passing.put([event], [record])
    got = [passing.attach([stored(record)])[0].event for _ in range(3)]
    assert got == [event, event, None]


def test_a_record_that_was_there_before_keeps_its_own_bytes():
    passing = Passing([(topics.FEEDBACK,)])
    event, record = one()
    other = one(0.5)[1]
    assert other.event_id == record.event_id
    passing.put([event], [record])
    (found,) = passing.attach([stored(record, other.value)])
    assert found.event is None
    assert found.value == other.value


@pytest.mark.parametrize("topic", [topics.FEEDBACK, topics.SPANS])
def test_what_nobody_reads_is_not_kept_and_what_is_kept_is_bounded(topic):
    passing = Passing([(topic,)])
    for n in range(PASSED_MAX + 10):
        event = FeedbackReceived(feedback_id=str(n), target_kind="trace", target_id="t", value=1.0)
        passing.put([event], [new_record(event)])
    assert len(passing._waiting) == (PASSED_MAX if topic == topics.FEEDBACK else 0)
