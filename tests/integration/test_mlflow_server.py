"""MLflow as a server (``mlflow server`` over sqlite on loopback): LoRA versions are registered, uploaded, promoted and rolled
back; what a client downloads by the alias is the champion, hash by hash; an outage is waited out."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hf_world import first_policy, settings, tiny

from spanloop.learner.model import load_artifact, save_artifact
from spanloop.learner.registry import MlflowRegistry, tracking_uri
from spanloop.learner.serving.memory import MemoryServing
from spanloop.learner.trainer import Learner
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.errors import TransientError
from spanloop.schemas.events import PolicyCommand

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
READY_S = 200.0
"""A server's first start makes its tables; alone on two cores it took 20 s."""


class Server:
    def __init__(self, home: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = home / "server.log"
        command = [
            sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
            "--backend-store-uri", f"sqlite:///{home}/server.db", "--artifacts-destination", str(home / "artifacts"),
        ]  # fmt: skip
        environment = {
            **os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true", "MLFLOW_MODEL_CATALOG_URI": "",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }  # fmt: skip
        with self._log.open("w") as out:
            self.child = subprocess.Popen(
                command, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait(self) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline and self.child.poll() is None:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=1):
                    return
            except OSError:
                time.sleep(0.1)
        pytest.fail(self._log.read_text()[-3000:])

    def signal(self, number: int) -> None:
        os.killpg(self.child.pid, number)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("mlflow-server"))
    try:
        made.wait()
        yield made
    finally:
        made.signal(signal.SIGKILL)
        made.child.wait(20)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(tmp_path_factory.mktemp("base") / "tiny")


def test_versions_are_registered_promoted_and_rolled_back(
    server: Server, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "2")
    options = settings(tmp_path, model, gate=False, tracking_uri=server.url)
    assert tracking_uri(options.learner.tracking_uri, tmp_path) == server.url
    log = MemoryLog(ManualClock(10**18))
    registry = MlflowRegistry(server.url, "lora", tmp_path)
    made = Learner(options, log=log, registry=registry, serving=MemoryServing(), clock=ManualClock(10**18))
    made.start()
    made.step()
    assert registry.champion() == 0
    other = first_policy(model, max_length=32)
    other.restore({name: tensor + 0.01 for name, tensor in other.tensors().items()})
    save_artifact(tmp_path / "other", other, None)
    log.append(
        [
            new_record(
                PolicyCommand(
                    policy="policy", command_id="1", kind="inject", argument=str(tmp_path / "other")
                )
            )
        ]
    )
    made.step()
    made.step()
    assert made.promoter.state.champion == 1
    assert MlflowRegistry(server.url, "lora", tmp_path / "elsewhere").champion() == 1

    from mlflow import MlflowClient
    from mlflow.artifacts import download_artifacts

    client = MlflowClient(tracking_uri=server.url, registry_uri=server.url)
    candidate = made.promoter.state.versions[1]
    found = client.get_model_version_by_alias("lora", "champion")
    assert str(found.version) == candidate.mlflow_version
    assert found.tags["spanloop.sha256"] == candidate.sha256
    assert found.tags["spanloop.injected"] == "injected by hand"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server.url)
    where = download_artifacts("models:/lora@champion", dst_path=str(tmp_path / "got"))
    got = load_artifact(Path(where), sha256=candidate.sha256).net
    assert got.probe([[1, 12, 5]]) == made.promoter.net(1).probe([[1, 12, 5]])

    # The server hangs: a rollback needs the log and serving only; the alias follows when it is back.
    server.signal(signal.SIGSTOP)
    try:
        log.append([new_record(PolicyCommand(policy="policy", command_id="2", kind="rollback"))])
        with pytest.raises(TransientError, match="MLflow at"):
            made.step()
        assert made.promoter.state.champion == 0
        assert made.promoter.state.routing is not None
        assert made.promoter.state.routing.champion == 0
    finally:
        server.signal(signal.SIGCONT)
    made.step()
    assert registry.champion() == 0
    assert str(client.get_model_version_by_alias("lora", "champion").version) != candidate.mlflow_version


def test_registering_is_idempotent_and_survives_a_lost_run(
    server: Server, model: Path, tmp_path: Path
) -> None:
    registry = MlflowRegistry(server.url, "again", tmp_path)
    net = first_policy(model)
    for version in (0, 1):
        save_artifact(tmp_path / f"policy@v{version}", net, None)
    first = registry.register(0, tmp_path / "policy@v0", tags={"a": "b"}, metrics={"loss": 0.5})
    assert isinstance(first, str)
    another = MlflowRegistry(server.url, "again", tmp_path)
    assert another.register(0, tmp_path / "policy@v0", tags={"a": "b"}, metrics={"loss": 0.5}) == first
    opened = registry._opened
    assert opened is not None
    registry._opened = (opened[0], "0" * 32)
    with pytest.raises(TransientError):
        registry.register(1, tmp_path / "policy@v1", tags={}, metrics={})
    assert registry.register(1, tmp_path / "policy@v1", tags={}, metrics={}) != first
    with pytest.raises(TransientError, match="does not know version 7"):
        registry.set_champion(7, epoch=1)
