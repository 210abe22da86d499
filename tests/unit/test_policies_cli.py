"""Verbs policies and provenance over a workspace that a learner has worked on."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from learner_world import CONFIG, WORDS, World, drive, learner

from spanloop.learner.cli import policies, provenance
from spanloop.learner.history import read_policies
from spanloop.learner.policy import PolicyNet, save_artifact
from spanloop.learner.provenance import lessons_of
from spanloop.learner.tokenizer import Tokenizer
from spanloop.learner.trainer import Learner
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.errors import SchemaError, TransientError
from spanloop.schemas.events import CandidateRegistered, PolicyCommand


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Learner]:
    workspace = tmp_path_factory.mktemp("policies")
    log = SqliteLog(workspace / "spanloop.db")
    system = learner(log, workspace, gate=False)
    drive(system, log, World(), 5, per_round=30)
    while system.step():
        pass
    yield system
    log.close()


def ask(made: Learner, *arguments: str, verb=policies) -> Result:
    """Run a verb while the learner steps in another thread."""
    place = ["--workspace", str(made.settings.workspace)]
    words = [*place, *arguments] if verb is policies else [*arguments, *place]
    stop = threading.Event()

    def steps() -> None:
        while not stop.wait(0.02):
            made.step()

    thread = threading.Thread(target=steps)
    thread.start()
    try:
        return CliRunner().invoke(verb, words)
    finally:
        stop.set()
        thread.join()


def test_list(made: Learner) -> None:
    state = made.promoter.state
    shown = ask(made)
    assert shown.exit_code == 0, shown.output
    assert f"policy@v{state.champion}" in shown.output
    assert f"serving: champion policy@v{state.champion} (epoch {state.epoch})" in shown.output
    data = json.loads(ask(made, "--json", "list").output)
    assert data["champion"] == state.champion
    assert [v["version"] for v in data["versions"]] == sorted(state.versions)
    assert {v["status"] for v in data["versions"]} >= {"champion", "former"}


def test_show(made: Learner) -> None:
    data = json.loads(ask(made, "--json", "show", "policy@v1").output)
    assert data["version"] == 1
    assert {"candidate_registered", "policy_promoted"} <= {e["type"] for e in data["events"]}
    assert "not registered" in str(ask(made, "show", "99").exception)
    assert "is no version" in str(ask(made, "show", "newest").exception)


def test_provenance_both_ways(made: Learner) -> None:
    version = made.training.state.batch
    history = json.loads(ask(made, str(version), "--json", verb=provenance).output)
    assert history["lineage"] == list(range(version + 1))
    assert [b["batch"] for b in history["batches"]] == list(range(1, version + 1))
    assert [len(b["lessons"]) for b in history["batches"]] == [
        made.promoter.state.versions[b].orchestrations for b in range(1, version + 1)
    ]
    lesson = history["batches"][1]["lessons"][0]
    assert made.training.state.ledger[lesson["orchestration_id"]] == 2
    back = json.loads(
        ask(made, "--orchestration", lesson["orchestration_id"], "--json", verb=provenance).output
    )
    assert back == {
        "orchestration_id": lesson["orchestration_id"],
        "batch": 2,
        "versions": list(range(2, version + 1)),
    }
    assert "no batch was trained on" in ask(made, "--orchestration", "nobody", verb=provenance).output
    common = lesson["orchestration_id"][:-4]
    assert "is ambiguous" in str(ask(made, "--orchestration", common, verb=provenance).exception)
    shown = ask(made, "policy@v1", verb=provenance).output
    assert "1 batches" in shown
    assert lesson["orchestration_id"] not in shown
    assert ask(made, verb=provenance).exit_code == 2


def test_the_beginning_of_an_id_is_enough(made: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    log = SqliteLog(made.settings.workspace / "spanloop.db")
    lessons = lessons_of(log, CONFIG, tenant="default", policy="policy")
    log.close()
    one = [(committed, rollouts[:1], dropped) for committed, rollouts, dropped in lessons[:1]]
    monkeypatch.setattr("spanloop.learner.provenance.lessons_of", lambda *_, **__: one)
    name = one[0][1][0].orchestration_id
    shown = ask(made, "--orchestration", name[:3], verb=provenance).output
    assert shown.startswith(f"{name} was in batch 1; it taught policy@v1")


def test_freeze_inject_rollback_unfreeze(made: Learner, tmp_path: Path) -> None:
    """In this order on one workspace; with the gate off an injected version serves at once, and rollback undoes it."""
    champion = made.promoter.state.champion
    assert ask(made, "freeze", "--reason", "test").exit_code == 0
    assert made.promoter.state.frozen
    folder = tmp_path / "other"
    save_artifact(folder, PolicyNet.initial(CONFIG, 9), Tokenizer(WORDS))
    shown = ask(made, "inject", str(folder), "--unsigned", "--reason", "a test")
    assert shown.exit_code == 0, shown.output
    version = made.promoter.state.next_version - 1
    assert made.promoter.state.versions[version].injected == "a test"
    assert "no orchestration" in ask(made, str(version), verb=provenance).output
    assert made.promoter.state.champion == champion
    assert ask(made, "unfreeze").exit_code == 0
    made.step()
    assert made.promoter.state.champion == version
    back = ask(made, "rollback", "--reason", "worse")
    assert back.exit_code == 0, back.output
    assert made.promoter.state.champion == champion
    assert version in made.promoter.state.retired
    assert made.promoter.state.routing is not None
    assert made.promoter.state.routing.champion == champion


def test_refusals(made: Learner, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no policy artifact" in str(ask(made, "inject", str(empty)).exception)
    broken = tmp_path / "nan"
    net = PolicyNet.initial(CONFIG, 1)
    net.head.bias.data[0] = float("nan")
    save_artifact(broken, net, Tokenizer(WORDS))
    assert "not finite" in str(ask(made, "inject", str(broken), "--unsigned").exception)
    words = tmp_path / "words"
    save_artifact(words, PolicyNet.initial(CONFIG, 1), Tokenizer([*WORDS[:-1], "other"]))
    assert "vocabulary" in str(ask(made, "inject", str(words), "--unsigned").exception)
    assert "not registered" in str(ask(made, "rollback", "--to", "99").exception)
    assert "champion already" in str(
        ask(made, "rollback", "--to", str(made.promoter.state.champion)).exception
    )


def _registered(workspace: Path) -> None:
    """A workspace whose learner registered one version and is down."""
    log = SqliteLog(workspace / "spanloop.db")
    version = CandidateRegistered(
        version=0, parent=-1, batch=0, mlflow_version="1", path="p", sha256="s", orchestrations=0
    )
    log.append([new_record(version)])
    log.close()


def _commands(workspace: Path) -> list[tuple[str, str]]:
    log = SqliteLog(workspace / "spanloop.db")
    try:
        events = [event for event, _ in read_policies(log, "default", "policy")]
    finally:
        log.close()
    return [(e.kind, e.argument) for e in events if isinstance(e, PolicyCommand)]


def test_without_a_learner_the_request_waits_on_the_log(tmp_path: Path) -> None:
    _registered(tmp_path)
    result = CliRunner().invoke(policies, ["--workspace", str(tmp_path), "freeze", "--wait", "0"])
    assert "is on the log" in str(result.exception)
    assert _commands(tmp_path) == [("freeze", "")]


@pytest.mark.parametrize("verb", ["rollback", "freeze", "unfreeze"])
def test_without_a_policy_nothing_is_queued(tmp_path: Path, verb: str) -> None:
    SqliteLog(tmp_path / "spanloop.db").close()
    result = CliRunner().invoke(policies, [verb, "--wait", "0", "--workspace", str(tmp_path)])
    assert isinstance(result.exception, SchemaError)
    assert f"there is no policy 'policy' of tenant 'default' in {tmp_path} to {verb}" in str(result.exception)
    assert _commands(tmp_path) == []


def test_a_request_that_waits_is_not_queued_twice(tmp_path: Path) -> None:
    _registered(tmp_path)

    def run(*arguments: str) -> Result:
        result = CliRunner().invoke(policies, [*arguments, "--wait", "0", "--workspace", str(tmp_path)])
        assert isinstance(result.exception, TransientError)
        return result

    assert run("rollback").stderr == ""
    assert "rollback is on the log already" in run("rollback").stderr
    assert _commands(tmp_path) == [("rollback", "")]
    assert "takes first what waits on the log: rollback" in run("freeze").stderr
    assert "rollback, freeze" in run("unfreeze").stderr
    run("freeze")  # another one than the first: it is to hold behind unfreeze
    assert [kind for kind, _ in _commands(tmp_path)] == ["rollback", "freeze", "unfreeze", "freeze"]


def test_a_request_that_waited_is_answered_to_whoever_asks_again(made: Learner) -> None:
    place = ["--workspace", str(made.settings.workspace)]
    CliRunner().invoke(policies, ["unfreeze", "--wait", "0", *place])
    again = ask(made, "unfreeze")
    assert again.exit_code == 0, again.output
    assert "not queued again" in again.stderr


def test_options_before_or_after_the_verb(made: Learner) -> None:
    place = ["--workspace", str(made.settings.workspace)]
    before = CliRunner().invoke(policies, [*place, "--json", "show", "1"])
    for words in (["show", "1", *place, "--json"], ["--json", "show", *place, "1"]):
        assert CliRunner().invoke(policies, words).output == before.output
    there = CliRunner().invoke(policies, ["--workspace", "/nowhere", "list", *place])
    assert there.exit_code == 0, there.output


def test_a_folder_that_is_no_policy_does_not_reach_the_log(tmp_path: Path) -> None:
    SqliteLog(tmp_path / "spanloop.db").close()
    result = CliRunner().invoke(
        policies, ["--workspace", str(tmp_path), "inject", str(tmp_path), "--wait", "0"]
    )
    assert "is no policy artifact" in str(result.exception)


def test_no_workspace(tmp_path: Path) -> None:
    result = CliRunner().invoke(policies, ["--workspace", str(tmp_path / "none")])
    assert "is no workspace" in str(result.exception)
