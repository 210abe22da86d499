"""One story whatever the clocks of the processes say: order comes from parents and from each process's own clock."""

from __future__ import annotations

import msgspec
import pytest
from made_spans import S, agent, chat, one, span, told, tool

from spanloop.pipeline.assembly.report import clock_skew_s, trace_row
from spanloop.schemas.events import OrchestrationRevised
from spanloop.schemas.spans import Span

HERE, THERE = {"service.instance.id": "here"}, {"service.instance.id": "there"}


def moved(item: Span, seconds: float) -> Span:
    shift = round(seconds * S)
    return msgspec.structs.replace(item, start_ns=item.start_ns + shift, end_ns=item.end_ns + shift)


def remote(ahead: float, resource: dict | None = None) -> list[Span]:
    """A caller here, two sub-agents over there, whose clock is ``ahead``."""
    here = [
        agent("root", None, 1000, 1010, resource=HERE),
        chat("c1", "root", 1000, 1001, asks={"x": "ask", "y": "ask"}, resource=HERE),
        tool("t1", "root", 1001, 1004, "ask", call="x", resource=HERE),
        tool("t2", "root", 1004.5, 1008, "ask", call="y", resource=HERE),
        chat("c2", "root", 1008.5, 1009, resource=HERE),
    ]
    there = [
        agent("a", "t1", 1001.5, 1003.5, resource=THERE if resource is None else resource),
        chat("ca", "a", 1002, 1003, resource=THERE if resource is None else resource),
        agent("b", "t2", 1005, 1007, resource=THERE if resource is None else resource),
    ]
    return [*here, *(moved(item, ahead) for item in there)]


def graph(spans: list[Span]) -> tuple[set, set]:
    content = one(spans)
    names = {e.id: (e.type, e.agent, e.to, e.mode) for e in content.events}
    return set(names.values()), {(names[x.src], names[x.dst], x.type) for x in content.edges}


@pytest.mark.parametrize("ahead", [-200, -8, -1, 1, 8, 200])
def test_another_hosts_clock_changes_no_event_and_no_edge(ahead):
    assert graph(remote(ahead)) == graph(remote(0))


@pytest.mark.parametrize(
    ("ahead", "shown"), [(0, 0), (1, 0), (-1, 0), (28_800, 28_798), (-28_800, 28_798), (-200, 198)]
)
def test_what_shows_that_clocks_differ_is_told(ahead, shown):
    """At least so much: a sub-agent cannot begin before it is asked, nor its answer be taken before it is given."""
    content = one([moved(item, 100_000) for item in remote(ahead)])
    assert clock_skew_s(content) == shown
    row = trace_row(
        OrchestrationRevised(tenant="t", orchestration_id="o", revision=1, complete=True), content, None
    )
    assert [f for f in row["flags"] if f.startswith("clock_skew")] == (
        [f"clock_skew:{shown}s"] if shown else []
    )


def test_within_one_process_the_clock_is_believed():
    assert graph(remote(200, HERE)) != graph(remote(0, HERE))


def lost(ahead: float, talk: str = "talk") -> list[Span]:
    """A sub-agent whose context was lost, in a trace and a process of its own."""
    said = '[{"role": "user", "parts": [{"type": "text", "content": "find the red one"}]}]'
    arguments = {
        "gen_ai.tool.call.arguments": '{"task": "find the red one"}',
        "gen_ai.conversation.id": "talk",
    }
    run = agent("a", None, 1001.5, 1003.5, trace=7, resource=THERE,
                attributes={"gen_ai.conversation.id": talk, "gen_ai.input.messages": said})  # fmt: skip
    return [
        agent("root", None, 1000, 1010, resource=HERE), chat("c1", "root", 1000, 1001, resource=HERE),
        tool("t1", "root", 1001, 1004, "ask", resource=HERE, attributes=arguments), chat("c2", "root", 1005, 1006, resource=HERE),
        moved(run, ahead),
    ]  # fmt: skip


@pytest.mark.parametrize("ahead", [-60, 0, 60])
def test_a_lost_context_is_found_across_clocks(ahead):
    assert told(one(lost(ahead)), "delegate") == [("delegate", "root", "a", "return_to_caller")]


def test_what_no_clock_explains_is_not_joined():
    from spanloop.pipeline.assembly.batch import assemble_spans

    assert len(assemble_spans(lost(4000), "default")) == 2


def test_a_hand_over_to_another_process_finds_its_run():
    flow = span("w", None, 1000, 1020, attributes={"gen_ai.operation.name": "invoke_workflow"}, resource=HERE)
    spans = [
        flow, agent("a", "w", 1001, 1003, resource=HERE), tool("t", "a", 1002, 1002.1, "transfer_to_b", resource=HERE),
        moved(agent("b", "w", 1004, 1006, resource=THERE), -30),
    ]  # fmt: skip
    events = sorted(told(one(spans), "delegate", "spawn"))
    assert events == [("delegate", "a", "b", "pass_control"), ("spawn", "a", "b")]
