"""GenAI log events: messages add to the call of their span; evaluations and guardrail results."""

from __future__ import annotations

import json

import pytest
from log_requests import log
from made_spans import TRACE, agent, chat, gateway, hex16, one, span, told, tool

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.dialects import operation_of


def job():
    return [
        agent("run", None, 0, 10, "lead"),
        chat("c1", "run", 1, 2, usage=None),
        tool("t1", "run", 3, 4, "search", call="x1"),
        chat("c2", "run", 5, 6, usage=None),
    ]


def under(key, name, t, **more):
    return log(name, t, trace=TRACE, span=hex16(key), **more)


def test_messages_add_to_the_call_of_their_span():
    asks = {
        "role": "assistant",
        "tool_calls": [{"id": "x1", "function": {"name": "search", "arguments": "{}"}}],
    }
    events = [
        under("c1", "gen_ai.user.message", 1, body={"content": "find it"}),
        under("c1", "gen_ai.choice", 2, body={"index": 0, "finish_reason": "tool_calls", "message": asks}),
        under("c2", "gen_ai.tool.message", 5, body={"id": "x1", "content": "found"}),
        under("c2", "gen_ai.client.inference.operation.details", 6, gen_ai__usage__input_tokens="9",
              gen_ai__usage__output_tokens=2, gen_ai__response__id="resp-2"),
    ]  # fmt: skip
    content = one(job() + events)
    first, second = content.calls
    assert [(t.id, t.name, t.status) for t in first.tool_calls] == [("x1", "search", "ok")]
    assert first.finish_reasons == ("tool_calls",)
    assert (second.input_tokens, second.output_tokens, second.response_id) == (9, 2, "resp-2")
    assert content.tokens.calls == 2, "a message is no call"
    assert told(content) == told(one(job())), "and no event"
    called = [e.call_id for e in content.events if e.type == "tool_call"]
    assert called == [first.id]


def test_messages_under_another_span_add_to_nothing():
    content = one([*job(), under("run", "gen_ai.choice", 2, body={"finish_reason": "stop"})])
    assert [c.finish_reasons for c in content.calls] == [(), ()]


def test_a_call_told_by_a_record_only():
    details = log("gen_ai.client.inference.operation.details", 2, gen_ai__response__id="r", gen_ai__usage__input_tokens=3,
                  gen_ai__usage__output_tokens=1)  # fmt: skip
    assert one([details]).tokens.calls == 1


def test_an_evaluation_is_no_event_no_call_and_no_job():
    result = log("gen_ai.evaluation.result", 2, gen_ai__response__id="r", gen_ai__evaluation__score__value=1)
    assert operation_of(result).kind == "evaluation"
    assert assemble_spans([result], "default") == []
    inside = under("c1", "gen_ai.evaluation.result", 2, gen_ai__evaluation__score__value=1)
    assert told(one([*job(), inside])) == told(one(job()))
    joined = one([gateway("r", 1, 2), result])
    assert len(joined.trace_ids) == 2, "the gateway's response ids are unique: the record belongs to its job"


@pytest.mark.parametrize(
    ("verdict", "triggered"), [("deny", True), ("BLOCK", True), ("allow", False), (True, True), (None, False)]
)
def test_a_guardrails_result_is_a_safety_event(verdict, triggered):
    more = {} if verdict is None else {"gen_ai__guardrail__result__type": verdict}
    result = under("run", "gen_ai.guardrail.result", 2, **more)
    (event,) = [e for e in one([*job(), result]).events if e.type == "safety_event"]
    assert (event.triggered, event.agent) == (triggered, "lead")
    assert event.confidence == (1.0 if verdict is not None else 0.6)


def test_a_record_that_no_dialect_knows_is_a_note():
    note = under("c1", "gen_ai.something.new", 2, x=json.dumps({"a": 1}))
    assert operation_of(note).kind == "note"
    other = span("z", "c1", 2, 2, kind=6, name="anything")
    assert operation_of(other).kind == "note"
