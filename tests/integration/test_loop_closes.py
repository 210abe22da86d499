"""The main job, with every process real: the desk's spans become a newer policy that answers the desk's calls.

Each stage has its own assertion, named for what is missing when the stage is taken out.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from spanloop.pipeline.log import scan
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.schemas import topics
from spanloop.schemas.events import decode

ROOT = Path(__file__).resolve().parents[2]
CLI = [sys.executable, "-m", "spanloop.schemas.cli"]
SECONDS = 20


def _events(workspace, topic):
    with closing(SqliteLog(workspace / "spanloop.db")) as log:
        return [decode(record.value) for record in scan(log, [topic])]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A workspace in which the desk worked for SECONDS."""
    folder = tmp_path_factory.mktemp("loop") / "w"
    environment = {
        **os.environ, "OMP_NUM_THREADS": "1", "SPANLOOP_LEARNER__BATCH_ORCHESTRATIONS": "32", "SPANLOOP_PIPELINE__VALUE_EVERY": "32",
    }  # fmt: skip
    config = ROOT / "examples" / "dispatch_desk" / "spanloop.toml"
    up = subprocess.Popen(
        [*CLI, "up", "--config", config, "--workspace", folder, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        urls = json.loads(up.stdout.readline())["urls"]
        done = subprocess.run(
            [sys.executable, "-m", "dispatch_desk.main", "--seconds", str(SECONDS), "--concurrency", "8", "--seed", "1"],
            cwd=ROOT / "examples", capture_output=True, text=True, check=True, timeout=SECONDS + 60,
            env={**environment, "OPENAI_BASE_URL": urls["gateway"] + "/v1", "OPENAI_API_KEY": "none",
                 "OTEL_EXPORTER_OTLP_ENDPOINT": urls["collector"], "FEEDBACK_URL": urls["collector"] + "/v1/feedback"},
        )  # fmt: skip
        report = json.loads(done.stdout.splitlines()[-1])
        assert report["failed"] == 0
        deadline = time.monotonic() + 30
        while sum(r.status == "final" for r in _events(folder, topics.REWARDS)) < report["tickets"]:
            assert time.monotonic() < deadline, "the pipeline did not catch up"
            time.sleep(0.5)
    finally:
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0
        up.stdout.close()
    return folder


@pytest.mark.slow
class TestLoop:
    def test_collector_spans_are_on_the_log(self, workspace):
        assert {e.source for e in _events(workspace, topics.SPANS)} == {"otlp", "gateway"}

    def test_assembly_joins_the_frameworks_and_the_gateways_spans(self, workspace):
        found = [e for e in _events(workspace, topics.ORCHESTRATIONS) if e.complete]
        assert len(found) > 50
        calls = [c for e in found for c in e.content.calls if c.policy_version]
        assert calls
        assert all(len(c.span_ids) == 2 and c.response_token_ids and c.agent_id for c in calls)
        kinds = {event.type for e in found for event in e.content.events}
        assert {"orchestrator_decision", "delegate", "spawn", "return", "aggregate", "stop"} <= kinds

    def test_rewards_come_from_feedback(self, workspace):
        assert sum(e.team is not None for e in _events(workspace, topics.REWARDS)) > 50

    def test_credit_is_conserved_and_uses_a_value_model(self, workspace):
        found = _events(workspace, topics.CREDITS)
        assert any(e.value_model != "none" for e in found)
        for event in found:
            parents = {n.parent for n in event.nodes}
            assert sum(n.credit for n in event.nodes if n.id not in parents) + event.baseline == event.reward

    def test_value_models_are_published(self, workspace):
        assert _events(workspace, topics.MODELS)

    def test_samples_carry_the_values_of_whole_menus(self, workspace):
        rows = [row for e in _events(workspace, topics.SAMPLES) for row in e.rows]
        assert any(row.menu_values for row in rows)
        assert all(len(row.logprobs) == len(row.response_token_ids) == len(row.advantages) for row in rows)

    def test_learner_registers_candidates_and_serving_answers_with_one(self, workspace):
        kinds = [type(e).__name__ for e in _events(workspace, topics.POLICIES)]
        assert kinds.count("CandidateRegistered") >= 2
        answered = {row.policy_version for e in _events(workspace, topics.SAMPLES) for row in e.rows}
        assert answered - {"policy@v0"}, "no call was answered by a version that was learned"

    @pytest.mark.parametrize(
        "command",
        [
            ("traces", "--limit", "3"), ("policies",), ("provenance", "1"), ("doctor",),
            ("query", "SELECT count(*) AS n FROM orchestrations"), ("verify", "--config", "examples/dispatch_desk/spanloop.toml"),
        ],
    )  # fmt: skip
    def test_its_verbs_work_on_it(self, workspace, command):
        done = subprocess.run(
            [*CLI, *command, "--workspace", workspace], cwd=ROOT, capture_output=True, text=True, check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", "SPANLOOP_PIPELINE__VALUE_EVERY": "32"},
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        assert done.stdout.strip()

    def test_a_token_is_explained_up_to_the_team(self, workspace):
        last = _events(workspace, topics.CREDITS)[-1].orchestration_id
        done = subprocess.run(
            [*CLI, "explain", "credit", last[:12], "--token", "--workspace", workspace],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        for word in ("team", "orchestrator", "turn 1", "token", "conserved"):
            assert word in done.stdout
