"""Langfuse, MLflow, Vercel and spans of no dialect: minimal records, kept content and dropped content."""

from __future__ import annotations

import json

import pytest
from made_spans import agent, one, span, told, tool

from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.dialects import operation_of
from spanloop.pipeline.dialects.operation import Asked, text_hash
from spanloop.schemas.settings import Content
from spanloop.schemas.spans import Span

DIALOGUE = {
    "messages": [
        {"role": "user", "content": "find the way"},
        {"role": "assistant", "tool_calls": [{"id": "x0", "function": {"name": "look", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "x0", "content": "nothing here"},
    ]
}
ANSWER = {
    "choices": [
        {"index": 0, "finish_reason": "tool_calls",
         "message": {"role": "assistant", "content": None,
                     "tool_calls": [{"id": "x1", "type": "function", "function": {"name": "search", "arguments": "{}"}}]}}
    ]
}  # fmt: skip


def langfuse(key, parent, start, end, kind, name, given=None, answer=None, **more):
    attributes = {"langfuse.observation.type": kind, "session.id": "s", **more}
    for part, value in (("input", given), ("output", answer)):
        if value is not None:
            attributes[f"langfuse.observation.{part}"] = (
                value if isinstance(value, str) else json.dumps(value)
            )
    return span(key, parent, start, end, name=name, scope="langfuse-sdk", attributes=attributes)


def mlflow(key, parent, start, end, kind, name, given=None, answer=None, **more):
    attributes = {"mlflow.spanType": json.dumps(kind), "mlflow.traceRequestId": '"tr-1"', **more}
    for part, value in (("spanInputs", given), ("spanOutputs", answer)):
        if value is not None:
            attributes[f"mlflow.{part}"] = json.dumps(value)
    return span(key, parent, start, end, name=name, scope="mlflow", attributes=attributes)


def langfuse_job() -> list[Span]:
    usage = {"langfuse.observation.usage_details": '{"input": 9, "output": "4", "total": 13}',
             "langfuse.observation.model.name": "m-1"}  # fmt: skip
    return [
        langfuse("root", None, 0, 9, "agent", "lead", {"args": [], "kwargs": {"query": "find the way"}}),
        langfuse("c1", "root", 1, 2, "generation", "think", DIALOGUE, ANSWER, **usage),
        langfuse("t1", "root", 3, 4, "tool", "search", {"args": [], "kwargs": {"q": "way"}}, "found"),
        langfuse("t2", "root", 5, 7, "tool", "ask_helper", {"args": ["be quick"], "kwargs": {}}),
        langfuse("sub", "t2", 5.5, 6.5, "agent", "helper", {"args": ["be quick"], "kwargs": {}}),
        langfuse("x", "sub", 6, 6.1, "chain", "format"),
        langfuse("t3", "sub", 6.1, 6.2, "tool", "fetch", **{"langfuse.observation.level": "ERROR"}),
        langfuse("c9", "root", 8, 8.5, "generation", "think"),
    ]


def mlflow_job() -> list[Span]:
    usage = {"mlflow.chat.tokenUsage": '{"input_tokens": 9, "output_tokens": "4", "total_tokens": 13}',
             "mlflow.llm.model": '"m-1"'}  # fmt: skip
    return [
        mlflow("root", None, 0, 9, "AGENT", "lead", {"query": "find the way"}),
        mlflow("c1", "root", 1, 2, "CHAT_MODEL", "think", DIALOGUE, ANSWER, **usage),
        mlflow("t1", "root", 3, 4, "TOOL", "search", {"q": "way"}, "found"),
        mlflow("t2", "root", 5, 7, "TOOL", "ask_helper", {"task": "be quick"}),
        mlflow("sub", "t2", 5.5, 6.5, "AGENT", "helper", {"task": "be quick"}),
        mlflow("x", "sub", 6, 6.1, "CHAIN", "format"),
        span("t3", "sub", 6.1, 6.2, name="fetch", error=True, attributes={"mlflow.spanType": '"TOOL"'}),
        mlflow("c9", "root", 8, 8.5, "LLM", "think"),
    ]


TOLD = [
    ("tool_call", "lead", "search"),
    ("tool_result", "lead", "search", "ok"),
    ("orchestrator_decision", "lead"),
    ("delegate", "lead", "helper", "return_to_caller"),
    ("spawn", "lead", "helper"),
    ("tool_call", "helper", "fetch"),
    ("tool_result", "helper", "fetch", "error"),
    ("return", "helper", "lead", "ok"),
    ("despawn", "helper"),
    ("stop", "lead", "ok"),
]


@pytest.mark.parametrize("job", [langfuse_job, mlflow_job])
@pytest.mark.parametrize("kept", [True, False], ids=["content", "redacted"])
def test_a_job_of_nested_observations(job, kept):
    redactor = Redactor(Content(training=kept), b"k" * 32)
    content = one([redactor.span(s) for s in job()])
    assert sorted(told(content)) == sorted(TOLD)
    call, last = content.calls
    assert (last.input_tokens, last.agent_id) == (None, call.agent_id)
    assert (call.model, call.input_tokens, call.output_tokens) == ("m-1", 9, 4)
    assert [(t.id, t.name) for t in call.tool_calls] == [("x1", "search")]
    assert call.finish_reasons == ("tool_calls",)
    assert "unparsed_messages" not in " ".join(content.flags)
    facts = operation_of(redactor.span(job()[1])).call
    assert facts is not None
    assert facts.answered == ("x0",)
    task = operation_of(redactor.span(job()[4])).run
    given = operation_of(redactor.span(job()[3])).tool
    assert task is not None
    assert given is not None
    assert task.task_hash, "a task is compared with the argument that passed it on"
    assert task.task_hash in given.argument_hashes


@pytest.mark.parametrize("answer", [
    {"role": "assistant", "content": [{"type": "tool_use", "id": "x1", "name": "search", "input": {}}], "stop_reason": "tool_use"},
    {"output": [{"type": "function_call", "call_id": "x1", "name": "search", "arguments": "{}"}]},
    {"generations": [[{"message": {"role": "assistant", "tool_calls": [{"id": "x1", "name": "search"}]}}]]},
    [{"role": "assistant", "tool_calls": [{"id": "x1", "function": {"name": "search"}}]}],
])  # fmt: skip
def test_answers_in_the_shapes_of_their_clients(answer):
    operation = operation_of(mlflow("c", None, 0, 1, "LLM", "call", None, answer))
    assert operation.call is not None
    assert operation.call.asked == (Asked("x1", "search"),)


def test_an_answer_in_plain_words_is_no_broken_json():
    for operation in (
        operation_of(langfuse("c", None, 0, 1, "generation", "g", "what?", "that.")),
        operation_of(mlflow("c", None, 0, 1, "LLM", "g", "what?", "that.")),
    ):
        assert operation.flags == ()
        assert operation.call is not None
        assert operation.call.input_tokens is None


def vercel(key, parent, start, end, operation, **attributes):
    given = {k.replace("__", "."): v for k, v in attributes.items()}
    return span(key, parent, start, end, name=operation, scope="ai",
                attributes={"ai.operationId": operation, "operation.name": operation, **given})  # fmt: skip


def test_vercels_loops_are_runs():
    calls = json.dumps([{"toolCallId": "x1", "toolName": "getWeather", "input": {}}])
    asked = {"ai.response.toolCalls": calls, "gen_ai.system": "openai", "gen_ai.request.model": "m"}
    history = json.dumps([
        {"role": "user", "content": [{"type": "text", "text": "weather?"}]},
        {"role": "tool", "content": [{"type": "tool-result", "toolCallId": "x1", "toolName": "getWeather"}]},
    ])  # fmt: skip
    content = one([
        vercel("run", None, 0, 9, "ai.generateText", ai__telemetry__functionId="forecast", ai__usage__promptTokens="62",
               ai__usage__completionTokens=85, ai__prompt="weather?"),
        vercel("c1", "run", 1, 2, "ai.generateText.doGenerate", ai__usage__promptTokens="30",
               ai__usage__completionTokens="5", ai__response__id="r1", ai__response__finishReason="tool-calls", **asked),
        vercel("t", "run", 3, 4, "ai.toolCall", ai__toolCall__name="getWeather", ai__toolCall__id="x1",
               ai__toolCall__args='{"location": "here"}'),
        vercel("c2", "run", 5, 6, "ai.generateText.doGenerate", ai__usage__inputTokens=32, ai__usage__outputTokens=80,
               ai__prompt__messages=history),
    ])  # fmt: skip
    assert told(content) == [
        ("tool_call", "forecast", "getWeather"), ("tool_result", "forecast", "getWeather", "ok"), ("stop", "forecast", "ok"),
    ]  # fmt: skip
    assert (content.tokens.input, content.tokens.output, content.tokens.calls) == (62, 85, 2)
    assert [t.name for t in content.calls[0].tool_calls] == ["getWeather"]
    assert [e.call_id for e in content.events if e.type == "tool_call"] == ["r1"]
    second = operation_of(
        vercel("c2", None, 5, 6, "ai.streamText.doStream", ai__prompt__messages=history)
    ).call
    assert second is not None
    assert (second.answered, second.task_hash) == (("x1",), text_hash("weather?"))


@pytest.mark.parametrize(
    "value", [None, 3, [], {}, "", "{", '"', "[[", {"$redacted": 3, "$hmac": "ab"}, [None, 3, {"role": 4}]]
)
def test_values_of_any_type_are_read(value):
    keys = ("langfuse.observation.input", "langfuse.observation.output", "langfuse.observation.usage_details",
            "langfuse.observation.type", "mlflow.spanType", "mlflow.spanInputs", "mlflow.spanOutputs",
            "mlflow.chat.tokenUsage", "ai.operationId", "ai.prompt.messages", "ai.response.toolCalls", "ai.toolCall.args")  # fmt: skip
    bases = (
        {"langfuse.observation.type": "generation"}, {"langfuse.observation.type": "agent"},
        {"langfuse.observation.type": "tool"}, {"mlflow.spanType": '"LLM"'}, {"mlflow.spanType": '"AGENT"'},
        {"mlflow.spanType": '"TOOL"'}, {"ai.operationId": "ai.generateText"}, {"ai.operationId": "ai.toolCall"},
        {"ai.operationId": "ai.generateText.doGenerate"},
    )  # fmt: skip
    for base in bases:
        for key in keys:
            operation_of(span("s", None, 0, 1, attributes={**base, key: value}))


# ---------------------------------------------------------------- no dialect


@pytest.mark.parametrize(("name", "kind", "who"), [
    ("shop.subagent.price-checker", "agent_run", "price-checker"), ("agent writer", "agent_run", "writer"),
    ("WriterAgent.run", "agent_run", "WriterAgent"), ("run research_agent", "agent_run", "research_agent"),
    ("agent.run", "agent_run", "service-x"), ("tool.get_weather", "tool_call", "get_weather"),
    ("get_weather_tool", "tool_call", "get_weather_tool"), ("llm.call", "model_call", ""),
    ("HTTP GET /agents", "unknown", ""), ("nodeExecuteTool", "unknown", ""), ("SELECT 1", "unknown", ""), ("", "unknown", ""),
])  # fmt: skip
def test_names_are_the_best_evidence_where_there_is_no_other(name, kind, who):
    operation = operation_of(span("s", None, 0, 1, name=name or " ", resource={"service.name": "service-x"}))
    assert operation.kind == kind
    assert (operation.tool.tool if operation.tool else operation.agent) == who
    assert ("unknown_dialect" in operation.flags) == (kind != "unknown")


def test_an_unknown_dialect_still_gives_agents_and_says_so():
    content = one([
        span("root", None, 0, 9, name="app.agent.planner"),
        span("sub", "root", 2, 5, name="app.subagent.finder"),
        span("t", "sub", 3, 4, name="app.tool.lookup"),
        span("http", "t", 3.1, 3.9, name="GET"),
    ])  # fmt: skip
    assert {(a.name, bool(a.parent_id)) for a in content.agents} == {("planner", False), ("finder", True)}
    assert ("tool_call", "finder", "lookup") in told(content)
    assert "unknown_dialect:3" in content.flags
    spawn = next(e for e in content.events if e.type == "spawn")
    assert spawn.confidence <= 0.5, "guessed from names"


def test_a_known_dialect_is_never_guessed():
    content = one([agent("a", None, 0, 5, "lead"), tool("t", "a", 1, 2, "subagent.x")])
    assert content.flags == ()
