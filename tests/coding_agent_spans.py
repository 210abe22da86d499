"""Random spans and log records of coding agents and of GenAI events, few names so that they meet each other."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from made_spans import S, hex16, hex32

from spanloop.pipeline.otlp.log_ids import UNSET_TRACE, identified
from spanloop.schemas.spans import LOG, Span

__all__ = ["coding_agent_item"]

CLAUDE_SPANS = ["interaction", "llm_request", "tool", "tool.execution", "tool.blocked_on_user", "hook"]
CLAUDE_EVENTS = ["user_prompt", "api_request", "api_error", "tool_result", "tool_decision", "other"]
CODEX_EVENTS = [
    "conversation_starts",
    "user_prompt",
    "api_request",
    "sse_event",
    "tool_decision",
    "tool_result",
]
GENAI_EVENTS = ["choice", "tool.message", "user.message", "client.inference.operation.details", "evaluation.result",
                "guardrail.result"]  # fmt: skip
IDS = st.builds(lambda kind, n: 10 * (kind + 1) + n, st.integers(0, len(CLAUDE_SPANS) - 1), st.integers(0, 1))
"""Ids of spans: versions of one span differ in what they say, not in what they are."""


def _some(draw: Any, choices: dict[str, list[Any]]) -> dict[str, Any]:
    """Each attribute with one of its values, or without."""
    found = {key: draw(st.sampled_from([None, *values])) for key, values in choices.items()}
    return {key: value for key, value in found.items() if value is not None}


def _claude(draw: Any) -> dict[str, Any]:
    return _some(draw, {
        "session.id": ["s1", "s1", "s2"], "prompt.id": ["p1", "p1", "p2"], "agent_id": ["x", "y"],
        "parent_agent_id": ["x", "y"], "subagent.id": ["scout:x"], "request_id": ["r1", "r2"],
        "tool_use_id": ["u1", "u2"], "tool_name": ["Bash", "Agent"], "source": ["user_temporary", "config"],
        "success": ["true", "false", True], "duration_ms": ["1500", 200, "x"], "input_tokens": ["3", 4],
        "output_tokens": [1],
    })  # fmt: skip


def _codex(draw: Any) -> dict[str, Any]:
    return _some(draw, {
        "conversation.id": ["c1", "c1", "c2"], "call_id": ["u1", "u2"], "tool_name": ["shell"], "model": ["m"],
        "source": ["User", "Config"], "success": ["true", "false"], "duration_ms": ["500"],
        "event.kind": ["response.completed", "response.created", "response.failed"], "input_token_count": ["9"],
        "output_token_count": ["2"],
    })  # fmt: skip


def _genai(draw: Any) -> dict[str, Any]:
    return _some(draw, {
        "gen_ai.response.id": ["r1", "r2", "r3"], "gen_ai.conversation.id": ["talk"], "finish_reason": ["stop"],
        "id": ["id1", "id2"], "gen_ai.usage.input_tokens": ["5"], "gen_ai.guardrail.result.type": ["deny", "allow"],
        "log.body": [{"role": "assistant", "tool_calls": [{"id": "id1", "name": "look"}]}, "text"],
    })  # fmt: skip


@st.composite
def coding_agent_item(draw: Any) -> Span:
    """A span of Claude Code, or a log record of it, of Codex or of GenAI."""
    names, prefix, attributes = draw(st.sampled_from([
        (CLAUDE_SPANS, "claude_code.", _claude), (CLAUDE_EVENTS, "claude_code.", _claude),
        (CODEX_EVENTS, "codex.", _codex), (GENAI_EVENTS, "gen_ai.", _genai),
    ]))  # fmt: skip
    start, kind = draw(st.integers(1, 12)) * S, 0 if names is CLAUDE_SPANS else LOG
    end = draw(st.sampled_from([0, start, start + 2 * S, start + 5 * S])) if kind != LOG else start
    trace = hex32(draw(st.integers(1, 3)))
    if kind == LOG and draw(st.booleans()):
        trace = UNSET_TRACE
    parent = None if trace == UNSET_TRACE or draw(st.booleans()) else hex16(draw(st.integers(1, 9) | IDS))
    name = draw(st.sampled_from(names))
    item = Span(
        trace_id=trace,
        span_id=hex16(10 * (names.index(name) + 1) + draw(st.integers(0, 1))),
        parent_span_id=parent,
        name=prefix + name,
        start_ns=start,
        end_ns=end,
        kind=kind,
        scope="com.anthropic.claude_code" if prefix == "claude_code." else "logs",
        attributes=attributes(draw),
    )
    return identified(item)
