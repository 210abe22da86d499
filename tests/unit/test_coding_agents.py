"""Claude Code and Codex: spans, log events, both; the same thing counts once; runs that no span tells."""

from __future__ import annotations

import random

import pytest
from log_requests import log
from made_spans import hashes, one, span, told

from spanloop.pipeline.dialects import operation_of
from spanloop.schemas.spans import Span

TURN = {"session__id": "S", "prompt__id": "P"}
SUB = {"agent_id": "x", "subagent__id": "scout:x"}
TALK = {"conversation__id": "C", "model": "gpt"}


def claude_logs() -> list[Span]:
    return [
        log("claude_code.user_prompt", 1, prompt="do it", **TURN),
        log("claude_code.api_request", 3, duration_ms="1500", request_id="r1", model="m", input_tokens="10",
            output_tokens="5", cost_usd="0.1", **TURN),
        log("claude_code.tool_decision", 3.1, tool_name="Bash", tool_use_id="u1", source="user_temporary", **TURN),
        log("claude_code.tool_result", 4, duration_ms="500", tool_name="Bash", tool_use_id="u1", success="true", **TURN),
        log("claude_code.tool_decision", 4.5, tool_name="Agent", tool_use_id="u2", source="config", **TURN),
        log("claude_code.tool_result", 9, duration_ms="4000", tool_name="Agent", tool_use_id="u2", success="true", **TURN),
        log("claude_code.api_request", 7, duration_ms="500", request_id="r2", model="m", input_tokens="1",
            output_tokens="1", **SUB, **TURN),
        log("claude_code.tool_result", 8, duration_ms="500", tool_name="Read", tool_use_id="u3", success="false",
            **SUB, **TURN),
        log("claude_code.api_request", 10, duration_ms="500", request_id="r3", model="m", input_tokens=2,
            output_tokens=2, **TURN),
    ]  # fmt: skip


def claude_spans() -> list[Span]:
    def made(key, parent, start, end, name, **attributes):
        given = {k.replace("__", "."): v for k, v in attributes.items()}
        return span(key, parent, start, end, name=f"claude_code.{name}", scope="com.anthropic.claude_code",
                    attributes={"session.id": "S", "prompt.id": "P", "span.type": name, **given})  # fmt: skip

    return [
        made("run", None, 0.9, 10.1, "interaction", user_prompt="do it"),
        made(
            "c1",
            "run",
            1.5,
            3,
            "llm_request",
            request_id="r1",
            input_tokens="10",
            output_tokens="5",
            model="m",
        ),
        made("t1", "run", 3, 4, "tool", tool_name="Bash", tool_use_id="u1"),
        made(
            "w1",
            "t1",
            3,
            3.1,
            "tool.blocked_on_user",
            tool_use_id="u1",
            decision="accept",
            source="user_temporary",
        ),
        made("e1", "t1", 3.1, 4, "tool.execution", success="true"),
        made("t2", "run", 5, 9, "tool", tool_name="Agent", tool_use_id="u2"),
        made("c2", "t2", 6.5, 7, "llm_request", request_id="r2", input_tokens=1, output_tokens=1, **SUB),
        made("t3", "t2", 7.5, 8, "tool", tool_name="Read", tool_use_id="u3", **SUB),
        made("e3", "t3", 7.6, 8, "tool.execution", success="false", **SUB),
        made("c3", "run", 9.5, 10, "llm_request", request_id="r3", input_tokens=2, output_tokens="2"),
    ]


TOLD = [
    ("orchestrator_decision", "claude_code"),
    ("human_intervention", "human", "claude_code"),
    ("tool_call", "claude_code", "Bash"),
    ("tool_result", "claude_code", "Bash", "ok"),
    ("delegate", "claude_code", "scout", "return_to_caller"),
    ("spawn", "claude_code", "scout"),
    ("tool_call", "scout", "Read"),
    ("tool_result", "scout", "Read", "error"),
    ("return", "scout", "claude_code", "ok"),
    ("despawn", "scout"),
    ("stop", "claude_code", "ok"),
]


@pytest.mark.parametrize(
    "sent", [claude_logs, claude_spans, lambda: claude_spans() + claude_logs()], ids=["logs", "spans", "both"]
)
def test_a_turn_is_the_same_on_either_signal_and_on_both(sent):
    content = one(sent())
    assert sorted(told(content)) == sorted(TOLD)
    assert (content.tokens.input, content.tokens.output, content.tokens.calls) == (13, 8, 3)
    assert content.tokens.unknown_calls == 0
    entry, scout = content.agents
    assert (entry.name, scout.name, scout.parent_id) == ("claude_code", "scout", entry.id)
    assert [c.agent_id for c in content.calls] == [entry.id, scout.id, entry.id]


def test_order_and_repetition_change_nothing():
    sent = claude_spans() + claude_logs()
    mixed = sent * 2
    random.Random(3).shuffle(mixed)
    assert hashes(mixed) == hashes(sent)


def test_model_spans_of_the_streaming_mode_are_one_run():
    """They come alone, each in a trace of its own; the prompt says that they belong together."""
    made = [
        span(key, parent, start, start + 1, trace=f"t{key}", name="claude_code.llm_request",
             attributes={"session.id": "S", "prompt.id": "P", "request_id": key, "input_tokens": "3", "output_tokens": "1"})
        for key, parent, start in (("a", None, 1), ("b", "gone", 3))
    ]  # fmt: skip
    content = one(made)
    assert [(a.name, a.started_ns, a.ended_ns) for a in content.agents] == [("claude_code", 10**9, 4 * 10**9)]
    assert [c.agent_id for c in content.calls] == [content.agents[0].id] * 2
    assert {"agent_without_span:1", "orphan_spans:1"} <= set(content.flags)


def test_prompts_of_one_session_are_different_jobs():
    other = [log("claude_code.api_request", 30, request_id="q", session__id="S", prompt__id="Q")]
    assert len(hashes(claude_logs() + other)) == 2


def test_a_session_without_prompt_ids_is_divided_by_its_prompts():
    records = [
        log(f"claude_code.{name}", t, session__id="S", **more)
        for name, t, more in (
            ("user_prompt", 1, {}), ("api_request", 2, {"request_id": "a"}),
            ("user_prompt", 5, {}), ("api_request", 6, {"request_id": "b"}), ("api_error", 7, {"error": "x"}),
        )
    ]  # fmt: skip
    content = one(records)
    assert [a.name for a in content.agents] == ["claude_code", "claude_code"]
    assert [c.status for c in content.calls] == ["ok", "ok", "error"]
    assert [c.agent_id for c in content.calls] == [content.agents[i].id for i in (0, 1, 1)]


def codex_logs() -> list[Span]:
    return [
        log("codex.conversation_starts", 0.5, **TALK),
        log("codex.user_prompt", 1, prompt="[REDACTED]", **TALK),
        log("codex.api_request", 2, duration_ms="500", http__response__status_code="503", success="false", **TALK),
        log("codex.api_request", 3, duration_ms="500", http__response__status_code="200", success="true", **TALK),
        log("codex.sse_event", 3.5, event__kind="response.created", **TALK),
        log("codex.sse_event", 4, event__kind="response.completed", input_token_count="100", output_token_count="7",
            cached_token_count=3, tool_token_count="107", **TALK),
        log("codex.tool_decision", 4.5, tool_name="shell", call_id="c1", decision="approved", source="User", **TALK),
        log("codex.tool_result", 6, tool_name="shell", call_id="c1", duration_ms="700", success="false", **TALK),
        log("codex.tool_decision", 6.5, tool_name="shell", call_id="c2", decision="approved", source="Config", **TALK),
        log("codex.user_prompt", 10, prompt="[REDACTED]", **TALK),
        log("codex.api_request", 11, duration_ms="500", **TALK),
        log("codex.sse_event", 12, event__kind="response.completed", input_token_count="1", output_token_count="1", **TALK),
    ]  # fmt: skip


def test_codex_is_turns_calls_tools_and_a_persons_decisions():
    content = one(codex_logs())
    assert told(content) == [
        ("human_intervention", "human", "codex"),
        ("tool_call", "codex", "shell"),
        ("tool_result", "codex", "shell", "error"),
        ("stop", "codex", "ok"),
        ("stop", "codex", "ok"),
    ]
    assert [(c.start_ns / 1e9, c.end_ns / 1e9, c.input_tokens, c.status) for c in content.calls] == [
        (1.5, 2.0, None, "error"), (2.5, 4.0, 100, "ok"), (10.5, 12.0, 1, "ok"),
    ]  # fmt: skip
    assert (content.tokens.input, content.tokens.output, content.tokens.calls) == (101, 8, 2)
    assert [c.agent_id for c in content.calls] == [content.agents[i].id for i in (0, 0, 1)]


def test_an_answer_that_never_came_is_a_call_of_which_nothing_is_known():
    content = one([r for r in codex_logs() if r.attributes.get("event.kind") != "response.completed"])
    assert (content.tokens.calls, content.tokens.unknown_calls) == (2, 2)


@pytest.mark.parametrize("record", [*claude_logs(), *codex_logs()], ids=lambda r: r.name)
@pytest.mark.parametrize("value", [None, [], {"$redacted": 3, "$hmac": "ab"}, "1e400", -5, True, "x" * 300])
def test_values_of_any_type_are_read(record, value):
    for key in record.attributes:
        broken = Span(**{**{f: getattr(record, f) for f in record.__struct_fields__},
                         "attributes": {**record.attributes, key: value}})  # fmt: skip
        assert operation_of(broken).start_ns > 0
