"""Scaffolds that go by a measured number: advanced by the value stage, carried by its versions, paid by them, replayed from them."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_orchestrations import make_content, make_feedback, make_revision

from spanloop.pipeline.credit.value import ValueStage
from spanloop.pipeline.credit.value_model import ValueModel
from spanloop.pipeline.ports import LogRecord, new_record
from spanloop.pipeline.rewards.indicators import progress_in, watched_of
from spanloop.pipeline.signal import SignalStage, derive
from spanloop.schemas.canonical import canonical_json, micro
from spanloop.schemas.errors import ConfigError, SchemaError
from spanloop.schemas.events import Event, RewardsComputed, ValueModelPublished
from spanloop.schemas.settings import Pipeline, load_settings

TERM = {
    "name": "parl/1", "weight": 0.5, "schedule": "linear", "length": 8, "options": {"of": "finish"}, "gated": False,
    "indicator": "outcome", "indicator_target": 0.5, "indicator_tolerance": 1.0,
}  # fmt: skip


def pipeline(**term: Any) -> Pipeline:
    flags = {
        "rewards": [{**TERM, **term}],
        "value_every": 2,
        "value_growth": 0.0,
        "value_features": 64,
        "holdout": 0.0,
    }
    return load_settings(flags={"pipeline": flags}).pipeline


SETTINGS = pipeline()
(KEY,) = (item.key for item in watched_of(SETTINGS))


def lesson(seed: int, value: float) -> list[Event]:
    content = make_content(seed)
    outcome = msgspec.structs.replace(make_feedback(content), value=value, name="outcome", final=True)
    return [
        make_revision(content),
        derive(content, [outcome], complete=True, settings=SETTINGS).rewards,
    ]


def records(events: list[Event]) -> list[LogRecord]:
    made = [new_record(event) for event in events]
    return [LogRecord(r.topic, i, r.key, r.event_id, r.value, 0) for i, r in enumerate(made)]


def published(parts: list[list[LogRecord]], restarts: set[int] = frozenset()) -> list[ValueModelPublished]:  # type: ignore[assignment]
    stage = ValueStage(SETTINGS)
    stage.restore({})
    entries: dict[str, bytes] = {}
    out: list[Any] = []
    for i, part in enumerate(parts):
        if i in restarts:
            stage = ValueStage(SETTINGS)
            stage.restore(dict(entries))
        result = stage.process(part, i)
        out += [e for e in result.events if isinstance(e, ValueModelPublished)]
        for key, value in result.writes.items():
            entries.pop(key, None) if value is None else entries.update({key: value})
    return out


def test_it_stands_still_until_what_it_holds_up_stands() -> None:
    low = [event for seed in range(4) for event in lesson(seed, 0.0)]
    high = [event for seed in range(4, 12) for event in lesson(seed, 1.0)]
    models = published([records([*low, *high])])
    progress = [progress_in(model.parameters)[KEY] for model in models]
    assert progress[:2] == [0.0, 0.0]
    assert progress == sorted(progress)
    assert 0 < progress[-1] < 8, "the mean has to come up first"
    assert len({model.version for model in models}) == len(models)


@given(
    st.lists(st.sampled_from([0.0, 0.4, 1.0]), min_size=3, max_size=8),
    st.sets(st.integers(1, 15)),
    st.sets(st.integers(1, 15)),
)
@settings(max_examples=10, deadline=None)
def test_batches_and_restarts_leave_the_same_versions(
    values: list[float], cuts: set[int], restarts: set[int]
) -> None:
    events = records([event for seed, value in enumerate(values) for event in lesson(seed, value)])
    edges = [0, *sorted(c for c in cuts if c < len(events)), len(events)]
    parts = [events[a:b] for a, b in pairwise(edges)]
    assert canonical_json(published(parts, restarts)) == canonical_json(published([events]))


def test_what_is_paid_is_what_the_version_says_in_stream_and_batch() -> None:
    models = published([records([event for seed in range(10) for event in lesson(seed, 1.0)])])
    for model in (models[0], models[-1]):
        content = make_content(99)
        outcome = msgspec.structs.replace(make_feedback(content), value=1.0, name="outcome", final=True)
        stage = SignalStage(SETTINGS)
        out = stage.process(records([model, outcome, make_revision(content)]), 1).events
        (streamed,) = (e for e in out if isinstance(e, RewardsComputed))
        batch = derive(
            content, [outcome], complete=True, settings=SETTINGS, version=model.version,
            model=ValueModel.from_dict(model.parameters),
        ).rewards  # fmt: skip
        assert streamed == batch
        (paid,) = (r for r in streamed.rewards if r.name == "parl:finish")
        assert paid.weight == micro(0.5 * max(0.0, 1 - progress_in(model.parameters)[KEY] / 8))
        assert paid.scaffold == (paid.weight > 0)


def test_without_indicators_versions_are_as_before() -> None:
    plain = pipeline(indicator="")
    assert watched_of(plain) == ()
    assert progress_in({}) == {}
    with pytest.raises(SchemaError, match="indicators"):
        progress_in({"indicators": {"x": 3}})


def test_an_indicator_without_a_schedule_is_refused() -> None:
    with pytest.raises(ConfigError, match="schedule"):
        pipeline(schedule="constant")


def test_an_unknown_part_of_parl_is_named() -> None:
    content = make_content(1)
    with pytest.raises(ConfigError, match="parallel"):
        derive(content, [make_feedback(content)], complete=True, settings=pipeline(options={"of": "speed"}))
