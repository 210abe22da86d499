"""Random spans of OpenInference for the forests: nodes of graphs, hand-overs, delegation tools, guessed agents, guardrails."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st
from made_spans import S, hex16, hex32

from spanloop.schemas.spans import Span

__all__ = ["openinference_span"]

NODES = ["orchestrator", "worker", "checker"]


def _node(draw: Any) -> dict[str, Any]:
    name = draw(st.sampled_from(NODES))
    metadata = {
        "langgraph_node": name,
        "langgraph_step": draw(st.integers(1, 4)),
        "langgraph_checkpoint_ns": f"{name}:{draw(st.integers(1, 4))}",
    }
    target = draw(st.sampled_from(NODES))
    result = draw(
        st.sampled_from(
            [
                {"goto": target},
                {"goto": [f"Send(node='{target}', arg={{}})"]},
                {"goto": {"$redacted": 6, "$hmac": "ab"}},
                {},
                target,
            ]
        )
    )
    kind = draw(st.sampled_from(["CHAIN", "AGENT"]))
    return {
        "openinference.span.kind": kind,
        "metadata": json.dumps(metadata),
        "output.value": result if isinstance(result, str) else json.dumps(result),
    }


def _tool(draw: Any) -> dict[str, Any]:
    arguments = draw(st.sampled_from([{"coworker": "worker"}, {"agent_name": "checker"}, {"task": "find"}]))
    return {
        "openinference.span.kind": "TOOL",
        "tool.name": draw(
            st.sampled_from(["look", "delegate_work", "transfer_to_worker", "transfer_to_agent"])
        ),
        "input.value": json.dumps(arguments),
        "output.value": draw(
            st.sampled_from(["fine", '{"data": {"status": "error", "tool_call_id": "id1"}}'])
        ),
    }


def _attributes(draw: Any, kind: str) -> dict[str, Any]:
    if kind == "node":
        return _node(draw)
    if kind == "tool":
        return _tool(draw)
    found: dict[str, Any] = {"openinference.span.kind": kind}
    if kind == "LLM":
        found |= {
            "llm.token_count.prompt": draw(st.sampled_from([0, 7])),
            "llm.output_messages.0.message.tool_calls.0.tool_call.id": f"id{draw(st.integers(0, 3))}",
            "llm.input_messages.0.message.role": "user",
            "llm.input_messages.0.message.content": draw(st.sampled_from(["find", "count"])),
        }
    elif kind == "AGENT":
        if draw(st.booleans()):
            found["graph.node.id"] = draw(st.sampled_from(NODES))
        if draw(st.booleans()):
            found["graph.node.parent_id"] = draw(st.sampled_from(NODES))
    elif kind == "CHAIN" and draw(st.booleans()):
        found["crew_key"] = "k"
    return found


@st.composite
def openinference_span(draw: Any) -> Span:
    kind = draw(
        st.sampled_from(
            ["node", "node", "tool", "LLM", "AGENT", "CHAIN", "GUARDRAIL", "EVALUATOR", "handoff"]
        )
    )
    attributes = {"openinference.span.kind": "TOOL"} if kind == "handoff" else _attributes(draw, kind)
    names = {
        "handoff": "handoff to worker",
        "LLM": draw(st.sampled_from(["ChatOpenAI", "invoke_agent worker"])),
        "CHAIN": "team.kickoff",
    }
    start = draw(st.integers(0, 12))
    return Span(
        trace_id=hex32(draw(st.integers(1, 3))),
        span_id=hex16(draw(st.integers(1, 8))),
        parent_span_id=None if draw(st.integers(0, 3)) == 0 else hex16(draw(st.integers(1, 9))),
        name=names.get(kind, "x"),
        start_ns=start * S,
        end_ns=draw(st.sampled_from([0, start, start + 1, start + 3, start + 9])) * S,
        status=draw(st.sampled_from(["ok", "error"])),
        status_message=draw(st.sampled_from(["", "Guardrail tripwire triggered: {'guardrail': 'x'}"])),
        scope=draw(
            st.sampled_from(
                ["openinference.instrumentation.langchain", "openinference.instrumentation.openai_agents", ""]
            )
        ),
        attributes=attributes,
    )
