"""The supervisor over small children of our own: start, crash, give up, stop in order, refuse."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from spanloop.pipeline import child, workspace
from spanloop.pipeline.child import Backoff, describe_exit
from spanloop.pipeline.supervisor import MODULES, STOP_ORDER, child_specs, supervise
from spanloop.pipeline.workspace import SERVERS, WorkspaceLock, claim_ports, port_holder
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.settings import load_settings

_CHILD = """
import json, os, pathlib, signal, sys, time
name, mode, notes = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3])
if mode == "crash":
    print("error: no such vocabulary", file=sys.stderr); sys.exit(1)
if mode == "config":
    print("error: learner.width is wrong", file=sys.stderr); sys.exit(2)
def stop(*_):
    with open(notes, "a") as file:
        file.write(name + "\\n")
    if mode != "stubborn":
        sys.exit(0)
signal.signal(signal.SIGTERM, stop)
port = os.environ.get(f"SPANLOOP_{name.upper()}__PORT", "")
if mode == "grandchild":
    import subprocess
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("warming up", flush=True)
print(json.dumps({"ready": name, "url": f"http://127.0.0.1:{port}" if port else ""}), flush=True)
if mode == "later":
    time.sleep(0.3); sys.exit(3)
while True:
    time.sleep(0.05)
"""

_DRIVER = """
import json, sys
from pathlib import Path
from spanloop.pipeline import child, supervisor
from spanloop.schemas.errors import SpanloopError
from spanloop.schemas.settings import load_settings

plan, notes, program = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
child.RESTART_FIRST_S, child.RESTARTS_MAX, child.STARTS_MAX, child.STOP_S = 0.05, 2, 1, 1.0
supervisor.STATUS_EVERY_S = 0.05
supervisor.child_specs = lambda *_: [
    child.ChildSpec(name, (sys.executable, "-c", program, name, mode, notes)) for name, mode in plan.items()
]
try:
    sys.exit(supervisor.supervise(
        load_settings(None, {"workspace": Path(sys.argv[4])}), None, status_file=Path(sys.argv[5]),
        on_ready=lambda report: print(json.dumps(report), flush=True)))
except SpanloopError as exc:
    print("error: " + exc.message, file=sys.stderr)
    sys.exit(exc.exit_code)
"""


class System:
    def __init__(self, tmp_path, plan, **environment):
        self.notes, self.workspace, self.status = (
            tmp_path / "notes",
            tmp_path / "workspace",
            tmp_path / "status.json",
        )
        ports = {f"SPANLOOP_{name.upper()}__PORT": "0" for name in SERVERS}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _DRIVER, json.dumps(plan), self.notes, _CHILD, self.workspace, self.status],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **ports, **environment},
        )  # fmt: skip

    def ready(self):
        line = self.process.stdout.readline()
        assert line, self.process.communicate()[1]
        return json.loads(line)

    def until(self, condition, what):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ValueError):
                status = json.loads(self.status.read_text())
                if condition(status):
                    return status
            time.sleep(0.02)
        pytest.fail(f"not within 20 s: {what}")
        return None

    def end(self, number=signal.SIGINT):
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=30)
        return self.process.returncode, err


@pytest.fixture
def start(tmp_path):
    systems = []

    def begin(plan, **environment):
        systems.append(System(tmp_path, plan, **environment))
        return systems[-1]

    yield begin
    for system in systems:
        if system.process.poll() is None:
            system.process.kill()
        system.process.communicate()


def _alive(pid):
    return bool(workspace.process_name(pid))


def test_all_start_tell_their_urls_and_stop_in_order(start):
    system = start(dict.fromkeys(MODULES, "run"))
    report = system.ready()
    assert set(report["pids"]) == set(MODULES)
    ports = [int(report["urls"][name].rpartition(":")[2]) for name in SERVERS]
    assert len({*ports}) == 3
    assert 0 not in ports
    run = json.loads((system.workspace / "run.json").read_text())
    assert (run["pid"], run["urls"], run["state"]) == (system.process.pid, report["urls"], "running")
    assert run["config"] == ""
    code, err = system.end()
    assert code == 0, err
    assert system.notes.read_text().split() == list(STOP_ORDER)
    assert not (system.workspace / "run.json").exists()
    assert json.loads(system.status.read_text())["state"] == "stopped"
    assert not any(_alive(pid) for pid in report["pids"].values())
    assert "[collector] warming up" in err


def test_a_killed_child_is_started_again_and_the_others_stay(start):
    system = start({"collector": "run", "pipeline": "run"})
    before = system.ready()
    os.kill(before["pids"]["collector"], signal.SIGKILL)
    after = system.until(
        lambda s: (
            s["children"]["collector"]["restarts"] == 1 and s["children"]["collector"]["state"] == "ready"
        ),
        "collector is back",
    )
    assert after["urls"] == before["urls"]
    assert after["pids"]["pipeline"] == before["pids"]["pipeline"]
    assert after["pids"]["collector"] != before["pids"]["collector"]
    code, err = system.end(signal.SIGTERM)
    assert code == 0
    assert "collector ended (killed by SIGKILL)" in err


def test_a_child_that_keeps_failing_is_given_up_and_named_and_the_others_go_on(start):
    system = start({"collector": "run", "learner": "later"})
    system.ready()
    status = system.until(lambda s: s["children"]["learner"]["state"] == "failed", "learner is given up")
    assert status["children"]["collector"]["state"] == "ready"
    code, err = system.end()
    assert code == 1
    assert "learner is given up, 2 restarts did not help (exit code 3)" in err
    assert system.notes.read_text().split() == ["collector"]


@pytest.mark.parametrize(
    ("mode", "code", "says"), [("crash", 1, "no such vocabulary"), ("config", 2, "width is wrong")]
)
def test_what_cannot_start_ends_the_start_with_its_message(start, mode, code, says):
    system = start({"collector": "run", "learner": mode})
    out, err = system.process.communicate(timeout=30)
    assert (out, system.process.returncode) == ("", code)
    assert says in err.split("given up")[1]
    assert ("restart 1" in err) == (mode == "crash")


def test_what_does_not_stop_is_killed_and_a_second_ctrl_c_kills_at_once(start):
    system = start({"collector": "stubborn"})
    system.ready()
    code, err = system.end()
    assert code == 0
    assert "did not end within" in err
    again = start({"collector": "stubborn", "pipeline": "run"})
    again.ready()
    again.process.send_signal(signal.SIGINT)
    again.until(lambda s: s["state"] == "stopping", "stopping")
    code, err = again.end()
    assert code == 0
    assert "ending everything now" in err


def test_what_a_child_started_does_not_hold_up_its_restart(start):
    system = start({"collector": "grandchild"})
    os.kill(system.ready()["pids"]["collector"], signal.SIGKILL)
    system.until(lambda s: s["children"]["collector"]["restarts"] == 1 and s["pids"], "restart")
    assert system.end()[0] == 0


def test_a_second_supervisor_is_refused_and_a_killed_one_is_followed(start):
    first = start({"collector": "run"})
    report = first.ready()
    second = start({"collector": "run"})
    _, err = second.process.communicate(timeout=30)
    assert second.process.returncode == 2
    assert f"already run by pid {first.process.pid}" in err
    first.process.kill()
    first.process.communicate()
    third = start({"collector": "run"})
    third.ready()
    assert not _alive(report["pids"]["collector"])
    assert first.notes.read_text().split() == ["collector"]  # the kernel told the orphan to flush
    code, err = third.end()
    assert code == 0
    assert f"the last run (pid {first.process.pid}) was killed" in err


def test_a_taken_port_names_the_port_its_holder_and_the_setting(start):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        system = start({"collector": "run"}, SPANLOOP_COLLECTOR__PORT=str(port))
        _, err = system.process.communicate(timeout=30)
        assert system.process.returncode == 2
        assert f"port {port} on 127.0.0.1 is taken by pid {os.getpid()}" in err
        assert "collector.port (SPANLOOP_COLLECTOR__PORT)" in err
        assert port_holder(port).startswith(f"pid {os.getpid()} ")
    assert port_holder(port) == ""


def test_a_damaged_log_is_told_before_anything_starts(start, tmp_path):
    (tmp_path / "workspace").mkdir()
    (tmp_path / "workspace" / "spanloop.db").write_bytes(b"no database " * 1000)
    system = start({"collector": "run"})
    _, err = system.process.communicate(timeout=30)
    assert system.process.returncode == 1
    assert "not a SQLite database" in err
    assert not system.notes.exists()


def test_one_port_for_two_servers_is_refused(tmp_path):
    settings = load_settings(None, {"collector": {"port": 4999}, "gateway": {"port": 4999}})
    with pytest.raises(ConfigError, match=r"gateway\.port and collector\.port are both 4999"):
        claim_ports(settings, list(MODULES))
    assert claim_ports(settings, ["pipeline"]) == {}


def test_settings_and_without_decide_what_runs(tmp_path):
    words: dict[str, object] = {"vocabulary": ("a",)}
    names = [spec.name for spec in child_specs(load_settings(None, {"learner": words}), None, [])]
    assert names == [
        name for name in MODULES if name != "archiver"
    ]  # queries fill an embedded workspace's archive
    there = load_settings(None, {"learner": words, "archive": {"url": "s3://bucket/x"}})
    assert [spec.name for spec in child_specs(there, None, [])] == list(MODULES)
    names = [spec.name for spec in child_specs(load_settings(), None, [])]
    assert names == [
        name for name in MODULES if name not in ("serving", "learner", "archiver")
    ]  # no policy without words
    config = tmp_path / "spanloop.toml"
    specs = child_specs(load_settings(None, {"learner": {**words, "enabled": False}}), config, ["gateway"])
    assert [spec.name for spec in specs] == ["collector", "pipeline", "serving"]
    assert specs[0].command == (sys.executable, "-m", "spanloop.collectors.receiver", "--config", str(config))
    with pytest.raises(ConfigError, match="no such process"):
        child_specs(load_settings(), None, ["colector"])
    with pytest.raises(ConfigError, match="nothing to run"):
        child_specs(load_settings(), None, list(MODULES))


def test_a_status_file_that_cannot_be_written_is_told_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="--status-file"):
        supervise(load_settings(), None, status_file=tmp_path / "none" / "status.json", on_ready=print)


def test_backoff_grows_is_bounded_resets_and_ends():
    backoff = Backoff()
    pauses = [backoff.after(0.1) for _ in range(child.RESTARTS_MAX)]
    assert pauses == sorted(pauses)
    assert max(pauses) == child.RESTART_MAX_S
    assert backoff.after(0.1) is None
    assert Backoff().after(0.1, was_ready=False) == child.RESTART_FIRST_S
    assert backoff.after(0.1, was_ready=False) is None
    assert backoff.after(child.HEALTHY_S) == child.RESTART_FIRST_S


def test_exits_are_told_in_words():
    assert [describe_exit(code) for code in (0, 2, -9, -99)] == [
        "exit code 0", "exit code 2", "killed by SIGKILL", "killed by signal 99",
    ]  # fmt: skip


def test_a_workspace_that_cannot_be_made_names_the_setting(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="SPANLOOP_WORKSPACE"):
        WorkspaceLock(Path(tmp_path / "file" / "workspace"))


def test_over_kafka_the_pipeline_is_workers_of_one_group():
    sections = {"bootstrap_servers": "127.0.0.1:1", "process": {"workers": 3}}
    specs = child_specs(load_settings(None, sections), Path("/x.toml"), [])
    assert [spec.name for spec in specs] == [
        "collector",
        "pipeline",
        "pipeline-2",
        "pipeline-3",
        "gateway",
        "archiver",
    ]
    for more, spec in zip(((), ("--worker", "2"), ("--worker", "3")), specs[1:4], strict=True):
        assert spec.command[2:] == ("spanloop.pipeline.runtimes.worker", "--config", "/x.toml", *more)
    assert [spec.name for spec in child_specs(load_settings(None, sections), None, ["pipeline"])] == [
        "collector",
        "gateway",
        "archiver",
    ]
