"""Spans of each dialect as operations; redacted, cut, deprecated and forged ones too."""

from __future__ import annotations

import json

import pytest
from made_spans import agent, chat, gateway, span, tool

from spanloop.pipeline.dialects import DIALECTS, decode_operation, encode_operation, operation_of
from spanloop.pipeline.dialects.fields import integer, texts
from spanloop.pipeline.dialects.operation import KINDS, Asked, text_hash
from spanloop.schemas.spans import redacted


def call_of(**attributes):
    named = {key.replace("__", "."): value for key, value in attributes.items()}
    operation = operation_of(span("c", None, 0, 1, attributes=named))
    assert operation.kind == "model_call"
    assert operation.call is not None
    return operation.call


def test_the_registry_has_one_interface():
    assert len({d.NAME for d in DIALECTS}) == len(DIALECTS)
    assert all(callable(d.matches) and callable(d.read) for d in DIALECTS)


@pytest.mark.parametrize(
    ("attributes", "kind"),
    [
        ({"gen_ai.operation.name": "chat"}, "model_call"),
        ({"gen_ai.operation.name": "invoke_agent"}, "agent_run"),
        ({"gen_ai.operation.name": "execute_tool"}, "tool_call"),
        ({"gen_ai.operation.name": "create_agent"}, "build"),
        ({"gen_ai.operation.name": "invoke_workflow"}, "workflow"),
        ({"gen_ai.operation.name": "apply_guardrail"}, "guardrail"),
        ({"gen_ai.operation.name": "embeddings"}, "unknown"),
        ({"gen_ai.operation.name": "something new"}, "unknown"),
        ({"llm.request.type": "chat"}, "model_call"),
        ({"gen_ai.system": "openai", "gen_ai.request.model": "m"}, "model_call"),
        ({"gen_ai.tool.name": "t"}, "tool_call"),
        ({"http.method": "GET"}, "unknown"),
        ({}, "unknown"),
    ],
)
def test_kinds(attributes, kind):
    operation = operation_of(span("s", None, 0, 1, attributes=attributes))
    assert operation.kind == kind
    assert kind in KINDS


@pytest.mark.parametrize("prefix", ["gen_ai.usage", "llm.usage"])
@pytest.mark.parametrize("names", [("input_tokens", "output_tokens"), ("prompt_tokens", "completion_tokens")])
def test_usage_under_old_and_new_names(prefix, names):
    operation = operation_of(
        span("c", None, 0, 1, attributes={
            "gen_ai.operation.name": "chat", f"{prefix}.{names[0]}": 10, f"{prefix}.{names[1]}": "2",
        })
    )  # fmt: skip
    assert operation.call is not None
    assert (operation.call.input_tokens, operation.call.output_tokens) == (10, 2)


def test_unknown_usage_is_none_and_so_is_a_default_zero():
    assert call_of(gen_ai__operation__name="chat").input_tokens is None
    zero = call_of(
        gen_ai__operation__name="chat", gen_ai__usage__input_tokens=0, gen_ai__usage__output_tokens=0
    )
    assert (zero.input_tokens, zero.output_tokens) == (None, None)
    silent = call_of(
        gen_ai__operation__name="chat", gen_ai__usage__input_tokens=5, gen_ai__usage__output_tokens=0
    )
    assert (silent.input_tokens, silent.output_tokens) == (5, 0)


@pytest.mark.parametrize(
    ("value", "meant"),
    [(3, 3), ("3", 3), (3.0, 3), (3.5, None), (-1, None), (True, None), ("NaN", None), ("x", None), (None, None), ([1], None)],
)  # fmt: skip
def test_integer(value, meant):
    assert integer(value) == meant


@pytest.mark.parametrize(
    ("value", "meant"),
    [(["stop"], ("stop",)), ('["tool_call"]', ("tool_call",)), ("stop", ("stop",)), (None, ()), ([1, "a"], ("a",)), ("[bad", ())],
)  # fmt: skip
def test_texts(value, meant):
    assert texts(value) == meant


OUTPUT = [
    {"role": "assistant", "parts": [
        {"type": "text", "content": "I will ask."},
        {"type": "tool_call", "id": "id-1", "name": "ask", "arguments": {"task": "find"}},
    ]}
]  # fmt: skip
INPUT = [
    {"role": "user", "parts": [{"type": "text", "content": "Plan"}]},
    {"role": "tool", "parts": [{"type": "tool_call_response", "id": "id-0", "name": "x", "result": "ok"}]},
]
REDACTED_OUTPUT = [
    {"role": "assistant", "parts": [
        {"type": "text", "content": redacted(11, "aa")},
        {"type": "tool_call", "id": "id-1", "name": "ask", "arguments": redacted(20, "bb")},
    ]}
]  # fmt: skip


@pytest.mark.parametrize("output", [OUTPUT, json.dumps(OUTPUT), REDACTED_OUTPUT, json.dumps(REDACTED_OUTPUT)])
@pytest.mark.parametrize("encode", [lambda x: x, json.dumps])
def test_the_structure_of_messages_survives_redaction(output, encode):
    call = call_of(
        gen_ai__operation__name="chat", gen_ai__output__messages=output, gen_ai__input__messages=encode(INPUT)
    )
    assert call.asked == (Asked("id-1", "ask"),)
    assert call.answered == ("id-0",)


def test_openai_shaped_messages():
    output = [
        {"role": "assistant", "tool_calls": [{"id": "i", "function": {"name": "f", "arguments": "{}"}}]}
    ]
    history = [{"role": "tool", "tool_call_id": "j", "content": "done"}]
    call = call_of(
        gen_ai__operation__name="chat", gen_ai__output__messages=output, gen_ai__input__messages=history
    )
    assert (call.asked, call.answered) == ((Asked("i", "f"),), ("j",))


def test_flattened_old_completions():
    call = call_of(gen_ai__system="openai", gen_ai__request__model="m", gen_ai__completion__0__tool_calls__0__name="f", gen_ai__completion__0__tool_calls__0__id="i")  # fmt: skip
    assert call.asked == (Asked("i", "f"),)


def test_a_cut_message_is_flagged_and_what_stands_before_the_cut_is_read():
    cut = json.dumps(OUTPUT, separators=(",", ":"))[:-30]
    operation = operation_of(
        span("c", None, 0, 1, attributes={"gen_ai.operation.name": "chat", "gen_ai.output.messages": cut})
    )
    assert operation.call is not None
    assert operation.call.asked == (Asked("id-1", "ask"),)
    assert operation.flags == ("unparsed_messages",)


def test_dropped_and_cut_attributes_are_flagged():
    assert operation_of(span("c", None, 0, 1, dropped_attributes=2)).flags == ("truncated_attributes",)
    cut = span("c", None, 0, 1, attributes={"spanloop.truncated": ["gen_ai.input.messages"]})
    assert operation_of(cut).flags == ("truncated_attributes",)
    repaired = span("c", None, 0, 1, attributes={"spanloop.flags": ["invalid_number:x"]})
    assert operation_of(repaired).flags == ("repaired_attributes",)


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("running tool", {"tool_arguments": '{"task": "find"}'}),
        ("execute_tool ask", {"gen_ai.tool.call.arguments": '{"task": "find"}'}),
        ("execute_tool ask", {"gen_ai.tool.call.arguments": {"task": "find"}}),
    ],
)
def test_pydantic_ai_tools_of_all_versions(name, keys):
    operation = operation_of(tool("t", None, 0, 1, "ask", call="i", scope="pydantic-ai", attributes=keys))
    assert operation.tool is not None
    assert (operation.tool.tool, operation.tool.call_id, operation.tool.role) == ("ask", "i", "")
    assert operation.tool.argument_hashes == (text_hash("find"),)
    assert name


@pytest.mark.parametrize(
    ("tool_name", "keys", "role"),
    [
        ("final_result", {}, "output"),
        ("final_result_Plan", {}, "output"),
        ("close", {"logfire.msg": "running output function: close"}, "output"),
        ("close", {"logfire.msg": "running tool: close"}, ""),
        ("spawn", {"pydantic_ai.tool.failure_stage": "validation"}, "rejected"),
        ("pay", {"pydantic_ai.tool.deferral.name": "ApprovalRequired"}, "deferred"),
    ],
)
def test_pydantic_ai_tool_roles(tool_name, keys, role):
    operation = operation_of(tool("t", None, 0, 1, tool_name, scope="pydantic-ai", attributes=keys))
    assert operation.tool is not None
    assert operation.tool.role == role


def test_a_tool_named_final_result_is_ordinary_elsewhere():
    operation = operation_of(tool("t", None, 0, 1, "final_result", scope="other"))
    assert operation.tool is not None
    assert operation.tool.role == ""


def test_pydantic_ai_agents_task_and_roll_up():
    messages = json.dumps([{"role": "user", "parts": [{"type": "text", "content": " find "}]}])
    operation = operation_of(
        agent("a", None, 0, 1, "researcher", scope="pydantic-ai", attributes={
            "pydantic_ai.all_messages": messages, "gen_ai.aggregated_usage.input_tokens": 36,
            "gen_ai.aggregated_usage.output_tokens": 16, "gen_ai.agent.call.id": "run-1",
        })
    )  # fmt: skip
    assert operation.run is not None
    assert (operation.agent, operation.run_id, operation.run.task_hash) == (
        "researcher",
        "run-1",
        text_hash("find"),
    )
    assert (operation.run.input_tokens, operation.run.output_tokens) == (36, 16)


def test_the_gateway_is_believed_only_from_a_trusted_source():
    call = gateway("r", 0, 1)
    for source, believed in (("gateway", True), ("import", True), ("otlp", False)):
        operation = operation_of(call, source)
        assert operation.call is not None
        assert (operation.call.gateway is not None) == believed


@pytest.mark.parametrize(
    "arrays",
    [
        {"spanloop.response_token_ids": [1, 2], "spanloop.response_logprobs": [-1.0]},
        {"spanloop.response_token_ids": [1, "x"], "spanloop.response_logprobs": [-1.0, -1.0]},
        {"spanloop.response_token_ids": [1], "spanloop.response_logprobs": ["NaN"]},
    ],
)
def test_token_arrays_that_do_not_fit_are_dropped_whole(arrays):
    call = gateway("r", 0, 1)
    call.attributes.update({"spanloop.prompt_token_ids": [9], **arrays})
    operation = operation_of(call, "gateway")
    assert operation.call is not None
    assert operation.call.gateway is not None
    facts = operation.call.gateway
    assert (facts.prompt_token_ids, facts.response_token_ids, facts.logprobs, facts.menus) == ((), (), (), ())
    assert "token_arrays_differ" in operation.flags


def test_bad_menus_cost_only_the_menus():
    call = gateway("r", 0, 1)
    call.attributes.update({
        "spanloop.response_token_ids": [1], "spanloop.response_logprobs": [-1.0], "spanloop.menus": [[[1]]],
    })  # fmt: skip
    operation = operation_of(call, "gateway")
    assert operation.call is not None
    assert operation.call.gateway is not None
    assert (operation.call.gateway.response_token_ids, operation.call.gateway.menus) == ((1,), ())


def test_an_operation_survives_its_encoding_and_keeps_no_text():
    secret = "my card is 4111"
    messages = json.dumps([{"role": "user", "parts": [{"type": "text", "content": secret}]}])
    operation = operation_of(
        chat("c", None, 0, 1, asks={"i": "f"}, attributes={"gen_ai.input.messages": messages})
    )
    data = encode_operation(operation)
    assert decode_operation(data) == operation
    assert secret.encode() not in data


def test_errors_by_status_or_error_type():
    assert operation_of(chat("c", None, 0, 1, error=True)).status == "error"
    assert operation_of(chat("c", None, 0, 1, attributes={"error.type": "429"})).status == "error"
    assert operation_of(chat("c", None, 0, 1)).status == ""
