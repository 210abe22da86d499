"""The gateway's span and the framework's are one call: by response id, by trace context, by time and text."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_spans import S, hex16, hex32

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.schemas.ids import gateway_span_id, gateway_trace_id
from spanloop.schemas.spans import Span

TRACE = hex32(7)


def messages(*said):
    return json.dumps([{"role": r, "parts": [{"type": "text", "content": t}]} for r, t in said])


def agent(number=1, start=0, end=100, trace=TRACE):
    return Span(trace, hex16(number), f"invoke_agent a{number}", start * S, end * S, scope="frame",
                attributes={"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": f"a{number}"})  # fmt: skip


def framework(
    number,
    start,
    end,
    *,
    parent=1,
    model="policy",
    asked="red",
    said="blue",
    response="",
    trace=TRACE,
    dialect="genai",
):
    """A model call as a framework's instrumentation tells it, without a response id unless given."""
    if dialect == "openinference":
        attributes = {"openinference.span.kind": "LLM", "llm.model_name": model,
                      "llm.input_messages.0.message.role": "user", "llm.input_messages.0.message.content": asked,
                      "llm.output_messages.0.message.role": "assistant", "llm.output_messages.0.message.content": said}  # fmt: skip
    else:
        attributes = {"gen_ai.operation.name": "chat", "gen_ai.request.model": model, "gen_ai.input.messages": messages(("user", asked)),
                      "gen_ai.output.messages": messages(("assistant", said)), "gen_ai.response.id": response}  # fmt: skip
    return Span(trace, hex16(number), "chat", start * S, end * S, parent_span_id=hex16(parent), scope="frame.instrumentation",
                attributes={k: v for k, v in attributes.items() if v})  # fmt: skip


def proxied(response, start, end, *, parent=None, asked="red", said="blue", trace=TRACE, version="policy@v3"):
    """The gateway's span of a call."""
    return Span(
        trace if parent else gateway_trace_id(response), gateway_span_id(response), "chat policy", int(start * S), int(end * S),
        parent_span_id=hex16(parent) if parent else None, scope="spanloop.gateway", kind=3,
        attributes={"gen_ai.operation.name": "chat", "gen_ai.request.model": "policy", "gen_ai.response.model": version,
                    "gen_ai.response.id": response, "spanloop.policy.version": version, "gen_ai.usage.input_tokens": 5,
                    "gen_ai.usage.output_tokens": 2, "gen_ai.input.messages": messages(("user", asked)),
                    "gen_ai.output.messages": messages(("assistant", said))},
    )  # fmt: skip


def http(number, parent, start, end):
    return Span(TRACE, hex16(number), "POST", start * S, end * S, parent_span_id=hex16(parent), scope="httpx", kind=3,
                attributes={"http.request.method": "POST"})  # fmt: skip


def calls_of(spans):
    (content,) = assemble_spans(spans, "default")
    return [(c.span_ids, c.policy_version, c.response_id) for c in content.calls], content


@pytest.mark.parametrize("dialect", ["genai", "openinference"])
def test_below_the_frameworks_span_and_its_http_client(dialect):
    spans = [
        agent(),
        framework(2, 10, 20, dialect=dialect),
        http(3, 2, 11, 19),
        proxied("r1", 12, 18, parent=3, asked="x", said="y"),
    ]
    calls, content = calls_of(spans)
    assert calls == [(tuple(sorted((hex16(2), gateway_span_id("r1")))), "policy@v3", "r1")]
    assert (content.tokens.calls, content.tokens.input) == (1, 5)


@pytest.mark.parametrize("dialect", ["genai", "openinference"])
def test_beside_the_frameworks_span_in_one_trace(dialect):
    """The framework's span is not the current one while it asks: both stand below the agent."""
    spans = [agent(), framework(2, 10, 20, dialect=dialect), proxied("r1", 12, 18, parent=1)]
    assert [c[0] for c in calls_of(spans)[0]] == [tuple(sorted((hex16(2), gateway_span_id("r1"))))]


@pytest.mark.parametrize("dialect", ["genai", "openinference"])
def test_without_any_trace_context_by_time_model_and_text(dialect):
    spans = [agent(), framework(2, 10, 20, dialect=dialect), framework(3, 30, 40, said="green", dialect=dialect),
             proxied("r1", 12, 18), proxied("r2", 31, 39, said="green")]  # fmt: skip
    calls, content = calls_of(spans)
    assert [c[2] for c in calls] == ["r1", "r2"]
    assert [c[0] for c in calls] == [
        tuple(sorted((hex16(i), gateway_span_id(r)))) for i, r in ((2, "r1"), (3, "r2"))
    ]
    assert content.tokens.calls == 2


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"model": "gpt-5"}, "another model"),
        ({"said": "green"}, "another answer"),
        ({"asked": "black"}, "another question"),
        ({"start": 13}, "it began after the gateway's"),
        ({"end": 17}, "it ended before the gateway's"),
        ({"response": "r9"}, "it knows its own answer"),
    ],
)
def test_what_keeps_them_apart(change, why):
    fields = {"start": 10, "end": 20, **change}
    spans = [agent(), framework(2, **fields), proxied("r1", 12, 18)]
    assert len(assemble_spans(spans, "default")) == 2, why


def test_content_that_was_dropped_still_finds_its_pair():
    def dropped(text):
        return json.dumps(
            [{"role": "user", "parts": [{"type": "text", "content": {"$redacted": 3, "$hmac": text}}]}]
        )

    spans = [agent(), framework(2, 10, 20), proxied("r1", 12, 18)]
    for span in spans[1:]:
        for name, text in (("gen_ai.input.messages", "aa"), ("gen_ai.output.messages", "bb")):
            span.attributes[name] = dropped(text)
    assert len(calls_of(spans)[0]) == 1


def test_the_same_text_asked_again_and_at_the_same_time():
    """Equal calls at equal times: each of the gateway's goes with one of the framework's, none with two."""
    spans = [
        agent(),
        *[framework(2 + i, 10 + i, 30 + i) for i in range(4)],
        *[proxied(f"r{i}", 14 + i, 20) for i in range(4)],
    ]
    calls, _ = calls_of(spans)
    assert [len(c[0]) for c in calls] == [2] * 4
    assert sorted(c[2] for c in calls) == ["r0", "r1", "r2", "r3"]


def test_two_agents_in_one_trace_keep_their_calls():
    spans = [agent(1), agent(5), framework(2, 10, 20, parent=1), framework(6, 10, 20, parent=5), proxied("r5", 12, 18, parent=5), proxied("r1", 12, 18, parent=1)]  # fmt: skip
    (content,) = [c for c in assemble_spans(spans, "default") if len(c.calls) == 2]
    names = {a.id: a.name for a in content.agents}
    assert {(names[c.agent_id], c.response_id) for c in content.calls} == {("a1", "r1"), ("a5", "r5")}


def test_by_response_id_whatever_the_text():
    spans = [agent(), framework(2, 10, 20, response="r1", said="other"), proxied("r1", 1, 99)]
    assert [c[2] for c in calls_of(spans)[0]] == ["r1"]


TIMES = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 12), st.integers(0, 2), st.booleans()),
    min_size=1,
    max_size=6,
)


@given(TIMES, TIMES, st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_pairs_do_not_depend_on_order(ours, theirs, random):
    words = ["blue", "green", "black"]
    spans = [
        agent(1, 0, 100),
        *[framework(10 + i, a, a + d, said=words[w]) for i, (a, d, w, _) in enumerate(theirs)],
    ]
    spans += [
        proxied(f"r{i}", a, a + d, said=words[w], parent=1 if known else None)
        for i, (a, d, w, known) in enumerate(ours)
    ]
    first = assemble_spans(spans, "default")
    for content in first:
        found = list(itertools.chain.from_iterable(call.span_ids for call in content.calls))
        assert len(found) == len(set(found))
        for call in content.calls:
            assert (
                sum(name in {gateway_span_id(f"r{i}") for i in range(len(ours))} for name in call.span_ids)
                <= 1
            )
    random.shuffle(spans)
    assert assemble_spans(spans, "default") == first
