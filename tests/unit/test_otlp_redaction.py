"""The allow-list: what is kept, what leaves a stand-in, and that rules can still compare."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from otlp_requests import case, case_request, corpora

from spanloop.collectors.redaction import Redactor, looks_like_label, workspace_key
from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.otlp.decode_json import decode_json
from spanloop.pipeline.otlp.files import read_spans
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.events import SpansReceived, encode
from spanloop.schemas.orchestration import OrchestrationContent
from spanloop.schemas.settings import Content, Settings
from spanloop.schemas.spans import Span, SpanEvent, SpanLink

KEY = b"k" * 32


def _redact(span: Span, **content: Any) -> Span:
    return Redactor(Content(**content), KEY).span(span)


def _with(**attributes: Any) -> Span:
    return Span("a" * 32, "b" * 16, "chat m", 1, 2, attributes=attributes)


def _is_stand_in(value: Any) -> bool:
    return isinstance(value, dict) and set(value) == {"$redacted", "$hmac"}


def test_structure_stays_and_content_leaves_a_stand_in() -> None:
    attributes = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "tiny", "gen_ai.usage.input_tokens": 7,
        "gen_ai.response.finish_reasons": ["stop"], "gen_ai.agent.name": "researcher", "error.type": "ValueError",
        "user.id": "u-1", "customer.note": "hello", "secret.number": 4111, "flag": True, "nothing": None,
    }  # fmt: skip
    found = _redact(_with(**attributes)).attributes
    kept = [k for k in attributes if k.startswith(("gen_ai.", "error")) or k in ("flag", "nothing")]
    assert {k: found[k] for k in kept} == {k: attributes[k] for k in kept}
    assert found["customer.note"]["$redacted"] == 5
    assert all(_is_stand_in(found[k]) for k in ("user.id", "customer.note", "secret.number"))


def test_equal_texts_leave_equal_hashes_of_this_key_only() -> None:
    one = _redact(_with(x="hello")).attributes["x"]
    assert one == _redact(_with(y="hello")).attributes["y"]
    assert one != _redact(_with(x="hellO")).attributes["x"]
    assert one != Redactor(Content(), b"j" * 32).span(_with(x="hello")).attributes["x"]


def test_messages_keep_their_structure() -> None:
    arguments = json.dumps({"task": "weather in Lisbon", "n": 3})
    output = [{"role": "assistant", "finish_reason": "tool_call", "parts": [
        {"type": "text", "content": "I ask."},
        {"type": "tool_call", "id": "call_1", "name": "delegate", "arguments": arguments},
        {"type": "tool_call_response", "id": "call_1", "name": "delegate", "result": {"name": "Pat"}}]}]  # fmt: skip
    first = [{"role": "user", "parts": [{"type": "text", "content": "weather in Lisbon"}]}]
    found = _redact(
        _with(**{"gen_ai.output.messages": json.dumps(output), "gen_ai.input.messages": json.dumps(first)})
    ).attributes
    (message,) = json.loads(found["gen_ai.output.messages"])
    text, call, result = message["parts"]
    assert (message["role"], message["finish_reason"]) == ("assistant", "tool_call")
    assert (call["type"], call["id"], call["name"]) == ("tool_call", "call_1", "delegate")
    assert _is_stand_in(text["content"])
    assert _is_stand_in(result["result"]["name"])
    task = json.loads(call["arguments"])["task"]
    (user,) = json.loads(found["gen_ai.input.messages"])
    assert user["parts"][0]["content"] == task, "a rule that compares argument and first message still can"


def test_a_name_that_is_no_tool_is_content() -> None:
    found = _redact(_with(**{"gen_ai.input.messages": '[{"role":"user","name":"Pat","content":"hi"}]'}))
    (message,) = json.loads(found.attributes["gen_ai.input.messages"])
    assert _is_stand_in(message["name"])


def test_broken_json_goes_as_a_whole() -> None:
    found = _redact(_with(**{"gen_ai.input.messages": '[{"role":"user","content":"half of a sec'}))
    assert _is_stand_in(found.attributes["gen_ai.input.messages"])


def test_routing_of_langgraph_stays() -> None:
    meta = {"langgraph_node": "writer", "langgraph_step": 3, "customer": "Pat"}
    found = _redact(_with(metadata=json.dumps(meta), **{"output.value": '{"goto": "writer", "text": "hi"}'}))
    assert json.loads(found.attributes["metadata"])["langgraph_node"] == "writer"
    assert _is_stand_in(json.loads(found.attributes["metadata"])["customer"])
    assert json.loads(found.attributes["output.value"])["goto"] == "writer"


@pytest.mark.parametrize(
    "text",
    [
        "pat@example.invalid", "4111 1111 1111 1111", "4111111111111111", "https://u:secret@h/x", "eyJhbGciOi.x.y",
        "Bearer abcdef", "sk-fake-000000", "ghp_0123456789abcdef", "AKIA0123456789ABCDEF", "+1 555 0100 200",
        "password: hunter2", "078-05-1120", "two\nlines", 'say "x"', "x" * 300,
    ],
)  # fmt: skip
def test_what_is_no_label(text: str) -> None:
    assert not looks_like_label(text)
    span = _redact(_with(**{"gen_ai.agent.name": text}))
    assert _is_stand_in(span.attributes["gen_ai.agent.name"])
    assert text not in _redact(Span("a" * 32, "b" * 16, text, 1, 2)).name


@pytest.mark.parametrize(
    "text",
    [
        "chat fake-model", "invoke_agent Trip Planner", "gpt-5.1-mini", "skeleton_selector", "http://127.0.0.1:41093/v1/",
        "01a22d4c-f375-739f-84bc-e2f62d719a8a", "chatcmpl-orchestrator-0", "researcher:1f2e|tools:9c", "policy@v12",
        "handoff to writer", "orchestrator._execute_core", "pydantic_ai.exceptions.ToolRetryError", "1.45.2",
    ],
)  # fmt: skip
def test_what_is_a_label(text: str) -> None:
    assert looks_like_label(text)


def test_senders_may_not_set_our_attributes() -> None:
    span = _with(**{"spanloop.policy.version": "policy@v9", "spanloop.task.key": "t", "x": "y"})
    redactor = Redactor(Content(training=True), KEY)
    found = redactor.span(span)
    assert (found.attributes, found.dropped_attributes) == ({"spanloop.task.key": "t", "x": "y"}, 1)
    assert redactor.reserved_removed == 1
    assert redactor.span(span, trusted=True) is span


def test_training_keeps_contents_and_allow_keeps_keys() -> None:
    span = Span(
        "a" * 32, "b" * 16, "n", 1, 2, status_message="m", attributes={"x": "y", "z.a": "pat@example.invalid"}
    )
    assert _redact(span, training=True) is span
    found = _redact(span, allow=("z.*",))
    assert found.attributes["z.a"] == "pat@example.invalid"
    assert _is_stand_in(found.attributes["x"])


def test_every_part_of_a_span_is_scrubbed() -> None:
    secret = "pat@example.invalid"
    span = Span(
        "a" * 32, "b" * 16, f"run {secret}", 1, 2, status="error", status_message=secret, scope=secret,
        scope_version=secret, attributes={secret: secret, "n": {secret: [secret]}},
        events=(SpanEvent(secret, 1, {"exception.message": secret, "exception.stacktrace": secret}),),
        links=(SpanLink("c" * 32, "d" * 16, {"by": secret}),), resource={"note": secret},
    )  # fmt: skip
    found = _redact(span)
    assert secret.encode() not in encode(SpansReceived(trace_id="a" * 32, spans=(found,)))
    assert found.status_message.startswith("redacted:19:")


def test_case_45_pii() -> None:
    found, spans = case(45)
    redactor = Redactor(Content(), KEY)
    batch = decode_json(case_request(spans))
    event = SpansReceived(trace_id=spans[0]["traceId"], spans=tuple(redactor.span(s) for s in batch.spans))
    text = encode(event).decode()
    assert [s for s in found["forbidden_strings"] if s in text] == []
    assert '"u-1"' not in text
    assert "orchestrator" in text


def test_real_spans_keep_what_the_dialects_need() -> None:
    redactor = Redactor(Content(), KEY)
    wanted = {
        "gen_ai.operation.name", "gen_ai.agent.name", "gen_ai.tool.name", "gen_ai.tool.call.id", "gen_ai.response.id",
        "gen_ai.conversation.id", "gen_ai.agent.call.id", "openinference.span.kind", "agent.name", "graph.node.id",
        "llm.model_name", "traceloop.span.kind", "sender_agent_type", "gen_ai.usage.input_tokens",
    }  # fmt: skip
    for path in sorted(corpora().glob("live-*/*/spans.otlp.jsonl")):
        for batch in read_spans(path):
            for span in batch.spans:
                kept = redactor.span(span)
                same = [
                    k for k in wanted & span.attributes.keys() if kept.attributes[k] != span.attributes[k]
                ]
                assert same == [], f"{path.parent}: {span.name}"
                if (
                    "{" not in span.name
                    and '"' not in span.name
                    and "'" not in span.name
                    and len(span.name.split()) <= 6
                ):
                    assert kept.name == span.name


def test_workspace_key_is_made_once_and_private(tmp_path: Path) -> None:
    settings = Settings(workspace=tmp_path / "ws")
    key = workspace_key(settings)
    assert len(key) == 64
    assert workspace_key(settings) == key
    assert stat.S_IMODE((tmp_path / "ws" / "hmac.key").stat().st_mode) == 0o600
    assert [p.name for p in (tmp_path / "ws").iterdir()] == ["hmac.key"]
    (tmp_path / "ws" / "hmac.key").write_text("short")
    with pytest.raises(ConfigError, match="damaged"):
        workspace_key(settings)
    with pytest.raises(ConfigError, match="16"):
        workspace_key(Settings(workspace=tmp_path, content=Content(hmac_key="short")))  # type: ignore[arg-type]
    given = Settings(workspace=tmp_path, content=Content(hmac_key="x" * 40))  # type: ignore[arg-type]
    assert workspace_key(given) == b"x" * 40


@pytest.mark.parametrize("variant", ["v2", "v5", "v6", "lostctx"])
def test_redacted_spans_give_the_same_events(variant: str) -> None:
    redactor = Redactor(Content(), KEY)
    batches = read_spans(corpora() / "live-pydantic-ai" / variant / "spans.otlp.jsonl")
    clear = [span for batch in batches for span in batch.spans]
    (with_texts,) = assemble_spans(clear, "t")
    (without,) = assemble_spans([redactor.span(span) for span in clear], "t")

    def events(content: OrchestrationContent) -> list[tuple[Any, ...]]:
        return sorted((e.type, e.agent, e.to, e.tool, e.status, e.rule) for e in content.events)

    assert len(with_texts.events) > 10
    assert events(without) == events(with_texts)


@pytest.mark.parametrize("training", [False, True])
def test_an_agent_cannot_pass_for_the_gateway(training: bool) -> None:
    """A span of the gateway's scope with the response id of a real call would hide that call's version and tokens."""
    span = Span(
        "a" * 32,
        "b" * 16,
        "chat policy",
        1,
        2,
        scope="spanloop.gateway",
        attributes={"spanloop.policy.version": "9"},
    )
    redactor = Redactor(Content(training=training), KEY)
    found = redactor.span(span)
    assert (found.scope, found.attributes, redactor.reserved_removed) == ("", {}, 2)
    assert redactor.span(span, trusted=True).scope == "spanloop.gateway"
