"""Engines that run agents as nodes: who is an agent, who sent whom, who gets the result; and runs without a span."""

from __future__ import annotations

import json

import pytest
from made_spans import one, span, told

from spanloop.schemas.spans import redacted

LANGCHAIN = "openinference.instrumentation.langchain"


def chain(key, parent, start, end, name="", scope=LANGCHAIN, **attributes):
    named = {k.replace("__", "."): v for k, v in attributes.items()}
    return span(
        key,
        parent,
        start,
        end,
        name=name,
        scope=scope,
        attributes={"openinference.span.kind": "CHAIN", **named},
    )


def node(key, parent, start, end, name, step, goto=None, **attributes):
    metadata = {"langgraph_node": name, "langgraph_step": step, "langgraph_checkpoint_ns": f"{name}:{key}"}
    result = {"messages": []} if goto is None else {"goto": goto}
    given = {"output.value": json.dumps(result), **attributes}
    return chain(key, parent, start, end, name, metadata=json.dumps(metadata), **given)


def inner(key, parent, start, end, name, of, result):
    """A function inside node ``of``, such as the one of a conditional edge."""
    metadata = {
        "langgraph_node": of[0],
        "langgraph_step": of[2],
        "langgraph_checkpoint_ns": f"{of[0]}:{of[1]}",
    }
    return chain(key, parent, start, end, name, metadata=json.dumps(metadata), output__value=result)


def llm(key, parent, start, end, asks=None):
    attributes = {
        "openinference.span.kind": "LLM",
        "llm.token_count.prompt": 5,
        "llm.token_count.completion": 1,
    }
    for i, (call, name) in enumerate((asks or {}).items()):
        stem = f"llm.output_messages.0.message.tool_calls.{i}.tool_call."
        attributes |= {stem + "id": call, stem + "function.name": name}
    return span(key, parent, start, end, scope=LANGCHAIN, attributes=attributes)


def use(key, parent, start, end, name, arguments=None, **more):
    attributes = {
        "openinference.span.kind": "TOOL",
        "tool.name": name,
        "input.value": json.dumps(arguments or {}),
    }
    return span(key, parent, start, end, scope=LANGCHAIN, attributes=attributes, **more)


def routed(*more, first=("east", "west"), last="west"):
    """A router that sends two workers off at once, sees their results, and passes control on."""
    sends = [f"Send(node='{name}', arg={{}})" for name in first]
    return [
        chain("g", None, 0, 100, "job"),
        node("r1", "g", 1, 10, "router", 1, sends), llm("c1", "r1", 2, 9),
        node("w1", "g", 11, 20, "east", 2), llm("c2", "w1", 12, 19),
        node("w2", "g", 11.5, 30, "west", 2), llm("c3", "w2", 12, 29),
        node("r2", "g", 31, 40, "router", 3, "clerk"), llm("c4", "r2", 32, 39),
        node("w3", "g", 41, 50, "clerk", 4), llm("c5", "w3", 42, 49),
        *more,
    ]  # fmt: skip


ROUTED = [
    ("orchestrator_decision", "router"),
    ("delegate", "router", "east", "return_to_caller"),
    ("spawn", "router", "east"),
    ("delegate", "router", "west", "return_to_caller"),
    ("spawn", "router", "west"),
    ("return", "east", "router", "ok"),
    ("despawn", "east"),
    ("return", "west", "router", "ok"),
    ("despawn", "west"),
    ("aggregate", "router"),
    ("orchestrator_decision", "router"),
    ("delegate", "router", "clerk", "pass_control"),
    ("spawn", "router", "clerk"),
    ("return", "clerk", "user", "ok"),
    ("despawn", "clerk"),
    ("stop", "router", "ok"),
]


def test_results_of_nodes_say_who_is_next():
    content = one(routed())
    assert told(content) == ROUTED
    assert [(a.name, a.parent_id != "") for a in content.agents] == [
        ("router", False), ("east", True), ("west", True), ("clerk", True)]  # fmt: skip
    spawn = next(e for e in content.events if e.type == "spawn")
    assert (spawn.rule, spawn.confidence) == ("goto_then_node", 0.9)
    assert (content.tokens.input, content.tokens.calls) == (25, 5)


def test_targets_that_were_dropped_are_told_by_the_next_superstep():
    spans = routed()
    spans[1].attributes["output.value"] = json.dumps({"goto": [redacted(30, "ab"), redacted(30, "cd")]})
    content = one(spans)
    assert told(content) == ROUTED
    assert {e.confidence for e in content.events if e.type == "spawn"} == {0.7, 0.9}


def test_a_conditional_edge_names_the_next_node_too():
    spans = [
        chain("g", None, 0, 50),
        node("a", "g", 1, 10, "front", 1), llm("c1", "a", 2, 5), inner("f", "a", 6, 7, "route", ("front", "a", 1), "back"),
        node("b", "g", 11, 20, "back", 2), llm("c2", "b", 12, 19),
    ]  # fmt: skip
    assert told(one(spans), "delegate") == [("delegate", "front", "back", "pass_control")]


def test_a_graph_without_decisions_is_an_agent_that_runs_its_nodes():
    spans = [
        chain("g", None, 0, 50, "job"),
        node("a", "g", 1, 10, "one", 1), llm("c1", "a", 2, 9),
        node("b", "g", 11, 20, "two", 2), llm("c2", "b", 12, 19),
        node("x", "g", 21, 22, "format", 3),
    ]  # fmt: skip
    assert told(one(spans)) == [
        ("spawn", "graph", "one"),
        ("message", "one", "two"),
        ("return", "one", "graph", "ok"),
        ("despawn", "one"),
        ("spawn", "graph", "two"),
        ("return", "two", "graph", "ok"),
        ("despawn", "two"),
        ("stop", "graph", "ok"),
    ]


@pytest.mark.parametrize(("model", "tools"), [("agent", "tools"), ("model", "tools"), ("call_llm", "act")])
def test_the_loop_of_model_and_tools_is_one_agent(model, tools):
    spans = [
        chain("g", None, 0, 50, "helper"),
        node("a1", "g", 1, 10, model, 1), llm("c1", "a1", 2, 9, {"i": "look"}),
        inner("s", "a1", 9, 9.5, "should_continue", (model, "a1", 1), tools),
        node("t1", "g", 11, 15, tools, 2), use("t", "t1", 12, 14, "look"),
        node("a2", "g", 16, 20, model, 3), llm("c2", "a2", 17, 19),
    ]  # fmt: skip
    content = one(spans)
    assert told(content) == [
        ("tool_call", "helper", "look"),
        ("tool_result", "helper", "look", "ok"),
        ("stop", "helper", "ok"),
    ]
    assert len(content.agents) == 1
    assert {c.agent_id for c in content.calls} == {content.agents[0].id}


def test_a_loop_inside_a_node_is_that_nodes_agent():
    loop = [
        chain("sub", "w1", 11.1, 19.9, "east"),
        node("m1", "sub", 12, 13, "agent", 1), llm("c9", "m1", 12.1, 12.9),
        node("t1", "sub", 14, 15, "tools", 2), use("t", "t1", 14.1, 14.9, "look"),
    ]  # fmt: skip
    content = one(routed(*loop))
    assert [row for row in told(content) if not row[0].startswith("tool_")] == ROUTED
    assert told(content, "tool_call") == [("tool_call", "east", "look")]


def test_a_graph_used_as_a_tool_is_an_agent_under_the_tool():
    spans = [
        chain("g", None, 0, 50, "lead"),
        node("a1", "g", 1, 10, "agent", 1), llm("c1", "a1", 2, 9, {"i": "ask"}),
        node("t1", "g", 11, 30, "tools", 2), use("t", "t1", 12, 29, "ask"),
        chain("h", "t", 13, 28, "expert"), node("b1", "h", 14, 20, "agent", 1), llm("c2", "b1", 15, 19),
        node("a2", "g", 31, 40, "agent", 3), llm("c3", "a2", 32, 39),
    ]  # fmt: skip
    content = one(spans)
    assert told(content, "delegate", "return") == [
        ("delegate", "lead", "expert", "return_to_caller"),
        ("return", "expert", "lead", "ok"),
    ]
    assert content.events[0].rule == "call_delegates"


def test_handing_back_to_who_waits_is_a_return_and_another_errand_is_another_run():
    spans = [
        chain("g", None, 0, 90),
        node("a1", "g", 1, 10, "front", 1, "desk"), llm("c1", "a1", 2, 9),
        node("b1", "g", 11, 20, "desk", 2, "front"), llm("c2", "b1", 12, 19),
        node("a2", "g", 21, 30, "front", 3, "desk"), llm("c3", "a2", 22, 29),
        node("b2", "g", 31, 40, "desk", 4, "front"), llm("c4", "b2", 32, 39),
        node("a3", "g", 41, 50, "front", 5), llm("c5", "a3", 42, 49),
    ]  # fmt: skip
    content = one(spans)
    assert told(content, "spawn", "return") == [
        ("spawn", "front", "desk"), ("return", "desk", "front", "ok"),
        ("spawn", "front", "desk"), ("return", "desk", "front", "ok"),
    ]  # fmt: skip
    assert sorted(a.name for a in content.agents) == ["desk", "desk", "front"]


def test_a_transfer_tool_inside_a_nodes_loop_returns_when_the_engine_comes_back():
    loop = [
        chain("sub", "r1", 1.1, 9.9, "front"),
        node("m1", "sub", 2, 3, "agent", 1), llm("c1", "m1", 2.1, 2.9, {"i": "transfer_to_desk"}),
        node("t1", "sub", 4, 5, "tools", 2), use("t", "t1", 4.1, 4.9, "transfer_to_desk"),
    ]  # fmt: skip
    spans = [
        chain("g", None, 0, 90),
        node("r1", "g", 1, 10, "front", 1), *loop,
        node("w", "g", 11, 20, "desk", 2), llm("c2", "w", 12, 19),
        node("r2", "g", 21, 30, "front", 3), llm("c3", "r2", 22, 29),
    ]  # fmt: skip
    content = one(spans)
    assert told(content) == [
        ("orchestrator_decision", "front"),
        ("delegate", "front", "desk", "return_to_caller"),
        ("spawn", "front", "desk"),
        ("return", "desk", "front", "ok"),
        ("despawn", "desk"),
        ("stop", "front", "ok"),
    ]


def test_tools_of_a_node_that_is_no_agent_belong_to_the_agent_before_it():
    spans = [
        chain("g", None, 0, 90),
        node("a1", "g", 1, 10, "front", 1), llm("c1", "a1", 2, 9, {"i": "look"}),
        node("t1", "g", 11, 15, "call_tool", 2), use("t", "t1", 12, 14, "look"),
        node("a2", "g", 16, 20, "front", 3, "desk"), llm("c2", "a2", 17, 19),
        node("b1", "g", 21, 30, "desk", 4), llm("c3", "b1", 22, 29),
    ]  # fmt: skip
    content = one(spans)
    assert told(content, "tool_call", "spawn") == [("tool_call", "front", "look"), ("spawn", "front", "desk")]
    assert len(content.agents) == 2


def test_a_team_inside_a_node_is_run_by_it():
    team = [
        chain("sub", "w1", 11.1, 19.9, "team"),
        node("s1", "sub", 12, 13, "lead", 1, "hand"), llm("x1", "s1", 12.1, 12.9),
        node("s2", "sub", 14, 15, "hand", 2), llm("x2", "s2", 14.1, 14.9),
    ]  # fmt: skip
    spawns = told(one(routed(*team)), "spawn")
    assert ("spawn", "east", "lead") in spawns
    assert ("spawn", "lead", "hand") in spawns
    assert ("spawn", "router", "east") in spawns


def test_nodes_whose_engine_never_arrived_are_still_agents():
    assert told(one(routed()[1:]), "spawn") == [row for row in ROUTED if row[0] == "spawn"]


def crew(*tools):
    manager = {"openinference.span.kind": "AGENT", "graph.node.id": "Chief"}
    return [
        chain("k", None, 0, 90, "shift.kickoff", scope="crew", crew_key="x"),
        span("m", "k", 1, 80, scope="crew", attributes=manager),
        *tools,
    ]


def test_an_agent_without_a_span_is_told_by_the_tool_that_asked_for_it():
    spans = crew(
        use("t1", "m", 2, 10, "Delegate work to coworker", {"coworker": "Night Clerk"}), use("u1", "t1", 3, 4, "look"),
        use("t2", "m", 11, 20, "Delegate work to coworker", {"coworker": "Guard"}),
    )  # fmt: skip
    content = one(spans)
    assert told(content) == [
        ("orchestrator_decision", "Chief"),
        ("delegate", "Chief", "Night Clerk", "return_to_caller"),
        ("spawn", "Chief", "Night Clerk"),
        ("tool_call", "Night Clerk", "look"),
        ("tool_result", "Night Clerk", "look", "ok"),
        ("return", "Night Clerk", "Chief", "ok"),
        ("despawn", "Night Clerk"),
        ("orchestrator_decision", "Chief"),
        ("delegate", "Chief", "Guard", "return_to_caller"),
        ("spawn", "Chief", "Guard"),
        ("return", "Guard", "Chief", "ok"),
        ("despawn", "Guard"),
        ("aggregate", "Chief"),
        ("stop", "Chief", "ok"),
    ]
    assert [(a.name, a.virtual) for a in content.agents] == [
        ("Chief", False),
        ("Night Clerk", True),
        ("Guard", True),
    ]


def test_a_delegated_agent_with_a_span_needs_no_made_one():
    own = {"openinference.span.kind": "AGENT", "graph.node.id": "Guard"}
    spans = crew(
        use("t", "m", 2, 10, "Delegate work to coworker", {"coworker": "Guard"}),
        span("a", "t", 3, 9, scope="crew", attributes=own),
    )
    content = one(spans)
    assert [(a.name, a.virtual) for a in content.agents] == [("Chief", False), ("Guard", False)]
    assert {e.rule for e in content.events if e.type == "spawn"} == {"agent_under_tool"}


def test_agents_one_after_the_other_in_a_crew_are_its_nodes():
    scope = "openinference.instrumentation.crewai"
    first = {"openinference.span.kind": "AGENT", "graph.node.id": "one"}
    second = {"openinference.span.kind": "AGENT", "graph.node.id": "two", "graph.node.parent_id": "one"}
    spans = [
        chain("k", None, 0, 90, "shift.kickoff", scope=scope, crew_key="x"),
        span("a", "k", 1, 10, scope=scope, attributes=first),
        span("b", "k", 11, 20, scope=scope, attributes=second),
    ]
    assert told(one(spans), "spawn", "message", "return", "stop") == [
        ("spawn", "crew", "one"), ("message", "one", "two"), ("return", "one", "crew", "ok"),
        ("spawn", "crew", "two"), ("return", "two", "crew", "ok"), ("stop", "crew", "ok"),
    ]  # fmt: skip


def turn(key, parent, start, end, message="", error=False):
    return span(key, parent, start, end, name="turn", scope="s", error=error, status_message=message,
                attributes={"openinference.span.kind": "CHAIN"})  # fmt: skip


def guard(key, parent, start, end):
    return span(
        key, parent, start, end, name=key, scope="s", attributes={"openinference.span.kind": "GUARDRAIL"}
    )


def run(key, parent, start, end, **attributes):
    named = {k.replace("__", "."): v for k, v in attributes.items()}
    return span(
        key,
        parent,
        start,
        end,
        scope="s",
        attributes={"openinference.span.kind": "AGENT", "agent.name": key, **named},
    )


@pytest.mark.parametrize(
    ("message", "verdicts"),
    [("Guardrail tripwire triggered: {'guardrail': 'b'}", [False, True]), ("boom", [True, True])],
)
def test_a_verdict_that_is_not_recorded_is_told_by_the_turn_that_ended(message, verdicts):
    spans = [
        run("a0", None, 0, 9),
        turn("t", "a0", 1, 5, message, error=True),
        guard("a", "t", 2, 3),
        guard("b", "t", 2.5, 3),
    ]
    content = one(spans)
    assert [e.triggered for e in content.events if e.type == "safety_event"] == verdicts
    assert told(content, "stop") == [("stop", "a0", "error")]


def test_a_guardrail_before_a_model_call_let_it_pass():
    spans = [
        run("a0", None, 0, 9),
        turn("t", "a0", 1, 5, error=True),
        guard("a", "t", 2, 3),
        llm("c", "t", 3, 4),
    ]
    assert [e.triggered for e in one(spans).events if e.type == "safety_event"] == [False]


def test_a_turn_that_failed_and_was_repeated_is_no_error_of_the_run():
    assert told(one([run("a", None, 0, 9), turn("t", "a", 1, 5, error=True), turn("u", "a", 6, 8)])) == [
        ("stop", "a", "ok")
    ]


def test_a_run_that_names_who_was_in_control_before_it_was_handed_over_to():
    spans = [
        chain("k", None, 0, 90, scope="s"),
        run("front", "k", 1, 10),
        run("desk", "k", 11, 20, **{"graph.node.parent_id": "front"}),
    ]
    (spawn,) = [e for e in one(spans).events if e.type == "spawn"]
    assert (spawn.agent, spawn.to, spawn.rule, spawn.confidence) == ("front", "desk", "parent_node_key", 1.0)


def test_a_part_that_only_bears_an_agents_name_is_part_of_the_run_around_it():
    guessed = {"openinference.span.kind": "AGENT"}
    spans = [
        run("a", None, 0, 9),
        span("p", "a", 1, 8, name="RunnableAgent", scope="s", attributes=guessed),
        llm("c", "p", 2, 3),
    ]
    content = one(spans)
    assert [a.name for a in content.agents] == ["a"]
    assert content.calls[0].agent_id == content.agents[0].id


def test_calls_written_onto_a_run_count_as_tokens_and_decide_nothing():
    last = {"openinference.span.kind": "LLM", "llm.token_count.prompt": 7, "llm.token_count.completion": 2,
            "llm.input_messages.0.message.role": "user", "llm.input_messages.1.message.role": "model"}  # fmt: skip
    spans = [
        run("a", None, 0, 30),
        span("i", "a", 0.1, 29, name="invoke_agent a", scope="t", attributes=last),
        use("u", "i", 2, 9, "ask"), run("b", "u", 3, 8),
        use("v", "i", 12, 19, "ask"), run("c", "v", 13, 18),
    ]  # fmt: skip
    content = one(spans)
    assert [a.name for a in content.agents] == ["a", "b", "c"]
    assert (content.tokens.input, content.tokens.calls, content.tokens.unknown_calls) == (7, 2, 1)
    assert told(content, "orchestrator_decision", "aggregate") == [
        ("orchestrator_decision", "a"), ("orchestrator_decision", "a"), ("aggregate", "a")]  # fmt: skip


def test_what_a_judge_spends_is_not_the_agents():
    judge = {"openinference.span.kind": "EVALUATOR"}
    spans = [
        run("a", None, 0, 9),
        llm("c", "a", 1, 2),
        span("e", "a", 3, 8, scope="s", attributes=judge),
        llm("j", "e", 4, 5),
    ]
    content = one(spans)
    assert (content.tokens.calls, len(content.calls)) == (1, 1)
