"""``spanloop explain credit``: the printed numbers are the ledger's and the sums are checked."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner
from synthetic_orchestrations import make_content, make_feedback, make_model, make_revision

from spanloop.pipeline.credit.cli import explain
from spanloop.pipeline.credit.explain import explain_credit, find_orchestration
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import LogRecord, new_record
from spanloop.pipeline.signal import SignalStage
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import CreditAssigned, Event
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
