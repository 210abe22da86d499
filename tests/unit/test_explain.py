"""``spanloop explain credit``: the printed numbers are the ledger's and the sums are checked."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from synthetic_orchestrations import make_content, make_feedback, make_model, make_revision

from spanloop.pipeline.credit.cast import cast_of
from spanloop.pipeline.credit.cli import explain
from spanloop.pipeline.credit.estimates import lessons
from spanloop.pipeline.credit.explain import explain_credit, find_orchestration
from spanloop.pipeline.credit.value_training import Example, ValueTrainer
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import LogRecord, new_record
from spanloop.pipeline.signal import SignalStage
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import CreditAssigned, Event, FeedbackReceived, ValueModelPublished
from spanloop.schemas.orchestration import Agent, ModelCall, OrchestrationContent, TokenUsage
from spanloop.schemas.settings import Pipeline

CONTENTS = [make_content(seed) for seed in range(4)]


def derived() -> list[Event]:
    sources: list[Event] = [make_model(1), *map(make_revision, CONTENTS), *map(make_feedback, CONTENTS[:3])]
    made = [new_record(event) for event in sources]
    records = [LogRecord(r.topic, i, r.key, r.event_id, r.value, 0) for i, r in enumerate(made)]
    return SignalStage(Pipeline()).process(records, 0).events  # type: ignore[call-arg]


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return derived()


@pytest.fixture
def workspace(tmp_path: Path, events: list[Event]) -> Path:
    log = SqliteLog(tmp_path / "spanloop.db")
    log.append([new_record(event) for event in events])
    log.close()
    return tmp_path


def run(workspace: Path, *arguments: str):
    return CliRunner().invoke(explain, ["credit", *arguments, "--workspace", str(workspace)])


def test_the_tree_reaches_the_token_and_says_it_is_conserved(workspace: Path):
    oid = CONTENTS[0].orchestration_id
    result = run(workspace, oid, "--token")
    assert result.exit_code == 0, result.output
    assert "value model value@v1" in result.output
    assert "conserved: children sum to their parent" in result.output
    for unit in ("team", "orchestrator", "agent", "turn", "message", "token"):
        assert f"{unit} " in result.output
    assert "token " not in run(workspace, oid).output


def test_json_holds_every_account_with_its_numbers(workspace: Path, events: list[Event]):
    oid = CONTENTS[1].orchestration_id
    found = msgspec.json.decode(run(workspace, oid[:12], "--json").output)
    ledger = next(e for e in events if isinstance(e, CreditAssigned) and e.orchestration_id == oid)
    assert {(line["id"], round(line["credit"] * 1e6)) for line in found["lines"]} == {
        (node.id, node.credit) for node in ledger.nodes
    }
    assert found["problems"] == []


def test_one_agent(workspace: Path):
    oid = CONTENTS[0].orchestration_id
    result = run(workspace, oid, "--agent", "orchestrator", "--json")
    lines = msgspec.json.decode(result.output)["lines"]
    assert {line["unit"] for line in lines} >= {"orchestrator", "agent", "turn"}
    assert "team" not in {line["unit"] for line in lines}
    missing = run(workspace, oid, "--agent", "nobody")
    assert isinstance(missing.exception, SchemaError)
    assert "there are" in missing.exception.message


def test_a_broken_ledger_is_said_and_fails(tmp_path: Path, events: list[Event]):
    oid = CONTENTS[0].orchestration_id
    log = SqliteLog(tmp_path / "spanloop.db")
    for event in events:
        if isinstance(event, CreditAssigned) and event.orchestration_id == oid:
            nodes = (
                *event.nodes[:-1],
                msgspec.structs.replace(event.nodes[-1], credit=event.nodes[-1].credit + 1),
            )
            log.append([new_record(msgspec.structs.replace(event, nodes=nodes))])
            continue
        log.append([new_record(event)])
    log.close()
    result = run(tmp_path, oid)
    assert result.exit_code == 1
    assert "NOT conserved" in result.output


def test_ids_that_are_unknown_ambiguous_or_without_outcome(workspace: Path):
    log = SqliteLog(workspace / "spanloop.db")
    try:
        with pytest.raises(SchemaError, match="spanloop traces"):
            find_orchestration(log, "zz")
        with pytest.raises(SchemaError, match="ambiguous"):
            find_orchestration(log, "default/")
        with pytest.raises(SchemaError, match="its reward is missing"):
            explain_credit(log, CONTENTS[3].orchestration_id)
    finally:
        log.close()


def test_a_name_does_not_steer_the_terminal(tmp_path: Path, events: list[Event]):
    evil = "\x1b]0;owned\x07\x9b31m\u202ename"
    log = SqliteLog(tmp_path / "spanloop.db")
    found = [
        msgspec.structs.replace(
            event, nodes=tuple(msgspec.structs.replace(node, label=evil) for node in event.nodes)
        )
        if isinstance(event, CreditAssigned)
        else event
        for event in events
    ]
    log.append([new_record(event) for event in found])
    log.close()
    output = run(tmp_path, CONTENTS[0].orchestration_id).output
    assert "agent ?]0;owned??31m?name" in output
    assert all(c.isprintable() or c == "\n" for c in output)


def side_by_side() -> list[Event]:
    """Two agents of two roles after one turn, in four tries of one task that all got the same, and one other."""
    agents = (
        Agent("main", "main", "main"),
        Agent("a", "one", "one", "main", started_ns=20),
        Agent("b", "two", "two", "main", started_ns=20),
    )
    contents = [
        OrchestrationContent(
            orchestration_id=f"{n:032x}", tenant="default", trace_ids=(f"t{n}",), events=(), edges=(),
            agents=agents, tokens=TokenUsage(), started_ns=0, ended_ns=30,
            calls=(ModelCall(f"c{n}", "main", (f"s{n}",), 10, 11, task_key="trip" if n < 4 else "other"),),
        )
        for n in range(5)
    ]  # fmt: skip
    trainer = ValueTrainer.fresh(64)
    learned = tuple(lessons(cast_of(contents[0])))
    trainer.update([Example(f"o{i}", learned, i * 300_000) for i in range(4)], steps=8)
    model = ValueModelPublished(
        tenant="default", version="value@v1", kind=trainer.model.kind, trained_on=4,
        parameters=trainer.model.to_dict(),
    )  # fmt: skip
    outcomes = [
        FeedbackReceived(feedback_id=f"f{n}", target_kind="trace", target_id=f"t{n}", value=0.5)
        for n in range(5)
    ]
    sources: list[Event] = [model, *map(make_revision, contents), *outcomes]
    return [*sources, *SignalStage(Pipeline(holdout=0.0)).fold(sources, 0).events]  # type: ignore[call-arg]


def test_a_group_without_variance_and_the_coalitions_are_said(tmp_path: Path):
    log = SqliteLog(tmp_path / "spanloop.db")
    log.append([new_record(event) for event in side_by_side()])
    log.close()
    output = run(tmp_path, f"{0:032x}").output
    assert "group of 4, no variance: advantage 0" in output
    assert "shapley/1: Shapley value in all coalitions" in output
    assert "coalitions of those that worked side by side" in output
    found = msgspec.json.decode(run(tmp_path, f"{0:032x}", "--json").output)
    assert found["group"]["grpo"] == found["group"]["rloo"] == 0.0
    (game,) = found["coalitions"]
    values = [item["value"] for item in game]
    assert [item["agents"] for item in game] == [[], ["one a"], ["two b"], ["one a", "two b"]]
    shares = {line["subject"]: line["raw"] for line in found["lines"] if line["unit"] == "agent"}
    assert shares["a"] == pytest.approx((values[1] - values[0] + values[3] - values[2]) / 2, abs=2e-6)
    assert "the only try of its task" in run(tmp_path, f"{4:032x}").output


def test_one_message_with_what_is_above_and_below_it(workspace: Path):
    oid = CONTENTS[0].orchestration_id
    call = CONTENTS[0].calls[0].id
    result = run(workspace, oid, "--message", call, "--json")
    lines = msgspec.json.decode(result.output)["lines"]
    assert next(line["unit"] for line in lines) == "team"
    assert {line["unit"] for line in lines} >= {"team", "agent", "turn", "message"}
    assert sum(line["unit"] == "message" for line in lines) == 1
    missing = run(workspace, oid, "--message", "nothing")
    assert isinstance(missing.exception, SchemaError)


def test_who_gives_a_trace_is_told_how_to_find_its_orchestration(workspace: Path):
    with pytest.raises(SchemaError, match="list_contains"):
        find_orchestration(SqliteLog(workspace / "spanloop.db"), "0" * 32)
