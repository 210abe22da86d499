"""Serving in process: the reference of the serving port."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spanloop.learner.model import Artifact, load_artifact
from spanloop.schemas.errors import SchemaError, StaleError

__all__ = ["MemoryServing"]


class MemoryServing:
    """Artifacts in a dictionary."""

    def __init__(self) -> None:
        self._loaded: dict[str, tuple[Path, Artifact]] = {}

    def load(self, name: str, path: Path) -> None:
        """Read and verify an artifact."""
        known = self._loaded.get(name)
        if known is not None:
            if known[0] != path.absolute():
                raise StaleError(f"{name} serves {known[0]}, it cannot become {path}: use a new name")
            return
        self._loaded[name] = (path.absolute(), load_artifact(path))

    def unload(self, name: str) -> None:
        """Forget a version."""
        self._loaded.pop(name, None)

    def loaded(self) -> list[str]:
        """Names, sorted."""
        return sorted(self._loaded)

    def probe(self, name: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of the prompts' tokens."""
        if name not in self._loaded:
            raise SchemaError(f"The model `{name}` does not exist.")
        return self._loaded[name][1].net.probe(prompts)
