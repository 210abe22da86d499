"""Comparing two versions, and promoting one by hand."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from learner_world import World, drive, learner

from spanloop.learner.cli import policies
from spanloop.learner.differences import differences
from spanloop.learner.history import read_policies
from spanloop.learner.promotion import fold
from spanloop.learner.trainer import Learner
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    GateEvaluated,
    PolicyCommand,
    PolicyCommandFinished,
    PolicyPromoted,
    SentinelRaised,
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Learner, SqliteLog]]:
    """A learner with four versions whose gate has evaluated none."""
    workspace = tmp_path_factory.mktemp("compared")
    log = SqliteLog(workspace / "spanloop.db")
    system = learner(log, workspace, gate_every=1000)
    drive(system, log, World(), 4, per_round=30)
    yield system, log
    log.close()


def ask(made: tuple[Learner, SqliteLog], *words: str) -> Result:
    """Queue a request, let the learner take it, and ask for the answer. What cannot be queued is answered at once."""
    place = ["--workspace", str(made[0].settings.workspace), "--wait", "0"]
    first = CliRunner().invoke(policies, [*words, *place])
    made[0].step()
    return first


# ---------------------------------------------------------------- diff


def test_a_version_does_not_differ_from_itself(made) -> None:
    system, log = made
    found = differences(log, system.settings, 2, 2)
    assert (found.tensors, found.only_a, found.only_b, found.delta) == ((), (), (), 0.0)
    assert (found.taught_a, found.taught_b, found.settings, found.figures) == ((), (), (), ())


def test_differences_are_those_of_weights_log_and_settings(made) -> None:
    system, log = made
    found = differences(log, system.settings, 1, 3)
    back = differences(log, system.settings, 3, 1)
    one, three = (system.promoter.net(v).tensors() for v in (1, 3))
    assert {c.name for c in found.tensors} == {n for n in one if not torch.equal(one[n], three[n])}
    for change in found.tensors:
        moved = three[change.name].double() - one[change.name].double()
        assert change.delta == pytest.approx(float(moved.norm()), rel=1e-12)
        assert change.largest == float(moved.abs().max())
    assert found.delta == pytest.approx(sum(c.delta**2 for c in found.tensors) ** 0.5)
    assert found.delta == pytest.approx(back.delta)
    used = [name for name, batch in system.training.state.ledger.items() if batch in (2, 3)]
    assert {name.partition("@")[0] for name in found.taught_b} == set(used)
    assert (found.taught_a, back.taught_b) == ((), ())
    assert back.taught_a == found.taught_b
    assert {row.name for row in found.figures} >= {"reward", "loss"}
    first = differences(log, system.settings, 0, 1)
    assert {row.name for row in first.settings} >= {"learning_rate"}  # version 0 has no batch
    assert all(row.a is None for row in first.settings)


def test_diff_for_people_and_programs(made) -> None:
    shown = CliRunner().invoke(
        policies, ["diff", "1", "policy@v3", "--workspace", str(made[0].settings.workspace)]
    )
    assert shown.exit_code == 0, shown.output
    assert shown.output.startswith("policy@v1 -> policy@v3: ")
    assert "taught policy@v3 only: " in shown.output
    data = json.loads(
        CliRunner()
        .invoke(policies, ["diff", "1", "3", "--json", "--workspace", str(made[0].settings.workspace)])
        .output
    )
    assert len(data["taught_b"]) > 10
    missing = CliRunner().invoke(
        policies, ["diff", "1", "99", "--workspace", str(made[0].settings.workspace)]
    )
    assert "99 is not registered" in str(missing.exception)


def test_a_changed_folder_is_not_compared(made) -> None:
    system, log = made
    weights = system.settings.workspace / "policies" / "policy@v2" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    try:
        with pytest.raises(SchemaError, match="corrupt"):
            differences(log, system.settings, 1, 2)
    finally:
        weights.write_bytes(whole)


# ---------------------------------------------------------------- promote


def test_promotion_by_hand(made) -> None:
    """In this order on one workspace: no evidence, evidence, a version that is out, frozen."""
    system, log = made
    assert system.promoter.state.champion == 0
    refused = ask(made, "promote", "2", "--reason", "incident 7")
    assert "nothing speaks for version 2" in str(refused.exception)
    assert "no gate has evaluated it" in refused.output
    assert ask(made, "promote", "2").exit_code == 2  # a reason is needed

    ask(made, "promote", "2", "--reason", "incident 7", "--without-evidence")
    state = system.promoter.state
    assert (state.champion, state.epoch) == (2, 2)
    assert state.routing is not None
    assert state.routing.champion == 2
    told = [e for e, _ in read_policies(log, "default", "policy") if isinstance(e, PolicyPromoted)][-1]
    assert told.reason == "by hand: incident 7; no gate has evaluated it"
    assert told.command

    gate = GateEvaluated(
        version=3, against=2, attempt=0, estimate=50_000, lower=10_000, ess=40.0, n=60, passed=True
    )
    log.append([new_record(gate)])
    system.promoter.sync()
    shown = ask(made, "promote", "3", "--reason", "checked")
    assert "gate against v2 passed: +0.0500, lower bound +0.0100, 60 orchestrations" in shown.output
    assert system.promoter.state.champion == 3

    log.append([new_record(PolicyCommand(command_id="back", kind="rollback"))])
    system.step()
    assert system.promoter.state.champion == 2
    finished = _obeyed(made, "promote", "3")
    assert "never promoted again" in finished
    assert "champion already" in _obeyed(made, "promote", "2")
    assert "not registered" in _obeyed(made, "promote", "99")
    assert "'x' is not a version number" in _obeyed(made, "promote", "x")
    alarm = SentinelRaised(
        sentinel="spawn_spam", version=1, epoch=1, value=2.0, reference=1.0, limit=1.5, orchestrations=("o",), reason="r"
    )  # fmt: skip
    log.append([new_record(alarm)])
    system.promoter.sync()
    assert "frozen" in _obeyed(made, "promote", "1")
    assert system.promoter.state.champion == 2
    epochs = [e.epoch for e, _ in read_policies(log, "default", "policy") if isinstance(e, PolicyPromoted)]
    assert epochs == sorted(set(epochs))
    assert fold(read_policies(log, "default", "policy")) == system.promoter.state


def _obeyed(made: tuple[Learner, SqliteLog], kind: str, argument: str) -> str:
    """What the learner answers to a request that is on the log."""
    system, log = made
    name = f"{kind}-{argument}"
    log.append([new_record(PolicyCommand(command_id=name, kind=kind, argument=argument))])
    system.step()
    return next(
        e.message
        for e, _ in read_policies(log, "default", "policy")
        if isinstance(e, PolicyCommandFinished) and e.command_id == name
    )


def test_a_promotion_that_a_kill_left_without_an_answer_is_not_done_twice(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "spanloop.db")
    system = learner(log, tmp_path, gate_every=1000)
    drive(system, log, World(), 2, per_round=30)
    log.append([new_record(PolicyCommand(command_id="p", kind="promote", argument="1"))])
    log.append([new_record(PolicyPromoted(epoch=2, version=1, previous=0, reason="by hand", command="p"))])
    system.step()
    state = system.promoter.state
    assert (state.champion, state.epoch, state.commands) == (1, 2, ())
    log.close()
