"""Agents that live on, messages between nodes, engines, hand-overs without a target, people between two runs."""

from __future__ import annotations

import json

import pytest
from made_spans import agent, chat, hex16, hex32, one, span, told, tool

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.schemas.spans import SpanEvent, SpanLink

STRANDS = "strands.telemetry.tracer"
ANSWERS = {"a": "The answer of the first.", "b": "The answer of the other."}


def engine(key: str, parent: str | None, start: float, end: float, kind: str = "graph"):
    return span(
        key, parent, start, end, scope=STRANDS, attributes={"gen_ai.operation.name": f"invoke_{kind}"}
    )


def node(key: str, parent: str, start: float, end: float, name: str = "", *, heard: str = "", said: str = ""):
    events = (
        SpanEvent(
            "gen_ai.user.message", 1, {"content": json.dumps([{"text": f"From x:\n - Agent: {heard}"}])}
        ),
        SpanEvent("gen_ai.choice", 2, {"message": said}),
    )
    return agent(key, parent, start, end, name or key, scope=STRANDS, events=events)


def test_an_engines_edges_are_found_by_what_its_nodes_repeat():
    spans = [
        engine("g", None, 0, 10),
        node("a", "g", 1, 3, said=ANSWERS["a"]),
        node("b", "g", 1, 4, said=ANSWERS["b"]),
        node("c", "g", 5, 9, heard="\n".join(ANSWERS.values()), said="Both together, then."),
        chat("c1", "c", 6, 7),
    ]
    assert told(one(spans)) == [
        ("spawn", "graph", "a"), ("spawn", "graph", "b"),
        ("message", "a", "c"), ("return", "a", "graph", "ok"), ("despawn", "a"),
        ("message", "b", "c"), ("return", "b", "graph", "ok"), ("despawn", "b"),
        ("spawn", "graph", "c"), ("aggregate", "c"), ("return", "c", "graph", "ok"), ("despawn", "c"), ("stop", "graph", "ok"),
    ]  # fmt: skip


def test_an_answer_that_came_after_the_question_was_not_heard():
    spans = [
        engine("g", None, 0, 10),
        node("a", "g", 1, 8, said=ANSWERS["a"]),
        node("c", "g", 5, 9, heard=ANSWERS["a"]),
    ]
    assert not told(one(spans), "message")


def test_a_node_that_runs_again_is_a_turn_of_the_same_agent():
    spans = [
        engine("g", None, 0, 10),
        node("a", "g", 1, 2, "writer", said=ANSWERS["a"]),
        node("b", "g", 3, 4, "critic", heard=ANSWERS["a"], said=ANSWERS["b"]),
        node("a2", "g", 5, 6, "writer", heard=ANSWERS["b"]),
    ]
    content = one(spans)
    assert sorted((a.name, (a.ended_ns - a.started_ns) // 10**9) for a in content.agents) == [
        ("critic", 1),
        ("graph", 10),
        ("writer", 5),
    ]
    assert told(content, "spawn", "message") == [
        ("spawn", "graph", "writer"), ("message", "writer", "critic"), ("spawn", "graph", "critic"), ("message", "critic", "writer"),
    ]  # fmt: skip


def test_nodes_of_one_name_that_overlap_are_two_agents():
    spans = [engine("g", None, 0, 10), node("a", "g", 1, 5, "writer"), node("b", "g", 2, 6, "writer")]
    assert len(one(spans).agents) == 3


def transfer(key: str, parent: str, start: float, target: str = "", **more):
    attributes = {"gen_ai.tool.call.arguments": json.dumps({"agent_name": target})} if target else {}
    return tool(key, parent, start, start + 0.1, "transfer_to_agent", attributes=attributes, **more)


def flow(key: str, start: float, end: float):
    return span(key, None, start, end, attributes={"gen_ai.operation.name": "invoke_workflow"})


def test_handing_back_spawns_nobody_and_who_has_control_last_returns():
    spans = [
        flow("w", 0, 10),
        agent("a", "w", 1, 3), chat("c1", "a", 1, 2), transfer("t1", "a", 2.5, "b"),
        agent("b", "w", 3.1, 5), chat("c2", "b", 3.2, 4), transfer("t2", "b", 4.5, "a"),
        agent("a2", "w", 5.1, 7, "a"), chat("c3", "a2", 5.2, 6),
    ]  # fmt: skip
    content = one(spans)
    assert told(content, "orchestrator_decision", "delegate", "spawn", "return", "stop") == [
        ("orchestrator_decision", "a"), ("delegate", "a", "b", "pass_control"), ("spawn", "a", "b"),
        ("delegate", "b", "a", "pass_control"), ("stop", "a", "ok"),
    ]  # fmt: skip
    assert [(a.name, a.ended_ns) for a in content.agents] == [("a", 7 * 10**9), ("b", 5 * 10**9)]


def test_the_same_agent_called_twice_without_a_hand_back_is_two_runs():
    spans = [flow("w", 0, 10), agent("a", "w", 1, 3), agent("a2", "w", 4, 6, "a")]
    assert len(one(spans).agents) == 2


@pytest.mark.parametrize("target", ["b", ""])
def test_a_transfer_that_does_not_say_to_whom_goes_to_the_next_run_beside(target):
    spans = [
        flow("w", 0, 10), agent("a", "w", 1, 3), chat("c1", "a", 1, 2), transfer("t", "a", 2.5, target), agent("b", "w", 4, 5),
    ]  # fmt: skip
    content = one(spans)
    assert told(content, "delegate", "spawn", "return", "tool_call") == [
        ("delegate", "a", "b", "pass_control"), ("spawn", "a", "b"), ("return", "b", "user", "ok"),
    ]  # fmt: skip
    rule = {e.type: (e.rule, e.confidence) for e in content.events}["delegate"]
    assert rule == (("transfer_tool", 0.9) if target else ("next_agent", 0.7))


def test_a_sub_agent_beside_its_caller_is_found_by_the_text_it_was_given():
    """Within one trace, contained in the tool call in time; a run with another task, or later, is nobody's."""

    def sub(key: str, start: float, end: float, task: str):
        said = json.dumps([{"role": "user", "parts": [{"type": "text", "content": task}]}])
        return [
            agent(key, "w", start, end),
            chat("c" + key, key, start, end, attributes={"gen_ai.input.messages": said}),
        ]

    spans = [
        flow("w", 0, 20), agent("a", "w", 1, 15), chat("c1", "a", 1, 2), chat("c2", "a", 9, 10),
        tool("t", "a", 3, 6, "ask", attributes={"gen_ai.tool.call.arguments": '{"input": "find the red one"}'}),
        *sub("b", 4, 5, "find the red one"), *sub("x", 4, 5, "something else"), *sub("y", 7, 8, "find the red one"),
    ]  # fmt: skip
    assert told(one(spans), "delegate") == [("delegate", "a", "b", "return_to_caller")]


def test_an_agent_that_only_runs_others_decides_nothing():
    spans = [
        agent("s", None, 0, 10, "pipeline"),
        agent("a", "s", 1, 3), chat("c1", "a", 1, 2), agent("b", "s", 4, 6), chat("c2", "b", 4, 5),
    ]  # fmt: skip
    assert told(one(spans), "orchestrator_decision", "delegate", "spawn", "return") == [
        ("spawn", "pipeline", "a"), ("return", "a", "pipeline", "ok"), ("spawn", "pipeline", "b"), ("return", "b", "pipeline", "ok"),
    ]  # fmt: skip
    acting = [*spans, chat("c0", "s", 0.1, 0.2)]
    assert len(told(one(acting), "delegate")) == 2


def member(key: str, name: str, start: float, end: float, trace: int):
    ids = {"gen_ai.agent.id": f"{name}_T/T"}
    return agent(key, None, start, end, name, trace=trace, scope="autogen-core", attributes=ids)


def heard(key: str, sender: str, receiver: str, start: float, trace: int, *, links=(), team: str = "T"):
    attributes = {
        "messaging.operation": "process", "messaging.destination": f"{receiver}_{team}.({team})-A", "sender_agent_type": f"{sender}_{team}",
    }  # fmt: skip
    return span(
        key, None, start, start + 0.1, trace=trace, scope="autogen-core", attributes=attributes, links=links
    )


def team(*, linked: bool = True):
    links = (SpanLink(hex32(1), hex16("a")),) if linked else ()
    return [
        member("a", "a", 1, 2, 1), heard("m1", "a", "b", 2.1, 2, links=links), heard("m0", "manager", "a", 0.5, 1),
        member("b", "b", 3, 4, 2), heard("m2", "b", "a", 4.1, 3, links=(SpanLink(hex32(2), hex16("b")),) if linked else ()),
        member("a2", "a", 5, 6, 3),
    ]  # fmt: skip


@pytest.mark.parametrize("linked", [True, False])
def test_members_of_a_team_are_joined_by_links_or_by_their_team_and_time(linked):
    content = one(team(linked=linked))
    assert len(content.trace_ids) == 3
    assert told(content, "spawn", "message", "stop", "return") == [
        ("message", "a", "b"), ("spawn", "a", "b"), ("message", "b", "a"), ("stop", "a", "ok"),
    ]  # fmt: skip
    assert [a.name for a in content.agents] == ["a", "b"]
    assert ("joined_by_team:2" in content.flags) is not linked


def test_a_team_that_ran_long_before_and_another_team_are_other_orchestrations():
    one_run = heard("m1", "a", "b", 2.1, 2)
    later = heard("m2", "a", "b", 200, 3)
    other = heard("m3", "a", "b", 2.2, 4, team="U")
    assert len(assemble_spans([one_run, later, other], "default")) == 3


def paused(key: str, trace: int, start: float, call: str, talk: str = "talk", *, approvals: bool = True):
    asked = {"role": "assistant", "parts": [{"type": "tool_call", "id": call, "name": "wipe"}]}
    waits = [{"tool_call_id": call}]
    attributes = {
        "gen_ai.conversation.id": talk, "pydantic_ai.all_messages": json.dumps([asked]),
        "final_result": json.dumps({"calls": [] if approvals else waits, "approvals": waits if approvals else []}),
    }  # fmt: skip
    return agent(
        key, None, start, start + 1, "keeper", trace=trace, scope="pydantic-ai", attributes=attributes
    )


def resumed(key: str, trace: int, start: float, call: str, talk: str = "talk"):
    asked = {"role": "assistant", "parts": [{"type": "tool_call", "id": call, "name": "wipe"}]}
    answered = {"role": "user", "parts": [{"type": "tool_call_response", "id": call}]}
    attributes = {
        "gen_ai.conversation.id": talk, "pydantic_ai.new_message_index": 1,
        "pydantic_ai.all_messages": json.dumps([asked, answered]),
    }  # fmt: skip
    return agent(
        key, None, start, start + 1, "keeper", trace=trace, scope="pydantic-ai", attributes=attributes
    )


def test_a_run_that_goes_on_with_what_a_person_approved():
    content = one([paused("a", 1, 0, "c1"), resumed("b", 2, 50_000, "c1")])
    assert told(content, "human_intervention", "stop") == [
        ("stop", "keeper", "ok"), ("human_intervention", "human", "keeper"), ("stop", "keeper", "ok"),
    ]  # fmt: skip
    assert "joined_by_approval:1" in content.flags


@pytest.mark.parametrize(("call", "talk"), [("c2", "talk"), ("c1", "other")])
def test_a_conversation_alone_joins_nothing_nor_does_a_call_id(call, talk):
    assert len(assemble_spans([paused("a", 1, 0, "c1"), resumed("b", 2, 5, call, talk)], "default")) == 2


def test_calls_that_another_program_executes_are_no_persons_doing():
    content = one([paused("a", 1, 0, "c1", approvals=False), resumed("b", 2, 5, "c1")])
    assert not told(content, "human_intervention")


def test_what_an_agent_says_after_it_passed_control_on_is_dead():
    spans = [
        engine("s", None, 0, 10, "swarm"),
        agent("a", "s", 1, 5), chat("c1", "a", 1, 2), transfer("t", "a", 2.5, "b"), chat("c2", "a", 3, 4),
        agent("b", "s", 6, 8), chat("c3", "b", 6, 7),
    ]  # fmt: skip
    content = one(spans)
    assert "dead_calls:1" in content.flags
    assert told(content, "orchestrator_decision", "return") == [
        ("orchestrator_decision", "a"),
        ("return", "b", "swarm", "ok"),
    ]
