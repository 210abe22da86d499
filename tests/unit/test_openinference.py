"""OpenInference's spans as operations: flattened messages with holes, hand-overs, nodes, runs that only look like ones."""

from __future__ import annotations

import json

import pytest
from made_spans import span

from spanloop.pipeline.dialects import operation_of
from spanloop.pipeline.dialects.flattened import asked_in, read_conversation
from spanloop.pipeline.dialects.langgraph import goto_of
from spanloop.pipeline.dialects.operation import Asked, Handover, text_hash

SCOPE = "openinference.instrumentation."


def read(kind, name="x", scope="langchain", error=False, parent="p", message="", **attributes):
    named = {key.replace("__", "."): value for key, value in attributes.items()}
    return operation_of(
        span("s", parent, 0, 1, name=name, scope=SCOPE + scope, error=error, status_message=message,
             attributes={"openinference.span.kind": kind, **named})
    )  # fmt: skip


def asked(call, i, name=None, id_=None):
    stem = f"llm.output_messages.0.message.tool_calls.{i}.tool_call."
    return {**call, **({stem + "function.name": name} if name else {}), **({stem + "id": id_} if id_ else {})}


@pytest.mark.parametrize(
    ("kind", "meant"),
    [("LLM", "model_call"), ("TOOL", "tool_call"), ("AGENT", "agent_run"), ("GUARDRAIL", "guardrail"),
     ("EVALUATOR", "evaluation"), ("CHAIN", "unknown"), ("RETRIEVER", "unknown"), ("PROMPT", "unknown"), ("new", "unknown")],
)  # fmt: skip
def test_kinds(kind, meant):
    assert read(kind).kind == meant


def test_a_model_call_with_usage_and_messages():
    attributes = asked(asked({}, 1, "b", "id-b"), 0, "a", "id-a")
    attributes |= {
        "llm.model_name": "m", "llm.token_count.prompt": 12, "llm.token_count.completion": "3", "llm.finish_reason": "stop",
        "llm.input_messages.0.message.role": "user", "llm.input_messages.0.message.content": "go",
        "llm.input_messages.1.message.role": "assistant",
        "llm.input_messages.2.message.role": "tool", "llm.input_messages.2.message.tool_call_id": "id-0",
    }  # fmt: skip
    call = read("LLM", **attributes).call
    assert call is not None
    assert (call.model, call.input_tokens, call.output_tokens, call.finish_reasons) == ("m", 12, 3, ("stop",))
    assert call.asked == (Asked("id-a", "a"), Asked("id-b", "b"))
    assert (call.answered, call.fresh, call.task_hash) == (("id-0",), ("id-0",), text_hash("go"))


def test_keys_that_a_limit_dropped_cost_only_themselves():
    talk = read_conversation(asked(asked({}, 0, id_="id-a"), 2, name="c"))
    assert talk.asked == (Asked("id-a", ""), Asked("", "c"))
    whole = json.dumps([{"role": "assistant", "tool_calls": [{"id": "i", "function": {"name": "f"}}]}])
    cut = operation_of(
        span(
            "s",
            None,
            0,
            1,
            dropped_attributes=3,
            attributes={"openinference.span.kind": "LLM", "output.value": whole},
        )
    )
    assert cut.call is not None
    assert cut.call.asked == (Asked("i", "f"),)
    assert cut.flags == ("truncated_attributes",)


@pytest.mark.parametrize(
    "key",
    [
        "llm.output_messages.x.message.tool_calls.y.tool_call.id",
        "llm.output_messages.tool_call.id",
        "llm.input_messages..message.role",
        "llm.input_messages.99999999999999999999.message.role",
        "llm.input_messages.²",
    ],
)
def test_broken_keys_do_not_raise(key):
    read_conversation({key: "user"})
    assert read("LLM", **{key: "user"}).kind == "model_call"


@pytest.mark.parametrize(
    "answer",
    [
        {"content": {"parts": [{"text": "x"}, {"function_call": {"name": "f", "id": "i"}}]}},
        [{"tool_calls": [{"id": "i", "function": {"name": "f"}}]}],
        {"generations": [[{"message": {"kwargs": {"tool_calls": [{"id": "i", "name": "f"}]}}}]]},
        [{"type": "function_call", "call_id": "i", "name": "f"}],
        {"choices": [{"message": {"tool_calls": [{"id": "i", "function": {"name": "f"}}]}}]},
    ],
)
def test_the_raw_answer_tells_the_tool_calls_of_each_client(answer):
    assert asked_in(json.dumps(answer)) == (Asked("i", "f"),)


def test_a_call_written_onto_its_run_is_both_and_keeps_only_the_calls_of_the_last_answer():
    stale = asked(asked({}, 0, "done"), 1, "stale")
    stale |= {
        f"llm.input_messages.{i}.message.role": r
        for i, r in enumerate(["user", "model", "tool", "model", "tool"])
    }
    stale |= {"output.value": '{"content": {"parts": [{"function_call": {"name": "done"}}]}}', "llm.token_count.prompt": 5,
              "gen_ai.operation.name": "generate_content", "gen_ai.agent.name": "desk", "gen_ai.conversation.id": "c"}  # fmt: skip
    operation = read("LLM", "invoke_agent desk", "google_adk", **stale)
    assert (operation.kind, operation.agent, operation.conversation) == ("agent_run", "desk", "c")
    assert operation.call is not None
    assert operation.call.asked == (Asked("", "done"),)
    assert (operation.call.lost, operation.call.input_tokens) == (2, 5)
    assert "overwritten_calls" in operation.flags


@pytest.mark.parametrize(
    ("name", "attributes", "agent", "guessed"),
    [
        ("x", {"agent.name": "desk", "graph.node.id": "n7"}, "desk", False),
        ("x", {"graph.node.id": "desk"}, "desk", False),
        ("agent_run [desk]", {}, "desk", False),
        ("desk.run", {}, "desk", False),
        ("desk._execute_core", {}, "desk", False),
        ("desk.on_messages_stream", {}, "desk", True),
        ("AgentExecutor", {}, "", True),
    ],
)
def test_who_runs(name, attributes, agent, guessed):
    operation = read("AGENT", name, "other", **attributes)
    assert operation.run is not None
    assert (operation.agent, operation.run.guessed) == (agent, guessed)


def test_the_root_of_an_openai_agents_trace_is_the_workflow():
    assert read("AGENT", "job", "openai_agents", parent=None).kind == "workflow"
    assert read("AGENT", "job", "openai_agents", **{"agent.name": "a"}).kind == "agent_run"


def test_an_engine_is_called_by_its_kind():
    crew = read("CHAIN", "night shift.kickoff", "crewai", crew_key="k")
    team = read("CHAIN", "SelectorGroupChat.run_stream", "autogen_agentchat")
    for operation, kind in ((crew, "crew"), (team, "team")):
        assert operation.run is not None
        assert (operation.kind, operation.agent, operation.run.engine) == ("workflow", kind, True)


def test_hand_overs():
    told = read("TOOL", "handoff to desk", "openai_agents", input__value="front", output__value="desk")
    assert (told.kind, told.handover) == ("handover", Handover("front", "desk", "pass_control"))
    named = read("TOOL", "t", tool__name="transfer_to_agent", input__value='{"agent_name": "desk"}')
    assert named.handover is not None
    assert (named.handover.target, named.handover.mode) == ("desk", "pass_control")
    untold = read("TOOL", "t", tool__name="transfer_to_agent", input__value="")
    assert untold.handover is not None
    assert (untold.handover.target, untold.handover.rule) == ("", "next_agent")


@pytest.mark.parametrize(
    ("tool", "arguments", "target"),
    [
        ("Delegate work to coworker", {"task": "t", "coworker": "desk"}, "desk"),
        ("task", {"description": "d", "subagent_type": "desk"}, "desk"),
        ("delegate_task_to_member", {"member_id": "desk"}, "desk"),
        ("look", {"agent_name": "desk"}, None),
        ("look", {"coworker": 7.5}, "7.5"),
        ("look", {"coworker": {"x": 1}}, None),
    ],
)
def test_a_delegation_tool_names_an_agent(tool, arguments, target):
    handover = read("TOOL", tool__name=tool, input__value=json.dumps(arguments)).handover
    assert (handover.target if handover else None) == target
    assert handover is None or handover.mode == "return_to_caller"


@pytest.mark.parametrize(
    ("result", "call_id", "status"),
    [
        ('{"type": "tool", "data": {"tool_call_id": "i", "status": "error"}}', "i", "error"),
        ('{"type": "tool", "data": {"tool_call_id": "i", "status": "success"}}', "i", ""),
        ('{"id": "x", "name": "f", "response": {"status": "error"}}', "", "error"),
        ('{"content": [], "isError": true}', "", "error"),
        ("An error occurred while running the tool. Please try again.", "", "error"),
        ('{"status": "error"', "", ""),
        ("status: error", "", ""),
        (7.0, "", ""),
    ],
)
def test_a_result_tells_its_call_and_that_it_failed(result, call_id, status):
    operation = read("TOOL", tool__name="f", output__value=result)
    assert operation.tool is not None
    assert (operation.tool.call_id, operation.status) == (call_id, status)


@pytest.mark.parametrize(
    ("result", "targets"),
    [
        ('{"goto": "a"}', ("a",)),
        ('{"goto": ["Send(node=\'a\', arg={})", "Send(node=\\"b c\\", arg={})"]}', ("a", "b c")),
        ('{"goto": [{"node": "a"}, {"$redacted": 3, "$hmac": "ff"}]}', ("a", "")),
        ("[\"Send(node='a', arg={})\"]", ("a",)),
        ("a", ("a",)),
        ("__end__", ()),
        ("Plan: go there, then (maybe) home", ()),
        ('{"goto": 7}', ()),
        ('{"goto": "a', ()),
        (None, ()),
        ({"goto": "a"}, ("a",)),
    ],
)
def test_where_a_node_sends_its_graph(result, targets):
    assert goto_of(result) == targets


def test_a_node_repeats_its_metadata_and_middleware_is_none():
    metadata = {
        "langgraph_node": "desk",
        "langgraph_step": 3,
        "langgraph_checkpoint_ns": "desk:1",
        "thread_id": "t",
    }
    operation = read("CHAIN", metadata=json.dumps(metadata), output__value='{"goto": "next"}')
    assert operation.node is not None
    assert (operation.node.name, operation.node.instance, operation.node.step) == ("desk", "desk:1", 3)
    assert (operation.node.goto, operation.conversation) == (("next",), "t")
    middleware = {**metadata, "langgraph_node": "Summary.before_model"}
    assert read("CHAIN", metadata=json.dumps(middleware)).node is None


def test_a_turn_names_the_guardrail_that_ended_it():
    message = "Guardrail tripwire triggered: {'guardrail': 'no cards'}"
    assert read("CHAIN", "turn", "openai_agents", error=True, message=message).guardrail == "no cards"
    assert read("CHAIN", "turn", "openai_agents", message=message).guardrail == ""


def test_two_dialects_on_one_span_complete_each_other():
    both = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "f", "gen_ai.tool.call.id": "i",
            "gen_ai.agent.name": "desk", "error.type": "boom"}  # fmt: skip
    operation = read("TOOL", tool__name="f", **both)
    assert operation.tool is not None
    assert (operation.tool.call_id, operation.agent, operation.status) == ("i", "desk", "error")
    flow = {"gen_ai.operation.name": "invoke_workflow", "gen_ai.workflow.name": "job"}
    assert (read("CHAIN", **flow).kind, read("CHAIN", **flow).name) == ("workflow", "job")
    usage = {"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 9, "gen_ai.response.id": "r"}
    call = read("LLM", llm__token_count__prompt=4, **usage).call
    assert call is not None
    assert (call.input_tokens, call.response_id) == (4, "r")
