"""The serving port for vLLM: one LoRA adapter a version, on one or several servers, all or nothing.

Place: what the learner uses where ``serving.engine`` is ``vllm``. A version is loaded under a new immutable name from a new
path, or fetched by that name from MLflow (vLLM keys its prefix cache by both, so that weights replaced in place would go on answering from the old cache).

Invariants: no server is asked to load what ``lora_files`` refuses. A version counts as loaded when every server lists it with
its path and all answer a probe alike; where one of them fails, it is unloaded from those that had taken it. A version is
unloaded once the server says that nothing runs on it, or after ``grace_s``; what still runs then finishes (vLLM keeps it).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from spanloop.learner.serving.http import HttpServing
from spanloop.learner.serving.lora_files import check_lora
from spanloop.learner.serving.port import ServingPort
from spanloop.learner.serving.vllm_replica import PROBE, Replica, taken
from spanloop.schemas.errors import ConfigError, SchemaError, SpanloopError
from spanloop.schemas.settings import Settings

__all__ = ["VllmServing", "serving_of", "serving_urls"]

_LOG = logging.getLogger(__name__)

TIMEOUT_S = 60.0
"""For one call: the first request of a fresh server compiles kernels for up to 20 s."""
GRACE_S = 5.0
"""How long ``unload`` waits for requests that run on the version; the learner has stopped routing to it long before."""


class VllmServing:
    """vLLM servers that serve the same versions.

    Args:
        urls: Base URLs, with or without /v1; all see the artifacts under the learner's paths.
        key: For servers with ``--api-key``; empty: none.
        timeout_s: For one call.
        grace_s: How long ``unload`` waits for requests on the version.
        tolerance: Largest difference in nats between two servers' answers to a probe.
        by_name: The servers fetch a version by its name (from MLflow) instead of reading the learner's path.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        key: str = "",
        timeout_s: float = TIMEOUT_S,
        grace_s: float = GRACE_S,
        tolerance: float = 1e-2,
        by_name: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not urls:
            raise ConfigError("serving.urls is empty: name at least one vLLM server")
        self._replicas = [Replica(url, timeout_s=timeout_s, key=key, sleep=sleep) for url in urls]
        if len({replica.url for replica in self._replicas}) != len(self._replicas):
            raise ConfigError(f"serving.urls names a server twice: {', '.join(urls)}")
        self._grace_s = grace_s
        self._tolerance = tolerance
        self._by_name = by_name

    def load(self, name: str, path: Path) -> None:
        """Load on every server, then verify on every server; on a failure undo what this call loaded.

        Raises SchemaError, StaleError, TransientError, each naming the server."""
        path = path.absolute()
        known = [
            replica.versions().get(name) for replica in self._replicas
        ]  # all must be there before one changes
        for replica, served in zip(self._replicas, known, strict=True):
            if served is not None and not self._is(served, path):
                raise taken(name, served, path, replica.url)
        check_lora(path)
        mine: list[Replica] = []
        try:
            for replica, served in zip(self._replicas, known, strict=True):
                if served is None:
                    mine.append(replica)  # also where the answer is lost: it may load it yet
                    if self._by_name:
                        replica.fetch(name)
                    else:
                        replica.load(name, path)
            self._verify(name, path)
        except SpanloopError:
            self._undo(name, mine)
            raise

    def _is(self, served: str, path: Path) -> bool:
        """Whether what a server lists can be the artifact; a server that fetched it has it under a path of its own, and the
        learner's probe proves the rest."""
        return Path(served) == path or (self._by_name and Path(served).name == path.name)

    def _verify(self, name: str, path: Path) -> None:
        for replica in self._replicas:
            served = replica.versions().get(name)
            if served is None or not self._is(served, path):
                raise SchemaError(
                    f"the server {replica.url} said that it loaded {name}, but lists {served or 'no such model'}"
                )
        self.probe(name, PROBE)
        for replica in self._replicas:
            replica.check_behaviour(name)

    def _undo(self, name: str, replicas: Sequence[Replica]) -> None:
        for replica in replicas:
            try:
                replica.unload(name, 0.0)
            except SpanloopError as exc:
                _LOG.warning(
                    "%s stays on %s, where nothing is routed to it: %s", name, replica.url, exc.message
                )

    def unload(self, name: str) -> None:
        """Unload everywhere; a server that fails does not keep the others from it. Raises the first failure."""
        failed: list[SpanloopError] = []
        for replica in self._replicas:
            try:
                if name in replica.versions():
                    replica.unload(name, self._grace_s)
            except SpanloopError as exc:
                failed.append(exc)
        if failed:
            raise failed[0]

    def loaded(self) -> list[str]:
        """Versions that every server lists."""
        return sorted(set.intersection(*(set(replica.versions()) for replica in self._replicas)))

    def probe(self, name: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """The first server's log-probabilities, once all have answered alike. Raises SchemaError where one does not."""
        found = [replica.scores(name, prompts) for replica in self._replicas]
        for replica, scores in zip(self._replicas[1:], found[1:], strict=True):
            pairs = zip(scores, found[0], strict=True)
            difference = max(
                (abs(a - b) for mine, first in pairs for a, b in zip(mine, first, strict=True)), default=0.0
            )
            if difference > self._tolerance:
                raise SchemaError(
                    f"{name} answers differently on {replica.url} and {self._replicas[0].url}: {difference:.2g} nats, more "
                    f"than {self._tolerance:g} (learner.probe_tolerance); one of them serves other weights"
                )
        return found[0]


def serving_urls(settings: Settings) -> tuple[str, ...]:
    """Base URLs of what serves the policy: ``serving.urls``, else the gateway's upstream, else this workspace's server."""
    host = settings.serving.host
    own = f"http://{f'[{host}]' if ':' in host else host}:{settings.serving.port}"
    return settings.serving.urls or (settings.gateway.upstream or own,)


def serving_of(settings: Settings) -> ServingPort:
    """The adapter that ``serving.engine`` names."""
    urls = serving_urls(settings)
    if settings.serving.engine == "embedded":
        return HttpServing(urls[0])
    learner = settings.learner
    mean = learner.probe_tolerance or (0.001 if learner.dtype == "float32" else 0.06)
    return VllmServing(
        urls,
        key=settings.gateway.upstream_key.get_secret_value(),
        tolerance=10.0 * mean,
        by_name=settings.serving.adapters == "mlflow",
    )
