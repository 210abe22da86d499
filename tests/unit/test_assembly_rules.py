"""What counts as which event, rule by rule."""

from __future__ import annotations

import json

import pytest
from made_spans import TRACE, S, agent, chat, gateway, hex16, hex32, one, span, told, tool

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.schemas.ids import orchestration_id
from spanloop.schemas.orchestration import EDGE_TYPES
from spanloop.schemas.spans import SpanLink


def desk(second_tool_end: float = 5.0, *more):
    """One tool that runs a specialist and then a checker; the model looks at the result and ends."""
    return [
        agent("root", None, 0, 10, "Orchestrator"),
        chat("c1", "root", 0.1, 1, asks={"id1": "spawn"}),
        tool("t1", "root", 1, second_tool_end, "spawn", call="id1"),
        agent("spec", "t1", 1.5, 2.5, "specialist"),
        agent("chk", "t1", 2.6, 4, "checker"),
        chat("c2", "root", 6, 7),
        *more,
    ]


def test_two_agents_under_one_tool_are_two_delegations_of_one_decision():
    content = one(desk())
    assert told(content) == [
        ("orchestrator_decision", "Orchestrator"),
        ("delegate", "Orchestrator", "specialist", "return_to_caller"),
        ("spawn", "Orchestrator", "specialist"),
        ("return", "specialist", "Orchestrator", "ok"),
        ("despawn", "specialist"),
        ("delegate", "Orchestrator", "checker", "return_to_caller"),
        ("spawn", "Orchestrator", "checker"),
        ("return", "checker", "Orchestrator", "ok"),
        ("despawn", "checker"),
        ("aggregate", "Orchestrator"),
        ("stop", "Orchestrator", "ok"),
    ]
    by_type = {e.type: e for e in content.events}
    assert by_type["orchestrator_decision"].call_id == by_type["delegate"].call_id == hex16("c1")
    assert by_type["stop"].call_id == by_type["aggregate"].call_id == hex16("c2")
    assert [(a.name, a.role, a.parent_id) for a in content.agents] == [
        ("Orchestrator", "orchestrator", ""),
        ("specialist", "specialist", hex16("root")),
        ("checker", "checker", hex16("root")),
    ]
    assert {e.confidence for e in content.events} == {1.0}


def test_edges_tell_who_caused_what():
    content = one(desk())
    by_id = {e.id: e for e in content.events}
    told_edges = {(by_id[e.src].type, by_id[e.dst].type, e.type) for e in content.edges}
    assert ("orchestrator_decision", "delegate", "causal") in told_edges
    assert ("delegate", "spawn", "spawn") in told_edges
    assert ("return", "aggregate", "aggregate") in told_edges
    assert ("aggregate", "stop", "temporal") in told_edges
    assert {e.type for e in content.edges} <= set(EDGE_TYPES)


def test_results_of_two_rounds_are_two_aggregates():
    second = [
        chat("c3", "root", 7.1, 7.2, asks={"id2": "spawn"}),
        tool("t2", "root", 7.3, 8.5, "spawn", call="id2"),
        agent("spec2", "t2", 7.4, 7.5, "specialist"),
        agent("chk2", "t2", 7.6, 8, "checker"),
        chat("c4", "root", 9, 9.5),
    ]
    content = one(desk(5.0, *second))
    assert [e.call_id for e in content.events if e.type == "aggregate"] == [hex16("c2"), hex16("c4")]
    assert len(content.agents) == 5
    assert sorted({a.role for a in content.agents}) == ["checker", "orchestrator", "specialist"]


def test_results_one_by_one_are_one_aggregate_at_the_turn_that_saw_all():
    spans = [
        agent("root", None, 0, 10),
        chat("c1", "root", 0, 1),
        tool("t1", "root", 1, 2),
        agent("a", "t1", 1, 2),
        chat("c2", "root", 2, 3),
        tool("t2", "root", 3, 4),
        agent("b", "t2", 3, 4),
        chat("c3", "root", 5, 6),
    ]
    content = one(spans)
    assert [e.call_id for e in content.events if e.type == "aggregate"] == [hex16("c3")]
    assert told(content, "orchestrator_decision") == [("orchestrator_decision", "root")] * 2


def test_control_passed_on_by_an_output_function_returns_to_the_user():
    spans = [
        agent("root", None, 0, 10),
        chat("c1", "root", 0, 1, asks={"x": "final_result"}),
        tool("out", "root", 1, 9, "final_result", call="x", scope="pydantic-ai"),
        agent("writer", "out", 2, 8),
    ]
    assert told(one(spans)) == [
        ("orchestrator_decision", "root"),
        ("delegate", "root", "writer", "pass_control"),
        ("spawn", "root", "writer"),
        ("return", "writer", "user", "ok"),
        ("despawn", "writer"),
        ("stop", "root", "ok"),
    ]


def test_a_sub_agent_that_passes_control_on_decides_nothing_and_its_peer_returns_to_the_caller():
    spans = [
        agent("root", None, 0, 20),
        chat("c1", "root", 0, 1),
        tool("t1", "root", 1, 10),
        agent("mid", "t1", 1, 10),
        chat("m1", "mid", 2, 3),
        tool("out", "mid", 3, 9, "final_result", scope="pydantic-ai"),
        agent("leaf", "out", 4, 8),
        chat("c2", "root", 11, 12),
    ]
    content = one(spans)
    assert told(content, "orchestrator_decision") == [("orchestrator_decision", "root")]
    assert told(content, "return") == [("return", "leaf", "root", "ok")]


def test_leaf_tools_only_and_errors_by_status():
    spans = [
        agent("root", None, 0, 10),
        chat("c1", "root", 0, 1, asks={"a": "look", "b": "boom", "r": "bad", "d": "risky"}),
        tool("look", "root", 1, 2, call="a"),
        tool("boom", "root", 2.5, 3, call="b", error=True),
        tool("fin", "root", 3, 4, "final_result", scope="pydantic-ai"),
        tool("bad", "root", 4, 5, call="r", scope="pydantic-ai", error=True,
             attributes={"pydantic_ai.tool.failure_stage": "validation"}),
        tool("risky", "root", 5, 6, call="d", scope="pydantic-ai",
             attributes={"pydantic_ai.tool.deferral.name": "ApprovalRequired"}),
    ]  # fmt: skip
    content = one(spans)
    assert told(content, "tool_call", "tool_result") == [
        ("tool_call", "root", "look"),
        ("tool_result", "root", "look", "ok"),
        ("tool_call", "root", "boom"),
        ("tool_result", "root", "boom", "error"),
    ]
    (call,) = content.calls
    assert {t.id: t.status for t in call.tool_calls} == {
        "a": "ok",
        "b": "error",
        "r": "rejected",
        "d": "deferred",
    }


def test_an_unfinished_tool_has_no_result():
    content = one([agent("root", None, 0, 10), tool("t", "root", 1, 0)])
    assert told(content, "tool_call", "tool_result") == [("tool_call", "root", "t")]
    assert "unfinished_spans:1" in content.flags


def test_a_delegation_is_found_by_tool_call_id_not_by_order():
    spans = desk()
    late = chat("c1b", "root", 0.9, 0.95, asks={"other": "look"})
    content = one([*spans, late])
    assert {e.call_id for e in content.events if e.type == "delegate"} == {hex16("c1")}


def test_without_model_spans_overlapping_delegations_are_one_decision():
    spans = [
        agent("m", None, 0, 20),
        tool("t1", "m", 1, 5), agent("a", "t1", 1, 5),
        tool("t2", "m", 2, 6), agent("b", "t2", 2, 6),
        tool("t3", "m", 7, 9), agent("c", "t3", 7, 9),
    ]  # fmt: skip
    content = one(spans)
    assert told(content, "orchestrator_decision") == [("orchestrator_decision", "m")] * 2
    assert told(content, "aggregate") == [("aggregate", "m")]
    assert {e.confidence for e in content.events if e.type == "orchestrator_decision"} == {0.7}


@pytest.mark.parametrize(
    ("attributes", "rule", "confidence"),
    [
        ({"gen_ai.operation.name": "agent_handoff", "gen_ai.handoff.to_agent": "writer"}, "handover_keys", 1.0),
        ({"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "transfer_to_writer"}, "transfer_tool", 0.9),
        (
            {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "handoff_to_agent",
             "gen_ai.tool.call.arguments": '{"agent_name": "Writer"}'},
            "transfer_tool", 0.9,
        ),
        (
            {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": "go", "gen_ai.transfer.target.name": "writer",
             "gen_ai.transfer.mode": "pass_control"},
            "handover_keys", 1.0,
        ),
    ],
)  # fmt: skip
def test_a_transfer_delegates_to_the_next_run_of_its_target(attributes, rule, confidence):
    spans = [
        span("flow", None, 0, 30, attributes={"gen_ai.operation.name": "invoke_workflow"}),
        agent("first", "flow", 0, 10),
        chat("c1", "first", 0, 1),
        span("h", "first", 2, 3, attributes=attributes),
        agent("w", "flow", 11, 20, "writer"),
    ]
    content = one(spans)
    assert told(content) == [
        ("orchestrator_decision", "first"),
        ("delegate", "first", "writer", "pass_control"),
        ("spawn", "first", "writer"),
        ("return", "writer", "user", "ok"),
        ("despawn", "writer"),
        ("stop", "first", "ok"),
    ]
    delegate = next(e for e in content.events if e.type == "delegate")
    assert (delegate.rule, delegate.confidence) == (rule, confidence)


def test_handing_back_to_a_run_that_exists_spawns_nobody():
    spans = [
        span("flow", None, 0, 30, attributes={"gen_ai.operation.name": "invoke_workflow"}),
        agent("triage", "flow", 0, 29),
        agent("worker", "flow", 5, 10),
        tool("h", "worker", 9, 10, "transfer_to_triage"),
    ]
    assert told(one(spans), "delegate", "spawn") == [("delegate", "worker", "triage", "pass_control")]


def test_a_run_under_a_missing_parent_is_its_only_roots_with_little_confidence():
    spans = [agent("root", None, 0, 10), agent("lost", "never", 2, 4)]
    content = one(spans)
    assert told(content, "spawn") == [("spawn", "root", "lost")]
    assert {e.confidence for e in content.events if e.agent == "lost"} == {0.5}
    assert "orphan_spans:1" in content.flags


def test_a_run_whose_caller_sends_its_spans_elsewhere_still_stops():
    (stop,) = [e for e in one([agent("only", "elsewhere", 0, 3)]).events if e.type == "stop"]
    assert stop.confidence == 0.5


def test_the_run_id_finds_the_agent_that_a_missing_parent_hides():
    run = {"gen_ai.agent.call.id": "run-7"}
    spans = [
        agent("root", None, 0, 10),
        agent("sub", "root", 1, 9, attributes=run),
        tool("t", "never", 2, 3, "look", attributes={**run, "gen_ai.agent.name": "sub"}),
    ]
    content = one(spans)
    (call,) = [e for e in content.events if e.type == "tool_call"]
    assert call.agent_id == hex16("sub")


def lost_context(conversation: str = "chat-42", text: str = "find sights", start: float = 2.0):
    ask = {
        "gen_ai.tool.call.arguments": json.dumps({"task": "find sights"}),
        "gen_ai.conversation.id": "chat-42",
    }
    task = json.dumps([{"role": "user", "parts": [{"type": "text", "content": text}]}])
    run = {"gen_ai.input.messages": task, "gen_ai.conversation.id": conversation}
    return [
        agent("root", None, 0, 10, trace=1),
        tool("t", "root", 1, 5, "ask", trace=1, attributes=ask),
        agent("sub", None, start, 4, trace=2, attributes=run),
    ]


def test_a_lost_context_is_joined_by_conversation_text_and_time():
    content = one(lost_context())
    assert len(content.trace_ids) == 2
    (spawn,) = [e for e in content.events if e.type == "spawn"]
    assert (spawn.agent, spawn.to, spawn.rule, spawn.confidence) == (
        "root",
        "sub",
        "task_is_tool_argument",
        0.8,
    )


@pytest.mark.parametrize("change", [{"conversation": "chat-43"}, {"text": "other"}, {"start": 0.5}])
def test_without_all_three_it_is_not(change):
    assert len(assemble_spans(lost_context(**change), "default")) == 2


def test_two_runs_of_one_conversation_stay_two_orchestrations():
    talk = {"gen_ai.conversation.id": "chat-1"}
    runs = [
        agent("a", None, 0, 1, trace=1, attributes=talk),
        agent("a", None, 2, 3, trace=2, attributes=talk),
    ]
    assert len(assemble_spans(runs, "default")) == 2


def test_the_gateways_span_and_the_frameworks_are_one_call():
    spans = [
        agent("root", None, 0, 10),
        chat("c1", "root", 1, 3, response="r-1", usage=(100, 50), asks={"x": "look"}),
        gateway("r-1", 1.1, 2.9, spanloop__prompt_token_ids=[1, 2], spanloop__response_token_ids=[5, 6],
                spanloop__response_logprobs=[-0.5, 0.0], spanloop__menus=[[[5, -0.5], [7, -0.9]], [[6, 0.0]]],
                spanloop__task__key="k"),
    ]  # fmt: skip
    content = one(spans, source="gateway")
    (call,) = content.calls
    assert (call.id, call.agent_id, call.input_tokens, call.output_tokens) == ("r-1", hex16("root"), 7, 3)
    assert (call.policy_version, call.harness, call.task_key) == ("policy@v3", "harness-1", "k")
    assert (call.start_ns, call.end_ns) == (1 * S, 3 * S)
    assert (call.prompt_token_ids, call.response_token_ids, call.logprobs) == ((1, 2), (5, 6), (-0.5, 0.0))
    assert [[(o.token_id, o.logprob) for o in menu] for menu in call.menus] == [
        [(5, -0.5), (7, -0.9)],
        [(6, 0.0)],
    ]
    assert [t.name for t in call.tool_calls] == ["look"]
    assert len(call.span_ids) == 2
    assert content.tokens.calls == 1
    assert content.flags == ("joined_by_response_id:1",)
    assert content.orchestration_id == orchestration_id("default", [TRACE])


def test_equal_response_ids_of_two_frameworks_spans_join_nothing():
    runs = [
        part
        for trace in (1, 2)
        for part in (
            agent("a", None, 0, 9, trace=trace),
            chat("c", "a", 1, 2, trace=trace, response="scripted-0"),
        )
    ]
    assert len(assemble_spans(runs, "default")) == 2


def test_an_agent_cannot_speak_as_the_gateway():
    spans = [agent("root", None, 0, 10), chat("c1", "root", 1, 3, response="r-1"), gateway("r-1", 1, 2)]
    contents = assemble_spans(spans, "default", source="otlp")
    assert {call.policy_version for c in contents for call in c.calls} == {""}


def test_a_link_joins_traces_and_names_them():
    linked = agent("b", None, 2, 3, trace=2, links=(SpanLink(hex32(1), hex16("a")),))
    content = one([agent("a", None, 0, 5, trace=1), linked])
    assert content.trace_ids == (hex32(1), hex32(2))
    assert "joined_by_link:1" in content.flags


def test_two_instrumentations_of_one_call_run_and_tool_count_once():
    spans = [
        agent("root", None, 0, 10, scope="outer"),
        agent("root2", "root", 0.1, 9.9, "root", scope="inner"),
        chat("c", "root2", 1, 3, scope="outer", usage=(5, 5)),
        chat("c2", "c", 1.1, 2.9, scope="inner", usage=(5, 5)),
        tool("t", "root2", 4, 6, "look", scope="outer"),
        tool("t2", "t", 4.1, 5.9, "look", scope="inner"),
    ]
    content = one(spans)
    assert [a.name for a in content.agents] == ["root"]
    assert content.tokens.calls == 1
    assert told(content) == [
        ("tool_call", "root", "look"),
        ("tool_result", "root", "look", "ok"),
        ("stop", "root", "ok"),
    ]
    assert {e.agent_id for e in content.events} == {hex16("root")}


def test_guardrails_and_content_filters_are_safety_events():
    verdict = {"gen_ai.operation.name": "apply_guardrail", "gen_ai.guardrail.triggered": True}
    filtered = {"gen_ai.response.finish_reasons": ["content_filter"]}
    spans = [
        agent("root", None, 0, 10),
        span("g", "root", 1, 2, attributes=verdict),
        chat("c", "root", 3, 4, attributes=filtered),
    ]
    events = [e for e in one(spans).events if e.type == "safety_event"]
    assert [(e.rule, e.triggered) for e in events] == [("guardrail_span", True), ("content_filter", True)]


def test_totals_come_from_the_agents_only_where_there_are_no_calls():
    totals = {"gen_ai.usage.input_tokens": 40, "gen_ai.usage.output_tokens": 4}
    alone = one([agent("root", None, 0, 10, attributes=totals)])
    assert (alone.tokens.input, alone.tokens.output, alone.flags) == (40, 4, ("usage_from_rollup",))
    both = one([agent("root", None, 0, 10, attributes=totals), chat("c", "root", 1, 2)])
    assert (both.tokens.input, both.tokens.output) == (10, 2)


def test_what_holds_no_operation_is_no_orchestration():
    web = span("GET /", None, 0, 1)
    build = span("b", None, 0, 1, trace=2, attributes={"gen_ai.operation.name": "create_agent"})
    assert assemble_spans([web, build], "default") == []


def test_an_error_of_the_entry_run_is_the_stops():
    assert told(one([agent("root", None, 0, 1, error=True)])) == [("stop", "root", "error")]
