"""Versions straight from MLflow: a vLLM server that does not see the learner's disk fetches an adapter by its name.

Place: a LoRA resolver in the vLLM process (entry point ``vllm.general_plugins``, see ``vllm_server.write_plugins``), which knows
nothing else of spanloop: standard library and vllm only. vLLM asks it for a model name that it does not serve, such as
``policy@v7``; the adapter is looked up by the tag that the learner's registry sets, its files are downloaded beside their place,
compared with the version's sha256, synced and renamed.

Environment: SPANLOOP_MLFLOW_URI (http or https), SPANLOOP_MLFLOW_CACHE (a folder of this server), MLFLOW_TRACKING_TOKEN or
MLFLOW_TRACKING_USERNAME and _PASSWORD where the server wants them.
Invariants: a folder of the cache is one version for ever; what does not have the version's hash is not kept and not served; a name
that is not a version's is none of ours.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import http.client
import json
import logging
import os
import re
import shutil
import tempfile
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["MlflowVersions", "register"]

_LOG = logging.getLogger("vllm.spanloop_mlflow")

FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Of a version, in the order in which its sha256 covers them."""
TIMEOUT_S = 30.0
BYTES_MAX = 8 * 2**30
_VERSION = re.compile(r"(?P<model>[A-Za-z0-9][A-Za-z0-9._-]{0,99})@v(?P<number>[0-9]{1,9})\Z")


class MlflowVersions:
    """Downloads versions from an MLflow server, once.

    Args:
        uri: Of the tracking server, with its artifact proxy (the default of ``mlflow server``).
        cache: Folder of versions; made if there is none.
        environment: Where credentials are looked up.
    """

    def __init__(self, uri: str, cache: Path, environment: dict[str, str]) -> None:
        self._uri = urllib.parse.urlsplit(uri)
        if self._uri.scheme not in ("http", "https") or not self._uri.hostname:
            raise ValueError(f"SPANLOOP_MLFLOW_URI = {uri!r} is not the http(s) URL of an MLflow server")
        self._shown = f"{self._uri.scheme}://{self._uri.netloc.rpartition('@')[2]}"
        self._cache = cache
        self._headers = {}
        token, user = environment.get("MLFLOW_TRACKING_TOKEN"), environment.get("MLFLOW_TRACKING_USERNAME")
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        elif user:
            pair = f"{user}:{environment.get('MLFLOW_TRACKING_PASSWORD', '')}".encode()
            self._headers["Authorization"] = "Basic " + base64.b64encode(pair).decode()
        cache.mkdir(parents=True, exist_ok=True)

    def fetch(self, name: str) -> Path | None:
        """Folder of the version ``name``; None when it is no version's name or MLflow has none such.

        Raises:
            ValueError: what MLflow holds is not the version that it names.
            OSError: MLflow does not answer, or the disk refuses.
        """
        match = _VERSION.match(name)
        if match is None:
            return None
        folder = self._cache / name
        if folder.is_dir():
            return folder
        found = self._version(match["model"], match["number"])
        if found is None:
            return None
        source, sha256 = found
        root = self._root(source)
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=self._cache))
        try:
            for file in FILES:
                self._download(f"{root}/{file}", work / file)
            lines = "".join(f"{_sha256(work / file)}  {file}\n" for file in FILES)
            got = hashlib.sha256(lines.encode()).hexdigest()
            if got != sha256:
                raise ValueError(
                    f"{name} from {self._shown} has sha256 {got[:12]}, its tag says {sha256[:12]}: it is not served"
                )
            try:
                work.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was quicker
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return folder

    def _version(self, model: str, number: str) -> tuple[str, str] | None:
        query = urllib.parse.urlencode(
            {"filter": f"name = '{model}' and tags.`spanloop.version` = '{number}'", "max_results": 1}
        )
        body = self._json(f"/api/2.0/mlflow/model-versions/search?{query}")
        versions = body.get("model_versions") or []
        if not versions:
            return None
        tags = {tag["key"]: tag["value"] for tag in versions[0].get("tags") or []}
        if "spanloop.sha256" not in tags:
            raise ValueError(f"version {number} of {model} in {self._shown} has no tag spanloop.sha256")
        return str(versions[0]["source"]), tags["spanloop.sha256"]

    def _root(self, source: str) -> str:
        """Path of an artifact folder below the server's artifact proxy."""
        if source.startswith("runs:/"):
            run, _, inside = source.removeprefix("runs:/").partition("/")
            query = urllib.parse.urlencode({"run_id": run})
            about = self._json(f"/api/2.0/mlflow/runs/get?{query}")
            source = f"{about['run']['info']['artifact_uri'].rstrip('/')}/{inside}"
        split = urllib.parse.urlsplit(source)
        if split.scheme != "mlflow-artifacts":
            raise ValueError(
                f"the version's files are at {source}, which only a client with access to that store can read: start the MLflow "
                "server with --artifacts-destination, so that it serves them itself"
            )
        return split.path.strip("/")

    def _download(self, path: str, to: Path) -> None:
        with (
            self._open(f"/api/2.0/mlflow-artifacts/artifacts/{urllib.parse.quote(path)}") as answer,
            to.open("wb") as file,
        ):
            size = 0
            while block := answer.read(2**20):
                size += len(block)
                if size > BYTES_MAX:
                    raise ValueError(f"{path} is larger than {BYTES_MAX >> 30} GiB")
                file.write(block)
            file.flush()
            os.fsync(file.fileno())

    def _json(self, path: str) -> Any:
        with self._open(path) as answer:
            return json.loads(answer.read())

    @contextlib.contextmanager
    def _open(self, path: str) -> Iterator[http.client.HTTPResponse]:
        """The answer to a GET. Raises OSError, also where its status is not 200."""
        kind = http.client.HTTPSConnection if self._uri.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._uri.hostname or "", self._uri.port, timeout=TIMEOUT_S)
        try:
            connection.request("GET", self._uri.path.rstrip("/") + path, headers=self._headers)
            answer = connection.getresponse()
            if answer.status != 200:
                raise OSError(f"MLflow at {self._shown} answers {answer.status}: {answer.read(300)!r}")
            yield answer
        except http.client.HTTPException as exc:
            raise OSError(f"MLflow at {self._shown} breaks off: {exc!r}") from exc
        finally:
            connection.close()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def register() -> None:
    """Entry point: tell vLLM of the resolver, where SPANLOOP_MLFLOW_URI is set."""
    uri = os.environ.get("SPANLOOP_MLFLOW_URI", "")
    if not uri:
        return
    from vllm.lora.request import LoRARequest
    from vllm.lora.resolver import LoRAResolver, LoRAResolverRegistry

    versions = MlflowVersions(uri, Path(os.environ["SPANLOOP_MLFLOW_CACHE"]), dict(os.environ))

    class Resolver(LoRAResolver):
        """vLLM's port."""

        async def resolve_lora(self, base_model_name: str, lora_name: str) -> Any:
            """The adapter's request, or None."""
            try:
                folder = await asyncio.to_thread(versions.fetch, lora_name)
            except (OSError, ValueError, KeyError) as exc:
                _LOG.error("%s cannot be fetched: %s", lora_name, exc)
                return None
            if folder is None:
                return None
            base = json.loads((folder / FILES[0]).read_bytes()).get("base_model_name_or_path")
            if base != base_model_name:
                _LOG.error(
                    "%s was trained on %r, this server serves %r: start vLLM with the path that learner.model names",
                    lora_name, base, base_model_name,
                )  # fmt: skip
                return None
            return LoRARequest(
                lora_name=lora_name, lora_int_id=1, lora_path=str(folder)
            )  # vLLM numbers it itself

    LoRAResolverRegistry.register_resolver("spanloop_mlflow", Resolver())
