"""The Dynamic-Dec-POMDP view by hand, its laws, and the verb."""

from __future__ import annotations

import json
from collections import Counter

from click.testing import CliRunner
from forests import forests
from hypothesis import HealthCheck, given, settings
from made_spans import Desk, S, agent, chat, one, span, tool

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.log.open import open_log
from spanloop.pipeline.pomdp import active_at, pomdp_of
from spanloop.pipeline.ports import new_record
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.settings import load_settings
from spanloop.schemas.verbs import _cli

ACTIONS = ("spawn", "delegate", "message", "tool_call", "aggregate", "return", "stop")


def team():
    """lead asks two helpers at once, one of which uses a tool, and then answers."""
    return [
        agent("lead", None, 0, 10, "lead"),
        chat("c1", "lead", 0.5, 1, asks={"x": "ask_a", "y": "ask_b"}),
        tool("x", "lead", 1, 5, "ask_a", call="x"),
        agent("a", "x", 1.5, 4.5, "helper_a"),
        chat("ca", "a", 2, 2.5, asks={"z": "look"}),
        tool("z", "a", 3, 3.5, "look", call="z"),
        chat("cz", "a", 4, 4.4),
        tool("y", "lead", 1, 7, "ask_b", call="y"),
        agent("b", "y", 2, 6, "helper_b"),
        chat("cb", "b", 3, 4),
        chat("c2", "lead", 8, 9),
    ]


def test_the_active_set_over_time():
    trace = pomdp_of(one(team()))
    names = {run.id: run.name for run in trace.agents}
    sets = [(c.t_ns / S, sorted(names[i] for i in c.active)) for c in trace.changes]
    assert sets == [
        (0, ["lead"]), (1.5, ["helper_a", "lead"]), (2, ["helper_a", "helper_b", "lead"]),
        (4.5, ["helper_b", "lead"]), (6, ["lead"]), (10, []),
    ]  # fmt: skip
    assert (trace.most_active, trace.linear, trace.elsewhere) == (3, False, ())
    assert {names[i] for i in active_at(trace, 5 * S)} == {"helper_b", "lead"}
    assert active_at(trace, -1) == active_at(trace, 11 * S) == ()


def test_what_each_agent_saw_and_did():
    trace = pomdp_of(one(team()))
    told = {
        run.name: [
            ([(o.kind, o.source) for o in step.observations], [(a.kind, a.target) for a in step.actions], bool(step.call_id))
            for step in run.steps
        ]
        for run in trace.agents
    }  # fmt: skip
    assert told["lead"] == [
        (
            [],
            [
                ("delegate", "helper_a"),
                ("spawn", "helper_a"),
                ("delegate", "helper_b"),
                ("spawn", "helper_b"),
            ],
            True,
        ),
        ([("result", "helper_a"), ("result", "helper_b")], [("aggregate", ""), ("stop", "")], True),
    ]
    assert told["helper_a"] == [
        ([("task", "lead")], [("tool_call", "look")], True),
        ([("tool_result", "look")], [("return", "lead")], True),
    ]
    assert told["helper_b"] == [([("task", "lead")], [("return", "lead")], True)]
    lead = trace.agents[0]
    assert [a.kind for s in lead.steps for a in s.actions if a.changes_agents] == ["spawn", "spawn"]
    assert lead.tools == ("ask_a", "ask_b")


def test_an_agent_without_calls_has_a_step_for_each_thing_that_it_does():
    trace = pomdp_of(one([
        agent("a", None, 0, 9, "solo"), tool("t1", "a", 1, 2, "one"), tool("t2", "a", 3, 4, "two"),
    ]))  # fmt: skip
    (run,) = trace.agents
    assert [[a.target or a.kind for a in s.actions] for s in run.steps] == [["one"], ["two"], ["stop"]]
    assert [[o.source for o in s.observations] for s in run.steps] == [[], ["one"], ["two"]]
    assert (trace.linear, trace.most_active) == (True, 1)


def test_an_agent_whose_end_is_unknown_is_active_to_the_end():
    trace = pomdp_of(one([agent("a", None, 1, 0, "open"), tool("t", "a", 2, 5, "x")]))
    assert [(c.t_ns / S, len(c.active)) for c in trace.changes] == [(1, 1), (5, 0)]


def test_what_belongs_to_no_agent_is_listed():
    trace = pomdp_of(one([tool("t", None, 2, 5, "x"), chat("c", None, 6, 7)]))
    assert trace.agents == ()
    assert len(trace.elsewhere) == 3


@settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(forests)
def test_laws(spans):
    for content in assemble_spans(spans, "default"):
        trace = pomdp_of(content)
        ids = {a.id for a in content.agents}
        assert [run.id for run in trace.agents] == [a.id for a in content.agents]
        acted = Counter(a.event_id for run in trace.agents for s in run.steps for a in s.actions)
        assert acted == Counter(
            e.id
            for e in content.events
            if e.agent_id in ids and (e.type in ACTIONS or e.decision is not None)
        )
        seen = Counter(o.event_id for run in trace.agents for s in run.steps for o in s.observations)
        assert set(seen.values()) <= {1}
        calls = Counter(s.call_id for run in trace.agents for s in run.steps if s.call_id)
        assert calls == Counter(c.id for c in content.calls if c.agent_id in ids)
        for run in trace.agents:
            assert [s.index for s in run.steps] == list(range(len(run.steps)))
            assert [s.t_ns for s in run.steps] == sorted(s.t_ns for s in run.steps)
        times = [c.t_ns for c in trace.changes]
        assert times == sorted(set(times))
        active: set[str] = set()
        for change in trace.changes:
            active = (active | set(change.joined)) - set(change.left)
            assert tuple(sorted(active)) == change.active
        assert active == set()
        assert json.loads(canonical_json(trace))["orchestration_id"] == content.orchestration_id


def test_the_verb(tmp_path):
    desk = Desk(quiet_s=1)
    desk.send(
        *team(), span("other", None, 0, 1, trace="o", attributes={"gen_ai.operation.name": "invoke_agent"})
    )
    desk.later(5)
    log = open_log(load_settings(None, {"workspace": tmp_path}))
    log.append([new_record(event) for event in desk.events])
    log.close()
    name = one(team()).orchestration_id
    run = CliRunner().invoke
    shown = run(_cli, ["explain", "pomdp", name[:8], "--workspace", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert "at most 3 agents at once" in shown.output
    assert "result helper_a, result helper_b" in shown.output
    config = tmp_path / "settings.toml"
    config.write_text(f'workspace = "{tmp_path}"')
    for verb in (
        ["explain", "pomdp", name],
        ["explain", "failure", name],
        ["explain", "credit", name],
        ["traces"],
    ):
        by_folder = run(_cli, [*verb, "--workspace", str(tmp_path)])
        by_file = run(_cli, [*verb, "--config", str(config)])
        assert (by_file.exit_code, by_file.output) == (by_folder.exit_code, by_folder.output)
        assert str(by_file.exception) == str(by_folder.exception)
    told = json.loads(
        run(
            _cli, ["explain", "pomdp", name, "--workspace", str(tmp_path), "--json", "--agent", "lead"]
        ).output
    )
    assert [len(a["steps"]) for a in told["agents"]] == [2]
    for arguments, problem in (
        ((name, "--agent", "nobody"), "no agent 'nobody'"), (("zzz",), "no orchestration"), (("",), "2 orchestrations"),
    ):  # fmt: skip
        failed = run(_cli, ["explain", "pomdp", "--workspace", str(tmp_path), *arguments])
        assert problem in str(failed.exception)
