"""The learner as a process, with the embedded server and MLflow's sqlite: ready line, kill -9, one a workspace, SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from learner_world import CONFIG, EXPLORATION, WORDS, World, append

from spanloop.learner.checkpoint import load_latest, tensors_hash
from spanloop.learner.history import read_policies
from spanloop.learner.policy import PolicyNet, load_artifact
from spanloop.learner.promotion import fold
from spanloop.learner.registry import MlflowRegistry, tracking_uri
from spanloop.learner.training import replay
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.schemas.events import BatchCommitted

WAIT_S = 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Process:
    """A child with its ready line read and its stderr kept."""

    def __init__(self, module: str, config: Path) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.child = subprocess.Popen(
            [sys.executable, "-m", module, "--config", str(config)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=environment,
        )  # fmt: skip
        self.errors: list[str] = []
        assert self.child.stderr is not None
        self._reader = threading.Thread(target=self._read, args=(self.child.stderr,), daemon=True)
        self._reader.start()

    def _read(self, stream: IO[str]) -> None:
        self.errors.extend(stream)

    def ready(self) -> dict[str, Any]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        assert line, "".join(self.errors)
        return json.loads(line)

    def end(self, number: int) -> int:
        self.child.send_signal(number)
        code = self.child.wait(30)
        self._reader.join(5)
        assert self.child.stdout is not None
        assert self.child.stderr is not None
        self.child.stdout.close()
        self.child.stderr.close()
        return code


@pytest.fixture
def config(tmp_path: Path) -> Path:
    lines = [
        f'workspace = "{tmp_path / "w"}"', "[serving]", f"port = {free_port()}", f"exploration = {EXPLORATION}",
        "[learner]", f"vocabulary = {json.dumps(list(WORDS))}", "width = 16", "heads = 2", "context = 16",
        "batch_orchestrations = 16", "minibatch_orchestrations = 8", "epochs = 2", "learning_rate = 0.01",
        'gate = false', 'advantage = "all_action"',
    ]  # fmt: skip
    path = tmp_path / "spanloop.toml"
    path.write_text("\n".join(lines))
    return path


@pytest.fixture
def serving(config: Path) -> Iterator[Process]:
    process = Process("spanloop.learner.serving.embedded", config)
    try:
        assert process.ready()["ready"] == "serving"
        yield process
    finally:
        process.end(signal.SIGTERM)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


class Traffic:
    """Plays the world with whatever is routed to and appends its samples."""

    def __init__(self, workspace: Path) -> None:
        self.log = SqliteLog(workspace / "spanloop.db")
        self._workspace = workspace
        self._world = World(noise=0.02)
        self._nets: dict[int, PolicyNet] = {}

    def play(self, count: int) -> None:
        routing = fold(read_policies(self.log, "default", "policy")).routing
        assert routing is not None
        version = routing.champion
        if version not in self._nets:
            self._nets[version] = load_artifact(self._workspace / "policies" / f"policy@v{version}").net
        append(self.log, [self._world.play(self._nets[version], version) for _ in range(count)])

    def batches(self) -> int:
        return max(
            (
                e.batch
                for e, _ in read_policies(self.log, "default", "policy")
                if isinstance(e, BatchCommitted)
            ),
            default=0,
        )


@pytest.mark.slow
def test_killed_at_random_moments(config: Path, serving: Process, tmp_path: Path) -> None:
    workspace = tmp_path / "w"
    rng = np.random.default_rng(11)
    learner = Process("spanloop.learner.trainer", config)
    assert learner.ready() == {"ready": "learner", "url": ""}
    traffic = Traffic(workspace)
    for _ in range(2):
        before = traffic.batches()
        for _ in range(6):
            traffic.play(12)
            time.sleep(0.1)
        until(lambda before=before: traffic.batches() > before)
        time.sleep(float(rng.uniform(0, 0.3)))
        assert learner.end(signal.SIGKILL) == -signal.SIGKILL
        learner = Process("spanloop.learner.trainer", config)
        learner.ready()
    traffic.play(40)
    wanted = traffic.batches() + 1
    until(lambda: traffic.batches() >= wanted)
    assert learner.end(signal.SIGTERM) == 0, "".join(learner.errors)

    state = fold(read_policies(traffic.log, "default", "policy"))
    found = load_latest(workspace / "checkpoints")
    assert found is not None
    assert found.state.batch == traffic.batches()
    first = load_artifact(workspace / "policies" / "policy@v0").net
    assert tensors_hash(found.tensors) == replay(traffic.log, CONFIG, first)
    assert sorted(state.versions) == list(range(traffic.batches() + 1))
    assert (
        MlflowRegistry(tracking_uri("", workspace), "policy", workspace).pointed("champion") == state.champion
    )
    traffic.log.close()


@pytest.mark.slow
def test_one_learner_a_workspace_and_no_serving(config: Path, tmp_path: Path) -> None:
    """Without serving it waits and says why; a second one on the workspace is refused; SIGTERM ends it cleanly."""
    first = Process("spanloop.learner.trainer", config)
    until(lambda: any("serving at" in line for line in first.errors))
    second = Process("spanloop.learner.trainer", config)
    assert second.child.wait(WAIT_S) == 1
    until(lambda: any("another learner works on" in line for line in second.errors))
    second.end(signal.SIGTERM)
    assert first.end(signal.SIGTERM) == 0
    log = SqliteLog(tmp_path / "w" / "spanloop.db")
    assert fold(read_policies(log, "default", "policy")).champion == -1
    log.close()
