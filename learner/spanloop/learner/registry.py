"""MLflow as a store of versions: each candidate is a model version with tags; champion, challenger and candidate are aliases.

Place: ``promoter`` registers candidates and sets the aliases after the log has what they say. The log is the truth; whatever
is missing here is repaired from it. Registering is idempotent by the tag ``spanloop.version``.

One MLflow run a session carries the metrics, one step a version, their curves as a drawing, and each version's samples as a
dataset: topic, offsets, and the digest of which orchestrations it was taught by. With a local store the version's source is its
artifact folder; with a server it is a copy in the run's artifacts. Costs about 20 ms of CPU a version with sqlite.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from spanloop.learner.artifact import Origin
from spanloop.learner.curves import curves
from spanloop.learner.durable import sync_folder
from spanloop.schemas import topics
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.errors import SpanloopError, TransientError

if TYPE_CHECKING:
    from mlflow import MlflowClient

__all__ = ["ALIASES", "CHAMPION", "MemoryRegistry", "MlflowRegistry", "Registry", "tracking_uri"]

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
VERSION_TAG = "spanloop.version"
CHAMPION, CHALLENGER, CANDIDATE = "champion", "challenger", "candidate"
ALIASES = (CHAMPION, CHALLENGER, CANDIDATE)
"""What serves; what is in its canary, or waits for one after its gate; the learner's newest."""
DIGEST_MAX = 36
"""Characters of a dataset's digest that MLflow takes."""
NOWHERE = Origin()
_CREDENTIALS = re.compile(r"://[^/@\s]*@")


class Registry(Protocol):
    """Store of versions. Methods raise TransientError when the store cannot be reached."""

    def register(
        self,
        version: int,
        path: Path,
        *,
        tags: Mapping[str, str],
        metrics: Mapping[str, float],
        origin: Origin = NOWHERE,
    ) -> str:
        """Make a version known, once; returns the store's own version number as text."""
        ...

    def point(self, alias: str, version: int, *, epoch: int) -> None:
        """Point an alias at a registered version, or (-1) at none. The champion's version is tagged with its epoch."""
        ...

    def pointed(self, alias: str) -> int:
        """Version that an alias points at, -1 when it is not set."""
        ...

    def measure(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Keep figures that belong to no new version."""
        ...


class MemoryRegistry:
    """A registry for tests and experiments without MLflow."""

    def __init__(self) -> None:
        self.versions: dict[int, dict[str, Any]] = {}
        self.aliases: dict[str, int] = {}
        self.measured: list[tuple[int, dict[str, float]]] = []

    def register(
        self,
        version: int,
        path: Path,
        *,
        tags: Mapping[str, str],
        metrics: Mapping[str, float],
        origin: Origin = NOWHERE,
    ) -> str:
        self.versions.setdefault(version, {"path": path, "tags": dict(tags), "metrics": dict(metrics)})
        return str(list(self.versions).index(version) + 1)

    def point(self, alias: str, version: int, *, epoch: int) -> None:
        if alias == CHAMPION:
            self.versions[version]["tags"]["spanloop.epoch"] = str(epoch)
        self.aliases[alias] = version

    def pointed(self, alias: str) -> int:
        return self.aliases.get(alias, -1)

    def measure(self, metrics: Mapping[str, float], *, step: int) -> None:
        self.measured.append((step, dict(metrics)))


def tracking_uri(setting: str, workspace: Path) -> str:
    """``learner.tracking_uri``, else MLFLOW_TRACKING_URI, else sqlite in the workspace."""
    return (
        setting
        or os.environ.get("MLFLOW_TRACKING_URI", "")
        or f"sqlite:///{workspace.resolve()}/mlflow/mlflow.db"
    )


class MlflowRegistry:
    """The Registry over an MLflow tracking store: sqlite, or a server by http(s).

    Args:
        uri: Tracking and registry URI.
        model: Registered model and experiment name.
        workspace: Where a local store keeps its files.
    """

    def __init__(self, uri: str, model: str, workspace: Path) -> None:
        self._uri = uri
        self._model = model
        self._workspace = workspace
        self._remote = uri.startswith(("http://", "https://"))
        self._opened: tuple[MlflowClient, str] | None = None
        self._history: dict[str, list[tuple[int, float]]] = {}
        self._lock = threading.Lock()

    def register(
        self,
        version: int,
        path: Path,
        *,
        tags: Mapping[str, str],
        metrics: Mapping[str, float],
        origin: Origin = NOWHERE,
    ) -> str:
        """Make a version known, once. See ``Registry``."""

        def call() -> str:
            client, run = self._open()
            found = self._find(client, version)
            if found is not None:
                return str(found.version)
            source = path.resolve().as_uri()
            if self._remote:
                client.log_artifacts(run, str(path), artifact_path=path.name)
                source = f"runs:/{run}/{path.name}"
            created = client.create_model_version(
                self._model,
                source=source,
                run_id=run,
                tags={**tags, VERSION_TAG: str(version)},
                description=_described(version, origin),
                await_creation_for=0,
            )
            self._log(client, run, version, metrics)
            if origin.samples:
                client.log_inputs(run, [_dataset(version, origin)])
            return str(created.version)

        return self._guard("register a version", call)

    def point(self, alias: str, version: int, *, epoch: int) -> None:
        """Point an alias at a version or at none. See ``Registry``."""

        def call() -> None:
            client, _ = self._open()
            if version < 0:
                client.delete_registered_model_alias(self._model, alias)
                return
            found = self._find(client, version)
            if found is None:
                raise TransientError(f"MLflow at {self._shown} does not know version {version} yet")
            if alias == CHAMPION:
                client.set_model_version_tag(self._model, str(found.version), "spanloop.epoch", str(epoch))
            client.set_registered_model_alias(self._model, alias, str(found.version))

        self._guard(f"set the alias {alias}", call)

    def pointed(self, alias: str) -> int:
        """Version of an alias. Read by name: lists of aliases come back empty (MLflow #16734)."""

        def call() -> int:
            from mlflow.exceptions import MlflowException

            client, _ = self._open()
            try:
                found = client.get_model_version_by_alias(self._model, alias)
            except MlflowException as exc:
                if exc.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    return -1
                raise
            return int(found.tags.get(VERSION_TAG, -1))

        return self._guard(f"read the alias {alias}", call)

    def measure(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Keep figures. See ``Registry``."""

        def call() -> None:
            client, run = self._open()
            for name, value in metrics.items():
                client.log_metric(run, name, float(value), step=step)

        self._guard("log figures", call)

    # ------------------------------------------------------------ inside

    @property
    def _shown(self) -> str:
        return _CREDENTIALS.sub("://", self._uri)

    def _open(self) -> tuple[MlflowClient, str]:
        with self._lock:
            if self._opened is None:
                self._opened = self._connect()
            return self._opened

    def _connect(self) -> tuple[MlflowClient, str]:
        _quiet()
        from mlflow import MlflowClient
        from mlflow.exceptions import MlflowException

        _hush_loggers()
        if self._uri.startswith("sqlite:///"):
            file = Path(self._uri.removeprefix("sqlite:///"))
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not file.exists() or not file.stat().st_size:
                _make_store(file, self._workspace.resolve() / "mlflow" / "artifacts")
        client = MlflowClient(tracking_uri=self._uri, registry_uri=self._uri)
        experiment = client.get_experiment_by_name(self._model)
        if experiment is None:
            place = None if self._remote else (self._workspace.resolve() / "mlflow" / "artifacts").as_uri()
            experiment_id = client.create_experiment(self._model, artifact_location=place)
        else:
            experiment_id = experiment.experiment_id
        try:
            client.create_registered_model(self._model)
        except MlflowException as exc:
            if exc.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        run = client.create_run(
            experiment_id, run_name=f"learner-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}"
        )
        return client, run.info.run_id

    def _find(self, client: MlflowClient, version: int) -> Any:
        found = client.search_model_versions(
            f"name = '{self._model}' and tags.`{VERSION_TAG}` = '{version}'", max_results=1
        )
        return found[0] if found else None

    def _log(self, client: MlflowClient, run: str, version: int, metrics: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        rows = [Metric(name, float(value), now_ms, version) for name, value in sorted(metrics.items())]
        if not rows:
            return
        client.log_batch(run, metrics=rows)
        for name, value in metrics.items():
            self._history.setdefault(name, []).append((version, float(value)))
        client.log_text(run, curves(self._history, self._model), "plots/learning.svg")

    def _guard(self, doing: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except SpanloopError:
            raise
        except ModuleNotFoundError:
            raise
        except Exception as exc:  # MLflow raises its own, SQLAlchemy's, requests' and OSError
            if getattr(exc, "error_code", "") == "RESOURCE_DOES_NOT_EXIST":
                self._opened = None  # the store was replaced or cleaned up: the next try begins a new run
            first = _CREDENTIALS.sub("://", next(iter(str(exc).strip().splitlines()), ""))
            raise TransientError(
                f"cannot {doing}: MLflow at {self._shown} answers {type(exc).__name__}: {first[:200]}; training waits and tries again. Check learner.tracking_uri or "
                "MLFLOW_TRACKING_URI"
            ) from exc


def _make_store(file: Path, artifacts: Path) -> None:
    """MLflow's database with its tables, there whole or not at all: killed among its migrations, MLflow never opens it again."""
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    for leftover in file.parent.glob(f".building-{file.name}-*"):
        leftover.unlink(missing_ok=True)
    building = file.with_name(f".building-{file.name}-{secrets.token_hex(4)}")
    building.touch(mode=0o600)
    SqlAlchemyStore(f"sqlite:///{building}", artifacts.as_uri()).engine.dispose()
    if file.exists() and not file.stat().st_size:
        file.unlink()
    with contextlib.suppress(FileExistsError):  # another process was quicker
        os.link(building, file)
    building.unlink()
    sync_folder(file.parent)


def _described(version: int, origin: Origin) -> str:
    """Lineage in a sentence."""
    if origin.injected:
        return f"version {version}, put there by hand: {origin.injected[:200]}"
    if origin.parent < 0:
        return f"version {version}, the first"
    return (
        f"version {version}, parent {origin.parent} (sha256 {origin.parent_sha256[:12]}), batch {origin.batch}: "
        f"{origin.samples} orchestrations, samples ({origin.from_offset}, {origin.to_offset}]"
    )


def _dataset(version: int, origin: Origin) -> Any:
    """What a version's batch was trained on, as MLflow's dataset input."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    source = {"topic": topics.SAMPLES, "from_offset": origin.from_offset, "to_offset": origin.to_offset}
    profile = {"orchestrations": origin.samples, "samples_sha256": origin.samples_sha256}
    dataset = Dataset(
        name=f"{topics.SAMPLES}({origin.from_offset},{origin.to_offset}]",
        digest=origin.samples_sha256[:DIGEST_MAX],
        source_type="spanloop_log",
        source=canonical_json(source).decode(),
        profile=canonical_json(profile).decode(),
    )
    return DatasetInput(
        dataset, [InputTag("mlflow.data.context", "training"), InputTag(VERSION_TAG, str(version))]
    )


def _quiet() -> None:
    """No network but the tracking server's, few retries (the learner has its own), no telemetry, no git look-ups."""
    for name, value in (
        ("MLFLOW_MODEL_CATALOG_URI", ""),
        ("MLFLOW_DISABLE_TELEMETRY", "true"),
        ("DO_NOT_TRACK", "true"),
        ("GIT_PYTHON_REFRESH", "quiet"),
        ("MLFLOW_HTTP_REQUEST_TIMEOUT", "10"),
        ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1"),
        ("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false"),
    ):
        os.environ.setdefault(name, value)


def _hush_loggers() -> None:
    for name in ("mlflow", "alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.ERROR)
