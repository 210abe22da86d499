"""Random forests of spans: cycles, missing parents, unfinished spans, links, shared response ids, lost contexts, versions of
one span that differ."""

from __future__ import annotations

from coding_agent_spans import coding_agent_item
from framework_spans import framework_span
from hypothesis import strategies as st
from made_spans import S, hex16, hex32
from openinference_spans import openinference_span

from spanloop.schemas.ids import gateway_span_id, gateway_trace_id
from spanloop.schemas.spans import Span, SpanLink

__all__ = ["forests", "seeds"]

TEXTS = ["find", "count", ""]
NAMES = ["orchestrator", "worker", "checker"]
TOOLS = ["look", "spawn", "final_result", "transfer_to_worker"]


def _attributes(draw, kind: str) -> dict:
    fixed: dict = {"gen_ai.operation.name": kind} if kind else {}
    if draw(st.booleans()):
        fixed["gen_ai.conversation.id"] = "talk"
    if kind == "invoke_agent":
        fixed["gen_ai.agent.name"] = draw(st.sampled_from(NAMES))
        task = draw(st.sampled_from(TEXTS))
        fixed["gen_ai.input.messages"] = [{"role": "user", "parts": [{"type": "text", "content": task}]}]
    elif kind == "chat":
        if draw(st.booleans()):
            fixed["gen_ai.response.id"] = draw(st.sampled_from(["r1", "r2", "r3"]))
        fixed["gen_ai.usage.input_tokens"] = draw(st.sampled_from([0, 3, None]))
        fixed["gen_ai.output.messages"] = [{"role": "assistant", "parts": [
            {"type": "tool_call", "id": f"id{draw(st.integers(0, 3))}", "name": "look"}]}]  # fmt: skip
    elif kind == "execute_tool":
        fixed["gen_ai.tool.name"] = draw(st.sampled_from(TOOLS))
        fixed["gen_ai.tool.call.id"] = f"id{draw(st.integers(0, 3))}"
        fixed["gen_ai.tool.call.arguments"] = {"task": draw(st.sampled_from(TEXTS))}
    elif kind == "apply_guardrail":
        fixed["gen_ai.guardrail.triggered"] = draw(st.booleans())
    return fixed


@st.composite
def a_span(draw) -> Span:
    if draw(st.integers(0, 9)) == 0:
        response = draw(st.sampled_from(["r1", "r2"]))
        return Span(
            trace_id=gateway_trace_id(response), span_id=gateway_span_id(response), name="chat", scope="spanloop.gateway",
            start_ns=S, end_ns=2 * S,
            attributes={"gen_ai.operation.name": "chat", "gen_ai.response.id": response,
                        "spanloop.policy.version": "policy@v1"},
        )  # fmt: skip
    kind = draw(
        st.sampled_from(["invoke_agent", "chat", "execute_tool", "apply_guardrail", "invoke_workflow", ""])
    )
    start = draw(st.integers(0, 12))
    links = ()
    if draw(st.integers(0, 11)) == 0:
        links = (SpanLink(hex32(draw(st.integers(1, 5))), hex16(draw(st.integers(1, 8)))),)
    return Span(
        trace_id=hex32(draw(st.integers(1, 3))),
        span_id=hex16(draw(st.integers(1, 8))),
        parent_span_id=None if draw(st.integers(0, 3)) == 0 else hex16(draw(st.integers(1, 9))),
        name="x",
        start_ns=start * S,
        end_ns=draw(st.sampled_from([0, start, start + 1, start + 3, start + 9])) * S,
        status=draw(st.sampled_from(["unset", "error"])),
        scope=draw(st.sampled_from(["pydantic-ai", "other", ""])),
        attributes=_attributes(draw, kind),
        links=links,
    )


forests = st.lists(
    a_span() | openinference_span() | coding_agent_item() | framework_span(), min_size=1, max_size=18
)
seeds = st.integers(0, 2**32)
