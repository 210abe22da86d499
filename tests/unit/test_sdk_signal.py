"""Orchestrations told by the SDK through rewards and credit: the ledger holds, the decisions are there for whoever estimates effects."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, given, settings
from sdk_support import assembled, programs, recording, run_program
from synthetic_orchestrations import make_revision

from spanloop.pipeline.assembly.survey import survey_of
from spanloop.pipeline.ports import LogRecord, new_record
from spanloop.pipeline.signal import SignalStage
from spanloop.schemas.canonical import content_hash
from spanloop.schemas.events import FeedbackReceived, OrchestrationRevised, RewardsComputed, decode, encode
from spanloop.schemas.settings import Pipeline


def _outcome(trace_id: str, tenant: str) -> FeedbackReceived:
    return FeedbackReceived(
        tenant=tenant,
        feedback_id="f",
        target_kind="trace",
        target_id=trace_id,
        value=0.5,
        scorer="s",
        observed_ns=1,
    )


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(programs)
def test_told_orchestrations_are_rewarded_and_survive_the_log(program):
    with recording() as exporter:
        asyncio.run(run_program(program))
    (content,) = assembled(exporter)
    revised = make_revision(content)
    again = decode(encode(revised))
    assert isinstance(again, OrchestrationRevised)
    assert content_hash(again.content) == content_hash(content)
    stage = SignalStage(Pipeline())  # type: ignore[call-arg]
    stage.restore({})
    records = [new_record(event) for event in (_outcome(content.trace_ids[0], content.tenant), revised)]
    output = stage.process(
        [LogRecord(r.topic, n, r.key, r.event_id, r.value, 0) for n, r in enumerate(records)], 0
    )
    (rewards,) = [event for event in output.events if isinstance(event, RewardsComputed)]
    assert rewards.team == 500_000
    if content.events:
        told = [extra["decision"] for extra in survey_of(content).extras.values() if "decision" in extra]
        assert len(told) == sum(event.decision is not None for event in content.events)
