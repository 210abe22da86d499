"""Macros and decisions against values computed by hand."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.decisions.objects import decisions_of
from spanloop.pipeline.decisions.told import context_of, group_of, told_of
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.macros import MACROS
from spanloop.pipeline.otlp.files import read_spans
from spanloop.pipeline.pomdp import pomdp_of
from spanloop.pipeline.ports import new_record
from spanloop.pipeline.query.session import Query, QueryError
from spanloop.pipeline.rewards.metrics import metrics_of
from spanloop.pipeline.rewards.orchestration import orchestration_rewards
from spanloop.schemas.events import (
    BatchCommitted,
    CandidateRegistered,
    CreditAssigned,
    CreditNode,
    DecisionModelPublished,
    Event,
    OrchestrationRevised,
    Reward,
    RewardsComputed,
    Sample,
    SamplesBuilt,
)
from spanloop.schemas.orchestration import (
    Agent,
    Decision,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
)

T0 = 1_800_000_000_000_000_000
S = 1_000_000_000
GOLDEN = Path(__file__).parents[1] / "golden" / "assembly" / "desk.otlp.jsonl"


def ask(events: list[Event], tmp_path: Path, sql: str) -> list[dict[str, Any]]:
    log = MemoryLog(ManualClock(T0))
    log.append([new_record(event) for event in events])
    with Query(log, tmp_path / "archive") as query:
        return [json.loads(line) for line in b"".join(query.chunks(sql, "ndjson")).splitlines()]


def parallel(name: str = "o1", revision: int = 1) -> OrchestrationRevised:
    """METHODS 2.1: orch [0,1] starts A [1,6], B [1,4] and C [3,9] side by side, then aggregates [9,10]."""
    root = Agent("root", "orch", "orch", started_ns=T0, ended_ns=T0 + 10 * S)
    spans = {"A": (1, 6), "B": (1, 4), "C": (3, 9)}
    children = tuple(
        Agent(
            n,
            n.lower(),
            n.lower(),
            "root",
            started_ns=T0 + a * S,
            ended_ns=T0 + b * S,
            status="error" if n == "B" else "ok",
        )
        for n, (a, b) in spans.items()
    )
    calls = tuple(
        ModelCall(
            f"c{i}", "root", (f"s{i}",), T0 + a * S, T0 + b * S, model="m", policy_version="policy@v3", input_tokens=10, output_tokens=2
        )
        for i, (a, b) in enumerate(((0, 1), (9, 10)), start=1)
    )  # fmt: skip
    spawns = (
        OrchestrationEvent(
            f"e{n}",
            "spawn",
            "orch",
            T0 + S,
            1.0,
            "r",
            ("s1",),
            agent_id="root",
            to=n.lower(),
            to_id=n,
            call_id="c1",
        )
        for n in spans
    )
    stop = OrchestrationEvent(
        "stop", "stop", "orch", T0 + 10 * S, 1.0, "r", ("s2",), agent_id="root", call_id="c2", status="ok"
    )
    events = (*spawns, stop)
    content = OrchestrationContent(
        orchestration_id=name, tenant="default", trace_ids=(f"trace-{name}",), events=events, edges=(), agents=(root, *children),
        calls=calls, tokens=TokenUsage(input=20, output=4, calls=2), started_ns=T0, ended_ns=T0 + 10 * S,
    )  # fmt: skip
    return OrchestrationRevised(
        orchestration_id=name, revision=revision, complete=True, content_hash="h", content=content
    )


def ledger(name: str = "o1") -> CreditAssigned:
    nodes = (
        CreditNode("team", "team", "", "team", 600_000),
        CreditNode(
            "orchestrator",
            "orchestrator",
            "team",
            "orchestrator",
            400_000,
            raw=300_000,
            variance=0.5,
            estimator="sum/1",
        ),
        CreditNode("role:a", "role", "team", "a", 200_000, raw=200_000),
        CreditNode("agent:root", "agent", "orchestrator", "orch", 400_000, subject="root"),
        CreditNode("turn:c1", "turn", "agent:root", "turn 2", 250_000, subject="c1"),
        CreditNode("message:c1", "message", "turn:c1", "decision", 250_000, subject="c1"),
        CreditNode("turn:c2", "turn", "agent:root", "turn 10", 150_000, subject="c2"),
        CreditNode("message:c2", "message", "turn:c2", "decision", 150_000, subject="c2"),
        *(
            CreditNode(f"token:c2/{i}", "token", "message:c2", str(i), 15_000, subject=f"c2/{i}")
            for i in range(10)
        ),
    )
    return CreditAssigned(
        orchestration_id=name, revision=2, orchestration_revision=1, reward=700_000, baseline=100_000, value_model="v1", nodes=nodes
    )  # fmt: skip


def samples(name: str = "o1", revision: int = 2, *, holdout: bool = False, rows: bool = True) -> SamplesBuilt:
    row = Sample(
        "c1", "root", "orch", "policy@v3", (1, 2), (7, 9), (-0.5, -0.25), (250_000, 0), ("message:c1", "message:c1"),
        menu_ids=((7,), (8, 9)), menu_logprobs=((0.0,), (-1.5, -0.25)), menu_values=((500_000,), (200_000, 650_000)),
    )  # fmt: skip
    return SamplesBuilt(
        orchestration_id=name, revision=revision, group="g", harness="h", reward=700_000, baseline=100_000, value_model="v1",
        holdout=holdout, rows=(row,) if rows else (), excluded={} if rows else {"error": 1},
    )  # fmt: skip


def test_critical_path_by_hand(tmp_path: Path) -> None:
    rows = ask([parallel()], tmp_path, "FROM critical_path('o1')")
    assert [(r["kind"], r["id"], r["agent"], r["ms"], r["total_ms"]) for r in rows] == [
        ("call", "c1", "orch", 1000.0, 1000.0),
        ("agent", "C", "c", 6000.0, 7000.0),
        ("call", "c2", "orch", 1000.0, 8000.0),
    ]
    assert {(r["span_ms"], r["work_ms"], r["parallelism"]) for r in rows} == {(8000.0, 16000.0, 2.0)}
    assert rows[0]["started"] == "2027-01-15T08:00:00.000000Z"
    assert rows[0]["policy_version"] == "policy@v3"


def test_critical_path_is_the_span_that_rewards_report(tmp_path: Path) -> None:
    """On the recorded desk: parallelism W/L is the channel work_span."""
    spans = [span for batch in read_spans(GOLDEN) for span in batch.spans]
    (content,) = assemble_spans(spans, "default")
    revised = OrchestrationRevised(
        orchestration_id=content.orchestration_id,
        revision=1,
        complete=True,
        content_hash="h",
        content=content,
    )
    rows = ask([revised], tmp_path, f"FROM critical_path('{content.orchestration_id[:6]}')")
    (reported,) = (r.value for r in orchestration_rewards(content, (0, 0)) if r.name == "work_span")
    assert rows[-1]["parallelism"] == pytest.approx(reported / 1e6, abs=1e-4)
    assert rows[-1]["total_ms"] == rows[-1]["span_ms"] == pytest.approx(sum(r["ms"] for r in rows))
    # by hand from desk.expected.json: five turns of the orchestrator, the slower of each pair of helpers between them
    assert [r["agent"] for r in rows if r["agent"] == "Orchestrator"] == ["Orchestrator"] * 5


def test_fan_out_by_hand(tmp_path: Path) -> None:
    (row,) = ask([parallel()], tmp_path, "FROM fan_out('o1')")
    assert (row["agent_id"], row["depth"], row["started_agents"], row["max_parallel"]) == ("root", 0, 3, 3)
    assert (row["ok"], row["failed"], row["roles"]) == (2, 1, ["a", "b", "c"])
    assert (row["wall_ms"], row["busy_ms"], row["parallelism"]) == (8000.0, 14000.0, 1.75)


def test_credit_flow_by_hand(tmp_path: Path) -> None:
    rows = ask([parallel(), ledger()], tmp_path, "FROM credit_flow('o1')")
    assert [(r["depth"], r["node"]) for r in rows] == [
        (0, "team"), (1, "role:a"), (1, "orchestrator"), (2, "agent:root"), (3, "turn:c1"), (4, "message:c1"),
        (3, "turn:c2"), (4, "message:c2"), *((5, f"token:c2/{i}") for i in range(10)),
    ]  # fmt: skip
    by_node = {r["node"]: r for r in rows}
    assert by_node["orchestrator"]["residual"] == pytest.approx(0.1)
    assert by_node["orchestrator"]["share"] == pytest.approx(2 / 3)
    assert by_node["team"]["residual"] is None
    assert {(r["reward"], r["baseline"], r["value_model"]) for r in rows} == {(0.7, 0.1, "v1")}
    for row in rows:
        children = [r["credit_micro"] for r in rows if r["parent"] == row["node"]]
        assert not children or sum(children) == row["credit_micro"]


def test_timeline_by_hand(tmp_path: Path) -> None:
    rows = ask([parallel(), ledger()], tmp_path, "FROM timeline('o1')")
    assert [(r["ms"], r["kind"], r["what"], r["id"]) for r in rows] == [
        (0.0, "agent", "orch", "root"), (0.0, "call", "m", "c1"), (1000.0, "agent", "a", "A"), (1000.0, "agent", "b", "B"),
        (1000.0, "event", "spawn", "eA"), (1000.0, "event", "spawn", "eB"), (1000.0, "event", "spawn", "eC"),
        (3000.0, "agent", "c", "C"), (9000.0, "call", "m", "c2"), (10000.0, "event", "stop", "stop"),
    ]  # fmt: skip
    assert [r["credit"] for r in rows if r["kind"] == "call"] == [0.25, 0.15]
    assert rows[1]["tokens"] == 12
    assert rows[4]["other"] == "a"


def test_decisions_by_hand(tmp_path: Path) -> None:
    rows = ask(
        [parallel(), ledger(), samples()],
        tmp_path,
        "FROM decisions WHERE event_id IS NOT NULL ORDER BY t, event_id",
    )
    assert [(r["decision"], r["kind"], r["chosen"]) for r in rows] == [
        ("O1", "spawn", "a"), ("O1", "spawn", "b"), ("O1", "spawn", "c"), ("O5", "stop", "stop"),
    ]  # fmt: skip
    first, last = rows[0], rows[-1]
    assert first["propensity"] == pytest.approx(math.exp(-0.75))
    assert (first["action"], first["menu"], first["value"]) == ([7, 9], [[7], [8, 9]], 0.65)
    assert (first["credit"], first["credit_micro"], first["policy_version"]) == (0.25, 250_000, "policy@v3")
    assert (last["credit"], last["propensity"], last["menu"], last["value"]) == (0.15, None, None, None)


def test_told_decisions_have_their_menu_and_propensity(tmp_path: Path) -> None:
    revised = parallel()
    assert revised.content is not None
    first, *_, stop = revised.content.events
    told = Decision("stop", "continue", ("stop", "continue"), (0.25, 0.75), False)
    apart = OrchestrationEvent(
        "not yet",
        "orchestrator_decision",
        "orch",
        T0 + 9 * S,
        1.0,
        "said",
        ("s3",),
        agent_id="root",
        decision=told,
    )
    plain = msgspec.structs.replace(stop, decision=Decision("stop", "stop"))
    content = msgspec.structs.replace(revised.content, events=(first, apart, plain))
    rows = ask(
        [msgspec.structs.replace(revised, content=content)], tmp_path, "FROM decisions ORDER BY t, event_id"
    )
    assert [(r["decision"], r["kind"], r["chosen"], r["propensity"]) for r in rows] == [
        ("O1", "spawn", "a", None), ("O5", "stop", "continue", 0.75), ("O5", "stop", "stop", None),
    ]  # fmt: skip
    assert [(r["options"], r["propensities"], r["by_policy"]) for r in rows[1:]] == [
        (["stop", "continue"], [0.25, 0.75], False),
        (None, None, None),
    ]


def test_told_decisions_have_the_effects_of_the_version_that_their_credit_names(tmp_path: Path) -> None:
    revised = parallel()
    assert revised.content is not None
    first, *_ = revised.content.events
    decision = Decision("spawn", "spawn", ("spawn", "alone"), (0.5, 0.5))
    content = msgspec.structs.replace(
        revised.content, events=(msgspec.structs.replace(first, decision=decision),)
    )
    group = group_of(told_of(content)[0])

    def effect(option: str, value: float | None, status: str) -> dict[str, Any]:
        shown = dict.fromkeys(("value_error", "error", "low", "high", "naive"), 0.1)
        return {
            "option": option,
            "taken": 2,
            "value": value,
            "effect": value,
            "status": status,
            "reason": "",
            **shown,
        }

    def model(version: str, value_model: str, here: str) -> DecisionModelPublished:
        context = context_of(told_of(content)[0])
        effects = [
            [group, "", [effect("alone", 0.125, "ok"), effect("spawn", 0.25, "ok")]],
            [group, context, [effect("alone", None, here), effect("spawn", 0.5, here)]],
        ]
        return DecisionModelPublished(
            version=version,
            value_model=value_model,
            kind="decisions/1",
            trained_on=4,
            parameters={"effects": effects},
        )

    ledger_of_v1 = msgspec.structs.replace(ledger(), value_model="v1")
    for here, value in (("ok", 0.5), ("unidentified", 0.25)):
        events = [
            msgspec.structs.replace(revised, content=content),
            ledger_of_v1,
            model("d1", "v1", here),
            model("d2", "v2", "ok"),
        ]
        (row,) = ask(events, tmp_path / here, "FROM decisions WHERE event_id IS NOT NULL")
        assert (row["decision_model"], row["effect"], row["value"], row["effect_status"]) == (
            "d1",
            value,
            value,
            "ok",
        )
        assert row["option_values"] == {"alone": None if value == 0.5 else 0.125, "spawn": value}
        assert (row["low"], row["high"], row["reason"]) == (0.1, 0.1, None)


def versions() -> list[Event]:
    def batch(number: int, after: int, until: int) -> BatchCommitted:
        return BatchCommitted(batch=number, from_offset=after, to_offset=until, parent_version=number - 1)

    def candidate(version: int, parent: int, number: int, injected: str = "") -> CandidateRegistered:
        return CandidateRegistered(
            version=version, parent=parent, batch=number, mlflow_version=str(version), path="p", sha256="s", orchestrations=1,
            injected=injected,
        )  # fmt: skip

    return [
        batch(1, -1, 6), candidate(1, 0, 1), candidate(7, 1, 1, "by hand"), batch(2, 6, 9), candidate(2, 1, 2), batch(3, 9, 9),
        candidate(5, 2, 3),
    ]  # fmt: skip


def test_staleness_by_hand(tmp_path: Path) -> None:
    rows = ask([parallel("o1"), parallel("o2"), *versions()], tmp_path, "FROM staleness(bound := 3)")
    (row,) = rows
    assert (row["policy"], row["version"], row["calls"], row["orchestrations"]) == ("policy", 3, 4, 2)
    assert (row["newest_version"], row["lag"], row["within_bound"]) == (7, 4, False)
    assert ask([parallel("o1"), *versions()], tmp_path / "x", "SELECT within_bound FROM staleness()") == [
        {"within_bound": True}
    ]


def test_provenance_by_hand(tmp_path: Path) -> None:
    """A log in memory counts offsets by topic or over all: the batches' windows are cut where the samples lie."""
    log = MemoryLog(ManualClock(T0))
    done = log.append([
        new_record(event)
        for event in (samples("a", 1), samples("b", 1, holdout=True), samples("c", 1, rows=False), samples("d", 1), parallel("a"))
    ])  # fmt: skip
    offsets = [item.offset for item in done]

    def event(item: Event) -> Event:
        if isinstance(item, BatchCommitted):
            cut = {1: (-1, offsets[2]), 2: (offsets[2], offsets[3]), 3: (offsets[3], offsets[3])}[item.batch]
            return BatchCommitted(
                batch=item.batch, from_offset=cut[0], to_offset=cut[1], parent_version=item.parent_version
            )
        return item

    log.append([new_record(event(item)) for item in versions()])

    def of(version: int) -> list[tuple[Any, ...]]:
        sql = f"SELECT version, batch, orchestration_id, role, acted_by, tokens, trace_ids FROM provenance({version})"  # noqa: S608
        with Query(log, tmp_path / "archive") as query:
            return list(query.run(sql)[1])

    first = [
        (1, 1, "a", "offered", ["policy@v3"], 2, ["trace-a"]),
        (1, 1, "b", "held out", ["policy@v3"], 2, None),
        (1, 1, "c", "no rows", None, None, None),
    ]
    assert of(1) == first
    assert of(2) == of(5) == [*first, (2, 2, "d", "offered", ["policy@v3"], 2, None)]
    assert of(7) == []  # injected: it descends from nothing on this log
    assert of(99) == []


def test_last_revision_counts_and_a_beginning_is_enough(tmp_path: Path) -> None:
    log = [parallel("abc1"), parallel("abc1", 3), parallel("abd2")]
    assert len(ask(log, tmp_path, "FROM timeline('abc')")) == len(
        ask([parallel()], tmp_path / "x", "FROM timeline('o1')")
    )
    with pytest.raises(QueryError, match="several orchestrations begin with ab"):
        ask(log, tmp_path, "FROM timeline('ab')")
    assert ask(
        [parallel("o1"), parallel("o10")], tmp_path / "y", "SELECT count(*) AS n FROM fan_out('o1')"
    ) == [{"n": 1}]
    assert ask(log, tmp_path, "FROM critical_path('nowhere')") == []


def test_what_a_join_swallowed_is_gone(tmp_path: Path) -> None:
    gone = OrchestrationRevised(orchestration_id="o1", revision=2, complete=True, merged_into="o2")
    assert ask([parallel(), ledger(), gone], tmp_path, "FROM timeline('o1')") == []
    assert ask([parallel(), ledger(), gone], tmp_path / "x", "FROM credit_flow('o1')") == []


def test_a_cycle_of_agents_ends(tmp_path: Path) -> None:
    agents = (Agent("a", "a", parent_id="b"), Agent("b", "b", parent_id="a"), Agent("c", "c", parent_id="c"))
    content = OrchestrationContent(
        orchestration_id="o1", tenant="default", trace_ids=("t",), events=(), edges=(), agents=agents, calls=(), tokens=TokenUsage(),
        started_ns=T0, ended_ns=T0 + S,
    )  # fmt: skip
    revised = OrchestrationRevised(
        orchestration_id="o1", revision=1, complete=True, content_hash="h", content=content
    )
    for name in ("critical_path", "fan_out", "timeline"):
        assert ask([revised], tmp_path, f"SELECT count(*) AS n FROM {name}('o1')")[0]["n"] >= 0  # noqa: S608


@pytest.mark.parametrize("name", MACROS)
def test_every_macro_answers_its_example_on_an_empty_log(name: str, tmp_path: Path) -> None:
    ask([], tmp_path, MACROS[name].example)


def test_pomdp_is_what_the_pipeline_says(tmp_path: Path) -> None:
    """On the recorded desk: steps and active sets in SQL are those of ``pomdp_of``, to the microsecond."""
    spans = [span for batch in read_spans(GOLDEN) for span in batch.spans]
    (content,) = assemble_spans(spans, "default")
    revised = OrchestrationRevised(
        orchestration_id=content.orchestration_id,
        revision=1,
        complete=True,
        content_hash="h",
        content=content,
    )
    trace = pomdp_of(content)
    rows = ask([revised], tmp_path, f"FROM pomdp('{content.orchestration_id[:6]}')")
    expected = Counter(
        (run.id, step.index, part, item.kind, item.event_id)
        for run in trace.agents
        for step in run.steps
        for part, items in (("observation", step.observations), ("action", step.actions))
        for item in items
    )
    told = Counter(
        (r["agent_id"], r["step"], r["part"], r["kind"], r["event_id"]) for r in rows if r["kind"] != "answer"
    )
    assert told == expected
    changes = ask([revised], tmp_path / "x", f"FROM active_agents('{content.orchestration_id[:6]}')")
    assert [len(c["active"]) for c in changes] == [c["num_active"] for c in changes]
    assert max(c["num_active"] for c in changes) == trace.most_active
    assert len(changes) == len(trace.changes)


def test_metrics_of_every_orchestration_are_those_that_explain_tells(tmp_path: Path) -> None:
    (content, *_) = assemble_spans([span for batch in read_spans(GOLDEN) for span in batch.spans], "import")
    desk = OrchestrationRevised(
        orchestration_id=content.orchestration_id,
        tenant=content.tenant,
        revision=1,
        complete=True,
        content=content,
    )
    outcome = Reward("R1", "outcome", "team", "", 500_000, "final", "feedback_mean/1", weight=1_000_000)
    rewards = RewardsComputed(
        tenant=content.tenant, orchestration_id=content.orchestration_id, revision=1, orchestration_revision=1, rewards=(outcome,),
        team=500_000, status="final",
    )  # fmt: skip
    events: list[Event] = [parallel(), parallel("o2"), desk, rewards]
    rows = {row["orchestration_id"]: row for row in ask(events, tmp_path, "FROM metrics")}
    assert set(rows) == {"o1", "o2", content.orchestration_id}
    assert rows["o1"]["success"] is None
    assert (rows["o1"]["parallel_efficiency"], rows["o1"]["work_over_span"]) == (1.6, 2.0)
    found = rows[content.orchestration_id]
    expected = msgspec.structs.asdict(metrics_of(content, (outcome,)))
    assert found["success_status"] == "final"
    for name, value in expected.items():
        if name != "redundant_messages":
            assert found[name] == (None if value is None else pytest.approx(value, rel=1e-4)), name
    one = ask(events, tmp_path, "SELECT * FROM metrics WHERE orchestration_id = 'o1'")
    assert one == [rows["o1"]]


def test_metrics_is_listed_with_its_columns(tmp_path: Path) -> None:
    columns = {row["column_name"] for row in ask([parallel()], tmp_path, "DESCRIBE metrics")}
    assert {"success", "parallel_efficiency", "error_amplification", "interventions"} <= columns


def test_the_view_has_the_decisions_that_explain_tells_turns_that_went_on_too(tmp_path: Path) -> None:
    spans = [span for batch in read_spans(GOLDEN) for span in batch.spans]
    contents = assemble_spans(spans, "import")
    events: list[Event] = [
        OrchestrationRevised(
            orchestration_id=c.orchestration_id, tenant=c.tenant, revision=1, complete=True, content=c
        )
        for c in contents
    ]
    rows = ask(
        events,
        tmp_path,
        "SELECT orchestration_id, decision, agent_id, event_id, call_id, rule, chosen FROM decisions",
    )
    found = Counter(
        (r["orchestration_id"], r["decision"], r["agent_id"], r["event_id"] or "", r["call_id"] or "", r["rule"]) for r in rows
    )  # fmt: skip
    expected = Counter(
        (c.orchestration_id, d.code, d.agent_id, d.event_id, d.call_id, d.rule) for c in contents for d in decisions_of(c)
    )  # fmt: skip
    assert found == expected
    went_on = [r for r in rows if r["rule"] == "turn_went_on"]
    assert went_on
    assert {r["chosen"] for r in went_on} == {"continue"}
