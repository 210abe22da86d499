"""Ten kills -9 under ``spanloop up``, two of each process, while the dispatch desk works and a sender counts acknowledgements.

Then: no acknowledged span is missing from the log, no orchestration was learned from twice, the learner's weights are those
of an undisturbed replay of the same log, and the log replays to the same orchestrations, rewards and credit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from spanloop.learner.checkpoint import load_latest, tensors_hash
from spanloop.learner.history import read_policies
from spanloop.learner.policy import load_artifact
from spanloop.learner.promotion import fold
from spanloop.learner.provenance import policy_config, provenance
from spanloop.learner.training import replay
from spanloop.pipeline.log import scan
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.schemas import topics
from spanloop.schemas.events import decode

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = ("collector", "gateway", "pipeline", "serving", "learner")
TRAFFIC_S = 110.0
SEED = int(os.environ.get("SPANLOOP_TEST_SEED", "20261130"))


def _run_json(workspace: Path) -> dict:
    try:
        return json.loads((workspace / "run.json").read_text())
    except (OSError, ValueError):
        return {}


class Sender(threading.Thread):
    """Posts small traces until told to stop; remembers the span ids that were answered with 200 in full."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self.url = url
        self.acknowledged: set[str] = set()
        self.refused = 0
        self.stopping = threading.Event()

    def run(self) -> None:
        rng = random.Random(SEED)
        while not self.stopping.wait(0.03):
            trace, ids = (
                f"{rng.getrandbits(127) + 1:032x}",
                [f"{rng.getrandbits(63) + 1:016x}" for _ in range(5)],
            )
            spans = [
                {"traceId": trace, "spanId": span, "parentSpanId": "" if span == ids[0] else ids[0], "name": "work",
                 "startTimeUnixNano": str(time.time_ns()), "endTimeUnixNano": str(time.time_ns())}
                for span in ids
            ]  # fmt: skip
            body = json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}).encode()
            request = urllib.request.Request(
                self.url + "/v1/traces", body, {"Content-Type": "application/json"}
            )
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    if answer.status == 200 and not json.loads(answer.read()).get("partialSuccess"):
                        self.acknowledged.update(ids)
            except (urllib.error.URLError, OSError):
                self.refused += 1


def _wait(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.2)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_ten_kills_lose_nothing(tmp_path):
    workspace = tmp_path / "w"
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "SPANLOOP_LEARNER__BATCH_ORCHESTRATIONS": "48",
        "SPANLOOP_LEARNER__SEED": "3", "SPANLOOP_LEARNER__CANARY_MIN": "20",
    }  # fmt: skip
    config = ROOT / "examples" / "dispatch_desk" / "spanloop.toml"
    output = (tmp_path / "up.log").open("w")
    up = subprocess.Popen(
        [sys.executable, "-m", "spanloop.schemas.cli", "up", "--config", config, "--workspace", workspace],
        stdout=output, stderr=output, env=environment,
    )  # fmt: skip
    desk = None
    try:
        _wait(lambda: _run_json(workspace).get("state") == "running", 90, "spanloop up")
        urls = _run_json(workspace)["urls"]
        sender = Sender(urls["collector"])
        sender.start()
        desk = subprocess.Popen(
            [sys.executable, "-m", "dispatch_desk.main", "--seconds", str(TRAFFIC_S), "--concurrency", "8", "--seed", "5"],
            cwd=ROOT / "examples", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**environment, "OPENAI_BASE_URL": urls["gateway"] + "/v1", "OPENAI_API_KEY": "none",
                 "OTEL_EXPORTER_OTLP_ENDPOINT": urls["collector"], "FEEDBACK_URL": urls["collector"] + "/v1/feedback"},
        )  # fmt: skip
        rng = random.Random(SEED)
        victims = [*PROCESSES, *PROCESSES]
        rng.shuffle(victims)
        killed = []
        for victim in victims:
            time.sleep(rng.uniform(4.0, 10.0))
            _wait(
                lambda v=victim: _run_json(workspace)["children"][v]["state"] == "ready",
                60,
                f"{victim} to run again",
            )
            pid = _run_json(workspace)["pids"][victim]
            os.kill(pid, signal.SIGKILL)
            killed.append((victim, pid))
        report, _ = desk.communicate(timeout=TRAFFIC_S + 90)
        sender.stopping.set()
        sender.join(10)
        tickets = json.loads(report.splitlines()[-1])
        time.sleep(8)
    finally:
        if desk is not None and desk.poll() is None:
            desk.kill()
        up.send_signal(signal.SIGINT)
        code = up.wait(90)
        output.close()
    assert code == 0, (tmp_path / "up.log").read_text()[-2000:]
    assert len(killed) == 10

    with closing(SqliteLog(workspace / "spanloop.db")) as log:
        stored = {span.span_id for record in scan(log, [topics.SPANS]) for span in decode(record.value).spans}
        assert len(sender.acknowledged) > 500
        assert sender.acknowledged <= stored

        state = fold(read_policies(log, "default", "policy"))
        newest = max(version for version, candidate in state.versions.items() if not candidate.injected)
        assert newest >= 3, "too little was learned for the test to mean anything"
        taught = Counter(
            lesson.orchestration_id
            for batch in provenance(log, policy_config(workspace, state), newest).batches
            for lesson in batch.lessons
        )
        assert taught
        assert max(taught.values()) == 1
        found = load_latest(workspace / "checkpoints")
        assert found is not None
        first = load_artifact(workspace / "policies" / "policy@v0").net
        assert tensors_hash(found.tensors) == replay(
            log, policy_config(workspace, state), first, until=found.state.batch
        )
    verified = subprocess.run(
        [sys.executable, "-m", "spanloop.schemas.cli", "verify", "--workspace", workspace, "--config", config],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert verified.returncode == 0, verified.stdout + verified.stderr
    figures = {
        "kills": len(killed), "acknowledged_spans": len(sender.acknowledged), "refused_requests": sender.refused,
        "tickets": tickets["tickets"], "tickets_failed": tickets["failed"], "batches": newest, "taught": len(taught),
        "restarts": [victim for victim, _ in killed], "seed": SEED,
    }  # fmt: skip
    print(json.dumps(figures))
    if target := os.environ.get("SPANLOOP_RESULTS"):
        Path(target).write_text(json.dumps(figures, indent=1) + "\n")
