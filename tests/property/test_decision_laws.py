"""Laws of the decision models: order, duplication, corrections, retractions and restarts leave what a batch would make."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sdk_support import assembled, programs, recording, run_program

from spanloop.pipeline.decisions.effects import Row, Statistics
from spanloop.pipeline.decisions.learner import DecisionLearner, Lesson
from spanloop.pipeline.decisions.objects import decisions_of
from spanloop.pipeline.decisions.paths import Path, Point
from spanloop.pipeline.decisions.stopping import fit_stopping
from spanloop.schemas.canonical import MICRO, canonical_json


@st.composite
def rows(draw: st.DrawFn) -> Row:
    logged = draw(st.booleans())
    counts = draw(st.tuples(st.integers(0, 2), st.integers(0, 2)).filter(any))
    weights = tuple(
        count * draw(st.integers(MICRO, 100 * MICRO)) if logged else count * MICRO for count in counts
    )
    low = draw(st.tuples(st.integers(0, 1), st.integers(0, 1))) if logged else (0, 0)
    name = draw(st.sampled_from(["spawn|desk|a|b", "stop|desk|a|b"]))
    return Row(name, draw(st.sampled_from(["x", "y"])), ("a", "b"), logged, sum(counts), counts, weights, low)


def distinct(found: list[Row]) -> tuple[Row, ...]:
    return tuple({(r.group, r.context, r.logged): r for r in found}.values())


taught = st.lists(
    st.tuples(st.lists(rows(), max_size=3).map(distinct), st.integers(-MICRO, MICRO)), min_size=1, max_size=12
)


def all_effects(statistics: Statistics) -> list:
    return [
        (group, context, statistics.effects(group, context))
        for group in statistics.groups()
        for context in (None, *statistics.contexts(group))
    ]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(taught, st.data())
def test_sums_do_not_know_the_order_and_subtraction_undoes_addition(items, data):
    plain, moved = Statistics(), Statistics()
    named = [(f"o{i}", *item) for i, item in enumerate(items)]
    for item in named:
        plain.add(*item)
    for name, those, reward in data.draw(st.permutations(named)):
        moved.add(name, those, reward + 1)
        moved.add("guest", those, 7)
        moved.add(name, those, reward + 1, -1)
        moved.add(name, those, reward)
        moved.add("guest", those, 7, -1)
    assert all_effects(moved) == all_effects(plain)
    for item in named:
        plain.add(*item, -1)
    assert all_effects(plain) == []


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(taught, st.data())
def test_a_learner_is_a_function_of_what_it_last_heard(items, data):
    """Duplicates, corrections, retractions, and a restart at any moment."""
    final = {f"o{i}": (Lesson(0, those, ()), reward) for i, (those, reward) in enumerate(items)}
    straight = DecisionLearner()
    for name, (lesson, reward) in final.items():
        straight.observe(name, lesson)
        straight.reward(name, reward, ())
    names = data.draw(st.permutations(sorted(final)))
    noise = data.draw(
        st.lists(st.tuples(st.sampled_from(names), st.integers(0, 3), st.integers(-9, 9)), max_size=12)
    )
    wild = DecisionLearner()
    for name, what, number in noise:
        if what == 0:
            wild.observe(name, final[name][0])
        elif what == 1:
            wild.reward(name, number, ())
        elif what == 2:
            wild.observe(name, None)
        else:
            again = DecisionLearner()
            for oid, lesson in sorted(wild.lessons.items(), key=lambda item: item[1].sequence):
                again.restore(oid, lesson)
            wild = again
    for name in names:
        wild.observe(name, final[name][0])
        wild.reward(name, final[name][1], ())
        wild.reward(name, final[name][1], ())
    assert canonical_json(wild.parameters()) == canonical_json(straight.parameters())
    for name in names:
        wild.observe(name, None)
    assert wild.is_empty
    assert wild.statistics.groups() == []


points = st.builds(
    Point,
    st.lists(st.tuples(st.sampled_from("abc"), st.floats(-5, 5)), max_size=3, unique_by=lambda x: x[0]).map(
        lambda pairs: tuple(sorted(pairs))
    ),
    st.floats(0, 1),
    st.none() | st.floats(-1, 1),
    st.none() | st.floats(0, 1),
    st.just(False),
)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(points, min_size=1, max_size=4), min_size=30, max_size=40), st.data())
def test_stopping_is_total_finite_and_does_not_know_the_order(found, data):
    paths = [Path(f"{i:03d}", tuple(each)) for i, each in enumerate(found)]
    fitted = fit_stopping(paths)
    again = fit_stopping(data.draw(st.permutations(paths)))
    if fitted is None:
        assert again is None
        return
    assert again is not None
    assert canonical_json(again[0].to_dict()) == canonical_json(fitted[0].to_dict())
    assert repr(again[1]) == repr(fitted[1])
    for value in fitted[0].margin.value + fitted[0].value.value:
        assert abs(value) < 1e9


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs)
def test_every_told_decision_is_one_object_and_an_effect_or_a_reason_is_given(program):
    with recording() as exporter:
        asyncio.run(run_program(program))
    (content,) = assembled(exporter)
    found = decisions_of(content)
    named = [item.event_id for item in found if item.event_id]
    assert len(set(named)) == len(named)
    told = {event.id: event.decision for event in content.events if event.decision is not None}
    assert set(told) <= set(named)
    for item in found:
        assert item.status != "unidentified" or item.reason
        assert (item.effect is None) == (item.status == "unidentified")
        decision = told.get(item.event_id)
        if decision is not None:
            assert (item.kind, item.chosen) == (decision.kind, decision.chosen)
            assert tuple(option.name for option in item.options) in (decision.options, ("stop", "continue"))
    assert decisions_of(content) == found
