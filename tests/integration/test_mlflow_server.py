"""MLflow as a server (``mlflow server`` over sqlite on loopback): LoRA versions are registered, uploaded, promoted and rolled
back; what a client downloads by the alias is the champion, hash by hash; an outage is waited out."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hf_world import first_policy, settings, tiny
from mlflow_support import Server

from spanloop.learner.artifact import Origin
from spanloop.learner.model import load_artifact, save_artifact
from spanloop.learner.registry import MlflowRegistry, tracking_uri
from spanloop.learner.serving.memory import MemoryServing
from spanloop.learner.serving.vllm_plugins.spanloop_mlflow import FILES, MlflowVersions
from spanloop.learner.trainer import Learner
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.ports import new_record
from spanloop.schemas.errors import TransientError
from spanloop.schemas.events import PolicyCommand

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


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
    assert registry.pointed("champion") == 0
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
    assert MlflowRegistry(server.url, "lora", tmp_path / "elsewhere").pointed("champion") == 1

    from mlflow import MlflowClient
    from mlflow.artifacts import download_artifacts

    client = MlflowClient(tracking_uri=server.url, registry_uri=server.url)
    candidate = made.promoter.state.versions[1]
    found = client.get_model_version_by_alias("lora", "champion")
    assert str(found.version) == candidate.mlflow_version
    assert found.tags["spanloop.sha256"] == candidate.sha256
    assert found.tags["spanloop.injected"] == "injected by hand"
    assert found.description == "version 1, put there by hand: injected by hand"
    assert registry.pointed("candidate") == 0
    assert registry.pointed("challenger") == -1
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
    assert registry.pointed("champion") == 0
    assert str(client.get_model_version_by_alias("lora", "champion").version) != candidate.mlflow_version


def test_registering_is_idempotent_and_survives_a_lost_run(
    server: Server, model: Path, tmp_path: Path
) -> None:
    registry = MlflowRegistry(server.url, "again", tmp_path)
    net = first_policy(model)
    for version in (0, 1):
        save_artifact(tmp_path / f"policy@v{version}", net, None)
    origin = Origin(version=0, from_offset=3, to_offset=9, samples=4, samples_sha256="ab" * 32)
    first = registry.register(
        0, tmp_path / "policy@v0", tags={"a": "b"}, metrics={"loss": 0.5}, origin=origin
    )
    assert isinstance(first, str)
    assert registry._opened is not None
    client, run = registry._opened
    assert [d.dataset.name for d in client.get_run(run).inputs.dataset_inputs] == ["samples(3,9]"]
    assert [a.path for a in client.list_artifacts(run, "plots")] == ["plots/learning.svg"]
    registry.point("challenger", 0, epoch=1)
    assert registry.pointed("challenger") == 0
    registry.point("challenger", -1, epoch=1)
    assert registry.pointed("challenger") == -1
    another = MlflowRegistry(server.url, "again", tmp_path)
    assert another.register(0, tmp_path / "policy@v0", tags={"a": "b"}, metrics={"loss": 0.5}) == first
    opened = registry._opened
    assert opened is not None
    registry._opened = (opened[0], "0" * 32)
    with pytest.raises(TransientError):
        registry.register(1, tmp_path / "policy@v1", tags={}, metrics={})
    assert registry.register(1, tmp_path / "policy@v1", tags={}, metrics={}) != first
    with pytest.raises(TransientError, match="does not know version 7"):
        registry.point("champion", 7, epoch=1)


def test_a_vllm_server_elsewhere_fetches_a_version_by_its_name(
    server: Server, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = MlflowRegistry(server.url, "fetched", tmp_path)
    made = tmp_path / "policy@v0"
    sha256 = save_artifact(made, first_policy(model), None)
    registry.register(0, made, tags={"spanloop.sha256": sha256}, metrics={})
    registry.register(1, made, tags={"spanloop.sha256": "0" * 64}, metrics={})
    registry.register(2, made, tags={}, metrics={})
    cache = tmp_path / "elsewhere" / "cache"
    versions = MlflowVersions(server.url, cache, {"MLFLOW_TRACKING_USERNAME": "a"})
    folder = versions.fetch("fetched@v0")
    assert folder is not None
    assert folder == cache / "fetched@v0"
    assert [(folder / f).read_bytes() for f in FILES] == [(made / f).read_bytes() for f in FILES]

    with pytest.raises(ValueError, match="its tag says 000000000000: it is not served"):
        versions.fetch("fetched@v1")
    with pytest.raises(ValueError, match=r"no tag spanloop\.sha256"):
        versions.fetch("fetched@v2")
    for unknown in ("fetched@v7", "other@v0", "gpt-5", "../x@v0", "x' or '1'='1@v0"):
        assert versions.fetch(unknown) is None
    assert [path.name for path in cache.iterdir()] == ["fetched@v0"]  # nothing of a failed one stays

    def no_network(*_: Any, **__: Any) -> Any:
        raise AssertionError("asked again")

    monkeypatch.setattr("http.client.HTTPConnection.request", no_network)
    assert versions.fetch("fetched@v0") == folder
    monkeypatch.undo()
    with pytest.raises(OSError, match=r"refused|\[Errno"):
        MlflowVersions("http://127.0.0.1:9", cache, {}).fetch("fetched@v3")
    with pytest.raises(ValueError, match="is not the http"):
        MlflowVersions("sqlite:///x.db", cache, {})


def test_the_artifact_store_has_to_be_behind_the_server(tmp_path: Path) -> None:
    versions = MlflowVersions("http://127.0.0.1:9", tmp_path, {})
    with pytest.raises(ValueError, match="--artifacts-destination"):
        versions._root("file:///artifacts/policy@v0")
    assert versions._root("mlflow-artifacts:/1/abc/artifacts/policy@v0") == "1/abc/artifacts/policy@v0"
