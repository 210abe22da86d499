"""``spanloop feedback`` into a workspace's log: what it says of targets that nobody has seen."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from otlp_requests import TRACE, as_json, span

from spanloop.collectors.cli import feedback, import_

SEEN = TRACE
UNSEEN = "00000000000000000000000000000abc"


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    source = tmp_path / "spans.jsonl"
    source.write_bytes(as_json([span(1)]) + b"\n")
    done = CliRunner().invoke(import_, [str(source), "--workspace", str(tmp_path / "w"), "--tenant", "acme"])
    assert done.exit_code == 0, done.output
    return tmp_path / "w"


def give(workspace: Path, *arguments: str) -> Result:
    done = CliRunner().invoke(feedback, ["--value", "1", "--workspace", str(workspace), *arguments])
    assert done.exit_code == 0, done.output
    assert done.stdout == "accepted\n"
    return done


def test_a_trace_that_is_known_needs_no_note(workspace: Path) -> None:
    assert give(workspace, "--trace", SEEN, "--tenant", "acme").stderr == ""
    assert give(workspace, "--trace", SEEN.upper(), "--tenant", "acme", "--id", "2").stderr == ""


def test_a_trace_of_another_tenant_is_named(workspace: Path) -> None:
    said = give(workspace, "--trace", SEEN).stderr
    assert "knows no trace" in said
    assert "of tenant 'default'" in said
    assert "Tenant 'acme' has one" in said


@pytest.mark.parametrize("target", ["--trace", "--orchestration"])
def test_a_target_that_nobody_has_seen_is_kept_and_said(workspace: Path, target: str) -> None:
    said = give(workspace, target, UNSEEN, "--tenant", "acme").stderr
    assert said.startswith("note: it is durable, but")
    assert f"{target[2:]} {UNSEEN} of tenant 'acme'" in said
    assert "86400 s" in said
    assert "--workspace" in said


def test_of_spans_and_responses_nothing_is_claimed(workspace: Path) -> None:
    assert give(workspace, "--response", "chatcmpl-1").stderr == ""
