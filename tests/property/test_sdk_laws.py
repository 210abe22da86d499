"""A random program written with the SDK, and what assembly finds in its spans: the same, to the last event."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sdk_support import assembled, found_in, programs, received, recording, run_program

from spanloop.collectors import sdk
from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.schemas.canonical import canonical_json


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs)
def test_what_a_program_says_is_what_assembly_finds(program):
    before = sdk.failures()
    with recording() as exporter:
        record = asyncio.run(run_program(program))
    (content,) = assembled(exporter)
    found = found_in(content)
    assert found.events == record.events
    assert found.decisions == record.decisions
    if record.aggregates:
        assert sum(found.aggregates.values()) == sum(record.aggregates.values())
    assert content.flags == ()
    assert sdk.failures() == before


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs, st.randoms(use_true_random=False))
def test_the_order_and_number_of_deliveries_changes_nothing(program, rng: random.Random):
    with recording() as exporter:
        asyncio.run(run_program(program))
    spans = received(exporter)
    (once,) = assemble_spans(spans, "default", "otlp")
    shuffled = [*spans, *rng.sample(spans, len(spans) // 2)]
    rng.shuffle(shuffled)
    (again,) = assemble_spans(shuffled, "default", "otlp")
    assert canonical_json(again) == canonical_json(once)


@pytest.mark.parametrize("dropped", ["agent", "message", "stop"])
def test_the_law_can_fail(dropped):
    """A program whose spans of one act are lost has another record: the comparison above sees it."""
    with recording() as exporter, sdk.agent("a"):
        with sdk.delegate("b"), sdk.agent("b"):
            pass
        sdk.message("c").now()
        sdk.stop(options=["stop", "go"], chosen="stop").now()
    spans = received(exporter)
    full, less = (
        found_in(assemble_spans(some, "default", "otlp")[0])
        for some in (
            spans,
            [s for s in spans if s.attributes["spanloop.sdk.act"] != dropped or not s.parent_span_id],
        )
    )
    assert (full.events, full.decisions) != (less.events, less.decisions)
