"""Random spans of the frameworks whose engines, teams and pauses join traces and runs: parts for ``forests``."""

from __future__ import annotations

import json

from hypothesis import strategies as st
from made_spans import S, hex16, hex32

from spanloop.schemas.spans import Span, SpanEvent, SpanLink

__all__ = ["framework_span"]

NAMES = ["alpha", "beta", "gamma"]
ANSWERS = ["the first answer of all", "another answer altogether"]
TEAM = "0f0f"


@st.composite
def framework_span(draw) -> Span:
    """A span of Strands, AutoGen, agent-framework, ADK, Traceloop, Logfire or a run of pydantic-ai that pauses."""
    make = draw(st.sampled_from([_strands, _autogen, _workflow, _adk, _traceloop, _logfire, _paused]))
    attributes, more = make(draw)
    start = draw(st.integers(0, 40))
    return Span(
        trace_id=hex32(draw(st.integers(1, 4))),
        span_id=hex16(draw(st.integers(1, 8))),
        parent_span_id=None if draw(st.integers(0, 2)) == 0 else hex16(draw(st.integers(1, 9))),
        start_ns=start * S,
        end_ns=draw(st.sampled_from([0, start, start + 1, start + 3, start + 30])) * S,
        status=draw(st.sampled_from(["unset", "error"])),
        resource=draw(st.sampled_from([{}, {"service.instance.id": "a"}, {"process.pid": 7}])),
        attributes=attributes,
        **{"name": "x", **more},
    )


def _strands(draw):
    kind = draw(st.sampled_from(["invoke_graph", "invoke_swarm", "invoke_agent", "execute_tool", "chat"]))
    attributes = {"gen_ai.operation.name": kind, "gen_ai.system": "strands-agents"}
    events: tuple[SpanEvent, ...] = ()
    if kind == "invoke_agent":
        attributes["gen_ai.agent.name"] = draw(st.sampled_from(NAMES))
        heard = json.dumps([{"text": f"  - Agent: {draw(st.sampled_from(ANSWERS))}"}])
        events = (
            SpanEvent("gen_ai.user.message", 1, {"content": heard}),
            SpanEvent("gen_ai.choice", 2, {"message": draw(st.sampled_from(ANSWERS))}),
        )
    elif kind == "execute_tool":
        attributes["gen_ai.tool.name"] = draw(st.sampled_from(["look", "handoff_to_agent"]))
        arguments = draw(st.sampled_from(['{"agent_name": "beta"}', "{}"]))
        events = (SpanEvent("gen_ai.tool.message", 1, {"content": arguments}),)
    return attributes, {"scope": "strands.telemetry.tracer", "events": events}


def _autogen(draw):
    name, other = draw(st.sampled_from(NAMES)), draw(st.sampled_from(NAMES))
    kind = draw(st.sampled_from(["agent", "tool", "process", "create"]))
    links = ()
    if kind != "agent" and draw(st.booleans()):
        links = (SpanLink(hex32(draw(st.integers(1, 4))), hex16(draw(st.integers(1, 8)))),)
    if kind == "agent":
        attributes = {
            "gen_ai.operation.name": "invoke_agent",
            "gen_ai.agent.name": name,
            "gen_ai.agent.id": f"{name}_{TEAM}/{TEAM}",
        }
    elif kind == "tool":
        attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": f"transfer_to_{other}"}
    else:
        body = {"source": name, "models_usage": draw(st.sampled_from([None, {"prompt_tokens": 3, "completion_tokens": 1}])),
                "type": draw(st.sampled_from(["TextMessage", "UserInputRequestedEvent"]))}  # fmt: skip
        attributes = {
            "messaging.operation": kind, "messaging.destination": f"{other}_{TEAM}.({TEAM})-A",
            "sender_agent_type": f"{name}_{TEAM}", "message": json.dumps({"message": body}),
        }  # fmt: skip
    return attributes, {"scope": "autogen-core", "links": links}


def _workflow(draw):
    name = draw(st.sampled_from(["workflow.run", "workflow.build", "executor.process alpha", "message.send"]))
    links = ()
    if name.startswith("executor") and draw(st.booleans()):
        links = (SpanLink(hex32(draw(st.integers(1, 4))), hex16(draw(st.integers(1, 8)))),)
    return {"workflow.id": "w"}, {"scope": "agent_framework", "name": name, "links": links}


def _adk(draw):
    kind = draw(st.sampled_from(["invoke_workflow", "invoke_agent", "execute_tool", "generate_content"]))
    attributes = {"gen_ai.operation.name": kind}
    if kind == "invoke_agent":
        attributes["gen_ai.agent.name"] = draw(st.sampled_from(NAMES))
    elif kind == "execute_tool":
        attributes["gen_ai.tool.name"] = draw(
            st.sampled_from(["look", "transfer_to_agent", "(merged tools)"])
        )
    return attributes, {"scope": "gcp.vertex.agent"}


def _traceloop(draw):
    kind = draw(st.sampled_from(["workflow", "agent", "tool", "handoff"]))
    name = draw(st.sampled_from([*NAMES, "alpha → unknown", "alpha → beta"]))
    attributes = {"traceloop.span.kind": kind}
    if kind == "tool":
        attributes["gen_ai.tool.call.arguments"] = '{"input": "find"}'
    return attributes, {"name": f"{name}.{kind}"}


def _logfire(draw):
    template = draw(st.sampled_from(["OpenAI Agents trace: {name}", "Agent run: {name!r}", "Function: {name}",
                                     "Handoff: {from_agent} → {to_agent}", "Guardrail {name!r} {triggered=}"]))  # fmt: skip
    attributes = {"logfire.msg_template": template, "name": draw(st.sampled_from(NAMES)), "input": '{"input": "find"}',
                  "from_agent": "alpha", "to_agent": draw(st.sampled_from([*NAMES, ""])), "triggered": draw(st.booleans())}  # fmt: skip
    return attributes, {"scope": "logfire.openai_agents"}


def _paused(draw):
    call = f"id{draw(st.integers(0, 1))}"
    asked = {"role": "assistant", "parts": [{"type": "tool_call", "id": call, "name": "look"}]}
    answered = {"role": "user", "parts": [{"type": "tool_call_response", "id": call}]}
    attributes = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "alpha",
        "gen_ai.conversation.id": "talk",
    }
    if draw(st.booleans()):
        attributes["final_result"] = json.dumps({"calls": [], "approvals": [{"tool_call_id": call}]})
        attributes["pydantic_ai.all_messages"] = json.dumps([asked])
    else:
        attributes["pydantic_ai.new_message_index"] = 1
        attributes["pydantic_ai.all_messages"] = json.dumps([asked, answered])
    return attributes, {"scope": "pydantic-ai"}
