"""Decision objects and ``spanloop explain decisions``, from SDK programs and gateway menus to the table."""

from __future__ import annotations

import json
import math
import random

import msgspec
import pytest
from click.testing import CliRunner
from sdk_support import assembled, recording

from spanloop.collectors import sdk
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.credit.cli import explain
from spanloop.pipeline.credit.value import ValueStage
from spanloop.pipeline.decisions.cli import _row
from spanloop.pipeline.decisions.explain import explain_decisions
from spanloop.pipeline.decisions.learner import DecisionModel
from spanloop.pipeline.decisions.objects import decisions_of
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import LogRecord, new_record
from spanloop.pipeline.rewards.drafts import draft_rewards
from spanloop.pipeline.signal import SignalStage
from spanloop.schemas import topics
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    CreditNode,
    DecisionModelPublished,
    FeedbackReceived,
    OrchestrationRevised,
    RewardsComputed,
    Sample,
    ValueModelPublished,
    decode,
)
from spanloop.schemas.orchestration import (
    Agent,
    MenuOption,
    ModelCall,
    OrchestrationContent,
    OrchestrationEvent,
    TokenUsage,
)
from spanloop.schemas.settings import Pipeline

T0 = 1_800_000_000_000_000_000


def program(rng: random.Random) -> float:
    """Spawns or not, goes on or stops; hard tasks need the spawn."""
    hard = rng.random() < 0.5
    e = 0.9 if hard else 0.2
    spawn = rng.random() < e
    menu = {
        "options": ["spawn", "alone"],
        "propensities": [e, 1 - e],
        "by_policy": True,
        "state": {"hard": float(hard)},
    }
    with sdk.agent("desk"):
        sdk.decision("spawn", chosen="spawn" if spawn else "alone", **menu).now()
        for k in range(3):
            stop = rng.random() < 0.3
            state = {"vote_margin": k, "cost": 0.1 * k}
            if stop:
                sdk.stop("enough", options=["stop", "continue"], propensities=[0.3, 0.7], state=state).now()
                break
            sdk.decision("stop", ["stop", "continue"], [0.3, 0.7], chosen="continue", state=state).now()
    return float(rng.random() < ((0.5 if spawn else 0.2) if hard else (0.9 if spawn else 0.85)))


def told(count: int, seed: int = 0) -> tuple[list[OrchestrationContent], list[float]]:
    rng = random.Random(seed)
    outcomes = []
    with recording() as exporter:
        for _ in range(count):
            outcomes.append(program(rng))
        contents = {c.trace_ids[0]: c for c in assembled(exporter)}
        order = dict.fromkeys(f"{span.context.trace_id:032x}" for span in exporter.get_finished_spans())
    return [contents[trace] for trace in order], outcomes


def filled(log, count: int = 80) -> list[str]:
    """A log on which ``count`` told orchestrations went through rewards, credit and value training; ids in order."""
    contents, outcomes = told(count)
    settings = Pipeline(value_every=20, value_growth=0, holdout=0.0)
    signal, value = SignalStage(settings), ValueStage(settings)
    signal.restore({})
    value.restore({})
    for content, outcome in zip(contents, outcomes, strict=True):
        feedback = FeedbackReceived(
            feedback_id=content.trace_ids[0],
            target_kind="trace",
            target_id=content.trace_ids[0],
            value=outcome,
            scorer="s",
        )
        revised = OrchestrationRevised(
            orchestration_id=content.orchestration_id,
            revision=1,
            complete=True,
            content_hash="h",
            content=content,
        )
        given = log.append([new_record(revised), new_record(feedback)])
        records = log.read([topics.ORCHESTRATIONS, topics.FEEDBACK], {}, 10_000)[-len(given) :]
        derived = signal.process(records, 0).events
        log.append([new_record(event) for event in derived])
        taught = value.process(list(map(as_record, (revised, *derived))), 0).events
        log.append([new_record(event) for event in taught])
        signal.process([as_record(event) for event in taught], 0)
    return [content.orchestration_id for content in contents]


def as_record(event):
    record = new_record(event)
    return LogRecord(record.topic, 0, record.key, record.event_id, record.value, 0)


def test_told_decisions_have_menu_effect_and_version(tmp_path):
    log = MemoryLog(ManualClock(T0))
    ids = filled(log)
    first, last = explain_decisions(log, ids[0]), explain_decisions(log, ids[-1])
    assert (first.value_model, first.decision_model) == ("none", "")
    assert {item.status for item in first.decisions} == {"unidentified"}
    assert last.decision_model.startswith("decisions@v")
    published = [decode(r.value) for r in log.read([topics.MODELS], {}, 100)]
    assert [type(e) for e in published[:2]] == [DecisionModelPublished, ValueModelPublished]
    assert published[0].value_model == published[1].version
    newest = explain_decisions(log, ids[0], newest=True)
    assert newest.decision_model == published[-2].version
    spawn = newest.decisions[0]
    assert (spawn.code, spawn.kind, spawn.menu) == ("O1", "spawn", "told")
    assert [option.name for option in spawn.options] == ["spawn", "alone"]
    assert math.fsum(option.propensity for option in spawn.options) == pytest.approx(1.0)
    assert all(option.value is not None and option.source == "decision_model" for option in spawn.options)
    assert spawn.low < spawn.effect < spawn.high
    assert (spawn.decided_by, spawn.exploration, spawn.status) == ("policy", False, "ok")
    stops = [item for item in newest.decisions if item.code == "O5"]
    assert stops
    for k, item in enumerate(stops):
        assert (item.state["round"], item.state["vote_margin"], item.state["spent_cost"]) == (k, k, 0.1 * k)
        assert item.state["verifier_score"] is item.state["answer_stability"] is None
        assert item.margin is not None
        assert item.advantage == (item.margin if item.chosen == "stop" else -item.margin)


def test_the_command_prints_a_table_and_json(tmp_path):
    log = SqliteLog(tmp_path / "spanloop.db", ManualClock(T0))
    ids = filled(log, 40)
    log.close()
    run = CliRunner().invoke(explain, ["decisions", ids[-1][:12], "--workspace", str(tmp_path), "--newest"])
    assert run.exit_code == 0, run.output
    assert "O1 spawn" in run.output
    assert "*" in run.output
    run = CliRunner().invoke(
        explain, ["decisions", ids[-1], "--workspace", str(tmp_path), "--json", "--kind", "O5"]
    )
    found = json.loads(run.output)
    assert {item["code"] for item in found["decisions"]} == {"O5"}
    run = CliRunner().invoke(explain, ["decisions", ids[-1], "--workspace", str(tmp_path), "--kind", "O9"])
    assert run.exit_code == 2
    assert "'O9' is none: give O1, O2, O3, O4, O5, aggregate, delegate" in run.output
    with pytest.raises(SchemaError, match="no orchestration"):
        explain_decisions(MemoryLog(ManualClock(T0)), "zz")


def gateway_content() -> tuple[OrchestrationContent, Sample]:
    """A desk whose first turn said tokens 1, 5 (delegate to a), and whose second ended it."""
    calls = tuple(
        ModelCall(
            f"c{k}", "root", (f"s{k}",), T0 + k * 10, T0 + k * 10 + 5, policy_version="policy@v3", input_tokens=4, output_tokens=2,
            response_token_ids=(1, 5), menus=((MenuOption(1, 0.0),), (MenuOption(5, 0.0),)),
        )
        for k in (0, 1)
    )  # fmt: skip
    events = (
        OrchestrationEvent(
            "d", "delegate", "desk", T0 + 5, 1.0, "r", ("s0",), agent_id="root", to="a", call_id="c0"
        ),
        OrchestrationEvent("z", "stop", "desk", T0 + 20, 0.9, "r", ("s1",), agent_id="root", call_id="c9"),
    )
    content = OrchestrationContent(
        "o", "default", ("t",), events, (), (Agent("root", "desk"),), calls, TokenUsage(), T0, T0 + 20
    )
    log = math.log
    row = Sample(
        "c0", "root", "desk", "policy@v3", (9,), (1, 5), (log(0.8), log(0.75)), (0, 0), ("m", "m"),
        ((1, 2), (5, 6)), ((log(0.8), log(0.2)), (log(0.75), log(0.25))), ((600_000, 100_000), (700_000, 300_000)),
    )  # fmt: skip
    return content, row


def test_token_menus_are_one_menu_of_ways_to_go():
    content, row = gateway_content()
    nodes = [CreditNode("message:c0", "message", "turn:c0", "decision", 123_456, subject="c0")]
    found = decisions_of(content, nodes=nodes, samples=[row], words=["", "ask", "stop", "", "", "a", "b"])
    delegate, went_on, stop = found
    assert [(o.name, o.value) for o in delegate.options] == [("stop", 0.1), ("ask a", 0.7), ("ask b", 0.3)]
    assert [o.propensity for o in delegate.options] == pytest.approx([0.2, 0.6, 0.2])
    assert (delegate.chosen, delegate.status, delegate.credit) == ("ask a", "model_based", 123_456)
    assert delegate.effect == pytest.approx(0.7 - (0.2 * 0.1 + 0.6 * 0.7 + 0.2 * 0.3))
    assert (delegate.decided_by, delegate.action) == ("policy", (1, 5))
    assert (went_on.code, went_on.chosen, went_on.event_id, went_on.status) == (
        "O5",
        "continue",
        "",
        "unidentified",
    )
    assert (went_on.state["spent_tokens"], went_on.state["open_subtasks"]) == (6.0, 1.0)
    assert (stop.chosen, stop.menu, stop.status) == ("stop", "implied", "unidentified")
    assert "does not tell" in stop.reason


@pytest.mark.parametrize("chosen", range(7))
def test_the_choice_is_shown_of_a_menu_of_any_length(chosen):
    content, row = gateway_content()
    found = decisions_of(content, nodes=[], samples=[row], words=[])[0]
    menu = tuple(msgspec.structs.replace(found.options[0], name=f"option{n}") for n in range(7))
    shown = _row(msgspec.structs.replace(found, options=menu, chosen=f"option{chosen}"), 0)[3]
    assert f"*option{chosen} " in shown
    assert shown.count("option") == 4
    assert shown.endswith(", +3")


def test_an_option_that_was_nearly_impossible_leaves_the_effect_unidentified():
    content, row = gateway_content()
    rare = msgspec.structs.replace(
        row, menu_logprobs=((math.log(0.995), math.log(0.005)), row.menu_logprobs[1])
    )
    (delegate, *_) = decisions_of(content, samples=[rare])
    assert (delegate.status, delegate.effect) == ("unidentified", None)
    assert "0.005" in delegate.reason
    (bare, *_) = decisions_of(content)
    assert (bare.status, bare.menu, bare.options) == ("unidentified", "", ())


def test_drafts_keep_a_grade_a_target():
    def grade(name: str, target: str, value: float, scorer: str = "s", observed: int = 0) -> FeedbackReceived:
        return FeedbackReceived(
            feedback_id=name, target_kind="span", target_id=target, value=value, name="draft", scorer=scorer,
            observed_ns=observed,
        )  # fmt: skip

    given = [
        grade("1", "b", 0.1),
        grade("2", "a", 0.2),
        grade("3", "a", 0.6, observed=5),
        grade("4", "a", 1.0, "t"),
    ]
    for order in (given, given[::-1]):
        found = draft_rewards(order)
        assert [(r.unit_id, r.value, r.evidence) for r in found] == [
            ("a", 800_000, ("3", "4")),
            ("b", 100_000, ("1",)),
        ]
    assert draft_rewards([msgspec.structs.replace(given[0], target_kind="trace")]) == []


@pytest.mark.parametrize(
    "parameters", [{}, {"kind": "decisions/1"}, {"kind": "decisions/1", "effects": [[1]]}]
)
def test_what_is_no_decision_model_is_refused(parameters):
    with pytest.raises(SchemaError):
        DecisionModel.read("d", "v", 1, parameters)


def test_a_version_does_not_depend_on_batching_or_restarts():
    contents, outcomes = told(60, seed=5)
    settings = Pipeline(value_every=20, value_growth=0, holdout=0.0)
    signal = SignalStage(settings)
    signal.restore({})
    records = []
    for content, outcome in zip(contents, outcomes, strict=True):
        trace = content.trace_ids[0]
        feedback = FeedbackReceived(
            feedback_id=trace, target_kind="trace", target_id=trace, value=outcome, scorer="s"
        )
        revised = OrchestrationRevised(
            orchestration_id=content.orchestration_id,
            revision=1,
            complete=True,
            content_hash="h",
            content=content,
        )
        derived = signal.process([as_record(revised), as_record(feedback)], 0).events
        records += [as_record(event) for event in (revised, *derived)]

    def published(size: int, *, restarts: bool, twice: bool = False) -> list[DecisionModelPublished]:
        entries: dict[str, bytes] = {}
        stage = ValueStage(settings)
        stage.restore({})
        found = []
        for at in range(0, len(records), size):
            batch = records[at : at + size]
            output = stage.process([*batch, *batch] if twice else batch, 0)
            found += [event for event in output.events if isinstance(event, DecisionModelPublished)]
            for key, value in output.writes.items():
                if value is None:
                    entries.pop(key, None)
                else:
                    entries[key] = value
            if restarts:
                stage = ValueStage(settings)
                stage.restore(dict(entries))
        return found

    whole = published(len(records), restarts=False)
    assert len(whole) == 3
    assert whole[-1].trained_on == 60
    assert published(1, restarts=True) == published(7, restarts=False) == whole
    assert published(5, restarts=True, twice=True)[-1].parameters == whole[-1].parameters


def test_a_corrected_and_a_retracted_orchestration_leave_the_version_that_would_have_been():
    contents, _ = told(30, seed=9)
    stage, plain = ValueStage(Pipeline(holdout=0.0)), ValueStage(Pipeline(holdout=0.0))
    for each in (stage, plain):
        each.restore({})

    def rewarded(content: OrchestrationContent, team: int | None, revision: int) -> RewardsComputed:
        return RewardsComputed(
            orchestration_id=content.orchestration_id, revision=revision, orchestration_revision=1, rewards=(), team=team,
            status="missing" if team is None else "final",
        )  # fmt: skip

    def revised(content: OrchestrationContent) -> OrchestrationRevised:
        return OrchestrationRevised(
            orchestration_id=content.orchestration_id,
            revision=1,
            complete=True,
            content_hash="h",
            content=content,
        )

    for n, content in enumerate(contents):
        stage.process([as_record(revised(content)), as_record(rewarded(content, 123_456, 1))], 0)
        if n % 3 == 0:
            gone = OrchestrationRevised(
                orchestration_id=content.orchestration_id, revision=2, complete=True, merged_into="other"
            )
            stage.process([as_record(gone)], 0)
            continue
        stage.process([as_record(rewarded(content, n * 1000, 2))], 0)
        plain.process([as_record(revised(content)), as_record(rewarded(content, n * 1000, 1))], 0)
    learners = [each._tenant("default").decisions for each in (stage, plain)]
    assert len(learners[0].lessons) == 20
    assert canonical_json(learners[0].parameters()) == canonical_json(learners[1].parameters())
