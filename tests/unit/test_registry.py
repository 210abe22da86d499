"""The registry port: the same behaviour in memory and over MLflow's sqlite store; what MLflow's failures become."""

from __future__ import annotations

import json
import resource
import stat
from pathlib import Path
from xml.etree import ElementTree

import pytest
from learner_world import CONFIG, WORDS

from spanloop.learner.artifact import Origin
from spanloop.learner.policy import PolicyNet, save_artifact
from spanloop.learner.registry import MemoryRegistry, MlflowRegistry, Registry, tracking_uri
from spanloop.learner.tokenizer import Tokenizer
from spanloop.schemas.errors import TransientError

TAGS = {"spanloop.parent": "0", "spanloop.sha256": "ab"}


@pytest.fixture(scope="module")
def mlflow_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One MLflow database for the module: making its tables takes seconds."""
    home = tmp_path_factory.mktemp("mlflow-home")
    MlflowRegistry(tracking_uri("", home), "warm", home).pointed("champion")
    return home


@pytest.fixture(params=["memory", "mlflow"])
def registry(request: pytest.FixtureRequest) -> Registry:
    if request.param == "memory":
        return MemoryRegistry()
    home: Path = request.getfixturevalue("mlflow_home")
    return MlflowRegistry(tracking_uri("", home), f"p-{abs(hash(request.node.name))}", home)


def artifact(folder: Path, seed: int) -> Path:
    save_artifact(folder / f"policy@v{seed}", PolicyNet.initial(CONFIG, seed), Tokenizer(WORDS))
    return folder / f"policy@v{seed}"


def test_register_is_idempotent(registry: Registry, tmp_path: Path) -> None:
    first = registry.register(3, artifact(tmp_path, 3), tags=TAGS, metrics={"loss": 0.5})
    assert isinstance(first, str)
    assert registry.register(3, artifact(tmp_path, 3), tags=TAGS, metrics={"loss": 0.5}) == first
    assert registry.register(4, artifact(tmp_path, 4), tags=TAGS, metrics={}) != first


def test_champion_alias(registry: Registry, tmp_path: Path) -> None:
    assert registry.pointed("champion") == -1
    for version in (0, 1):
        registry.register(version, artifact(tmp_path, version), tags=TAGS, metrics={})
    registry.point("champion", 1, epoch=2)
    registry.point("champion", 1, epoch=2)
    assert registry.pointed("champion") == 1
    registry.point("champion", 0, epoch=3)
    assert registry.pointed("champion") == 0


def test_challenger_and_candidate_come_and_go(registry: Registry, tmp_path: Path) -> None:
    for version in (0, 1):
        registry.register(version, artifact(tmp_path, version), tags=TAGS, metrics={})
    registry.point("candidate", 1, epoch=1)
    registry.point("challenger", 1, epoch=1)
    assert [registry.pointed(a) for a in ("champion", "challenger", "candidate")] == [-1, 1, 1]
    registry.point("challenger", -1, epoch=1)
    registry.point("candidate", 0, epoch=1)
    assert [registry.pointed(a) for a in ("champion", "challenger", "candidate")] == [-1, -1, 0]


def test_mlflow_has_lineage_dataset_metrics_and_curves(mlflow_home: Path, tmp_path: Path) -> None:
    registry = MlflowRegistry(tracking_uri("", mlflow_home), "lineage", mlflow_home)
    for version in (1, 2, 3):
        origin = Origin(
            version=version, parent=version - 1, parent_sha256="ab" * 32, batch=version, from_offset=10 * version,
            to_offset=10 * version + 10, samples=8, samples_sha256=f"{version}" * 64, code="c",
        )  # fmt: skip
        registry.register(
            version, artifact(tmp_path, version), tags=TAGS, origin=origin,
            metrics={"reward": 0.1 * version, "loss": float("nan") if version == 2 else 0.5},
        )  # fmt: skip
    from mlflow import MlflowClient

    uri = tracking_uri("", mlflow_home)
    client = MlflowClient(tracking_uri=uri, registry_uri=uri)
    found = client.search_model_versions("name = 'lineage' and tags.`spanloop.version` = '3'")[0]
    assert found.description == (
        "version 3, parent 2 (sha256 abababababab), batch 3: 8 orchestrations, samples (30, 40]"
    )
    run = client.get_run(str(found.run_id))
    taught = {d.dataset.name: d for d in run.inputs.dataset_inputs}
    assert set(taught) == {"samples(10,20]", "samples(20,30]", "samples(30,40]"}
    last = taught["samples(30,40]"]
    assert last.dataset.digest == "3" * 36
    assert json.loads(last.dataset.source) == {"topic": "samples", "from_offset": 30, "to_offset": 40}
    assert json.loads(last.dataset.profile) == {"orchestrations": 8, "samples_sha256": "3" * 64}
    assert {t.key: t.value for t in last.tags} == {"mlflow.data.context": "training", "spanloop.version": "3"}
    history = client.get_metric_history(str(found.run_id), "reward")
    assert [(m.step, round(m.value, 3)) for m in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    where = client.download_artifacts(str(found.run_id), "plots/learning.svg", str(tmp_path))
    drawing = ElementTree.fromstring(Path(where).read_text())  # noqa: S314 - our own file
    assert len(drawing.findall("{http://www.w3.org/2000/svg}polyline")) == 2
    assert "nan" not in Path(where).read_text()


def test_mlflow_holds_what_we_said(mlflow_home: Path, tmp_path: Path) -> None:
    registry = MlflowRegistry(tracking_uri("", mlflow_home), "told", mlflow_home)
    number = registry.register(7, artifact(tmp_path, 7), tags=TAGS, metrics={"loss": 0.25})
    registry.point("champion", 7, epoch=4)
    from mlflow import MlflowClient

    client = MlflowClient(
        tracking_uri=tracking_uri("", mlflow_home), registry_uri=tracking_uri("", mlflow_home)
    )
    found = client.get_model_version("told", number)
    assert found.tags == {**TAGS, "spanloop.version": "7", "spanloop.epoch": "4"}
    assert found.source == (tmp_path / "policy@v7").resolve().as_uri()
    assert str(client.get_model_version_by_alias("told", "champion").version) == number
    assert client.get_run(str(found.run_id)).data.metrics == {"loss": 0.25}
    database = mlflow_home / "mlflow" / "mlflow.db"
    assert stat.S_IMODE(database.stat().st_mode) == 0o600


def test_a_store_whose_making_was_killed_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow cannot open a database whose first migrations were cut off: it is never seen under its name."""
    from alembic import command

    class Killed(BaseException):
        pass

    def cut_off(config: object, revision: str) -> None:
        raise Killed

    monkeypatch.setattr(command, "upgrade", cut_off)
    uri = tracking_uri("", tmp_path)
    with pytest.raises(Killed):
        MlflowRegistry(uri, "p", tmp_path).pointed("champion")
    assert not (tmp_path / "mlflow" / "mlflow.db").exists()
    monkeypatch.undo()
    assert MlflowRegistry(uri, "p", tmp_path).pointed("champion") == -1
    assert [p.name for p in (tmp_path / "mlflow").iterdir() if p.is_file()] == ["mlflow.db"]
    assert stat.S_IMODE((tmp_path / "mlflow" / "mlflow.db").stat().st_mode) == 0o600


def test_another_session_knows_the_versions(mlflow_home: Path, tmp_path: Path) -> None:
    uri = tracking_uri("", mlflow_home)
    first = MlflowRegistry(uri, "again", mlflow_home).register(
        0, artifact(tmp_path, 0), tags=TAGS, metrics={}
    )
    assert (
        MlflowRegistry(uri, "again", mlflow_home).register(0, artifact(tmp_path, 0), tags=TAGS, metrics={})
        == first
    )


def test_registering_is_cheap(mlflow_home: Path, tmp_path: Path) -> None:
    """A candidate about every five seconds: at most 150 ms of CPU each (measured: about 15)."""
    registry = MlflowRegistry(tracking_uri("", mlflow_home), "cheap", mlflow_home)
    path = artifact(tmp_path, 0)
    registry.register(0, path, tags=TAGS, metrics={"loss": 1.0})
    before = resource.getrusage(resource.RUSAGE_SELF)
    for version in range(1, 6):
        registry.register(version, path, tags=TAGS, metrics={f"metric{i}": 1.0 for i in range(12)})
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{spent / 5 * 1000:.0f} ms of CPU a version")
    assert spent / 5 < 0.15


def test_uri_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert tracking_uri("", tmp_path) == f"sqlite:///{tmp_path.resolve()}/mlflow/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    assert tracking_uri("", tmp_path) == "http://127.0.0.1:5000"
    assert tracking_uri("sqlite:////x.db", tmp_path) == "sqlite:////x.db"


def test_missing_mlflow_is_a_clear_message(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    registry = MlflowRegistry("http://user:secret@127.0.0.1:9", "policy", tmp_path)
    with pytest.raises(TransientError, match=r"127\.0\.0\.1:9.*MLFLOW_TRACKING_URI") as caught:
        registry.register(0, tmp_path, tags={}, metrics={})
    assert "secret" not in caught.value.message
