"""Each file format: what of a record becomes which span, event and score; what is refused, and what is never read."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from foreign_files import LINES, langfuse_trace, native, phoenix_span, survey_document, tau_try, who_log

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.formats.detect import FORMATS, NAMES, format_of, read_json
from spanloop.pipeline.formats.survey import EDGES_A_SPAN, document_of
from spanloop.pipeline.formats.values import Read, channel, span_id, time_ns, trace_id
from spanloop.pipeline.otlp.decoded import BadSpanError
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.errors import SchemaError


def read(value: object, wanted: str = "") -> Read:
    found = read_json(json.dumps(value).encode(), wanted)
    assert found.rejected == []
    return found


def contents(*values: object):
    return assemble_spans([s for value in values for s in read(value).spans], "default")


def events(*values: object) -> Counter:
    (content,) = contents(*values)
    return Counter((e.type, e.agent, e.to or e.tool, e.status) for e in content.events)


@pytest.mark.parametrize("name", LINES)
def test_a_record_is_told_by_its_content(name):
    for record in LINES[name]:
        assert format_of(record) == name
        assert sum(f.matches(record) for f in FORMATS) == 1
        with_other = next(other for other in NAMES if other != name)
        assert "expected" in read_json(json.dumps(record).encode(), with_other).rejected[0].reason
    assert format_of({"data": LINES[name]}) == format_of([[LINES[name]]]) == name
    assert format_of({"some": 1}) == format_of(7) == ""


def test_native_spans_become_an_orchestration():
    found = events(*native())
    assert found[("delegate", "lead", "helper", "")] == found[("delegate", "lead", "closer", "")] == 1
    assert found[("tool_result", "helper", "dig", "error")] == 1
    assert [key for key in found if key[0] in ("stop", "safety_event")] == [
        ("safety_event", "lead", "", ""),
        ("stop", "lead", "", "ok"),
    ]
    (content,) = contents(*native())
    assert (content.tokens.input, content.tokens.output, content.tokens.unknown_calls) == (10, 4, 0)
    assert content.started_ns == time_ns("2026-03-01T10:00:00.000001+00:00", "start")


def test_renaming_native_agents_changes_nothing_but_names():
    text = json.dumps(native())
    renamed = (
        text.replace("lead", "Zoë & co")
        .replace("helper", "lead 2")
        .replace("closer", "end")
        .replace("job", "x")
    )
    shapes = [
        Counter((e.type, e.status, e.mode) for e in contents(json.loads(t))[0].events)
        for t in (text, renamed)
    ]
    assert shapes[0] == shapes[1]


def test_the_group_of_a_native_trace_is_its_conversation():
    spans = read(native()[0]).spans
    assert [s.attributes["gen_ai.conversation.id"] for s in spans] == ["room-1"]
    assert contents(native()[0]) == []


def test_langfuse_puts_back_what_the_framework_sent():
    own, framework = read(langfuse_trace()).spans
    assert framework.attributes["gen_ai.response.id"] == "r-1"
    assert json.loads(framework.attributes["gen_ai.output.messages"])[0]["parts"][0]["name"] == "dig"
    assert (framework.attributes["gen_ai.usage.input_tokens"], framework.scope) == (7, "some.framework")
    assert framework.resource == {"service.name": "x"}
    assert framework.parent_span_id == own.span_id
    assert framework.attributes["session.id"] == own.attributes["session.id"] == "s-1"
    assert own.attributes["langfuse.observation.type"] == "agent"
    assert own.attributes["langfuse.observation.metadata.langgraph_node"] == "a"
    assert own.attributes["langfuse.trace.name"] == "my trace"
    assert (own.status, own.status_message) == ("error", "bad")


def test_langfuse_scores_are_feedback_and_categories_are_none():
    (score,) = read(langfuse_trace()).feedback
    assert (score["name"], score["value"], score["trace_id"]) == ("tone_of_voice", 0.5, "c" * 32)
    assert read(langfuse_trace()).ignored == 1
    number, category = langfuse_trace()["trace"]["scores"]
    assert read(number).feedback == [score]
    assert (read(category).feedback, read(category).ignored) == ([], 1)
    bad = langfuse_trace()
    bad["trace"]["scores"][0]["timestamp"] = "never"
    found = read_json(json.dumps(bad).encode())
    assert (len(found.spans), found.feedback, len(found.rejected)) == (2, [], 1)


def test_langfuse_observations_may_come_one_by_one_and_in_the_warehouses_spelling():
    whole = langfuse_trace()
    lines = [
        {
            {"traceId": "trace_id", "parentObservationId": "parent_observation_id", "startTime": "start_time",
             "endTime": "end_time", "statusMessage": "status_message", "usageDetails": "usage_details"}.get(k, k): v
            for k, v in raw.items()
        }
        for raw in whole["observations"]
    ]  # fmt: skip
    one_by_one = [s for line in lines for s in read(line).spans]
    assert [s.span_id for s in one_by_one] == [s.span_id for s in read(whole).spans]
    assert [s.start_ns for s in one_by_one] == [s.start_ns for s in read(whole).spans]


def test_a_bad_observation_costs_only_itself():
    whole = langfuse_trace()
    whole["observations"][0]["startTime"] = "yesterday"
    whole["observations"].append(7)
    found = read_json(json.dumps(whole).encode())
    assert ([s.name for s in found.spans], len(found.rejected)) == (["chat tiny"], 2)


def test_phoenix_attributes_are_folded_again():
    (span,) = read(phoenix_span()).spans
    get = span.attributes.get
    assert get("llm.input_messages.0.message.content") == "hi"
    assert get("llm.output_messages.0.message.tool_calls.0.tool_call.function.name") == "dig"
    assert get("llm.output_messages.0.message.tool_calls.0.tool_call.function.arguments") == '{"q":1}'
    assert (get("metadata"), get("session.id"), get("openinference.span.kind")) == ('{"a":[1]}', "s-1", "LLM")
    assert "input.mime_type" not in span.attributes
    assert (span.status, span.status_message, span.events[0].attributes) == (
        "error",
        "late",
        {"exception.type": "E"},
    )
    (flat,) = read(phoenix_span(flat=True)).spans
    assert (flat.start_ns, flat.end_ns) == (span.start_ns, span.end_ns)
    assert flat.attributes["llm.input_messages.0.message.role"] == "user"
    assert "tool.name" not in flat.attributes


def test_a_tools_outcome_is_never_the_teams():
    (note,) = read(phoenix_span()).feedback
    assert (note["name"], note["value"], note["label"]) == ("phoenix.outcome", 0.25, "meh")
    assert channel("outcome", "x") == "x.outcome"


def test_tau_bench_tools_rewards_and_groups():
    found = events(tau_try())
    assert found[("tool_result", "assistant", "look", "ok")] == 1
    assert found[("tool_result", "assistant", "cancel", "error")] == 1
    one, two = contents(tau_try(0), tau_try(1))
    assert len({c.task_key for content in (one, two) for c in content.calls}) == 1
    assert len({c.harness for content in (one, two) for c in content.calls}) == 1
    assert one.orchestration_id != two.orchestration_id
    assert (one.tokens.calls, one.tokens.unknown_calls) == (3, 3)
    (reward,) = read(tau_try(0, 0.5)).feedback
    assert (reward["name"], reward["value"]) == ("outcome", 0.5)


@pytest.mark.parametrize(
    "record", [tau_try(), who_log(), who_log("chat")], ids=["tau-bench", "ledger", "chat"]
)
def test_labels_are_never_read(record):
    spans = read(record).spans
    text = canonical_json(spans).decode()
    assert "LABEL_" not in text
    assert "SECRET" not in text
    assert "reward" not in text
    other = {k: "changed" if k.startswith(("mistake", "ground", "is_cor")) else v for k, v in record.items()}
    assert read(other).spans == spans


def test_a_ledger_is_decisions_delegations_returns_and_a_person():
    (content,) = contents(who_log())
    assert [(e.type, e.agent, e.to) for e in content.events] == [
        ("message", "user", "Boss"), ("orchestrator_decision", "Boss", ""), ("delegate", "Boss", "Finder"),
        ("return", "Finder", "Boss"), ("human_intervention", "user", "Boss"), ("orchestrator_decision", "Boss", ""),
        ("delegate", "Boss", "Writer"), ("return", "Writer", "Boss"), ("stop", "Boss", ""),
    ]  # fmt: skip
    assert {a.name: a.parent_id != "" for a in content.agents} == {
        "Boss": False,
        "Finder": True,
        "Writer": True,
    }
    assert {e.rule for e in content.events} == {"imported"}


def test_a_chat_is_messages_to_who_speaks_next():
    (content,) = contents(who_log("chat"))
    assert [(e.type, e.agent, e.to) for e in content.events] == [
        ("message", "Planner", "Terminal"), ("message", "Planner", "Terminal"), ("message", "Terminal", "Checker"),
        ("return", "Checker", "user"),
    ]  # fmt: skip


def test_a_turns_number_is_found_by_its_evidence():
    spans = {s.span_id: s for s in read(who_log()).spans}
    (content,) = contents(who_log())
    assert [spans[e.evidence[0]].attributes["event_log.turn"] for e in content.events] == list(range(9))


def test_a_survey_trace_comes_out_as_it_went_in():
    document = survey_document()
    document["edges"] = [document["edges"][n % 2] for n in range(2 * EDGES_A_SPAN + 3)]
    found = read(document)
    assert document_of(reversed(found.spans)) == (document, 0)
    assert {(f["name"], f["value"]) for f in found.feedback} == {("outcome", 1.0), ("tool", 0.25)}
    (content,) = contents(document)
    assert [(e.type, e.agent) for e in content.events] == [
        (e["type"], e["agent"]) for e in document["events"]
    ]
    assert len(content.edges) == 2
    with pytest.raises(SchemaError, match="3 of 4 events"):
        document_of([s for s in found.spans if s.name != "return"])


def test_events_of_a_log_are_believed_from_an_import_only():
    spans = read(survey_document()).spans
    claimed = [e for c in assemble_spans(spans, "default", source="otlp") for e in c.events]
    assert {e.rule for e in claimed} & {"imported"} == set()
    assert {e.type for e in claimed} & {"orchestrator_decision", "spawn", "return"} == set()


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"span_data": None}, "span_data"),
        ({"started_at": "soon"}, "started_at"),
        ({"started_at": True}, "started_at"),
        ({"trace_id": None}, "trace id"),
        ({"ended_at": 1e30}, "range"),
    ],
)
def test_what_makes_a_span_worthless_is_named(change, word):
    record = {**native()[2], **change}
    found = read_json(json.dumps(record).encode())
    assert (found.spans, word in found.rejected[0].reason) == ([], True)
    assert json.loads(found.rejected[0].data) == record


def test_broken_texts_and_numbers_are_repaired_and_flagged():
    record = native()[2]
    record["span_data"]["input"] = [{"role": "user", "content": "a\ud800b", "n": 2**80, "x": float("nan")}]
    (span,) = read_json(json.dumps(record).encode()).spans
    assert len(span.attributes["spanloop.flags"]) == 3
    assert "a\ufffdb" in json.loads(span.attributes["gen_ai.input.messages"])[0]["content"]


def test_ids_that_are_no_hex_are_digests():
    assert trace_id("trace_" + "A" * 32, "trace_") == "a" * 32
    assert trace_id("my trace") != trace_id("my Trace")
    assert span_id("span_" + "ab" * 12, "span_") == "ab" * 8
    assert len(span_id("x")) == 16
    with pytest.raises(BadSpanError):
        span_id(None)


@pytest.mark.parametrize(
    ("raw", "ns"),
    [
        ("2026-03-01T10:00:00Z", 1_772_359_200_000_000_000),
        ("2026-03-01 11:00:00.5+01:00", 1_772_359_200_500_000_000),
        ("2026-03-01T10:00:00.123456789", 1_772_359_200_123_456_789),
        (1_772_359_200, 1_772_359_200_000_000_000),
        (1_772_359_200_000, 1_772_359_200_000_000_000),
        ("1772359200000000000", 1_772_359_200_000_000_000),
        (None, 0),
    ],
)
def test_times(raw, ns):
    assert time_ns(raw, "start") == ns
