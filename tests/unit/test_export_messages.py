"""Conversations out of spans: every convention gives the same messages; nothing incomplete passes for whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spanloop.pipeline.export.messages import Conversation, conversation_of, problem_of
from spanloop.pipeline.export.rows import Chosen, Wish, pairs_of
from spanloop.schemas.spans import Span

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": '{"at":"door"}'}}
PROMPT = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Is it open?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "open", "tool_call_id": "c1"},
)
ANSWER = {"role": "assistant", "content": "Yes."}
OPENAI = [dict(message) for message in PROMPT]
PARTS = [
    {"role": "system", "parts": [{"type": "text", "content": "Be brief."}]},
    {"role": "user", "parts": [{"type": "text", "content": "Is it open?"}]},
    {"role": "assistant", "parts": [{"type": "thinking", "content": "hm"}, {"type": "tool_call", "id": "c1", "name": "look", "arguments": {"at": "door"}}]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "c1", "response": "open"}]},
]  # fmt: skip
RESPONSES = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "Is it open?"}]},
    {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at":"door"}'},
    {"type": "function_call_output", "call_id": "c1", "output": "open"},
]
ANTHROPIC = {
    "system": "Be brief.",
    "messages": [
        {"role": "user", "content": "Is it open?"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "door"}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": "open"}]},
    ],
}
FLAT = {
    "llm.input_messages.0.message.role": "system", "llm.input_messages.0.message.content": "Be brief.",
    "llm.input_messages.1.message.role": "user",
    "llm.input_messages.1.message.contents.0.message_content.type": "text",
    "llm.input_messages.1.message.contents.0.message_content.text": "Is it open?",
    "llm.input_messages.2.message.role": "assistant",
    "llm.input_messages.2.message.tool_calls.0.tool_call.id": "c1",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.name": "look",
    "llm.input_messages.2.message.tool_calls.0.tool_call.function.arguments": '{"at":"door"}',
    "llm.input_messages.3.message.role": "tool", "llm.input_messages.3.message.content": "open",
    "llm.input_messages.3.message.tool_call_id": "c1",
    "llm.output_messages.0.message.role": "assistant", "llm.output_messages.0.message.content": "Yes.",
}  # fmt: skip
TRACELOOP = {
    "gen_ai.prompt.0.role": "system", "gen_ai.prompt.0.content": "Be brief.",
    "gen_ai.prompt.1.role": "user", "gen_ai.prompt.1.content": "Is it open?",
    "gen_ai.prompt.2.role": "assistant", "gen_ai.prompt.2.tool_calls.0.id": "c1",
    "gen_ai.prompt.2.tool_calls.0.name": "look", "gen_ai.prompt.2.tool_calls.0.arguments": '{"at":"door"}',
    "gen_ai.prompt.3.role": "tool", "gen_ai.prompt.3.content": "open", "gen_ai.prompt.3.tool_call_id": "c1",
    "gen_ai.completion.0.role": "assistant", "gen_ai.completion.0.content": "Yes.",
}  # fmt: skip


def span(attributes: dict[str, Any], **fields: Any) -> Span:
    return Span("a" * 32, "b" * 16, "chat", 0, 1, attributes=attributes, **fields)


def genai(given: Any, said: Any = None) -> dict[str, Any]:
    said = [{"role": "assistant", "parts": [{"type": "text", "content": "Yes."}]}] if said is None else said
    return {"gen_ai.input.messages": json.dumps(given), "gen_ai.output.messages": json.dumps(said)}


@pytest.mark.parametrize(
    "attributes",
    [
        genai(PARTS),
        genai(OPENAI),
        genai(RESPONSES),
        {"gen_ai.input.messages": PARTS, "gen_ai.output.messages": [ANSWER]},
        {"gen_ai.system_instructions": '[{"type": "text", "content": "Be brief."}]'} | genai(PARTS[1:]),
        {"gen_ai.system_instructions": "Be brief."} | genai(PARTS[1:]),
        {"input.value": json.dumps({"messages": OPENAI}), "output.value": json.dumps({"choices": [{"message": ANSWER, "finish_reason": "stop"}]})},
        {"langfuse.observation.input": json.dumps(OPENAI), "langfuse.observation.output": json.dumps(ANSWER)},
        {"mlflow.spanInputs": json.dumps(ANTHROPIC), "mlflow.spanOutputs": json.dumps({"role": "assistant", "content": [{"type": "text", "text": "Yes."}]})},
        FLAT,
        TRACELOOP,
    ],
)  # fmt: skip
def test_every_convention_tells_the_same(attributes: dict[str, Any]) -> None:
    found = conversation_of(span(attributes))
    assert isinstance(found, Conversation), found
    assert found.prompt == PROMPT
    assert found.answer == ANSWER
    assert problem_of(found) == ""


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({}, "no_text"),
        ({"gen_ai.input.messages": json.dumps(PARTS)}, "no_text"),
        (genai([{"role": "user", "parts": [{"type": "text", "content": {"$redacted": 3, "$hmac": "ab"}}]}]), "content_not_kept"),
        ({"gen_ai.input.messages": {"$redacted": 9, "$hmac": "ab"}, "gen_ai.output.messages": [ANSWER]}, "content_not_kept"),
        (genai([{"role": "user", "content": {"$redacted": 3, "$hmac": "ab"}}]), "content_not_kept"),
        (genai(PARTS, [{"role": "assistant", "parts": [{"type": "tool_call", "id": "x", "name": "look", "arguments": {"at": {"$redacted": 4}}}]}]), "content_not_kept"),
        (genai([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]), "not_text"),
        (genai([{"role": "oracle", "content": "x"}]), "unknown_role"),
        ({"gen_ai.input.messages": '[{"role": "us', "gen_ai.output.messages": "[]"}, "unreadable"),
        (genai(PARTS, [{**ANSWER, "finish_reason": "stop"}, {**ANSWER, "finish_reason": "stop"}]), "several_answers"),
        (genai(PARTS, []), "no_text"),
        (genai([{"role": "user", "parts": [{"type": "text"}]}], [{"role": "assistant", "parts": [{"type": "text"}]}]), "no_text"),
        (genai(PARTS) | {"spanloop.truncated": True}, "truncated"),
        ({k: v for k, v in FLAT.items() if not k.startswith("llm.input_messages.1.")}, "truncated"),
    ],
)  # fmt: skip
def test_what_is_not_whole_says_why(attributes: dict[str, Any], reason: str) -> None:
    assert conversation_of(span(attributes)) == reason


def test_dropped_attributes_are_doubted() -> None:
    assert conversation_of(span(genai(PARTS), dropped_attributes=1)) == "truncated"
    assert conversation_of(span(FLAT), lossy=True) == "truncated"
    assert isinstance(conversation_of(span(genai(PARTS)), lossy=True), Conversation)


@pytest.mark.parametrize(
    ("prompt", "answer", "problem"),
    [
        (PROMPT[:1], ANSWER, "no_user_message"),
        ((PROMPT[1], PROMPT[3]), ANSWER, "tool_result_without_call"),
        ((PROMPT[1], PROMPT[2]), ANSWER, "tool_call_without_result"),
        ((PROMPT[1],), {"role": "assistant", "content": None}, "empty_message"),
        ((PROMPT[1],), {"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}, "tool_call_id_twice"),
        ((PROMPT[1],), {"role": "assistant", "content": None, "tool_calls": [{**CALL, "id": ""}]}, "tool_call_without_id"),
        ((PROMPT[1],), {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": {"name": "a b", "arguments": "{}"}}]}, "unknown_tool"),
        ((PROMPT[1],), {"role": "assistant", "content": None, "tool_calls": [{**CALL, "function": {"name": "look", "arguments": "[1]"}}]}, "bad_tool_arguments"),
    ],
)  # fmt: skip
def test_the_rules_of_openai(prompt: Any, answer: Any, problem: str) -> None:
    assert problem_of(Conversation(tuple(prompt), answer)) == problem


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "user", "tool", "text", "tool_call", "x", "[", '{"a":']),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(
        st.sampled_from(["role", "content", "parts", "type", "tool_calls", "text", "id", "message", "choices", "$redacted", "function", "arguments"]),
        inner,
        max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(given_=_JSON, said=_JSON, as_text=st.booleans(), keys=st.sampled_from([("gen_ai.input.messages", "gen_ai.output.messages"), ("input.value", "output.value")]))  # fmt: skip
@settings(max_examples=300)
def test_whatever_a_client_sends_it_is_read_or_refused(
    given_: Any, said: Any, as_text: bool, keys: tuple[str, str]
) -> None:
    attributes = dict(zip(keys, map(json.dumps, (given_, said)) if as_text else (given_, said), strict=True))
    found = conversation_of(span(attributes))
    if isinstance(found, Conversation):
        assert found.answer["role"] == "assistant"
        assert "$redacted" not in json.dumps([*found.prompt, found.answer])
        problem_of(found)
    else:
        assert found


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(-5, 5)), min_size=1, max_size=12),
    st.integers(1, 4),
    st.sampled_from([0.0, 2e-6]),
)
def test_answers_to_a_prompt_are_paired_once_or_counted(
    answers: list[tuple[str, int]], pairs: int, margin: float
) -> None:
    wish = Wish("dpo", pairs=pairs, margin=margin)
    found, left = pairs_of([Chosen(a, s, i) for i, (a, s) in enumerate(answers)], wish)
    assert 2 * len(found) + sum(left.values()) == len(answers)
    used = [item.answer for pair in found for item in pair]
    assert len(used) == len(set(used))
    for better, worse in found:
        assert better.score > worse.score
        assert (better.score - worse.score) / 1e6 >= margin
    assert len(found) <= pairs
