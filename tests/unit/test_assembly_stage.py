"""The assembly stage: when it publishes, revises, merges, forgets and refuses."""

from __future__ import annotations

import msgspec
import pytest
from made_spans import TRACE, Desk, agent, chat, gateway, hashes, hex16, hex32, span

from spanloop.pipeline.assembly import join, stage
from spanloop.schemas.events import DeadLettered, FeedbackReceived, OrchestrationRevised, encode
from spanloop.schemas.ids import gateway_trace_id, orchestration_id
from spanloop.schemas.spans import SpanLink

OWN = orchestration_id("default", [TRACE])


def run(response: str = "r-1"):
    """A trace as exporters send it: children first."""
    return [chat("c", "root", 1, 2, response=response), agent("root", None, 0, 3)]


def test_a_complete_orchestration_closes_after_the_quiet_time():
    desk = Desk(quiet_s=1, timeout_s=300)
    desk.send(*run())
    assert desk.later(0.99) == []
    (event,) = desk.later(0.02)
    assert isinstance(event, OrchestrationRevised)
    assert (event.orchestration_id, event.revision, event.complete, event.merged_into) == (OWN, 1, True, "")
    assert event.content is not None
    assert {event.orchestration_id: event.content_hash} == hashes(run())


def test_each_new_span_starts_the_quiet_time_anew_and_a_repeat_does_not():
    desk = Desk(quiet_s=1)
    child, root = run()
    desk.send(root)
    desk.later(0.6)
    desk.send(child)
    desk.later(0.6)
    desk.send(child)
    assert len(desk.later(0.5)) == 1


def test_one_with_a_gap_closes_provisionally_after_the_timeout_then_completely():
    desk = Desk(quiet_s=1, timeout_s=60)
    child, root = run()
    desk.send(child)
    assert desk.later(59) == []
    (first,) = desk.later(2)
    desk.send(root)
    (second,) = desk.later(2)
    assert isinstance(first, OrchestrationRevised)
    assert isinstance(second, OrchestrationRevised)
    assert [(e.revision, e.complete) for e in (first, second)] == [(1, False), (2, True)]


def test_a_late_span_that_changes_nothing_gives_no_revision():
    desk = Desk()
    desk.send(*run())
    desk.later(5)
    desk.send(msgspec.structs.replace(run()[0], attributes={**run()[0].attributes, "http.route": "/x"}))
    desk.later(500)
    assert len(desk.events) == 1


def test_a_provisional_result_that_proves_complete_as_it_was_says_so():
    desk = Desk(timeout_s=60)
    unfinished = span("bg", "root", 1, 0)
    desk.send(agent("root", None, 0, 3), unfinished)
    desk.later(100)
    desk.send(span("bg", "root", 1, 2))
    desk.later(100)
    revisions = [e for e in desk.events if isinstance(e, OrchestrationRevised)]
    assert [e.complete for e in revisions] == [False, True]


def test_the_gateways_span_alone_waits_for_its_framework():
    desk = Desk(quiet_s=1, timeout_s=300)
    desk.send(gateway("r-1", 1, 2), source="gateway")
    assert desk.later(20) == []
    desk.send(*run())
    (event,) = desk.later(2)
    assert isinstance(event, OrchestrationRevised)
    assert event.content is not None
    assert event.orchestration_id == OWN
    assert [c.policy_version for c in event.content.calls] == ["policy@v3"]


def test_a_published_id_that_is_lost_in_a_join_gets_a_last_revision():
    desk = Desk(quiet_s=1, timeout_s=10)
    desk.send(gateway("r-1", 1, 2), source="gateway")
    (alone,) = desk.later(11)
    desk.send(*run())
    merged = desk.later(0.1) + desk.events[1:]
    (joined,) = desk.later(2)
    lost_id = orchestration_id("default", [gateway_trace_id("r-1")])
    (merged,) = [e for e in merged if isinstance(e, OrchestrationRevised)]
    assert isinstance(alone, OrchestrationRevised)
    assert isinstance(joined, OrchestrationRevised)
    assert (alone.orchestration_id, alone.complete) == (lost_id, False)
    assert (merged.orchestration_id, merged.revision, merged.merged_into, merged.content) == (
        lost_id,
        2,
        OWN,
        None,
    )
    assert (joined.orchestration_id, joined.revision) == (OWN, 1)


def test_two_published_orchestrations_join_by_a_late_link_under_the_smaller_trace():
    one, two = agent("a", None, 0, 5, trace=1), agent("b", None, 0, 5, trace=2)
    linked = chat("c", "b", 1, 2, trace=2, links=(SpanLink(hex32(1), hex16("a")),))
    desk = Desk()
    desk.send(one, two)
    desk.later(2)
    desk.restart()
    desk.send(linked)
    desk.later(2)
    live = desk.live()
    assert {k: e.content_hash for k, e in live.items()} == hashes([one, two, linked])
    assert live[orchestration_id("default", [hex32(1)])].revision == 2
    lost = [e for e in desk.events if isinstance(e, OrchestrationRevised) and e.merged_into]
    assert [(e.orchestration_id, e.revision) for e in lost] == [(orchestration_id("default", [hex32(2)]), 2)]


def test_after_the_retention_state_is_gone_and_a_later_span_is_refused():
    desk = Desk(retention_s=100)
    child, root = run()
    desk.send(root)
    desk.later(50)
    desk.later(60)
    assert [key[:2] for key in desk.state] == ["f/"]
    desk.restart()
    (refused,) = desk.send(child)
    assert isinstance(refused, DeadLettered)
    assert "later than the retention" in refused.reason
    assert refused.details == {"trace_id": TRACE, "spans": 1}
    desk.later(100 * stage._TOMBSTONE_LIFE)
    desk.send(agent("x", None, 0, 1, trace=9))
    desk.later(10)
    assert not any(key == f"f/default/{TRACE}" for key in desk.state)


def test_more_orchestrations_than_allowed_forget_the_oldest():
    desk = Desk(orchestrations_max=2)
    for number in range(1, 5):
        desk.send(agent("a", None, 0, 1, trace=number))
        desk.later(5)
    kept = {key.split("/")[2] for key in desk.state if key.startswith("o/")}
    assert kept == {hex32(3), hex32(4)}


def test_spans_over_the_limit_are_counted_and_not_kept(monkeypatch):
    monkeypatch.setattr(join, "MAX_SPANS", 3)
    desk = Desk()
    desk.send(agent("root", None, 0, 9), *(chat(f"c{i}", "root", 1, 2) for i in range(5)))
    desk.restart()
    (event,) = desk.later(5)
    assert isinstance(event, OrchestrationRevised)
    assert event.content is not None
    assert len(event.content.calls) == 2
    assert "truncated_spans:3" in event.content.flags


@pytest.mark.parametrize(
    "value", [b"", b"{", b'{"type":"spans_received"}', b'{"type":"from_the_future"}', b"\xff\xfe"]
)
def test_a_record_that_cannot_be_read_is_dead_lettered_and_costs_no_other(value):
    desk = Desk()
    record = ("acme/x", "id-1", value)
    (refused,) = desk.send_raw(record)
    assert isinstance(refused, DeadLettered)
    assert (refused.tenant, refused.source, refused.size) == ("acme", "assembly", len(value))
    desk.send(*run())
    assert len(desk.later(5)) == 1


def test_a_span_on_which_a_dialect_fails_costs_no_other(monkeypatch):
    real = stage.operation_of

    def failing(item, source):
        if item.name == "poison":
            raise ValueError("secret text")
        return real(item, source)

    monkeypatch.setattr(stage, "operation_of", failing)
    desk = Desk()
    (refused,) = desk.send(*run(), span("p", "root", 1, 2, name="poison"))
    assert isinstance(refused, DeadLettered)
    assert "secret" not in refused.reason
    (event,) = desk.later(5)
    assert isinstance(event, OrchestrationRevised)
    assert event.complete


def test_other_events_on_the_topic_are_no_business_of_the_stage():
    desk = Desk()
    event = FeedbackReceived(feedback_id="f", target_kind="trace", target_id=TRACE, value=1.0)
    assert desk.send_raw((event.key, event.event_id, encode(event))) == []
    assert desk.state == {}


def test_only_what_changed_is_written():
    desk = Desk()
    desk.send(agent("a", None, 0, 1, trace=1), agent("b", None, 0, 1, trace=2))
    desk.now_ns += 1
    before = dict(desk.state)
    desk.send(chat("c", "a", 0, 1, trace=1))
    changed = {key for key, value in desk.state.items() if before.get(key) != value}
    assert changed == {f"o/default/{hex32(1)}/000001", f"c/default/{hex32(1)}"}


def test_traces_that_are_no_orchestration_publish_nothing():
    desk = Desk()
    desk.send(span("GET /", None, 0, 1))
    assert desk.later(1000) == []


def test_nothing_pending_has_no_timer():
    desk = Desk(retention_s=10)
    assert desk.stage.next_timer_ns() is None
    desk.send(*run())
    desk.later(100)
    assert desk.stage.next_timer_ns() is None
