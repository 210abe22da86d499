"""Hand-made spans of Logfire, Traceloop, openai-agents-v2, ADK, Strands, AutoGen and agent-framework as operations."""

from __future__ import annotations

import json

import pytest
from made_spans import span

from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.dialects import operation_of
from spanloop.pipeline.dialects.echoes import answer_echoes, input_echoes
from spanloop.pipeline.dialects.fields import says_error
from spanloop.pipeline.dialects.operation import Asked, text_hash
from spanloop.schemas.settings import Content
from spanloop.schemas.spans import SpanEvent


def read(scope: str, attributes: dict, *, name: str = "x", **more):
    return operation_of(
        span("s", more.pop("parent", "p"), 0, 1, name=name, scope=scope, attributes=attributes, **more)
    )


def logfire(template: str, **attributes):
    return read("logfire.openai_agents", {"logfire.msg_template": template, **attributes}, name=template)


def test_logfire_is_read_by_its_templates():
    trace = logfire("OpenAI Agents trace: {name}", name="job", group_id="talk")
    assert (trace.kind, trace.name, trace.conversation) == ("workflow", "job", "talk")
    run = logfire("Agent run: {name!r}", name="planner")
    assert (run.kind, run.agent) == ("agent_run", "planner")
    tool = logfire("Function: {name}", name="look", input='{"input": "find it"}', **{"logfire.level_num": 17})
    assert tool.tool is not None
    assert (tool.kind, tool.tool.tool, tool.status) == ("tool_call", "look", "error")
    assert tool.tool.argument_hashes == (text_hash("find it"),)
    hand = logfire("Handoff: {from_agent} → {to_agent}", from_agent="a", to_agent="b").handover
    assert hand is not None
    assert (hand.source, hand.target, hand.mode, hand.confidence) == ("a", "b", "pass_control", 1.0)
    assert logfire("Guardrail {name!r} {triggered=}", triggered=True).triggered is True
    assert logfire("Turn {turn} for agent planner", sdk_span_type="turn").kind == "unknown"
    call = logfire(
        "Chat completion with {gen_ai.request.model!r}",
        input=json.dumps([{"role": "user", "content": "go"}]),
        output=json.dumps(
            [{"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "look"}}]}]
        ),
        **{"gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 2},
    ).call
    assert call is not None
    assert (call.input_tokens, call.output_tokens, call.asked) == (3, 2, (Asked("c1", "look"),))
    assert call.task_hash == text_hash("go")


def test_logfire_templates_survive_redaction():
    attributes = {"logfire.msg_template": "Agent run: {name!r}", "name": "planner"}
    made = span(
        "s", None, 0, 1, name="Agent run: {name!r}", scope="logfire.openai_agents", attributes=attributes
    )
    run = operation_of(Redactor(Content(), b"k" * 32).span(made))
    assert (run.kind, run.agent) == ("agent_run", "planner")


def test_traceloop_names_come_before_the_suffix_and_a_handoff_may_not_say_to_whom():
    scope = "opentelemetry.instrumentation.x"
    flow = read(
        scope, {"traceloop.span.kind": "workflow", "traceloop.workflow.name": "job"}, name="job.workflow"
    )
    assert (flow.kind, flow.name) == ("workflow", "job")
    run = read(scope, {"traceloop.span.kind": "agent"}, name="planner.agent")
    assert (run.kind, run.agent) == ("agent_run", "planner")
    arguments = json.dumps({"input": "find it"})
    tool = read(
        scope, {"traceloop.span.kind": "tool", "traceloop.entity.input": arguments}, name="look.tool"
    ).tool
    assert tool is not None
    assert (tool.tool, tool.argument_hashes) == ("look", (text_hash("find it"),))
    lost = read(
        scope,
        {"traceloop.span.kind": "handoff", "gen_ai.handoff.from_agent": "a"},
        name="a → unknown.handoff",
    )
    assert lost.handover is not None
    assert (lost.kind, lost.handover.source, lost.handover.target) == ("handover", "a", "")
    named = read(scope, {"traceloop.span.kind": "handoff"}, name="a → b.handoff").handover
    assert named is not None
    assert (named.source, named.target) == ("a", "b")
    assert read(scope, {"traceloop.span.kind": "task"}, name="t.task").kind == "unknown"


def test_openai_agents_v2_root_is_no_agent_and_its_constant_name_nobody():
    scope = "opentelemetry.instrumentation.openai_agents"
    root = read(scope, {"gen_ai.operation.name": "invoke_agent"}, name="job", kind=2, parent=None)
    assert (root.kind, root.agent, root.name) == ("workflow", "", "job")
    run = read(scope, {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "planner"}, kind=3)
    assert (run.kind, run.agent) == ("agent_run", "planner")
    tool = read(
        scope,
        {
            "gen_ai.operation.name": "execute_tool",
            "gen_ai.agent.name": "OpenAI Agent",
            "gen_ai.tool.name": "look",
        },
    )
    assert (tool.kind, tool.agent) == ("tool_call", "")
    guard = read(scope, {"gen_ai.operation.name": "guardrail_check", "gen_ai.guardrail.triggered": False})
    assert (guard.kind, guard.triggered) == ("guardrail", False)


ADK = "gcp.vertex.agent"


def test_adk_transfers_with_and_without_content_and_ghosts():
    named = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "transfer_to_agent"}
    bare = read(ADK, named).handover
    told = read(ADK, {**named, "gen_ai.tool.call.arguments": '{"agent_name": "writer"}'}).handover
    old = read(ADK, {**named, "gcp.vertex.agent.tool_call_args": '{"agent_name": "writer"}'}).handover
    assert bare is not None
    assert told is not None
    assert old is not None
    assert (bare.target, told.target, old.target) == ("", "writer", "writer")
    assert bare.confidence < told.confidence
    ghost = read(ADK, {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "(merged tools)"}).tool
    assert ghost is not None
    assert ghost.role == "ghost"


def test_adk_before_the_conventions():
    assert read(ADK, {}, name="invocation").kind == "workflow"
    run = read(ADK, {"gcp.vertex.agent.session_id": "talk"}, name="agent_run [planner]")
    assert (run.kind, run.agent, run.conversation) == ("agent_run", "planner", "talk")
    answer = {"content": {"parts": [{"function_call": {"id": "c1", "name": "look"}}]},
              "usage_metadata": {"prompt_token_count": 5, "candidates_token_count": 2}}  # fmt: skip
    call = read(ADK, {"gen_ai.system": "gcp.vertex.agent", "gen_ai.request.model": "m",
                      "gcp.vertex.agent.llm_response": json.dumps(answer)}, name="call_llm").call  # fmt: skip
    assert call is not None
    assert (call.asked, call.input_tokens, call.output_tokens) == ((Asked("c1", "look"),), 5, 2)


@pytest.mark.parametrize(
    "result",
    ['{"status": "error", "error_message": "no"}', {"result": {"status": "failed"}}, {"isError": True}],
)
def test_a_tool_that_failed_by_its_result_failed(result):
    tool = {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "look",
        "gen_ai.tool.call.result": result,
    }
    assert read(ADK, tool).status == "error"
    assert says_error(result)


@pytest.mark.parametrize(
    "result", ["error", '{"status": "ok"}', {"error_rate": 1}, None, 7, [{"status": "error"}], "{"]
)
def test_other_results_say_nothing_of_failure(result):
    assert not says_error(result)


STRANDS = "strands.telemetry.tracer"


def strands(kind: str, *events: tuple[str, dict], **attributes):
    given = {"gen_ai.operation.name": kind, "gen_ai.system": "strands-agents"}
    given |= {key.replace("__", "."): value for key, value in attributes.items()}
    return read(STRANDS, given, events=tuple(SpanEvent(n, i, a) for i, (n, a) in enumerate(events)))


def test_strands_messages_stand_in_events():
    use = json.dumps([{"toolUse": {"toolUseId": "c1", "name": "look", "input": {}}}])
    result = json.dumps([{"toolResult": {"toolUseId": "c0", "status": "success"}}])
    call = strands(
        "chat", ("gen_ai.user.message", {"content": json.dumps([{"text": "go"}])}),
        ("gen_ai.tool.message", {"content": result}), ("gen_ai.choice", {"message": use}),
    ).call  # fmt: skip
    assert call is not None
    assert (call.asked, call.answered, call.fresh) == ((Asked("c1", "look"),), ("c0",), ("c0",))
    assert call.task_hash == text_hash("go")
    tool = strands("execute_tool", ("gen_ai.tool.message", {"content": '{"q": "red one"}'}), gen_ai__tool__name="look",
                   gen_ai__tool__status="error")  # fmt: skip
    assert tool.tool is not None
    assert (tool.status, tool.tool.argument_hashes) == ("error", (text_hash("red one"),))


def test_strands_engines_are_agents_called_by_their_kind_and_nodes_repeat_answers():
    engine = strands("invoke_graph")
    assert engine.run is not None
    assert (engine.kind, engine.agent, engine.run.engine) == ("agent_run", "graph", True)
    one = strands(
        "invoke_agent", ("gen_ai.choice", {"message": "Total 180 EUR, cheap.\n"}), gen_ai__agent__name="a"
    ).run
    heard = json.dumps([{"text": "\nFrom a:"}, {"text": "  - Agent: Total 180 EUR, cheap.\n"}])
    two = strands("invoke_agent", ("gen_ai.user.message", {"content": heard}), gen_ai__agent__name="b").run
    assert one is not None
    assert two is not None
    assert set(one.said) & set(two.heard)
    assert not set(two.said) & set(one.heard)
    assert strands("execute_event_loop_cycle").kind == "unknown"


def test_strands_hands_over_by_a_tool_whose_arguments_are_in_an_event():
    hand = strands("execute_tool", ("gen_ai.tool.message", {"content": '{"agent_name": "b", "message": "do"}'}),
                   gen_ai__tool__name="handoff_to_agent").handover  # fmt: skip
    assert hand is not None
    assert hand.target == "b"


def test_echoes_need_a_text_of_some_length():
    assert answer_echoes(["yes", None, 7]) == input_echoes(["no: yes"]) == ()
    assert set(answer_echoes(["One.\nA longer line of it."])) & set(
        input_echoes(["said: A longer line of it."])
    )


def test_autogen_agents_keep_their_id_and_messages_name_both_ends():
    run = read(
        "autogen-core",
        {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "a", "gen_ai.agent.id": "a_T/T"},
    )
    assert (run.kind, run.agent, run.instance) == ("agent_run", "a", "a_T/T")
    given = {
        "messaging.operation": "process",
        "messaging.destination": "b_T.(T)-A",
        "sender_agent_type": "a_T",
    }
    heard = read("autogen SingleThreadedAgentRuntime", given)
    assert heard.message is not None
    assert (heard.kind, heard.message.sender, heard.message.receiver) == ("message", "a_T/T", "b_T/T")
    body = {"message": {"type": "TextMessage", "models_usage": {"prompt_tokens": 4, "completion_tokens": 1}}}
    used = read("autogen-core", {**given, "message": json.dumps(body)}).call
    assert used is not None
    assert (used.input_tokens, used.output_tokens) == (4, 1)
    asked = {"message": {"type": "UserInputRequestedEvent", "models_usage": None}}
    assert read("autogen-core", {**given, "message": json.dumps(asked)}).kind == "human"
    topic = read(
        "autogen-core", {"messaging.operation": "process", "messaging.destination": "t.(T)-T"}
    ).message
    assert topic is not None
    assert topic.receiver == ""
    assert read("autogen-core", {"messaging.operation": "create"}).kind == "unknown"


def test_agent_framework_workflows_are_engines_and_building_them_is_none():
    scope = "agent_framework"
    run = read(scope, {"workflow.id": "w", "workflow.name": "Builder-7"}, name="workflow.run")
    assert run.run is not None
    assert (run.kind, run.agent, run.run.engine) == ("agent_run", "workflow", True)
    assert read(scope, {"workflow.id": "w"}, name="workflow.build").kind == "build"
    assert read(scope, {"executor.id": "a"}, name="executor.process a").kind == "message"
    assert read(scope, {}, name="message.send").kind == "unknown"
    assert read("", {"workflow.id": "w"}, name="workflow.run").kind == "agent_run"


def test_a_run_of_pydantic_ai_tells_what_it_put_off_and_what_it_was_resumed_with():
    asked = {"role": "assistant", "parts": [{"type": "tool_call", "id": "c1", "name": "wipe"}]}
    answered = {"role": "user", "parts": [{"type": "tool_call_response", "id": "c1"}]}
    run = {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "a",
        "gen_ai.conversation.id": "talk",
    }
    result = json.dumps({"calls": [], "approvals": [{"tool_call_id": "c1"}]})
    put_off = {**run, "final_result": result, "pydantic_ai.all_messages": json.dumps([asked])}
    resumed = {
        **run,
        "pydantic_ai.new_message_index": 1,
        "pydantic_ai.all_messages": json.dumps([asked, answered]),
    }
    redactor = Redactor(Content(), b"k" * 32)
    for treat in (lambda s: s, redactor.span):
        one = operation_of(treat(span("s", None, 0, 1, scope="pydantic-ai", attributes=put_off))).run
        two = operation_of(treat(span("t", None, 2, 3, scope="pydantic-ai", attributes=resumed))).run
        assert one is not None
        assert two is not None
        assert (one.pending, one.resumed, one.asks_human) == (("c1",), (), True)
        assert (two.pending, two.resumed, two.asks_human) == ((), ("c1",), False)


def test_a_process_is_known_by_its_instance_or_by_host_and_pid():
    made = [span("s", None, 0, 1, attributes={"gen_ai.operation.name": "chat"}, resource=r)
            for r in ({"service.instance.id": "a"}, {"service.instance.id": "b"}, {"host.name": "h", "process.pid": 1}, {})]  # fmt: skip
    names = [operation_of(s).resource for s in made]
    assert len(set(names)) == 4
    assert names[-1] == ""
