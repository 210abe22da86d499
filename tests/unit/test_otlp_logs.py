"""Log records as spans: names, ids, times, refusals, redaction."""

from __future__ import annotations

import json

import pytest
from log_requests import T0, log, logs_json, logs_protobuf, record
from otlp_requests import TRACE

from spanloop.collectors.batches import Intake
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.otlp.decode_logs_json import decode_log_request, decode_logs_json
from spanloop.pipeline.otlp.decode_logs_protobuf import decode_logs_protobuf
from spanloop.pipeline.otlp.log_ids import identified, is_told
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import decode
from spanloop.schemas.settings import Content
from spanloop.schemas.spans import LOG

BOTH = pytest.mark.parametrize(
    ("write", "read"),
    [(logs_json, decode_logs_json), (logs_protobuf, decode_logs_protobuf)],
    ids=["json", "pb"],
)


@BOTH
def test_a_record_is_an_instant_under_its_span(write, read):
    batch = read(write([record(body={"role": "user", "content": "hi"}, severity=17)]))
    (found,) = batch.spans
    assert (found.kind, found.trace_id, found.parent_span_id) == (LOG, TRACE, f"{7:016x}")
    assert (found.start_ns, found.end_ns, found.status) == (T0, T0, "error")
    assert found.name == "gen_ai.evaluation.result"
    assert found.attributes["log.body"] == {"role": "user", "content": "hi"}
    assert found.attributes["log.severity"] == 17


@BOTH
def test_the_time_of_observation_stands_in_and_a_record_without_any_time_is_refused_alone(write, read):
    batch = read(write([record(time=0), record(time=0, observed=0), record()]))
    assert [s.start_ns for s in batch.spans] == [T0 + 5, T0]
    assert [r.kind for r in batch.rejected] == ["time"]


@BOTH
def test_what_says_nothing_of_agents_is_counted(write, read):
    batch = read(
        write([record("http.access", attributes={"path": "/"}), record("", attributes={}), record()])
    )
    assert (len(batch.spans), batch.ignored, batch.rejected) == (1, 2, [])


def test_the_event_name_is_in_the_field_or_an_attribute_or_the_body():
    assert log("gen_ai.choice", 1).name == "gen_ai.choice"
    assert log("", 1, event__name="codex.tool_result").name == "codex.tool_result"
    long = log("", 1, event__name="api_request", body="claude_code.api_request")
    assert long.name == "claude_code.api_request"
    other = log("", 1, event__name="gen_ai.choice", body="it went well. really")
    assert other.name == "gen_ai.choice"


def test_ids_are_of_what_was_logged():
    one = log("gen_ai.choice", 1, gen_ai__response__id="r")
    assert one == log("gen_ai.choice", 1, gen_ai__response__id="r")
    assert one.span_id != log("gen_ai.choice", 2, gen_ai__response__id="r").span_id
    assert one.span_id != log("gen_ai.choice", 1, gen_ai__response__id="s").span_id
    assert identified(one) == one
    assert is_told(one.trace_id)
    assert log("gen_ai.choice", 1, trace=TRACE).trace_id == TRACE


def test_records_of_one_prompt_conversation_or_response_share_a_trace():
    def trace(**attributes):
        return log("claude_code.x", 1, **attributes).trace_id

    assert trace(session__id="a", prompt__id="p", n=1) == trace(session__id="a", prompt__id="p", n=2)
    assert trace(session__id="a", prompt__id="p") != trace(session__id="a", prompt__id="q")
    assert trace(conversation__id="a", n=1) == trace(conversation__id="a", n=2)
    assert trace(gen_ai__response__id="a", n=1) == trace(gen_ai__response__id="a", n=2)
    assert trace(n=1) != trace(n=2)


def test_a_bad_record_costs_itself():
    good = json.loads(logs_json([record(), record(attributes={"gen_ai.x": 2})]))
    records = good["resourceLogs"][0]["scopeLogs"][0]["logRecords"]
    records[1:1] = ["text", {"traceId": "ab", "timeUnixNano": "1"}, {"timeUnixNano": "soon"}, None]
    batch = decode_log_request(good)
    assert len(batch.spans) == 2
    assert len(batch.rejected) == 4
    assert json.loads(batch.rejected[0].data) == "text"
    assert "log record is text" in batch.rejected[0].reason


def test_a_request_that_the_parser_refuses_is_read_record_by_record():
    value: object = "deep"
    for _ in range(120):
        value = [value]
    batch = decode_logs_protobuf(logs_protobuf([record(), record(body=value), record(time=T0 + 1)]))
    assert len(batch.spans) == 2
    assert [r.kind for r in batch.rejected] in (["protobuf"], ["nesting"])


@pytest.mark.parametrize("body", [b"", b"{}"])
def test_an_empty_request_is_no_error(body):
    read = decode_logs_json if body else decode_logs_protobuf
    assert read(body).spans == []


@pytest.mark.parametrize(
    "body", [b'{"resourceSpans": []}', b"[]", b'{"resourceLogs": 3}', b'{"resourceLogs": [{"scopeLogs": [{"logRecords": {}}]}]}']
)  # fmt: skip
def test_what_is_no_log_request(body):
    with pytest.raises(SchemaError):
        decode_logs_json(body)


def test_snake_case_and_severity_names():
    body = {"resource_logs": [{"scope_logs": [{"log_records": [
        {"time_unix_nano": 5, "event_name": "gen_ai.choice", "severity_number": "SEVERITY_NUMBER_ERROR2"},
    ]}]}]}  # fmt: skip
    (found,) = decode_log_request(body).spans
    assert (found.start_ns, found.status, found.attributes["log.severity"]) == (5, "error", 18)


def test_without_consent_no_text_is_kept_and_ids_are_made_of_what_is():
    redactor = Redactor(Content(), b"k" * 32)
    intake = Intake(redactor, 4096, keep_content=False)
    body = {"role": "user", "content": "my secret is 1234"}
    batch = decode_logs_json(
        logs_json([record("gen_ai.user.message", attributes={}, body=body, trace_id="", span_id="")])
    )
    (raw,) = batch.spans
    (made,) = intake.prepare(batch, tenant="t", source="otlp").records
    event = decode(made.value)
    (kept,) = event.spans
    assert b"secret" not in made.value
    assert kept.attributes["log.body"]["role"] == "user"
    assert kept.span_id != raw.span_id, "the hash of a text that was dropped is not stored"
    assert event.trace_id == kept.trace_id != raw.trace_id
    other = Intake(Redactor(Content(), b"j" * 32), 4096, keep_content=False)
    assert other.prepare(batch, tenant="t", source="otlp").records[0].event_id != made.event_id
