"""Public bug reports of other tools as inputs (shared/cases); what each expects of assembly."""

from __future__ import annotations

import itertools
import random
import time

import msgspec
import pytest
from made_spans import Desk, hashes, load_case, one, told

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.schemas.events import OrchestrationRevised


def usage(content) -> tuple[int, int]:
    return content.tokens.input, content.tokens.output


def expected(case) -> tuple[int, int]:
    return case["checks"]["input_tokens"], case["checks"]["output_tokens"]


def test_a_span_later_than_the_close_revises_and_does_not_fork():
    case, spans = load_case(1)
    desk = Desk()
    desk.send(*spans[:4])
    (first,) = desk.later(10)
    desk.at(120)
    desk.send(spans[4])
    (second,) = desk.later(10)
    assert isinstance(first, OrchestrationRevised)
    assert isinstance(second, OrchestrationRevised)
    assert (first.orchestration_id, first.revision) == (second.orchestration_id, second.revision - 1)
    assert usage(second.content) == expected(case)
    assert {second.orchestration_id: second.content_hash} == hashes(spans)


@pytest.mark.parametrize("number", [2, 5])
def test_any_order_gives_the_same(number):
    _, spans = load_case(number)
    want = hashes(spans)
    assert len(want) == 1
    for order in itertools.permutations(spans):
        assert hashes(order) == want


def test_a_missing_parent_keeps_its_children_and_their_tokens():
    case, spans = load_case(4)
    content = one(spans)
    assert usage(content) == expected(case)
    assert "orphan_spans:1" in content.flags
    assert all(call.agent_id for call in content.calls)
    desk = Desk(timeout_s=300)
    desk.send(*spans)
    assert desk.later(299) == []
    (closed,) = desk.later(2)
    assert isinstance(closed, OrchestrationRevised)
    assert not closed.complete


def test_a_trace_without_root_is_flagged_and_provisional():
    _, spans = load_case(5)
    content = one(spans)
    assert "missing_root" in content.flags
    assert [a.name for a in content.agents] == ["researcher", "writer"]
    assert told(content, "stop", "spawn", "delegate") == []


def test_duplicates_change_nothing():
    case, spans = load_case(6)
    desk = Desk()
    for delivery in case["delivery"]:
        desk.at(delivery["at_s"])
        batch = [spans[i] for i in delivery["spans"]]
        if delivery.get("shuffle_attributes"):
            batch = [
                msgspec.structs.replace(s, attributes=dict(reversed(s.attributes.items()))) for s in batch
            ]
        desk.send(*batch)
    desk.later(1000)
    (only,) = desk.events
    assert isinstance(only, OrchestrationRevised)
    assert usage(only.content) == expected(case)


def test_two_contents_under_one_span_id_have_one_winner():
    case, spans = load_case(7)
    want = hashes(spans)
    assert all(hashes(order) == want for order in itertools.permutations(spans))
    content = one(spans)
    assert usage(content) == expected(case)
    assert content.flags == ("conflicting_spans:1",)


def test_an_agent_of_nine_hours_gives_one_final_result():
    case, spans = load_case(9)
    desk = Desk(timeout_s=600)
    for delivery in case["delivery"]:
        desk.at(delivery["at_s"])
        if delivery["at_s"] > case["restart_at_s"]:
            desk.restart()
        desk.send(*(spans[i] for i in delivery["spans"]))
    desk.later(1000)
    revisions = [e for e in desk.events if isinstance(e, OrchestrationRevised)]
    assert [r.revision for r in revisions] == list(range(1, len(revisions) + 1))
    assert [r.complete for r in revisions] == [False] * (len(revisions) - 1) + [True]
    assert usage(revisions[-1].content) == expected(case)
    assert len(revisions[-1].content.calls) == 9


def test_twelve_thousand_spans_three_thousand_deep():
    case, spans = load_case(10)
    random.Random(7).shuffle(spans)
    started = time.process_time()
    content = one(spans)
    assert time.process_time() - started < 20
    assert usage(content) == expected(case)
    assert content.tokens.calls == 12_000


def test_cycles_are_cut_once_each():
    case, spans = load_case(11)
    want = hashes(spans)
    for seed in range(30):
        order = spans[:]
        random.Random(seed).shuffle(order)
        assert hashes(order) == want
    content = one(spans)
    assert usage(content) == expected(case)
    assert "cycle:2" in content.flags


def test_old_names_count_once():
    case, spans = load_case(21)
    content = one(spans)
    assert usage(content) == expected(case)
    assert content.tokens.calls == 4


def test_unknown_usage_is_not_zero():
    case, spans = load_case(23)
    content = one(spans)
    assert usage(content) == expected(case)
    assert content.tokens.unknown_calls >= case["checks"]["usage_unknown_min"]
    assert [c.input_tokens for c in content.calls] == [10, None, None]


def test_roll_ups_and_repeated_response_ids_do_not_count_twice():
    case, spans = load_case(25)
    content = one(spans)
    assert usage(content) == expected(case)
    assert content.tokens.calls == case["checks"]["logical_calls"]
    assert [c.status for c in content.calls] == ["error", "ok", "ok"]
    assert len(content.calls) == case["checks"]["attempts"]


def test_one_agent_name_in_two_deployments_is_three_orchestrations():
    case, spans = load_case(27)
    contents = assemble_spans(spans, "default")
    assert len(contents) == case["checks"]["traces"]
    assert len({c.agents[0].id for c in contents}) == case["checks"]["agent_keys"]


def test_a_worker_killed_between_two_halves_equals_the_clean_run():
    case, spans = load_case(29)
    desk = Desk()
    desk.send(*spans[:3])
    desk.restart()
    desk.at(3)
    desk.send(*spans[3:])
    desk.later(10)
    assert {k: e.content_hash for k, e in desk.live().items()} == hashes(spans)
    assert usage(next(iter(desk.live().values())).content) == expected(case)


def test_reading_the_log_again_from_the_start_doubles_nothing():
    _, spans = load_case(31)
    desk = Desk()
    desk.send(*spans)
    desk.later(10)
    desk.later(60)
    desk.restart()
    desk.send(*spans)
    desk.later(1000)
    assert len(desk.events) == 1


def test_two_tenants_with_the_same_ids_stay_apart():
    _, spans = load_case(43)
    desk = Desk()
    desk.send(spans[0], tenant="A")
    desk.send(spans[1], tenant="B")
    desk.later(10)
    live = desk.live()
    assert {e.tenant: [a.name for a in e.content.agents] for e in live.values() if e.content} == {
        "A": ["orchestrator"],
        "B": ["evil"],
    }
