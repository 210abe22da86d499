"""Laws of the signal and value stages: permutation, duplication, re-batching, crash and restore, stream == batch."""

from __future__ import annotations

from itertools import pairwise
from typing import TypeVar

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_orchestrations import make_content, make_feedback, make_model, make_revision

from spanloop.pipeline.credit.ledger import check_ledger
from spanloop.pipeline.credit.value import ValueStage
from spanloop.pipeline.credit.value_model import ValueModel
from spanloop.pipeline.ports import LogRecord, Stage, new_record
from spanloop.pipeline.rewards.compose import paid
from spanloop.pipeline.signal import NO_MODEL, SignalStage, derive
from spanloop.schemas.canonical import content_hash
from spanloop.schemas.events import (
    CreditAssigned,
    Event,
    OrchestrationRevised,
    RewardsComputed,
    SamplesBuilt,
    ValueModelPublished,
)
from spanloop.schemas.settings import Pipeline

SETTINGS = Pipeline(
    parallel_weight=0.2, finish_weight=0.1, tool_weight=0.3, outcome_floor=0.0, credit_trace=0.9
)  # type: ignore[call-arg]
VALUE_SETTINGS = Pipeline(value_every=2, value_features=256, holdout=0.0)  # type: ignore[call-arg]
MODELS = [make_model(1), make_model(2)]
QUICK = settings(max_examples=40, deadline=None)
T = TypeVar("T", bound=Event)

FEEDBACK = st.builds(
    lambda seed, n, kind, final, scorer, name, at: make_feedback(
        make_content(seed), n, kind=kind, final=final, scorer=scorer, name=name, observed_ns=at
    ),
    st.integers(0, 3),
    st.integers(0, 5),
    st.sampled_from(["orchestration", "trace", "span", "response"]),
    st.booleans(),
    st.sampled_from(["desk", "user"]),
    st.sampled_from(["outcome", "outcome", "tone"]),
    st.integers(0, 3),
)
REVISIONS = st.builds(
    lambda seed, revision, complete: make_revision(
        make_content(seed, tokens=revision < 3), revision, complete or revision > 1
    ),
    st.integers(0, 3),
    st.integers(1, 3),
    st.booleans(),
)
EVENTS = st.lists(st.one_of(FEEDBACK, REVISIONS, st.sampled_from(MODELS)), min_size=1, max_size=25, unique_by=lambda e: e.event_id)  # fmt: skip


def records(events: list[Event]) -> list[LogRecord]:
    made = [new_record(event) for event in events]
    return [LogRecord(r.topic, i, r.key, r.event_id, r.value, 0) for i, r in enumerate(made)]


def batches(items: list, cuts: set[int]) -> list[list]:
    edges = [0, *sorted(c for c in cuts if 0 < c < len(items)), len(items)]
    return [items[a:b] for a, b in pairwise(edges) if a < b]


def run(stage: Stage, parts: list[list[LogRecord]], fresh=None, crash: set[int] = frozenset()) -> list[Event]:
    """All outputs; after batches in ``crash`` the stage is dropped and a new one restored from what was committed."""
    entries: dict[str, bytes] = {}
    out: list[Event] = []
    stage.restore({})
    for i, part in enumerate(parts):
        if i in crash:
            stage.process(part, i)  # dies before its commit
        if i in crash and fresh is not None:
            stage = fresh()
            stage.restore(dict(entries))
        result = stage.process(part, i)
        out += result.events
        for key, value in result.writes.items():
            if value is None:
                entries.pop(key, None)
            else:
                entries[key] = value
    return out


def last(events: list[Event], kind: type[T]) -> dict[str, T]:
    return {event.orchestration_id: event for event in events if isinstance(event, kind)}  # type: ignore[attr-defined]


def content_of(event: Event | None) -> str:
    """Hash of what the law is about: not revision numbers, not status."""
    if event is None:
        return ""
    names = [name for name in ("revision", "orchestration_revision") if hasattr(event, name)]
    return content_hash(msgspec.structs.replace(event, **dict.fromkeys(names, 0)))


def finals(events: list[Event]) -> dict[str, tuple[str, ...]]:
    """Hashes of the last rewards, credit and, of what ended final, samples (those of a state in between may stay)."""
    rewards, ledgers, samples = (
        last(events, kind) for kind in (RewardsComputed, CreditAssigned, SamplesBuilt)
    )
    return {
        oid: (
            content_of(rewards[oid]),
            content_of(ledgers.get(oid)),
            content_of(samples.get(oid)) if rewards[oid].status in {"final", "corrected"} else "",
        )
        for oid in rewards
    }


def signal() -> SignalStage:
    return SignalStage(SETTINGS)


@given(EVENTS, st.sets(st.integers(0, 24)))
@QUICK
def test_stream_equals_batch(events: list[Event], cuts: set[int]):
    """The last outputs of each orchestration are what ``derive`` says of its last content, all feedback and the recorded version."""
    out = run(signal(), batches(records(events), cuts))
    newest: dict[str, OrchestrationRevised] = {}
    for event in events:
        if isinstance(event, OrchestrationRevised):
            old = newest.get(event.orchestration_id)
            if old is None or event.revision > old.revision:
                newest[event.orchestration_id] = event
    rewards, ledgers, samples = (last(out, kind) for kind in (RewardsComputed, CreditAssigned, SamplesBuilt))
    models = {m.version: ValueModel.from_dict(m.parameters) for m in MODELS}
    assert set(rewards) == set(newest)
    for oid, revised in newest.items():
        content = revised.content
        assert content is not None
        names = {oid, *content.trace_ids, *(s for c in content.calls for s in c.span_ids)}
        names |= {c.response_id for c in content.calls}
        names |= {s for e in content.events for s in e.evidence} | {a.span_id for a in content.agents}
        feedback = [e for e in events if getattr(e, "target_id", None) in names]
        version = ledgers[oid].value_model if oid in ledgers else NO_MODEL
        batch = derive(
            content,
            feedback,
            complete=revised.complete,
            settings=SETTINGS,
            version=version,
            model=models.get(version),
        )
        assert content_of(rewards[oid]) == content_of(batch.rewards)
        assert content_of(ledgers.get(oid)) == content_of(batch.credit)
        if batch.samples is not None:
            assert content_of(samples[oid]) == content_of(batch.samples)
        assert rewards[oid].team is None or paid(rewards[oid].rewards) == rewards[oid].team
        if oid in ledgers:
            assert check_ledger(ledgers[oid].nodes, ledgers[oid].reward, ledgers[oid].baseline) == []
            assert ledgers[oid].revision == rewards[oid].revision


@given(EVENTS, st.sets(st.integers(0, 24)), st.sets(st.integers(0, 24)))
@QUICK
def test_batching_does_not_matter(events: list[Event], cuts: set[int], other: set[int]):
    items = records(events)
    assert finals(run(signal(), batches(items, cuts))) == finals(run(signal(), batches(items, other)))


@given(EVENTS, st.sets(st.integers(0, 24)), st.sets(st.integers(0, 24)))
@QUICK
def test_a_crash_before_any_commit_changes_nothing(events: list[Event], cuts: set[int], crash: set[int]):
    parts = batches(records(events), cuts)
    undisturbed = run(signal(), parts)
    assert run(signal(), parts, fresh=signal, crash=crash) == undisturbed


@given(EVENTS, st.randoms(use_true_random=False))
@QUICK
def test_order_and_duplicates_do_not_matter(events: list[Event], rng):
    """Without models, whose place in the order is a recorded input."""
    events = [event for event in events if not isinstance(event, ValueModelPublished)]
    if not events:
        return
    mixed = rng.sample(events, len(events)) + [rng.choice(events) for _ in range(3)]
    one = finals(run(signal(), [records(events)]))
    two = finals(run(signal(), [[r] for r in records(mixed)]))
    assert {oid: parts[:2] for oid, parts in one.items()} == {oid: parts[:2] for oid, parts in two.items()}


@given(EVENTS)
@QUICK
def test_revisions_count_up_and_every_one_changes_something(events: list[Event]):
    out = run(signal(), [[r] for r in records(events)])
    seen: dict[str, int] = {}
    before: dict[str, tuple[str, ...]] = {}
    for event in out:
        if isinstance(event, RewardsComputed):
            assert event.revision == seen.get(event.orchestration_id, 0) + 1
            seen[event.orchestration_id] = event.revision
            now = content_hash([event.rewards, event.team, event.status])
            credit = next(
                (e for e in out if isinstance(e, CreditAssigned) and (e.orchestration_id, e.revision) == (event.orchestration_id, event.revision)),
                None,
            )  # fmt: skip
            both = (now, content_of(credit))
            assert before.get(event.orchestration_id) != both
            before[event.orchestration_id] = both
    ids = [(type(e), e.event_id) for e in out]
    assert len(ids) == len(set(ids))


@given(st.integers(0, 50), st.permutations(range(6)))
@QUICK
def test_merging_in_any_order_gives_the_survivor_all_feedback(seed: int, order: list[int]):
    winner, loser = make_content(seed), make_content(seed + 100)
    joined = msgspec.structs.replace(winner, trace_ids=(*winner.trace_ids, *loser.trace_ids))
    gone = OrchestrationRevised(
        orchestration_id=loser.orchestration_id,
        revision=2,
        complete=True,
        merged_into=winner.orchestration_id,
    )
    on_loser = make_feedback(loser, 1, kind="orchestration", scorer="a", value=0.25)
    on_trace = make_feedback(loser, 2, kind="trace", scorer="b", value=0.75)
    events: list[Event] = [make_revision(winner), make_revision(loser), make_revision(joined, 2), gone, on_loser, on_trace]  # fmt: skip
    parts = [[r] for r in records([events[i] for i in order])]
    out = run(signal(), parts, fresh=signal, crash={2, 4})
    assert out == run(signal(), parts)
    rewards, samples = last(out, RewardsComputed), last(out, SamplesBuilt)
    batch = derive(joined, [on_loser, on_trace], complete=True, settings=SETTINGS)
    assert content_of(rewards[winner.orchestration_id]) == content_of(batch.rewards)
    if loser.orchestration_id in rewards:
        void = rewards[loser.orchestration_id]
        assert (void.team, void.status, void.rewards) == (None, "missing", ())
    if loser.orchestration_id in samples:
        assert samples[loser.orchestration_id].rows == ()


# ---------------------------------------------------------------- the value stage


def outcomes(seeds: list[int]) -> list[Event]:
    """Orchestrations, then their rewards, as the signal stage writes them."""
    contents = [make_content(seed, tokens=seed % 3 > 0) for seed in seeds]
    revised: list[Event] = [make_revision(c) for c in contents]
    rewards = [
        derive(c, [make_feedback(c)], complete=True, settings=VALUE_SETTINGS).rewards for c in contents
    ]
    return [event for pair in zip(revised, rewards, strict=True) for event in pair]


def value_stage() -> ValueStage:
    return ValueStage(VALUE_SETTINGS)


@given(
    st.lists(st.integers(0, 30), min_size=2, max_size=9, unique=True),
    st.sets(st.integers(0, 18)),
    st.sets(st.integers(0, 18)),
)
@settings(max_examples=6, deadline=None)
def test_value_models_do_not_depend_on_batching_or_crashes(seeds: list[int], cuts: set[int], crash: set[int]):
    items = records(outcomes(seeds))
    one = run(value_stage(), [items])
    parts = batches(items, cuts)
    two = run(value_stage(), parts, fresh=value_stage, crash=crash)
    assert [m.version.split("-")[0] for m in one] == [f"value@v{n}" for n in range(1, len(seeds) // 2 + 1)]
    assert [content_hash(m) for m in one] == [content_hash(m) for m in two]
