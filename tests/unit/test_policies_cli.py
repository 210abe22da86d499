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
from spanloop.learner.policy import PolicyNet, save_artifact
from spanloop.learner.tokenizer import Tokenizer
from spanloop.learner.trainer import Learner
from spanloop.pipeline.log.sqlite import SqliteLog


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
    shown = ask(made, "policy@v1", verb=provenance).output
    assert "1 batches" in shown
    assert lesson["orchestration_id"] not in shown
    assert ask(made, verb=provenance).exit_code == 2


def test_freeze_inject_rollback_unfreeze(made: Learner, tmp_path: Path) -> None:
    """In this order on one workspace; with the gate off an injected version serves at once, and rollback undoes it."""
    champion = made.promoter.state.champion
    assert ask(made, "freeze", "--reason", "test").exit_code == 0
    assert made.promoter.state.frozen
    folder = tmp_path / "other"
    save_artifact(folder, PolicyNet.initial(CONFIG, 9), Tokenizer(WORDS))
    shown = ask(made, "inject", str(folder), "--reason", "a test")
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
    assert "not finite" in str(ask(made, "inject", str(broken)).exception)
    words = tmp_path / "words"
    save_artifact(words, PolicyNet.initial(CONFIG, 1), Tokenizer([*WORDS[:-1], "other"]))
    assert "vocabulary" in str(ask(made, "inject", str(words)).exception)
    assert "not registered" in str(ask(made, "rollback", "--to", "99").exception)
    assert "champion already" in str(
        ask(made, "rollback", "--to", str(made.promoter.state.champion)).exception
    )


def test_without_a_learner_the_request_waits_on_the_log(tmp_path: Path) -> None:
    SqliteLog(tmp_path / "spanloop.db").close()
    result = CliRunner().invoke(policies, ["--workspace", str(tmp_path), "freeze", "--wait", "0"])
    assert "is on the log" in str(result.exception)


def test_a_folder_that_is_no_policy_does_not_reach_the_log(tmp_path: Path) -> None:
    SqliteLog(tmp_path / "spanloop.db").close()
    result = CliRunner().invoke(
        policies, ["--workspace", str(tmp_path), "inject", str(tmp_path), "--wait", "0"]
    )
    assert "is no policy artifact" in str(result.exception)


def test_no_workspace(tmp_path: Path) -> None:
    result = CliRunner().invoke(policies, ["--workspace", str(tmp_path / "none")])
    assert "is no workspace" in str(result.exception)
