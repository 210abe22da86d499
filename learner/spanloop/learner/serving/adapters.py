"""Loaded versions of the embedded server: verified on load, bounded, least recently used out first.

Invariants: a name is loaded once and never replaced; a version used in the last ``GRACE_S`` seconds is never evicted,
so a request in flight keeps its weights (rows hold the network itself anyway). When every version is that fresh the
bound is exceeded rather than traffic refused, up to ``HARD_FACTOR`` times.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from spanloop.learner.policy import load_artifact
from spanloop.learner.signing import Trust
from spanloop.learner.tokenizer import Tokenizer
from spanloop.schemas.errors import SchemaError, StaleError, TransientError

__all__ = ["Adapter", "Adapters", "AlreadyLoaded", "NotFound"]

GRACE_S = 30.0
HARD_FACTOR = 4
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}@v[0-9]{1,9}\Z")


class NotFound(SchemaError):
    """No such version, in memory or on disk."""


class AlreadyLoaded(StaleError):
    """The name is loaded already; versions are immutable."""


class Adapter(msgspec.Struct):
    """A loaded version."""

    name: str
    path: Path
    artifact: Any
    """Verified, of the server's kind of policy."""
    created_s: int
    used_s: float


class Adapters:
    """All loaded versions. Call from one thread; only ``read`` may run elsewhere.

    Args:
        folder: Where versions are found by name on first use.
        load: Reads and verifies an artifact, given its path and ``trust``.
        limit: Versions kept in memory.
        now_s: Monotonic seconds.
        wall_s: Seconds since the epoch, for ``created``.
        vocabulary: The deployment's tokenizer; an artifact with another one is refused. None: any.
        trust: Whose signature a version needs.
    """

    def __init__(
        self,
        folder: Path,
        *,
        load: Callable[..., Any] = load_artifact,
        limit: int,
        now_s: Callable[[], float],
        wall_s: Callable[[], float],
        vocabulary: Tokenizer | None = None,
        trust: Callable[[], Trust | None] = lambda: None,
    ) -> None:
        self._folder = folder
        self._load = load
        self._limit = limit
        self._now_s = now_s
        self._wall_s = wall_s
        self._vocabulary = vocabulary
        self._trust = trust
        self._by_name: OrderedDict[str, Adapter] = OrderedDict()
        self.num_evicted = 0

    def get(self, name: str) -> Adapter | None:
        """A loaded version, marked as used now."""
        adapter = self._by_name.get(name)
        if adapter is not None:
            adapter.used_s = self._now_s()
            self._by_name.move_to_end(name)
        return adapter

    def path_of(self, name: str) -> Path:
        """Folder of a version that is not loaded. Raises NotFound when the name or the folder is none."""
        folder = self._folder / name
        if _VERSION.fullmatch(name) is None or not folder.is_dir():
            raise NotFound(f"The model `{name}` does not exist.", model=name)
        return folder

    def read(self, path: Path) -> Any:
        """Read and verify an artifact (blocking; any thread). Raises NotFound, SchemaError."""
        if not path.is_dir():
            raise NotFound(f"No policy artifact at {path}.", path=str(path))
        artifact = self._load(path, trust=self._trust())
        if self._vocabulary is not None and artifact.tokenizer.hash != self._vocabulary.hash:
            raise SchemaError(
                f"{path} was made with another vocabulary ({artifact.tokenizer.size} tokens) than learner.vocabulary "
                f"({self._vocabulary.size} tokens); token ids would not mean the same"
            )
        return artifact

    def add(self, name: str, path: Path, artifact: Any) -> Adapter:
        """Keep a version that was read. Raises AlreadyLoaded, TransientError when all memory is in use."""
        if name in self._by_name:
            raise AlreadyLoaded(
                f"The lora adapter '{name}' has already been loaded; versions are immutable: use a new name."
            )
        self._evict()
        adapter = Adapter(name, path, artifact, int(self._wall_s()), self._now_s())
        self._by_name[name] = adapter
        return adapter

    def remove(self, name: str) -> None:
        """Forget a version; rows in flight finish on it. Raises NotFound."""
        if self._by_name.pop(name, None) is None:
            raise NotFound(f"The lora adapter '{name}' cannot be found.", model=name)

    def all(self) -> list[Adapter]:
        """Loaded versions, longest unused first."""
        return list(self._by_name.values())

    def _evict(self) -> None:
        now = self._now_s()
        for name in list(self._by_name):
            if len(self._by_name) < self._limit:
                return
            if now - self._by_name[name].used_s >= GRACE_S:
                del self._by_name[name]
                self.num_evicted += 1
        if len(self._by_name) >= HARD_FACTOR * self._limit:
            raise TransientError(
                f"{len(self._by_name)} versions were used in the last {GRACE_S:.0f} s (serving.max_adapters = {self._limit}); "
                "unload some"
            )
