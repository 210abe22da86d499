"""NaN and infinity are wrong usage of every verb that takes a number, before anything is read or written."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from spanloop.learner.cli import policies
from spanloop.pipeline.export.cli import export
from spanloop.pipeline.judges.cli import judge
from spanloop.pipeline.replay.cli import replay

OUT = ["OUT", "--format", "weighted"]


@pytest.mark.parametrize("number", ["nan", "inf", "-inf"])
@pytest.mark.parametrize(
    ("verb", "words"),
    [
        *((export, [*OUT, f]) for f in ("--min-reward", "--min-score", "--margin", "--beta", "--weight-max")),
        (export, [*OUT, "--timeout"]),
        (judge, ["--every"]),
        (policies, ["freeze", "--wait"]),
        (replay, ["--name", "x", "--bucket-mb"]),
    ],
)
def test_what_cannot_be_compared_is_wrong_usage(verb, words: list[str], number: str, tmp_path: Path) -> None:
    done = CliRunner().invoke(verb, [*words, number, "--workspace", str(tmp_path / "none")])
    assert done.exit_code == 2, done.output
    assert f"Invalid value for '{words[-1]}'" in done.output
    assert not (tmp_path / "none").exists()
