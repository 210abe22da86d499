"""The table of states that repeat: C3 from logs inside the value model, in the same version in stream, batch and replay."""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_orchestrations import make_content, make_feedback, make_revision

from spanloop.pipeline.credit.estimators.c3 import log_credits
from spanloop.pipeline.credit.repeats import LEAST, lookup, table_of
from spanloop.pipeline.credit.value import ValueStage
from spanloop.pipeline.credit.value_model import ValueModel
from spanloop.pipeline.ports import LogRecord, new_record
from spanloop.pipeline.signal import SignalStage, derive
from spanloop.schemas.canonical import MICRO
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import CreditAssigned, Event, ValueModelPublished
from spanloop.schemas.settings import Pipeline

EXAMPLES = st.lists(
    st.tuples(
        st.lists(st.sampled_from([(1,), (1, 2), (1, 3), (4, 5)]), min_size=1, max_size=4).map(tuple),
        st.integers(-(10**6), 10**6),
    ),
    max_size=20,
)


@given(EXAMPLES, st.randoms(use_true_random=False))
def test_a_table_is_a_function_of_the_set(
    examples: list[tuple[tuple[tuple[int, ...], ...], int]], rng: random.Random
) -> None:
    shuffled = [(tuple(reversed(states)), reward) for states, reward in examples]
    rng.shuffle(shuffled)
    assert table_of(shuffled) == table_of(examples)


@given(EXAMPLES, st.integers(0, 19))
def test_an_orchestration_taken_back_leaves_nothing(
    examples: list[tuple[tuple[tuple[int, ...], ...], int]], at: int
) -> None:
    without = [*examples[:at], *examples[at + 1 :]]
    kept = table_of(without)
    for key, (count, total) in table_of(examples).items():
        own = [(states, reward) for states, reward in examples if key in table_of([(states, reward)] * LEAST)]
        assert (count, total) == (len(own), sum(reward for _, reward in own))
    assert set(kept) <= set(table_of(examples))


def test_value_differences_of_repeated_states_are_c3s_credits() -> None:
    """With enough repetitions V(after) - mean V(options) is C3's Q - mean Q."""
    rng = random.Random(1)
    log = []
    for _ in range(400):
        good = rng.random() < 0.7
        log.append(("p", "good" if good else "bad", float(good and rng.random() < 0.8)))
    states = {"good": (1, 2), "bad": (1, 3)}
    table = table_of((((states[message],)), round(outcome * MICRO)) for _, message, outcome in log)
    value = {message: lookup(table, state, 0.0) for message, state in states.items()}
    share = sum(message == "good" for _, message, _ in log) / len(log)
    mean = share * value["good"] + (1 - share) * value["bad"]
    for (_, message), credit in log_credits(log).items():
        assert value[str(message)] - mean == pytest.approx(credit.value, abs=0.01)


def pipeline(*, table: bool) -> Pipeline:
    return Pipeline(value_every=6, value_growth=0.0, value_features=64, holdout=0.0, value_table=table)  # type: ignore[call-arg]


def records(events: list[Event]) -> list[LogRecord]:
    made = [new_record(event) for event in events]
    return [LogRecord(r.topic, i, r.key, r.event_id, r.value, 0) for i, r in enumerate(made)]


def published(*, table: bool) -> ValueModelPublished:
    """Learned from six tries that went through the same states."""
    events: list[Event] = []
    for n in range(6):
        content = msgspec.structs.replace(
            make_content(1), orchestration_id=f"{n:032x}", trace_ids=(f"{n:032x}",)
        )
        feedback = [make_feedback(content, n)]
        made = derive(content, feedback, complete=True, settings=pipeline(table=table))
        events += [make_revision(content), made.rewards]
    out = ValueStage(pipeline(table=table)).process(records(events), 1).events
    (found,) = (e for e in out if isinstance(e, ValueModelPublished))
    return found


def test_a_version_carries_its_table_and_what_it_credits_is_the_same_in_stream_and_batch() -> None:
    found = published(table=True)
    model = ValueModel.from_dict(found.parameters)
    assert model.table
    assert {count for count, _ in model.table.values()} == {6}
    content = make_content(1)
    feedback = make_feedback(content)
    out = (
        SignalStage(pipeline(table=True))
        .process(records([found, feedback, make_revision(content)]), 1)
        .events
    )
    (streamed,) = (e for e in out if isinstance(e, CreditAssigned))
    batch = derive(
        content, [feedback], complete=True, settings=pipeline(table=True), version=found.version, model=model
    ).credit
    assert streamed == batch
    plain = ValueModel.from_dict({**found.parameters, "table": {}})
    other = derive(
        content, [feedback], complete=True, settings=pipeline(table=True), version=found.version, model=plain
    ).credit
    assert other is not None
    assert other.nodes != streamed.nodes, "the table matters"


def test_without_it_versions_are_what_they_were() -> None:
    assert "table" not in published(table=False).parameters


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(-(10**6), 10**6)), min_size=1, max_size=6))
@settings(max_examples=20)
def test_a_state_with_many_repetitions_forgets_the_model(pairs: list[tuple[int, int]]) -> None:
    examples = [(((7,),), reward) for _, reward in pairs for _ in range(1000)]
    mean = sum(reward for _, reward in pairs) / len(pairs) / MICRO
    assert lookup(table_of(examples), (7,), 0.5) == pytest.approx(mean, abs=4e-3)
    assert lookup({}, (7,), 0.5) == 0.5


def test_a_malformed_table_is_refused() -> None:
    with pytest.raises(SchemaError, match="table"):
        ValueModel.from_dict({**published(table=True).parameters, "table": {"x": 3}})
