"""``doctor`` and ``verify`` as verbs: on nothing, on half of it, on all of it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import closing

import msgspec
import pytest
from simulation.small_system import append, job, outcome, run

from spanloop.pipeline.doctor import diagnose, lines
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.workspace import end_run
from spanloop.schemas.events import RewardsComputed, SpansReceived, decode
from spanloop.schemas.ids import gateway_span_id, orchestration_id
from spanloop.schemas.settings import load_settings
from spanloop.schemas.spans import Span


@pytest.fixture(autouse=True)
def _free_ports(monkeypatch):
    for name in list(os.environ):
        if name.startswith("SPANLOOP_"):
            monkeypatch.delenv(name)
    for name in ("COLLECTOR", "GATEWAY", "SERVING"):
        monkeypatch.setenv(f"SPANLOOP_{name}__PORT", "0")


def settings_of(tmp_path, **sections):
    return load_settings(None, {"workspace": tmp_path / "workspace", **sections})


def spanloop(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "spanloop.schemas.cli", *map(str, arguments)],
        capture_output=True, text=True, timeout=60, check=False, env={**os.environ, **environment},
    )  # fmt: skip


def gateway_span(number, response, *, tokens=True, logprobs=True, version="policy@v1"):
    attributes = {
        "gen_ai.operation.name": "chat", "gen_ai.response.id": response, "gen_ai.request.model": "policy",
        "spanloop.harness": "h", "spanloop.policy.version": version,
    }  # fmt: skip
    if tokens:
        attributes |= {"spanloop.prompt_token_ids": [1, 2], "spanloop.response_token_ids": [3]}
        attributes |= {"spanloop.response_logprobs": [-0.5]} if logprobs else {}
    trace = job(number)[0].trace_id
    span = Span(
        trace,
        gateway_span_id(response),
        "chat policy",
        1,
        2,
        attributes=attributes,
        scope="spanloop.gateway",
        kind=3,
    )
    return SpansReceived(trace_id=trace, spans=(span,), source="gateway")


def only(found):
    (deployment,) = found.deployments
    return deployment


def needs(deployment):
    return {(need.for_, need.setting) for need in deployment.needs}


def test_an_empty_workspace_is_healthy_and_says_how_to_begin(tmp_path):
    found = diagnose(settings_of(tmp_path))
    assert found.healthy
    assert found.deployments == []
    assert not (tmp_path / "workspace").exists()
    assert "OTEL_EXPORTER_OTLP_ENDPOINT" in "\n".join(lines(found))
    assert {"workspace", "disk", "log", "spanloop", "port collector", "packages learn"} <= {
        c.name for c in found.checks
    }


def test_spans_alone_make_traces_and_the_rest_is_named(tmp_path):
    settings = settings_of(tmp_path)
    append(settings.database, [*job(1), *job(2), *job(1)])
    desk = only(diagnose(settings))
    assert (desk.service, desk.traces, desk.agent_runs, desk.model_calls, desk.tool_calls) == (
        "desk",
        2,
        6,
        6,
        4,
    )
    assert desk.learns == {
        "traces": True,
        "team_reward": False,
        "credit": [],
        "token_training": False,
        "trainable_calls": 0,
    }
    assert ("token training", "content.training = true (SPANLOOP_CONTENT__TRAINING=true)") in needs(desk)
    assert any(need.for_ == "team reward" and "2 of 2 traces" in need.missing for need in desk.needs)
    assert any("gateway" in need.missing for need in desk.needs)


def test_outcomes_count_by_any_name_and_once_a_trace(tmp_path):
    settings = settings_of(tmp_path)
    traces = [job(n)[0].trace_id for n in range(4)]
    append(settings.database, [
        *(batch for n in range(4) for batch in job(n)),
        outcome(0, 1.0), outcome(0, 0.5), outcome(1, 1.0, kind="response", target="r-1-lead"),
        outcome(2, 1.0, kind="orchestration", target=orchestration_id("default", [traces[2]])),
        outcome(9, 1.0, kind="trace", target="ab" * 16),
    ])  # fmt: skip
    desk = only(diagnose(settings))
    assert desk.traces_with_outcome == 3
    assert desk.learns["team_reward"]
    assert "tool_call" in desk.learns["credit"]
    assert "token" not in desk.learns["credit"]
    assert any("1 of 4 traces" in need.missing for need in desk.needs)


def test_with_the_gateways_tokens_everything_is_learnable(tmp_path):
    settings = settings_of(tmp_path, content={"training": True}, learner={"vocabulary": ["a", "b"]})
    append(settings.database, [*job(1, helpers=0), outcome(1, 1.0), gateway_span(1, "r-1-lead")])
    desk = only(diagnose(settings))
    assert desk.needs == []
    assert desk.learns["token_training"]
    assert "token" in desk.learns["credit"]


def test_each_lack_of_the_gateways_calls_has_its_remedy(tmp_path):
    settings = settings_of(tmp_path, content={"training": True})
    append(settings.database, [
        *job(1), outcome(1, 1.0), gateway_span(1, "a", tokens=False), gateway_span(1, "b", logprobs=False),
        gateway_span(1, "c", version=""),
    ])  # fmt: skip
    desk = only(diagnose(settings))
    text = " ".join(need.missing for need in desk.needs)
    assert "1 of 3 gateway calls have no token ids" in text
    assert "1 calls have no log-probability" in text
    assert "1 of 3 gateway calls were passed to another model" in text
    assert "no vocabulary" in text


def test_a_taken_port_a_damaged_log_and_open_permissions_are_told(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        monkeypatch.setenv("SPANLOOP_COLLECTOR__PORT", str(port))
        settings = settings_of(tmp_path)
        settings.workspace.mkdir(mode=0o755)
        settings.workspace.chmod(0o755)
        settings.database.write_bytes(b"no database " * 500)
        found = diagnose(settings)
    told = {check.name: check for check in found.checks}
    assert not found.healthy
    assert told["port collector"].status == "fail"
    assert str(port) in told["port collector"].message
    assert (told["log"].status, told["workspace"].status) == ("fail", "warn")


def test_a_process_that_the_supervisor_gave_up_is_told(tmp_path):
    settings = settings_of(tmp_path)
    settings.workspace.mkdir(mode=0o700)
    failed = {"state": "failed", "restarts": 8, "last_exit": "exit code 1"}
    run_file = {"pids": {"collector": os.getpid()}, "urls": {}, "children": {"pipeline": failed}}
    (settings.workspace / "run.json").write_text(json.dumps(run_file))
    found = diagnose(settings)
    told = {check.name: check for check in found.checks}
    assert not found.healthy
    assert told["process pipeline"].status == "fail"
    assert "given up after 8 restarts (exit code 1)" in told["process pipeline"].message


def test_doctor_judges_by_the_settings_that_up_was_started_with(tmp_path):
    workspace, config = tmp_path / "workspace", tmp_path / "other.toml"
    workspace.mkdir(mode=0o700)
    config.write_text("[collector]\nhost = 'localhost'\n")
    plain = spanloop("doctor", "--workspace", workspace)
    assert "settings: " not in plain.stdout
    (workspace / "run.json").write_text(json.dumps({"pids": {}, "config": str(config)}))
    told = spanloop("doctor", "--workspace", workspace)
    assert f"ok    settings: from {config}" in told.stdout
    assert "http://localhost:" in told.stdout
    own = tmp_path / "own.toml"
    own.write_text("")
    end_run(workspace)  # a clean stop
    assert not (workspace / "run.json").exists()
    assert f"ok    settings: from {config}" in spanloop("doctor", "--workspace", workspace).stdout
    named = spanloop("doctor", "--workspace", workspace, "--config", own)
    assert "settings: " not in named.stdout
    config.unlink()
    assert "settings: " not in spanloop("doctor", "--workspace", workspace).stdout


def test_doctor_and_verify_as_commands(tmp_path):
    workspace = tmp_path / "workspace"
    settings = settings_of(tmp_path)
    absent = spanloop("verify", "--workspace", workspace)
    assert (absent.returncode, absent.stdout) == (2, "")
    assert "no log at" in absent.stderr
    append(settings.database, [*job(1), *job(2), outcome(1, 0.5)])
    run(settings.database, settings.pipeline)
    told = spanloop("doctor", "--workspace", workspace, "--json")
    assert told.returncode == 0, told.stderr
    report = json.loads(told.stdout)
    assert report["deployments"][0]["service"] == "desk"
    assert report["records"]["rewards"] == 2
    assert {"for", "missing", "do"} <= set(report["deployments"][0]["needs"][0])
    assert "yes  team reward: 1 of 2" in spanloop("doctor", "--workspace", workspace).stdout
    good = spanloop("verify", "--workspace", workspace, "--json")
    assert good.returncode == 0, good.stdout + good.stderr
    assert json.loads(good.stdout)["equal"] == 2
    with closing(SqliteLog(settings.database)) as log:
        rewards = decode(log.read(["rewards"], {}, 10)[0].value)
    assert isinstance(rewards, RewardsComputed)
    append(settings.database, [msgspec.structs.replace(rewards, revision=9, team=12345)])
    bad = spanloop("verify", "--workspace", workspace)
    assert bad.returncode == 1
    assert f"differs  {rewards.orchestration_id}  rewards" in bad.stdout
