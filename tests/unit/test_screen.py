"""JSON and tables on a terminal: names that strangers chose do not steer it, and a pipe gets them as they are."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from otlp_requests import as_json, span

from spanloop.pipeline.query.render import printable
from spanloop.pipeline.screen import escaped

STEERING = "a\u009b2Jb\u202ec\u200bd\u2028e"


@given(st.text())
def test_escaped_json_is_the_same_json(text: str) -> None:
    shown = escaped(json.dumps([text], ensure_ascii=False))
    assert json.loads(shown) == [text]
    assert shown.isprintable()


def test_tables_drop_what_is_not_seen() -> None:
    assert printable(STEERING) == "a2Jbcde"


def on_terminal(*words: object) -> str:
    """Standard output of the verb when it is a terminal."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "spanloop.schemas.cli", *map(str, words)]
    with subprocess.Popen(command, stdout=theirs, stdin=subprocess.DEVNULL) as running:
        os.close(theirs)
        found = b""
        while True:
            try:
                part = os.read(ours, 65_536)
            except OSError:  # the other side was closed
                break
            if not part:
                break
            found += part
    os.close(ours)
    assert running.returncode == 0
    return found.decode()


@pytest.fixture
def spans(tmp_path: Path) -> Path:
    path = tmp_path / "spans.jsonl"
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": STEERING}
    path.write_bytes(as_json([span(1, attributes=attributes)]) + b"\n")
    return path


@pytest.mark.parametrize("form", ["--json", "--ndjson"])
def test_json_of_orchestrations_on_a_terminal_and_into_a_pipe(spans: Path, form: str) -> None:
    shown = on_terminal("assemble", spans, form)
    assert "\\u009b2J" in shown
    assert all(c.isprintable() or c in "\r\n" for c in shown)
    command = [sys.executable, "-m", "spanloop.schemas.cli", "assemble", str(spans), form]
    piped = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert STEERING in piped
    assert json.loads(shown) == json.loads(piped)


@pytest.mark.parametrize("form", ["table", "json", "ndjson", "csv"])
def test_rows_of_a_query_on_a_terminal(tmp_path: Path, form: str) -> None:
    import_ = [
        sys.executable,
        "-m",
        "spanloop.schemas.cli",
        "import",
        "-",
        "--workspace",
        str(tmp_path / "w"),
    ]
    subprocess.run(import_, input=as_json([span(1)]), capture_output=True, check=True)
    sql = "SELECT 'a' || chr(155) || '2Jb' || chr(8238) || 'c' || chr(8203) || 'd' || chr(8232) || 'e' AS x"
    shown = on_terminal("query", sql, "--workspace", tmp_path / "w", "--format", form)
    assert all(c.isprintable() or c in "\r\n" for c in shown)
    assert ("a\\u009b2Jb\\u202ec\\u200bd\\u2028e" if "json" in form else "a2Jbcde") in shown
