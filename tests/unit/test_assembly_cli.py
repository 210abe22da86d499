"""Verbs ``assemble`` and ``traces``: formats, exit codes, what goes to stdout and what to stderr."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from foreign_files import native, tau_try
from made_spans import Desk, agent, chat, gateway, hex32, tool

from spanloop.pipeline.assembly.cli import assemble, traces
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.errors import ConfigError, SchemaError
from spanloop.schemas.events import RewardsComputed

RECORDING = Path(__file__).parents[1] / "golden" / "assembly" / "desk.otlp.jsonl"
EVENT_KEYS = {"id", "type", "agent", "t", "confidence", "rule", "evidence"}


def run(command, *args):
    return CliRunner().invoke(command, [str(a) for a in args], catch_exceptions=False)


def test_one_orchestration_a_line():
    done = run(assemble, RECORDING, "--ndjson")
    assert (done.exit_code, done.stderr) == (0, "")
    (line,) = [json.loads(text) for text in done.stdout.splitlines()]
    assert line["orchestration_id"]
    assert line["revision"] == 1
    assert all(event.keys() >= EVENT_KEYS for event in line["events"])
    assert all(isinstance(event["t"], float) and event["t"] > 1e9 for event in line["events"])
    assert {"edges", "agents", "tokens", "flags"} <= line.keys()
    assert line["tokens"]["calls"] == 9
    assert run(assemble, RECORDING).stdout == done.stdout


def test_json_is_one_array_and_the_table_is_for_reading():
    lines = run(assemble, RECORDING, "--ndjson").stdout.splitlines()
    assert json.loads(run(assemble, RECORDING, "--json").stdout) == [json.loads(x) for x in lines]
    table = run(assemble, RECORDING, "--table").stdout
    assert "orchestrator_decision" in table
    assert "specialist" in table


def test_the_tenant_is_in_the_id():
    one = json.loads(run(assemble, RECORDING, "--ndjson").stdout)
    two = json.loads(run(assemble, RECORDING, "--ndjson", "--tenant", "acme").stdout)
    assert one["orchestration_id"] != two["orchestration_id"]


def test_survey_out_and_in_again(tmp_path):
    out = run(assemble, RECORDING, "--format", "survey")
    path = tmp_path / "survey.json"
    path.write_text(out.stdout)
    assert run(assemble, path, "--format", "survey").stdout == out.stdout
    events = json.loads(run(assemble, path, "--ndjson").stdout)["events"]
    assert [e["type"] for e in events].count("delegate") == 4
    path.write_text("[" + out.stdout.strip() + "]")
    assert run(assemble, path, "--format", "survey").stdout == out.stdout


def test_a_broken_survey_trace_says_what_is_wrong(tmp_path):
    path = tmp_path / "survey.json"
    path.write_text(json.dumps({"trace_id": "t", "events": [], "edges": []}))
    with pytest.raises(SchemaError) as caught:
        run(assemble, path)
    assert "task_id" in caught.value.message


def test_bad_spans_are_counted_and_the_others_assembled(tmp_path):
    lines = RECORDING.read_text().splitlines()
    bad = json.loads(lines[0])
    bad["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["spanId"] = "00"
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join([*lines, json.dumps(bad), "{not json"]) + "\n")
    done = run(assemble, path, "--ndjson")
    assert done.exit_code == 3
    assert done.stdout == run(assemble, RECORDING, "--ndjson").stdout
    assert done.stderr.startswith("2 spans or records could not be read")


@pytest.mark.parametrize("content", [b"root:x:0:0", b"\x00\x01\x02\x03\x04\x05\x06"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "x"
    path.write_bytes(content)
    with pytest.raises(ConfigError):
        run(assemble, path)
    with pytest.raises(ConfigError):
        run(assemble, tmp_path / "not there")


def test_an_empty_file_gives_nothing(tmp_path):
    path = tmp_path / "empty.jsonl"
    path.write_text("")
    assert (run(assemble, path).exit_code, run(assemble, path).stdout) == (0, "")


def test_a_terminal_is_safe_from_names(tmp_path):
    text = RECORDING.read_text().replace('"stringValue": "checker"', '"stringValue": "x\\u001b[2Jy"')
    path = tmp_path / "evil.jsonl"
    path.write_text(text)
    assert "\x1b" not in run(assemble, path, "--table").stdout
    assert "\x1b" not in run(assemble, path, "--ndjson").stdout


@pytest.fixture
def workspace(tmp_path):
    desk = Desk(quiet_s=1, timeout_s=5)
    desk.send(gateway("r-9", 1, 2), source="gateway")
    desk.later(10)
    for number, start in ((1, 0), (2, 50)):
        desk.send(
            agent("root", None, start, start + 5, trace=number),
            chat("c", "root", start + 1, start + 2, trace=number, response="r-9" if number == 2 else ""),
            tool("t", "root", start + 3, start + 4, trace=number),
        )
    desk.later(10)
    newest = max(desk.live().values(), key=lambda e: e.content.started_ns if e.content else 0)
    rewards = RewardsComputed(
        orchestration_id=newest.orchestration_id, revision=1, orchestration_revision=1, rewards=(), team=530_000,
        status="provisional",
    )  # fmt: skip
    log = SqliteLog(tmp_path / "spanloop.db", ManualClock())
    log.append([new_record(event) for event in [*desk.events, rewards]])
    log.close()
    return tmp_path


def test_traces_lists_the_last_revisions_newest_first(workspace):
    done = run(traces, "--workspace", workspace, "--ndjson")
    newest, oldest = [json.loads(line) for line in done.stdout.splitlines()]
    assert (newest["reward"], newest["reward_status"], newest["policy_versions"]) == (
        0.53,
        "provisional",
        ["policy@v3"],
    )
    assert (oldest["reward"], oldest["reward_status"], oldest["agents"]) == (None, "missing", ["root"])
    assert newest["started_ns"] > oldest["started_ns"]
    assert newest["complete"]
    assert newest["events"] == 3


def test_traces_for_reading_and_its_limit(workspace):
    table = run(traces, "--workspace", workspace, "--table", "--limit", 1).stdout
    assert "policy@v3" in table
    assert "(1 of 2 orchestrations)" in table
    assert len(json.loads(run(traces, "--workspace", workspace, "--json").stdout)) == 2


def test_traces_of_no_workspace_says_so(tmp_path):
    with pytest.raises(ConfigError):
        run(traces, "--workspace", tmp_path / hex32(1))


@pytest.mark.parametrize("text", ["", " \n\n \n", '{"resourceSpans": []}'])
def test_a_file_without_spans_says_so(tmp_path, text):
    path = tmp_path / "empty.jsonl"
    path.write_text(text)
    done = run(assemble, path)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "holds no spans" in done.stderr


def test_spans_that_say_nothing_of_agents_are_told(tmp_path):
    span = {"traceId": "5b8efff798038103d269b633813fc60c", "spanId": "eee19b7ec3c1b174", "name": "GET /", "kind": 2,
            "startTimeUnixNano": "1544712660000000000", "endTimeUnixNano": "1544712661000000000"}  # fmt: skip
    path = tmp_path / "plain.jsonl"
    path.write_text(json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]}))
    done = run(assemble, path)
    assert (done.exit_code, done.stdout) == (0, "")
    assert "none of the 1 spans in" in done.stderr


def test_a_pipe_and_standard_input_are_read_once(tmp_path):
    wanted = run(assemble, RECORDING, "--ndjson").stdout
    done = CliRunner().invoke(
        assemble, ["-", "--ndjson"], input=RECORDING.read_bytes(), catch_exceptions=False
    )
    assert done.stdout == wanted
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(RECORDING.read_bytes(),))
    writer.start()
    assert run(assemble, tmp_path / "pipe", "--ndjson").stdout == wanted
    writer.join()


def test_other_formats_are_assembled_too(tmp_path):
    path = tmp_path / "x"
    path.write_text(json.dumps(native()))
    (line,) = run(assemble, path, "--ndjson").stdout.splitlines()
    assert [e["type"] for e in json.loads(line)["events"]].count("delegate") == 2
    path.write_text(json.dumps([tau_try(0), tau_try(1)]))
    done = run(assemble, path, "--ndjson")
    assert (len(done.stdout.splitlines()), done.exit_code) == (2, 0)
    assert "2 scores are no part of an orchestration" in done.stderr
