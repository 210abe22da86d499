"""Whatever the number of partitions, the interleaving, the repetition and the crashes: what one process would have made."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from forests import forests, seeds
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from made_spans import hex16, hex32
from partitioned_log import Faults, Partitions

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.held import targets_of
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.otlp.files import read_spans
from spanloop.pipeline.ports import NewRecord, new_record
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
from spanloop.schemas.ids import gateway_span_id, gateway_trace_id, orchestration_id
from spanloop.schemas.operations import OperationsMoved
from spanloop.schemas.settings import load_settings
from spanloop.schemas.spans import Span, SpanLink

S = 10**9
PIPELINE = load_settings(
    None, {"pipeline": {"value_every": 10_000, "quiet_s": 1.0, "timeout_s": 50.0}}
).pipeline
LAW = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
ROOT = Path(__file__).resolve().parents[2]
SHARED = ROOT.parent / "shared"
partition_counts = st.sampled_from([1, 2, 3, 7])
CAREFUL = Faults()
CRASHING = Faults(repeat=0.2, crash=0.1)
TORN = Faults(repeat=0.2, crash=0.1, torn=True)
ZOMBIES = Faults(repeat=0.1, crash=0.1, zombie=0.5)


def _sources(spans, source="import"):
    """One event for each span, so that every batching can be had."""
    return [SpansReceived(trace_id=span.trace_id, spans=(span,), source=source) for span in spans]


def _last(records, kind):
    last = {}
    for record in records:
        event = decode(record.value)
        if isinstance(event, kind) and (event.key not in last or event.revision >= last[event.key].revision):
            last[event.key] = event
    return last


def _alive(records_of):
    last = _last(records_of(topics.ORCHESTRATIONS), OrchestrationRevised)
    return {key: event for key, event in last.items() if event.content is not None}


def _content(records_of):
    """What may not depend on the runtime, by orchestration; what is derived from lost ids is void."""
    found = {}
    alive = _alive(records_of)
    rewards = _last(records_of(topics.REWARDS), RewardsComputed)
    credits_ = _last(records_of(topics.CREDITS), CreditAssigned)
    samples = _last(records_of(topics.SAMPLES), SamplesBuilt)
    for key, event in alive.items():
        reward, credit, sample = rewards[key], credits_.get(key), samples.get(key)
        plain = tuple(msgspec.structs.replace(r, status="") for r in reward.rewards)
        found[key] = (
            content_hash(event.content),
            event.complete,
            reward.team,
            content_hash(plain),
            content_hash(credit.nodes) if credit is not None and credit.nodes else "",
            content_hash(msgspec.structs.replace(sample, revision=0)) if sample and reward.status != "provisional" else "",
        )  # fmt: skip
    for key in rewards.keys() - alive.keys():
        assert rewards[key].team is None
        assert key not in credits_ or not credits_[key].nodes
        assert key not in samples or not samples[key].rows
    return found


class Embedded:
    """One process, everything at once."""

    def __init__(self, events, until_ns=60 * S):
        clock = ManualClock(0)
        log = MemoryLog(clock)
        state = MemoryState(log)
        log.append([new_record(event) for event in events])
        run_to_end(build_stages(PIPELINE), log, state, clock, fire_timers=False)
        clock.set(until_ns)
        run_to_end(build_stages(PIPELINE), log, state, clock, fire_timers=False)
        self.records_of = lambda topic: log.read([topic], {}, 100_000)
        self.content = _content(self.records_of)
        self.alive = _alive(self.records_of)


def _targets(spans, embedded):
    """What feedback can name without being ambiguous, whatever has arrived: kind, id, trace."""
    found = []
    traces_of: dict[tuple[str, str], set[str]] = {}
    for span in spans:
        traces_of.setdefault(("span", span.span_id), set()).add(span.trace_id)
        response = span.attributes.get("gen_ai.response.id", "")
        traces_of.setdefault(("response", response), set()).add(span.trace_id)
    for event in embedded.alive.values():
        content = event.content
        traces = set(content.trace_ids)
        found.append(("orchestration", content.orchestration_id, ""))
        found += [("trace", trace, "") for trace in content.trace_ids]
        for target in targets_of(content):
            _, kind, name = target.split("/")
            if kind == "span":
                found.append((kind, name, content.trace_ids[-1]))
            if traces_of.get((kind, name), {""}) <= traces and (
                kind == "response" or len(traces_of[kind, name]) == 1
            ):
                found.append((kind, name, ""))
    return found


scores = st.lists(st.tuples(st.integers(0, 999), st.integers(-4, 4), st.booleans()), max_size=4)


def _feedback(spans, embedded, drawn):
    targets = _targets(spans, embedded)
    if not targets:
        return []
    events = []
    for n, (pick, value, final) in enumerate(drawn):
        kind, name, trace = targets[pick % len(targets)]
        events.append(
            FeedbackReceived(
                feedback_id=f"f{n}", target_kind=kind, target_id=name, trace_id=trace, value=value / 4,
                scorer=f"s{n % 2}", observed_ns=n, final=final,
            )
        )  # fmt: skip
    return events


def _partitioned(events, partitions, seed, faults=CAREFUL, settle_s=3600):
    world = Partitions(PIPELINE, partitions, seed, faults)
    order = [new_record(event) for event in events]
    world.random.shuffle(order)
    for record in order:
        world.log.append([msgspec.structs.replace(record, partition=world.random.randrange(partitions))])
        while world.random.random() < 0.6 and world.step():
            pass
    world.settle(settle_s * S)
    return world


def _case(spans, drawn):
    """Events, and what one process makes of them."""
    events = _sources(spans)
    scored = [*events, *_feedback(spans, Embedded(events), drawn)]
    return scored, Embedded(scored).content


@LAW
@given(forests, scores, partition_counts, seeds)
def test_partitions_make_what_one_process_makes(spans, drawn, partitions, seed):
    events, expected = _case(spans, drawn)
    world = _partitioned(events, partitions, seed)
    assert _content(world.log.all) == expected
    _check_revisions(world)


@LAW
@given(forests, scores, partition_counts, seeds)
def test_repetition_and_crashes_change_nothing(spans, drawn, partitions, seed):
    events, expected = _case(spans, drawn)
    world = _partitioned(events, partitions, seed, CRASHING)
    assert _content(world.log.all) == expected
    _check_revisions(world)


@LAW
@given(forests, scores, partition_counts, seeds)
def test_a_step_whose_outputs_are_on_the_log_in_part_changes_nothing(spans, drawn, partitions, seed):
    """A record may be there twice then, under one revision and byte for byte; sinks are idempotent on that."""
    events, expected = _case(spans, drawn)
    world = _partitioned(events, partitions, seed, TORN)
    assert _content(world.log.all) == expected
    seen = {}
    for topic in (topics.ORCHESTRATIONS, topics.REWARDS, topics.CREDITS, topics.SAMPLES):
        for record in world.log.all(topic):
            event = decode(record.value)
            assert seen.setdefault((topic, event.key, event.revision), record.value) == record.value


@LAW
@given(forests, scores, partition_counts, seeds)
def test_a_worker_that_does_not_know_that_it_is_dead_changes_nothing(spans, drawn, partitions, seed):
    events, expected = _case(spans, drawn)
    assert _content(_partitioned(events, partitions, seed, ZOMBIES).log.all) == expected


def _check_revisions(world):
    """Revisions of an id rise in each partition, one has one content wherever it stands, and nothing is published again that
    was said already."""
    for topic in (topics.ORCHESTRATIONS, topics.REWARDS, topics.CREDITS, topics.SAMPLES):
        seen, contents = {}, {}
        for record in world.log.all(topic):
            event = decode(record.value)
            assert seen.setdefault((event.key, event.revision), record.value) == record.value
            contents.setdefault(event.key, {})[event.revision] = event
        for source in world.log.sources(topic):
            last = {}
            for record in world.log.records.get(source, []):
                event = decode(record.value)
                assert event.revision > last.get(event.key, 0) or topic == topics.SAMPLES
                last[event.key] = event.revision
        if topic == topics.SAMPLES:
            for revisions in contents.values():
                plain = [msgspec.structs.replace(e, revision=0) for _, e in sorted(revisions.items())]
                assert all(a != b for a, b in pairwise(plain))


@LAW
@given(forests, scores, partition_counts, seeds)
def test_a_restored_stage_goes_on_as_the_old_one_would_have(spans, drawn, partitions, seed):
    events, _ = _case(spans, drawn)
    worlds = [Partitions(PIPELINE, partitions, seed) for _ in range(2)]
    for world in worlds:
        world.log.append([new_record(event) for event in events])
        while world.step():
            if world is worlds[1]:
                for worker in world.workers:
                    worker.stage = worker.fresh()
                    worker.stage.restore(worker.entries)
        world.settle()
    assert worlds[0].log.records == worlds[1].log.records
    assert [w.entries for w in worlds[0].workers] == [w.entries for w in worlds[1].workers]


late = st.lists(st.integers(0, 5), max_size=6)


CALL = {"role": "assistant", "parts": [{"type": "tool_call", "id": "id1", "name": "look"}]}
ANSWER = {"role": "user", "parts": [{"type": "tool_call_response", "id": "id1"}]}
SECOND_HAND = [
    Span(
        trace_id=gateway_trace_id("r1"), span_id=gateway_span_id("r1"), name="chat", start_ns=S, end_ns=2 * S, scope="spanloop.gateway",
        attributes={"gen_ai.operation.name": "chat", "gen_ai.response.id": "r1", "spanloop.policy.version": "policy@v1"},
    ),
    Span(
        trace_id=hex32(2), span_id=hex16(1), name="x", start_ns=0, end_ns=0, scope="pydantic-ai",
        attributes={"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "alpha", "gen_ai.conversation.id": "talk",
                    "pydantic_ai.new_message_index": 1, "pydantic_ai.all_messages": json.dumps([CALL, ANSWER])},
    ),
    Span(
        trace_id=hex32(3), span_id=hex16(1), name="x", start_ns=0, end_ns=0, status="ok", scope="openinference.instrumentation.langchain",
        attributes={"openinference.span.kind": "TOOL", "tool.name": "look", "input.value": '{"coworker": "worker"}',
                    "output.value": "fine"},
    ),
]  # fmt: skip
"""With three partitions and seed 10**9 the normaliser dies and sends trace 3 again, which its shard, 240 s after it closed the
trace, has not read yet: with a retention of 200 s that copy is late."""


@LAW
@given(forests, late, partition_counts, seeds)
@example(SECOND_HAND, [], 3, 10**9)
def test_what_is_refused_is_refused_once_whatever_the_partitions(spans, later, partitions, seed):
    """Unreadable records, impossible values, unknown targets, and spans after the retention. What is late is a fact of arrival:
    the first spans, and whatever repeats them, come within the retention, as they do in embedded."""
    retention_s = 86_400
    world, letters, expected = _refusals(retention_s, spans, later, partitions, seed)
    assert letters == expected
    _check_nothing_is_remembered(world, retention_s)


@LAW
@given(forests, late, partition_counts, seeds)
@example(SECOND_HAND, [], 3, 10**9)
def test_a_delivery_slower_than_the_retention_refuses_nothing_else(spans, later, partitions, seed):
    """Then spans, or copies of them, are late that are not in embedded; no other refusal changes, and all is forgotten in the end."""
    retention_s = 200
    world, letters, expected = _refusals(retention_s, spans, later, partitions, seed, slow=True)
    assert _not_late(letters) == _not_late(expected)
    _check_nothing_is_remembered(world, retention_s)


def _refusals(retention_s, spans, later, partitions, seed, *, slow=False):
    """A world in which everything can be refused, its dead letters, and those of one process."""
    before = [new_record(event) for event in _sources(spans)]
    before += [_broken(topics.SPANS), _broken(topics.FEEDBACK)]
    before += [new_record(event) for event in _unknown()]
    again = [
        msgspec.structs.replace(spans[n % len(spans)], name="late", span_id=f"{n + 90:016x}") for n in later
    ]
    after = [new_record(event) for event in _sources(again)]
    pipeline = PIPELINE.model_copy(update={"retention_s": float(retention_s)})
    expected = _embedded_letters(pipeline, before, after)
    world = Partitions(pipeline, partitions, seed, CRASHING)
    world.log.append(
        [msgspec.structs.replace(r, partition=world.random.randrange(partitions)) for r in before]
    )
    world.deliver()  # the horizon below counts from here, else a slow world would still hold what must be forgotten
    assert slow or world.now_ns < retention_s * S, "the world took longer than the retention to deliver"
    world.settle(retention_s * 3 * S)
    world.log.append(
        [msgspec.structs.replace(r, partition=world.random.randrange(partitions)) for r in after]
    )
    world.settle(retention_s * 3 // 2 * S)
    return world, _letters(world.log.all(topics.DEAD_LETTERS)), expected


def _check_nothing_is_remembered(world, retention_s):
    world.settle(retention_s * 80 * S)
    world.log.now_ns += retention_s * 80 * S
    world.tick()
    assert all(w.entries == {} for w in world.workers), "nothing is remembered for ever"


def _broken(topic):
    return NewRecord(topic, "default/x", f"broken-{topic}", b'{"type":"nonsense"}')


def _unknown():
    kinds = [
        ("trace", "e" * 32, ""),
        ("span", "d" * 16, ""),
        ("span", "d" * 16, "e" * 32),
        ("response", "none", ""),
    ]
    for n, (kind, name, trace) in enumerate([*kinds, ("orchestration", "c" * 32, "")]):
        yield FeedbackReceived(
            feedback_id=f"u{n}", target_kind=kind, target_id=name, trace_id=trace, value=0.5
        )
    yield FeedbackReceived(feedback_id="big", target_kind="trace", target_id="e" * 32, value=1e300)


def _embedded_letters(pipeline, before, after):
    clock = ManualClock(0)
    log = MemoryLog(clock)
    state = MemoryState(log)
    half_ns = round(pipeline.retention_s * S / 2)
    times = (0, 60 * S, 3 * half_ns, 6 * half_ns + S, 6 * half_ns + 2 * S, 9 * half_ns)
    for now_ns, records in zip(times, (before, [], [], [], after, []), strict=True):
        clock.set(now_ns)
        log.append(records)
        run_to_end(build_stages(pipeline), log, state, clock, fire_timers=False)
    return _letters(log.read([topics.DEAD_LETTERS], {}, 10_000))


def _letters(records):
    """Dead letters: what of them may not depend on the partitions."""
    return {
        (e.tenant, e.source, e.reason, e.details.get("trace_id"), e.details.get("feedback_id"), e.size * ("late" not in e.reason))
        for e in (decode(record.value) for record in records)
    }  # fmt: skip


def _not_late(letters):
    return {letter for letter in letters if "later than the retention" not in letter[2]}


def test_a_copy_that_comes_after_the_retention_is_late():
    """The example above does what it says it does."""
    _, letters, expected = _refusals(200, SECOND_HAND, [], 3, 10**9, slow=True)
    assert [letter[2:4] for letter in letters - expected] == [
        (f"later than the retention of orchestration {orchestration_id('default', [hex32(3)])}", hex32(3))
    ]


def test_the_simulator_disturbs_its_worlds():
    """The laws above are worth something only if workers die, do not know it, and orchestrations move after they were published."""
    spans = [span for batch in read_spans(DESK) for span in batch.spans]
    chat = {"gen_ai.operation.name": "chat"}
    for n in range(2, 7):
        links = (SpanLink(hex32(n - 1), hex16(1)),)
        spans.append(Span(hex32(n), hex16(n), "x", 1, 2, attributes=chat, links=links))
    kinds = Counter()
    crashes = zombies = 0
    for seed in range(5):
        world = _partitioned(_sources(spans), 3, seed, ZOMBIES)
        crashes, zombies = crashes + world.num_crashes, zombies + world.num_zombies
        for record in world.log.all(topics.OPERATIONS):
            event = decode(record.value)
            kinds[type(event).__name__] += 1
            kinds["published moved"] += isinstance(event, OperationsMoved) and bool(event.published)
        kinds["merged"] += sum(
            bool(decode(r.value).merged_into) for r in world.log.all(topics.ORCHESTRATIONS)
        )
    assert crashes > 10
    assert zombies > 4
    wanted = {
        "OperationsRead",
        "TracesJoined",
        "OperationsMoved",
        "OrchestrationPlaced",
        "published moved",
        "merged",
    }
    assert wanted <= {name for name, count in kinds.items() if count}


DESK = ROOT / "tests/golden/assembly/desk.otlp.jsonl"


@pytest.mark.parametrize("partitions", [1, 4])
@pytest.mark.parametrize("path", sorted(DESK.parent.glob("*.jsonl")), ids=lambda p: p.name)
def test_recordings(path, partitions):
    spans = [span for batch in read_spans(path) for span in batch.spans]
    events, expected = _case(spans, [(0, 2, True), (5, 1, True)])
    world = _partitioned(events, partitions, 3, CRASHING)
    assert _content(world.log.all) == expected
    _check_revisions(world)


@pytest.mark.skipif(not (SHARED / "corpora").is_dir(), reason="the corpora are not beside this checkout")
@pytest.mark.parametrize("folder", ["live-autogen", "live-google-adk", "live-pydantic-ai", "live-langgraph"])
def test_recorded_systems(folder):
    """Real runs, the AutoGen one of 26 traces among them."""
    checked = 0
    for path in sorted((SHARED / "corpora" / folder).rglob("*.jsonl")):
        try:
            spans = [span for batch in read_spans(path) for span in batch.spans]
        except SchemaError:
            continue
        if 0 < len(spans) <= 400:
            events, expected = _case(spans, [(0, 2, True)])
            assert _content(_partitioned(events, 3, 1, CRASHING).log.all) == expected
            checked += 1
    assert checked
