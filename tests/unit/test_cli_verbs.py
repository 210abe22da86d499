"""Verbs are found without importlib.metadata, and the same ones; what a verb starts early does not outlive it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from spanloop.schemas import cli


def test_the_short_way_finds_what_the_long_way_finds():
    own = {e.name: e.value for e in entry_points(group="spanloop.cli") if e.value.startswith("spanloop.")}
    assert own
    assert cli._own_verbs() == own


def test_without_an_installation_there_is_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "missing")])
    assert cli._own_verbs() == {}


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
