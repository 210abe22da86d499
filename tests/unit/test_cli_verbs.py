"""Verbs are found without importlib.metadata, and the same ones; what a verb starts early does not outlive it."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from spanloop.schemas import cli, verbs
from spanloop.schemas.errors import SpanloopError


def test_the_short_way_finds_what_the_long_way_finds():
    own = {e.name: e.value for e in entry_points(group="spanloop.cli") if e.value.startswith("spanloop.")}
    assert own
    assert verbs._own_verbs() == own


def test_the_readme_names_them_all():
    text = (Path(__file__).parents[2] / "README.md").read_text().partition("## Verbs")[2]
    assert set(text.split("`")[1].split()) == set(verbs._own_verbs())


def test_without_an_installation_there_is_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "missing")])
    assert verbs._own_verbs() == {}


@pytest.mark.parametrize(
    "words", [["query", "SELECT 1", "--bad"], ["query", "SELECT 1", "--workspace", "nowhere"]]
)
def test_wrong_usage_ends_with_its_code_and_without_a_process_left(words: list[str], tmp_path: Path):
    pytest.importorskip("duckdb")
    done = subprocess.run(
        [sys.executable, "-m", "spanloop.schemas.cli", *words],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("number", "code"), [(errno.EROFS, 1), (errno.ENOSPC, 4), (errno.EACCES, 1)])
def test_a_disk_that_refuses_is_one_line(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuses(**_: object) -> None:
        raise OSError(number, os.strerror(number), "some/folder")

    monkeypatch.setattr(verbs._cli, "main", refuses)
    monkeypatch.setattr(sys, "argv", ["spanloop"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == code
    assert capsys.readouterr().err.startswith(f"error: some/folder: {os.strerror(number)}: ")


def test_an_error_does_not_steer_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def refuses(**_: object) -> None:
        raise SpanloopError("no agent \x1b]0;x\x07 here\nnext line")

    monkeypatch.setattr(verbs._cli, "main", refuses)
    monkeypatch.setattr(sys, "argv", ["spanloop"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().err == "error: no agent ?]0;x? here\nnext line\n"
