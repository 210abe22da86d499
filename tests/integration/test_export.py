"""``spanloop export`` over workspaces that the real stages made: formats, filters, consent, erasure, determinism."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from export_world import VALUE, ExportWorld

from spanloop.collectors.batches import Intake
from spanloop.collectors.redaction import Redactor
from spanloop.learner.erase_cli import erase
from spanloop.pipeline.export import write
from spanloop.pipeline.export.cli import export
from spanloop.pipeline.export.messages import Conversation
from spanloop.pipeline.export.rows import Call, Wish
from spanloop.pipeline.export.source import calls_of, words_of_calls
from spanloop.pipeline.export.write import Card, write_data_set
from spanloop.pipeline.query.session import open_query
from spanloop.pipeline.samples import is_holdout
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.settings import Content

HOLDOUT = 0.2
Make = Callable[..., tuple[Card, list[dict[str, Any]]]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> ExportWorld:
    found = ExportWorld(tmp_path_factory.mktemp("clear"), sealed=False)
    found.play(range(24))
    found.play([24], rewarded=False)
    return found


@pytest.fixture(scope="module")
def told(world: ExportWorld) -> list[tuple[Call, Conversation | str]]:
    """All calls of the workspace with their words, read once."""
    with open_query(world.settings.workspace, timeout_s=300) as query:
        calls = list(calls_of(query, holdout=HOLDOUT))
        return list(words_of_calls(query, calls, None))


@pytest.fixture
def make(told: list[tuple[Call, Conversation | str]], tmp_path: Path) -> Make:
    """Writes a data set of ``told`` and reads it back."""
    calls = [call for call, _ in told]
    said = {(call.orchestration_id, call.call_id): words for call, words in told}

    def words(some: Sequence[Call]) -> Iterator[tuple[Call, Conversation | str]]:
        for call in some:
            yield call, said[call.orchestration_id, call.call_id]

    def made(name: str, form: str, **wish: Any) -> tuple[Card, list[dict[str, Any]]]:
        card = write_data_set(tmp_path / name, Wish(form, **wish), calls, words)
        assert card.calls == card.used + sum(card.excluded.values()) == 50
        return card, lines(tmp_path / name)

    return made


def run(world: ExportWorld, out: Path, *words: str, sealed: bool = False) -> dict[str, Any]:
    given = {
        "SPANLOOP_CONTENT__TRAINING": "true",
        "SPANLOOP_CONTENT__SUBJECT_KEYS": str(sealed).lower(),
        "SPANLOOP_PIPELINE__HOLDOUT": str(HOLDOUT),
    }
    command = [str(out), "--workspace", str(world.settings.workspace), "--json", *words]
    result = CliRunner(env=given).invoke(export, command, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    card = json.loads((out / "card.json").read_text())
    assert card == json.loads(result.output)
    assert card["calls"] == card["used"] + sum(card["excluded"].values())
    return card


def lines(folder: Path, name: str = "data.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_supervised_rows_are_the_words_of_the_calls(make: Make) -> None:
    card, rows = make("out", "sft")
    assert card.rows == len(rows) == card.used > 0
    assert card.excluded.keys() == {"no_reward", "held_out"}
    answers = [row for row in rows if row["completion"][0]["content"]]
    assert {row["completion"][0]["content"] for row in answers} <= set(VALUE)
    for row in answers:
        assert [m["role"] for m in row["prompt"]] == ["system", "user", "assistant", "tool"]
        assert row["prompt"][2]["tool_calls"][0]["id"] == row["prompt"][3]["tool_call_id"] == "c1"
        assert row["reward"] == VALUE[row["completion"][0]["content"]]
        assert json.loads(row["tools"])[0]["function"]["name"] == "lookup"
    assert not any(is_holdout(row["orchestration_id"], HOLDOUT) for row in rows)


def test_splits_part_the_orchestrations(make: Make) -> None:
    counts = {split: make(split, "sft", split=split)[0].rows for split in ("train", "held-out", "all")}
    assert counts["train"] + counts["held-out"] == counts["all"] == 48
    assert counts["held-out"] > 0


def test_rejection_sampling(make: Make) -> None:
    card, rows = make("a", "sft", min_reward=0.9, split="all")
    assert {row["reward"] for row in rows} == {1.0}
    assert card.excluded == {"below_min_reward": 32, "no_reward": 2}
    card, rows = make("b", "sft", min_score=0.2, level="team", split="all")
    assert min(row["score"] for row in rows) >= 0.2
    assert card.excluded["below_min_score"] > 0


def test_the_best_of_each_task(told: list[tuple[Call, Conversation | str]], tmp_path: Path) -> None:
    calls = [
        msgspec.structs.replace(call, group=str(call.started_ns // 10_000_000_000 % 4)) for call, _ in told
    ]
    said = [words for _, words in told]
    by_id = {(c.orchestration_id, c.call_id): w for c, w in zip(calls, said, strict=True)}
    card = write_data_set(
        tmp_path / "out", Wish("sft", best=1, split="all"), calls,
        lambda some: ((call, by_id[call.orchestration_id, call.call_id]) for call in some),
    )  # fmt: skip
    assert card.orchestrations == 4
    assert {row["reward"] for row in lines(tmp_path / "out")} == {1.0}
    assert card.excluded["not_best_of_group"] == 2 * 20


def test_weights_are_exponential_and_capped(make: Make) -> None:
    _, rows = make("w", "weighted", level="reward", beta=0.5, weight_max=4.0)
    for row in rows:
        assert row["weight"] == pytest.approx(min(4.0, math.exp(row["score"] / 0.5)), abs=1e-6)


def test_pairs_compare_answers_to_one_prompt(make: Make) -> None:
    card, rows = make("p", "dpo", level="reward", margin=0.5, split="all")
    assert card.rows == len(rows) == 4, "one pair for each of the four questions"
    for row in rows:
        assert row["chosen"][0]["content"] == "four"
        assert row["rejected"][0]["content"] == "I do not know"
        assert row["chosen_score"] - row["rejected_score"] >= 0.5
    assert card.excluded["only_answer"] == 4, "the calls that ask for the tool all say the same"
    assert make("q", "dpo", level="reward", margin=2.0)[0].rows == 0


def test_labels_leave_the_middle_out(make: Make) -> None:
    card, rows = make("k", "kto", level="team", margin=0.1, split="all")
    assert {row["label"] for row in rows} == {True}
    assert min(abs(row["score"]) for row in rows) >= 0.1
    assert card.excluded == {"no_reward": 2, "undecided": 16}


def test_openai_rows_follow_its_rules(make: Make, tmp_path: Path) -> None:
    card, rows = make("o", "openai", split="all")
    assert len(rows) == len(lines(tmp_path / "o", "index.jsonl")) == card.rows
    for row in rows:
        assert row.keys() <= {"messages", "tools"}
        assert row["messages"][-1]["role"] == "assistant"
        weights = [m["weight"] for m in row["messages"] if m["role"] == "assistant"]
        assert weights == [*[0] * (len(weights) - 1), 1]
        for message in row["messages"]:
            assert message.keys() <= {"role", "content", "tool_calls", "tool_call_id", "weight"}
            assert message["content"] or message.get("tool_calls")
    card, rows = make("d", "openai-dpo", level="reward", split="all")
    assert card.notes == {"fewer_rows_than_openai_takes": 6}
    for row in rows:
        assert row.keys() == {"input", "preferred_output", "non_preferred_output"}
        assert row["input"].keys() <= {"messages", "tools"}


def test_the_verb_gives_the_same_bytes_archived_or_not(world: ExportWorld, tmp_path: Path) -> None:
    """In another order than the tests above: as lines from the log, as Parquet from the archive alone."""
    first = run(world, tmp_path / "a", "--format", "sft", "--role", "lead", "--until", "2026-09-21T14:15:30Z")
    world.archive()
    second = run(world, tmp_path / "b", "--format", "sft", "--role", "lead", "--until", "2026-09-21T14:15:30Z", "--archive-only")  # fmt: skip
    assert first == second
    assert (tmp_path / "a" / "data.jsonl").read_bytes() == (tmp_path / "b" / "data.jsonl").read_bytes()
    assert 0 < first["calls"] < 50
    run(world, tmp_path / "c", "--format", "sft", "--parquet", "--until", "2026-09-21T14:15:30Z")
    table = pq.read_table(tmp_path / "c" / "data.parquet").to_pylist()
    plain = lines(tmp_path / "a")
    assert [row["call_id"] for row in table] == [row["call_id"] for row in plain]
    assert [row["completion"][0]["content"] for row in table] == [
        row["completion"][0]["content"] for row in plain
    ]
    assert first["offsets"]["credits"]["0"] > 0
    with pytest.raises(ConfigError, match="there already"):
        run(world, tmp_path / "a", "--format", "sft")


def test_a_deployment_that_did_not_opt_in_is_refused(world: ExportWorld, tmp_path: Path) -> None:
    command = [str(tmp_path / "out"), "--format", "sft", "--workspace", str(world.settings.workspace)]
    with pytest.raises(ConfigError, match=r"content\.training is off"):
        CliRunner(env={"SPANLOOP_CONTENT__TRAINING": None}).invoke(export, command, catch_exceptions=False)
    assert not (tmp_path / "out").exists()


def test_content_that_was_not_kept_is_counted(tmp_path: Path) -> None:
    world = ExportWorld(tmp_path / "w", sealed=False)
    world.intake = Intake(Redactor(Content(), b"k" * 32), 65_536, keep_content=False, sealer=None)
    world.play(range(4))
    card = run(world, tmp_path / "out", "--format", "sft", "--split", "all")
    assert card["rows"] == 0
    assert card["excluded"] == {"content_not_kept": 8}


def test_erased_content_is_left_out_and_counted(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    world = ExportWorld(tmp_path / "w")
    world.play(range(10))
    before = run(world, tmp_path / "a", "--format", "sft", "--split", "all", sealed=True)
    assert before["rows"] == 20
    env = {"SPANLOOP_CONTENT__TRAINING": "true", "SPANLOOP_CONTENT__SUBJECT_KEYS": "true"}
    done = CliRunner(env=env).invoke(
        erase, ["u-1", "--workspace", str(world.settings.workspace)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    after = run(world, tmp_path / "b", "--format", "sft", "--split", "all", sealed=True)
    assert after["excluded"] == {"erased": 4}
    assert after["rows"] == 16


def test_a_folder_is_there_whole_or_not_at_all(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(write.os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        make("out", "sft")
    assert list(tmp_path.iterdir()) == []
