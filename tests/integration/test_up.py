"""``spanloop up`` with the real collector and pipeline: kills in between lose nothing, and a restart goes on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import closing

import pytest
from simulation.small_system import job

from spanloop.pipeline.log import scan
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.schemas.events import RewardsComputed, decode

JOBS = 12


def _otlp(batch):
    spans = [
        {
            "traceId": span.trace_id,
            "spanId": span.span_id,
            "parentSpanId": span.parent_span_id or "",
            "name": span.name,
            "kind": span.kind,
            "startTimeUnixNano": str(span.start_ns),
            "endTimeUnixNano": str(span.end_ns),
            "attributes": [{"key": key, "value": _value(value)} for key, value in span.attributes.items()],
        }
        for span in batch.spans
    ]
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "desk"}}]}
    return {
        "resourceSpans": [{"resource": resource, "scopeSpans": [{"scope": {"name": "test"}, "spans": spans}]}]
    }


def _value(value):
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    return {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value}


class Up:
    def __init__(self, workspace):
        self.workspace = workspace
        environment = {**os.environ, "SPANLOOP_COLLECTOR__PORT": "0", "SPANLOOP_PIPELINE__QUIET_S": "0.1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "spanloop.schemas.cli", "up", "--workspace", workspace, "--json",
             "--without", "gateway,serving", "--without", "learner"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        line = self.process.stdout.readline()
        if not line:
            pytest.fail(self.process.communicate()[1])
        self.url = json.loads(line)["urls"]["collector"]

    def send(self, path, body):
        """As a client does it: again until it is acknowledged."""
        request = urllib.request.Request(
            self.url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        deadline = time.monotonic() + 30
        while True:
            try:
                with urllib.request.urlopen(request, timeout=10) as response:
                    return response.status
            except (urllib.error.URLError, OSError) as exc:
                if time.monotonic() > deadline:
                    raise AssertionError(f"not acknowledged: {exc}") from exc
                time.sleep(0.05)

    def kill(self, name):
        with contextlib.suppress(OSError, ValueError, KeyError):
            pid = json.loads((self.workspace / "run.json").read_text())["pids"][name]
            os.kill(pid, signal.SIGKILL)

    def end(self):
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err
        return err


@pytest.fixture
def start(tmp_path):
    running = []

    def begin():
        running.append(Up(tmp_path / "workspace"))
        return running[-1]

    yield begin
    for up in running:
        if up.process.poll() is None:
            up.process.kill()
        up.process.communicate()


def _rewarded(path):
    with closing(SqliteLog(path)) as log:
        events = [decode(r.value) for r in scan(log, ["rewards"])]
    return {e.orchestration_id for e in events if isinstance(e, RewardsComputed) and e.team is not None}


def test_kills_between_requests_lose_nothing_and_verify_agrees(start, tmp_path):
    up = start()
    for number in range(JOBS):
        for batch in job(number):
            assert up.send("/v1/traces", _otlp(batch)) == 200
        if number in (2, 7):
            up.kill("collector")
        if number in (4, 7):
            up.kill("pipeline")
        body = {"trace_id": job(number)[0].trace_id, "value": number / JOBS, "feedback_id": f"f{number}"}
        assert up.send("/v1/feedback", body) < 300
        if number == JOBS // 2:
            assert "is killed" not in up.end()
            up = start()
    path = tmp_path / "workspace" / "spanloop.db"
    deadline = time.monotonic() + 40
    while len(_rewarded(path)) < JOBS and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(_rewarded(path)) == JOBS
    up.end()
    checked = subprocess.run(
        [sys.executable, "-m", "spanloop.schemas.cli", "verify", "--workspace", tmp_path / "workspace", "--json"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stdout + checked.stderr
    report = json.loads(checked.stdout)
    assert (report["equal"], report["open"], report["unread_records"]) == (JOBS, 0, 0)
