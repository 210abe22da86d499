"""Whatever the number of partitions, the interleaving, the repetition and the crashes: what one process would have made."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from forests import forests, seeds
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_spans import SHARED, hex16, hex32
from partitioned_log import Partitions

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.otlp.files import read_spans
from spanloop.pipeline.ports import new_record
from spanloop.pipeline.runtimes.embedded import run_to_end
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.state.memory import MemoryState
from spanloop.schemas import topics
from spanloop.schemas.canonical import content_hash
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    CreditAssigned,
    FeedbackReceived,
    OrchestrationRevised,
    RewardsComputed,
    SamplesBuilt,
    SpansReceived,
    decode,
)
from spanloop.schemas.ids import orchestration_id
from spanloop.schemas.settings import load_settings
from spanloop.schemas.spans import Span, SpanLink

PIPELINE = load_settings(
    None, {"pipeline": {"value_every": 10_000, "quiet_s": 1.0, "timeout_s": 50.0}}
).pipeline
LAW = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
partition_counts = st.sampled_from([1, 2, 3, 7])


def _sources(spans, source="import"):
    """One event for each span, so that every batching can be had."""
    return [SpansReceived(trace_id=span.trace_id, spans=(span,), source=source) for span in spans]


@st.composite
def scores(draw):
    kind = draw(st.sampled_from(["trace", "response", "span", "orchestration"]))
    traces = [hex32(n) for n in range(1, 6)]
    target = {
        "trace": lambda: draw(st.sampled_from(traces)),
        "response": lambda: draw(st.sampled_from(["r1", "r2", "r3", "r9"])),
        "span": lambda: hex16(draw(st.integers(1, 9))),
        "orchestration": lambda: orchestration_id("default", [draw(st.sampled_from(traces))]),
    }[kind]()
    inside = draw(st.sampled_from(["", *traces])) if kind == "span" else ""
    return FeedbackReceived(
        feedback_id=f"f{draw(st.integers(0, 9))}-{kind}-{target}-{inside}", target_kind=kind, target_id=target, trace_id=inside,
        value=draw(st.integers(-4, 4)) / 4, scorer="desk", observed_ns=draw(st.integers(0, 3)),
    )  # fmt: skip


def _last(records, kind):
    last = {}
    for record in records:
        event = decode(record.value)
        if isinstance(event, kind) and (event.key not in last or event.revision > last[event.key].revision):
            last[event.key] = event
    return last


def _content(records_of):
    """What may not depend on the runtime, by orchestration."""
    found = {}
    alive = {
        key: event
        for key, event in _last(records_of(topics.ORCHESTRATIONS), OrchestrationRevised).items()
        if event.content is not None
    }
    rewards = _last(records_of(topics.REWARDS), RewardsComputed)
    credits_ = _last(records_of(topics.CREDITS), CreditAssigned)
    for key, event in alive.items():
        reward = rewards[key]
        plain = tuple(msgspec.structs.replace(r, status="") for r in reward.rewards)
        credit = credits_.get(key)
        found[key] = (
            content_hash(event.content),
            event.complete,
            reward.team,
            content_hash(plain),
            content_hash(credit.nodes) if credit is not None and credit.nodes else "",
        )
    return found


def _embedded(events):
    clock = ManualClock(0)
    log = MemoryLog(clock)
    state = MemoryState(log)
    log.append([new_record(event) for event in events])
    run_to_end(build_stages(PIPELINE), log, state, clock, fire_timers=False)
    clock.set(60 * 10**9)
    run_to_end(build_stages(PIPELINE), log, state, clock, fire_timers=False)
    return _content(lambda topic: log.read([topic], {}, 100_000))


def _partitioned(events, partitions, seed, **faults):
    world = Partitions(PIPELINE, partitions, seed, **faults)
    order = [new_record(event) for event in events]
    world.random.shuffle(order)
    for record in order:
        world.log.append([msgspec.structs.replace(record, partition=world.random.randrange(partitions))])
        while world.random.random() < 0.3 and world.step():
            pass
    world.settle()
    return world


@LAW
@given(forests, st.lists(scores(), max_size=4), partition_counts, seeds)
def test_partitions_make_what_one_process_makes(spans, feedback, partitions, seed):
    events = [*_sources(spans), *{f.feedback_id: f for f in feedback}.values()]
    world = _partitioned(events, partitions, seed)
    assert _content(world.log.all) == _embedded(events)


@LAW
@given(forests, st.lists(scores(), max_size=3), partition_counts, seeds)
def test_repetition_and_crashes_change_nothing(spans, feedback, partitions, seed):
    events = [*_sources(spans), *{f.feedback_id: f for f in feedback}.values()]
    world = _partitioned(events, partitions, seed, repeat=0.3, crash=0.15)
    assert _content(world.log.all) == _embedded(events)


@LAW
@given(forests, partition_counts, seeds)
def test_a_revision_has_one_content_and_samples_are_built_once(spans, partitions, seed):
    world = _partitioned(_sources(spans), partitions, seed, repeat=0.3, crash=0.15)
    for topic, kind in (
        (topics.ORCHESTRATIONS, OrchestrationRevised),
        (topics.REWARDS, RewardsComputed),
        (topics.CREDITS, CreditAssigned),
        (topics.SAMPLES, SamplesBuilt),
    ):
        seen = {}
        for record in world.log.all(topic):
            event = decode(record.value)
            assert isinstance(event, kind)
            known = seen.setdefault((event.key, event.revision), record.value)
            assert known == record.value


@LAW
@given(forests, partition_counts, seeds)
def test_undisturbed_nothing_is_published_twice(spans, partitions, seed):
    world = _partitioned(_sources(spans), partitions, seed)
    for topic in (topics.ORCHESTRATIONS, topics.REWARDS, topics.CREDITS, topics.SAMPLES):
        names = [record.event_id for record in world.log.all(topic)]
        assert len(names) == len(set(names))


def test_the_simulator_disturbs_its_worlds():
    """The laws above are worth something only if workers crash and orchestrations move between partitions."""
    spans = [span for batch in read_spans(DESK) for span in batch.spans]
    links = (SpanLink(hex32(1), hex16(1)),)
    spans.append(
        Span(hex32(2), hex16(2), "x", 1, 2, attributes={"gen_ai.operation.name": "chat"}, links=links)
    )
    world = _partitioned(_sources(spans), 3, 5, repeat=0.2, crash=0.3)
    assert world.num_crashes > 3
    kinds = {type(decode(r.value)).__name__ for r in world.log.all(topics.OPERATIONS)}
    assert {"OperationsRead", "TracesJoined", "OperationsMoved", "OrchestrationPlaced"} <= kinds


DESK = Path(__file__).resolve().parents[1] / "golden/assembly/desk.otlp.jsonl"


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("path", sorted((DESK.parent).glob("*.jsonl")), ids=lambda p: p.name)
def test_recordings(path, partitions):
    batches = list(read_spans(path))
    events = [
        SpansReceived(trace_id=s.trace_id, spans=(s,), source="import") for b in batches for s in b.spans
    ]
    events.append(
        FeedbackReceived(feedback_id="f", target_kind="trace", target_id=events[0].trace_id, value=0.5)
    )
    assert _content(_partitioned(events, partitions, 3, repeat=0.1).log.all) == _embedded(events)


@pytest.mark.skipif(not (SHARED / "corpora").is_dir(), reason="the corpora are not beside this checkout")
@pytest.mark.parametrize("folder", ["live-autogen", "live-google-adk", "live-pydantic-ai", "live-langgraph"])
def test_recorded_systems(folder):
    """Real runs, the AutoGen one of 26 traces among them."""
    for path in sorted((SHARED / "corpora" / folder).rglob("*.jsonl"))[:6]:
        try:
            batches = list(read_spans(path))
        except SchemaError:
            continue
        events = _sources([span for batch in batches for span in batch.spans])
        if 0 < len(events) <= 400:
            assert _content(_partitioned(events, 3, 1, repeat=0.05).log.all) == _embedded(events)
