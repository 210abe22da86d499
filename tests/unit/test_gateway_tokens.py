"""What the gateway asks for and takes out again; streams; the span of a call."""

import itertools
import json
import math

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanloop.collectors.gateway_record import CallRecord, call_event
from spanloop.collectors.gateway_stream import ChunkFolder, SseSplitter, event_data, plain, with_data
from spanloop.collectors.gateway_tokens import (
    Asked,
    ask_for_tokens,
    call_tokens,
    shown_chat,
    shown_chat_bytes,
    strip_response,
)
from spanloop.collectors.redaction import Redactor
from spanloop.schemas.events import decode, encode
from spanloop.schemas.settings import Content

encode_json = msgspec.json.encode
HALF = math.log(0.5)


def entry(token, logprob, top):
    return {
        "token": f"token_id:{token}", "logprob": logprob, "bytes": [1],
        "top_logprobs": [{"token": f"token_id:{t}", "logprob": p, "bytes": [1]} for t, p in top],
    }  # fmt: skip


def response(**more):
    content = [entry(7, HALF, [(8, HALF), (7, HALF), (9, -9999.0)]), entry(5, 0.0, [(5, 0.0)])]
    message = {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "spawn", "arguments": '{"skill": "SECRET"}'}}]}  # fmt: skip
    choice = {
        "index": 0,
        "message": message,
        "finish_reason": "tool_calls",
        "token_ids": [7, 5],
        "logprobs": {"content": content},
    }
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    return {
        "id": "chatcmpl-1",
        "model": "policy@v2",
        "choices": [choice],
        "usage": usage,
        "prompt_token_ids": [1, 6, 3],
        **more,
    }


def record(**more):
    request = {"model": "policy", "temperature": 0.5, "seed": 3, "max_tokens": 9, "messages": [
        {"role": "system", "content": "SECRET system"}, {"role": "user", "content": [{"type": "text", "text": "SECRET words"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c0", "type": "function", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "c0", "content": "SECRET result"}]}  # fmt: skip
    fields = {
        "tenant": "t1", "call_id": "call", "request": request, "response": response(), "route": "learning", "policy_version": "policy@v2",
        "conversation": "cc", "conversation_source": "session", "harness": "hh", "start_ns": 10, "end_ns": 20, "status": 200,
        "task_key": "task", "server_address": "127.0.0.1", "server_port": 8788,
    }  # fmt: skip
    return CallRecord(**{**fields, **more})


def test_tokens_and_complete_menus():
    tokens = call_tokens(response())
    assert (tokens.prompt_ids, tokens.response_ids, tokens.logprobs) == ((1, 6, 3), (7, 5), (HALF, 0.0))
    assert tokens.menus == (((7, HALF), (8, HALF)), ((5, 0.0),))  # sorted; the masked option was not open
    assert tokens.problem == ""


@pytest.mark.parametrize("top", [[(8, math.log(0.3)), (7, HALF)], [(7, HALF)], []])
def test_a_list_that_leaves_probability_out_is_no_menu(top):
    body = response()
    body["choices"][0]["logprobs"]["content"][0] = entry(7, HALF, top)
    assert call_tokens(body).menus[0] == ((7, HALF),)


def test_words_instead_of_ids_are_no_menu():
    body = response()
    body["choices"][0]["logprobs"]["content"][0]["top_logprobs"][0]["token"] = "look"
    assert call_tokens(body).menus[0] == ((7, HALF),)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda b: b.update(prompt_token_ids=None), "no token ids"),
        (lambda b: b["choices"][0].pop("token_ids"), "no token ids"),
        (lambda b: b["choices"][0]["logprobs"]["content"].pop(), "2 token ids but 1 log-probabilities"),
        (lambda b: b["choices"][0].update(logprobs=None), "but 0 log-probabilities"),
        (lambda b: b["choices"].append(b["choices"][0]), "2 choices"),
        (lambda b: b["choices"][0]["logprobs"]["content"][0].update(logprob=math.nan), "not finite"),
    ],
)
def test_what_does_not_fit_is_left_out_and_named(change, says):
    body = response()
    change(body)
    tokens = call_tokens(body)
    assert says in tokens.problem
    assert tokens.logprobs == ()
    assert tokens.menus == ()
    (span,) = call_event(record(response=body), content=True).spans
    assert says in span.attributes["spanloop.tokens.problem"]


def test_a_client_gets_what_it_asked_for():
    asking, asked = ask_for_tokens({"model": "policy", "messages": []}, "policy@v2", tokens=True)
    assert (asking["model"], asking["logprobs"], asking["top_logprobs"]) == ("policy@v2", True, 20)
    assert asking["return_token_ids"]
    assert asking["return_tokens_as_token_ids"]
    shown = response()
    strip_response(shown, asked)
    assert "prompt_token_ids" not in shown
    assert shown["choices"][0]["logprobs"] is None
    assert "token_ids" not in shown["choices"][0]

    own = {"model": "policy", "logprobs": True, "top_logprobs": 2, "return_token_ids": True}
    asking, asked = ask_for_tokens(own, "policy@v2", tokens=True)
    assert asking == {**own, "model": "policy@v2"}  # its own words stay words
    shown = response()
    strip_response(shown, asked)
    assert shown == response()


def test_without_training_nothing_is_asked_for():
    body = {"model": "policy", "messages": []}
    assert ask_for_tokens(body, "policy@v1", tokens=False)[0] == {"model": "policy@v1", "messages": []}
    asking, asked = ask_for_tokens({**body, "stream": True}, "policy@v1", tokens=False)
    assert asking["stream_options"] == {"include_usage": True}
    assert not asked.usage


def test_the_span_of_a_call():
    event = call_event(record(), content=True)
    assert decode(encode(event)) == event
    assert (event.tenant, event.source) == ("t1", "gateway")
    (span,) = event.spans
    a = span.attributes
    assert (span.name, span.kind, span.scope, span.status) == ("chat policy", 3, "spanloop.gateway", "unset")
    assert span.trace_id.startswith("ffffffff")
    assert span.parent_span_id is None
    assert (span.start_ns, span.end_ns) == (10, 20)
    assert a["gen_ai.operation.name"] == "chat"
    assert (a["gen_ai.request.model"], a["gen_ai.response.model"], a["gen_ai.response.id"]) == (
        "policy",
        "policy@v2",
        "chatcmpl-1",
    )
    assert a["gen_ai.response.finish_reasons"] == ["tool_calls"]
    assert (a["gen_ai.usage.input_tokens"], a["gen_ai.usage.output_tokens"]) == (3, 2)
    assert (a["gen_ai.request.temperature"], a["gen_ai.request.seed"], a["gen_ai.request.max_tokens"]) == (
        0.5,
        3,
        9,
    )
    assert "gen_ai.request.top_p" not in a
    assert (a["spanloop.policy.version"], a["spanloop.policy.route"]) == ("policy@v2", "learning")
    assert (a["spanloop.harness"], a["spanloop.conversation"], a["spanloop.task.key"]) == ("hh", "cc", "task")
    assert (a["spanloop.prompt_token_ids"], a["spanloop.response_token_ids"]) == ([1, 6, 3], [7, 5])
    assert a["spanloop.response_logprobs"] == [HALF, 0.0]
    assert a["spanloop.menus"] == [[[7, HALF], [8, HALF]], [[5, 0.0]]]
    asked = json.loads(a["gen_ai.input.messages"])
    assert [m["role"] for m in asked] == ["system", "user", "assistant", "tool"]
    assert asked[1]["parts"] == [{"type": "text", "content": "SECRET words"}]
    assert asked[3]["parts"] == [{"type": "tool_call_response", "id": "c0", "response": "SECRET result"}]
    (answer,) = json.loads(a["gen_ai.output.messages"])
    assert answer["parts"] == [
        {"type": "tool_call", "id": "c1", "name": "spawn", "arguments": '{"skill": "SECRET"}'}
    ]
    assert answer["finish_reason"] == "tool_calls"


def test_long_texts_are_cut_and_flagged_and_long_arrays_left_out():
    body = response(prompt_token_ids=list(range(70_000)))
    request = {"model": "policy", "messages": [{"role": "user", "content": "word " * 100_000}]}
    (span,) = call_event(record(request=request, response=body), content=True, max_attribute_bytes=4096).spans
    assert len(span.attributes["gen_ai.input.messages"]) == 4096
    assert span.attributes["spanloop.truncated"] == ["gen_ai.input.messages"]
    assert "tokens" in span.attributes["spanloop.tokens.problem"]
    assert "spanloop.prompt_token_ids" not in span.attributes


def test_recording_twice_is_one_event():
    assert call_event(record(), content=True).event_id == call_event(record(), content=True).event_id
    assert (
        call_event(record(), content=True).event_id
        != call_event(record(response=response(id="x")), content=True).event_id
    )


@pytest.mark.parametrize("redacting", [True, False])
def test_content_off_leaves_no_content(redacting):
    redactor = Redactor(Content(), b"k" * 32)
    redact = (lambda span: redactor.span(span, trusted=True)) if redacting else None
    event = call_event(record(), content=False, redact=redact)
    data = encode(event)
    for word in (b"SECRET", b"token_ids", b"logprobs", b"menus", b"words", b"result"):
        assert word not in data
    (span,) = event.spans
    assert span.attributes["gen_ai.usage.input_tokens"] == 3
    assert span.attributes["spanloop.policy.version"] == "policy@v2"
    assert span.attributes["spanloop.harness"] == "hh"
    assert ("gen_ai.input.messages" in span.attributes) is redacting
    if redacting:
        asked = json.loads(span.attributes["gen_ai.input.messages"])
        assert asked[1]["parts"][0]["content"]["$redacted"] == len("SECRET words")
        assert json.loads(span.attributes["gen_ai.output.messages"])[0]["parts"][0]["name"] == "spawn"


def test_a_failed_call_is_an_error_span_below_its_caller():
    parent = ("ab" * 16, "cd" * 8)
    event = call_event(
        record(response=None, status=502, error="upstream_unreachable", parent=parent), content=True
    )
    (span,) = event.spans
    assert (span.trace_id, span.parent_span_id, event.trace_id) == (*parent, parent[0])
    assert (span.status, span.status_message) == ("error", "upstream_unreachable")
    assert span.attributes["http.response.status_code"] == 502
    assert span.attributes["error.type"] == "upstream_unreachable"
    assert "gen_ai.response.id" not in span.attributes
    assert "spanloop.response_token_ids" not in span.attributes
    json.loads(span.attributes["gen_ai.input.messages"])


@pytest.mark.parametrize(
    "odd",
    [{"choices": None}, {"choices": [3]}, {"usage": 3}, {"id": 5, "model": []}, {"choices": [{"message": "x"}]},
     {"choices": [{"message": {"tool_calls": [3, {"function": 4}]}}]}, {"choices": [{"logprobs": 3, "token_ids": [1]}]}],
)  # fmt: skip
def test_odd_answers_still_make_a_span(odd):
    (span,) = call_event(record(response=response(**odd)), content=True).spans
    assert span.attributes["gen_ai.operation.name"] == "chat"


CHUNKS = [b'data: {"a": 1}\n\n', b": ping\n\n", b"event: x\ndata: 1\ndata: 2\n\n", b"data: [DONE]\n\n"]


@given(st.lists(st.integers(0, 60), max_size=8), st.booleans())
@settings(max_examples=50)
def test_events_come_out_whole_however_the_bytes_are_cut(cuts, crlf):
    whole = b"".join(CHUNKS)
    if crlf:
        whole = whole.replace(b"\n", b"\r\n")
    bounds = sorted({0, *[c for c in cuts if c < len(whole)], len(whole)})
    splitter = SseSplitter()
    events = [e for a, b in itertools.pairwise(bounds) for e in splitter.feed(whole[a:b])]
    assert [event_data(e) for e in events] == [b'{"a": 1}', None, b"1\n2", b"[DONE]"]
    assert splitter.rest() == b""


def test_chunks_fold_into_the_response():
    folder = ChunkFolder()
    assert folder.response() is None
    for delta, more in [
        ({"role": "assistant", "content": ""}, {}),
        ({"content": "he"}, {"token_ids": [1], "logprobs": {"content": [{"logprob": 0.0}]}}),
        (
            {
                "content": "y",
                "tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}}],
            },
            {"token_ids": [2]},
        ),
        ({"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}, {"finish_reason": "tool_calls"}),
    ]:
        folder.add({"id": "i", "model": "m", "choices": [{"index": 0, "delta": delta, **more}]})
    folder.add({"id": "i", "choices": [], "usage": {"prompt_tokens": 1}})
    found = folder.response()
    (choice,) = found["choices"]
    assert (found["id"], found["model"], found["usage"]) == ("i", "m", {"prompt_tokens": 1})
    assert choice["message"] == {
        "role": "assistant", "content": "hey",
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }  # fmt: skip
    assert (choice["token_ids"], choice["logprobs"], choice["finish_reason"]) == (
        [1, 2],
        {"content": [{"logprob": 0.0}]},
        "tool_calls",
    )


@given(
    st.lists(
        st.sampled_from([b"data: ", b"data:", b"x", b"\n", b"\r\n", b"\n\n", b"event: a", b" ", b"\r"]),
        max_size=6,
    )
)
@settings(max_examples=500, deadline=None)
def test_an_event_of_one_line_is_read_as_any_other(parts):
    event = b"".join(parts)
    lines = plain(event).split(b"\n")
    told = [line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")]
    others = b"".join(line + b"\n" for line in lines if not line.startswith(b"data:"))
    assert event_data(event) == (b"\n".join(told) if told else None)
    assert with_data(event, b"[]") == others + b"data: []\n\n"


ANY = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.just(1.5e-7), st.text(max_size=3), st.just([]), st.just({}), st.just([1]))  # fmt: skip
CHOICES = st.one_of(
    ANY,
    st.lists(
        st.one_of(
            ANY,
            st.dictionaries(
                st.sampled_from(["logprobs", "token_ids", "delta", "message", "index"]), ANY, max_size=5
            ),
        ),
        max_size=3,
    ),
)
ANSWERS = st.one_of(
    ANY,
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(("id", "usage", "prompt_token_ids", "error", "type"), ANY)
        | {"choices": CHOICES},
    ),
)


@given(ANSWERS, st.booleans(), st.booleans(), st.booleans(), st.booleans())
@settings(max_examples=1500, deadline=None)
def test_a_client_sees_the_same_whether_all_is_read_or_only_what_changes(
    answer, logprobs, ids, usage, spaced
):
    asked = Asked(logprobs=logprobs, token_ids=ids, usage=usage)
    data = json.dumps(answer).encode() if spaced else encode_json(answer)

    def slow(*, event):
        if not isinstance(answer, dict) or (event and (answer.get("error") or answer.get("type") == "error")):
            return answer
        shown = shown_chat(answer, asked)
        if event and not asked.usage:
            if not shown.get("choices") and shown.get("usage") is not None:
                return None
            shown.pop("usage", None)
        return shown

    for event in (False, True):
        try:
            quick = shown_chat_bytes(data, asked, event=event)
        except msgspec.DecodeError:
            choices = answer.get("choices") if isinstance(answer, dict) else None
            assert not isinstance(choices, list) or not all(isinstance(c, dict) for c in choices)
            continue
        wanted = slow(event=event)
        assert (json.loads(quick) if quick else None) == wanted
        assert (quick is data) == (wanted == answer)


def test_a_long_answer_is_not_read_to_be_shown():
    """What is taken out is passed over: numbers and spacing of the rest stay as the server wrote them."""
    data = b'{"id": "a", "choices": [{"index": 0, "message": {"content": "\\u00e4"}, "x": 1.50, "logprobs": {"content": [1e-7]}}]}'
    told = shown_chat_bytes(data, Asked(logprobs=False, token_ids=False, usage=False))
    assert (
        told
        == b'{"id":"a","choices":[{"index":0,"message":{"content": "\\u00e4"},"x":1.50,"logprobs":null}]}'
    )
