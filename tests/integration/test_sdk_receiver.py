"""An agent process with the SDK, over OTLP and the feedback endpoint of a real receiver, to the orchestration: zero-code and by hand."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from receiver_harness import process, read_all

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.log.sqlite import SqliteLog

ROOT = Path(__file__).resolve().parents[2]


def run_example(url: str, command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ, "OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_SERVICE_NAME": "sdk-example",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf", "OTEL_METRICS_EXPORTER": "none", "OTEL_LOGS_EXPORTER": "none",
        "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    return subprocess.run(
        command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.parametrize("how", ["by hand", "zero code"])
def test_from_an_agent_process_to_its_orchestration(tmp_path, how):
    script = str(ROOT / "examples/sdk/main.py")
    if how == "by hand":
        command = [sys.executable, script]
    else:
        command = [
            str(Path(sys.executable).parent / "opentelemetry-instrument"),
            sys.executable,
            script,
            "--zero-code",
        ]
    with process(tmp_path / "ws") as (_, url):
        done = run_example(url, command)
        assert done.returncode == 0, done.stdout + done.stderr
        with contextlib.closing(SqliteLog(tmp_path / "ws" / "spanloop.db")) as log:
            spans = [span for event in read_all(log, "spans") for span in event.spans]
            outcomes = read_all(log, "feedback")
    contents = assemble_spans(spans, "default", "otlp")
    assert len(contents) == 3
    assert sorted(e.target_id for e in outcomes) == sorted(c.trace_ids[0] for c in contents)
    kinds = set()
    for content in contents:
        told = [e for e in content.events if e.rule == "said"]
        count = Counter(e.type for e in told)
        assert count["aggregate"] == count["stop"] == 1
        assert count["message"] == sum(e.type == "spawn" and e.to != "critic" for e in told) > 0
        for event in told:
            decision = event.decision
            if decision is None:
                continue
            kinds.add(decision.kind)
            assert abs(sum(decision.propensities) - 1) < 1e-9
            if event.type in ("spawn", "delegate"):
                assert decision.chosen == event.to
            elif event.type == "orchestrator_decision":
                assert decision.chosen in ("nobody", "again")
        critics = [a.id for a in content.agents if a.name == "critic"]
        for event in told:
            if event.type == "message" and critics:
                assert event.to_id == critics[0]
        asked = [e for e in told if e.type == "delegate" and e.to == "critic"]
        assert len(asked) == sum(e.type == "return" and e.agent == "critic" and e.to == "desk" for e in told)
        assert content.flags == ()
        assert all(len(a.harness) == 32 for a in content.agents)
    assert kinds == {"spawn", "delegate", "message", "aggregate", "stop"}
    assert {s.resource.get("service.name") for s in spans} == {"sdk-example"}
