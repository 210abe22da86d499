"""The serving port over HTTP, for the embedded server (and any one server that takes vLLM's calls)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from spanloop.learner.serving.calls import LOAD, UNLOAD, ServerCalls
from spanloop.schemas.errors import SchemaError, StaleError

__all__ = ["HttpServing"]


class HttpServing:
    """A server at ``url`` (``http://host:port``, with or without /v1).

    Args:
        url: Base URL.
        timeout_s: For one call; loading a version may take that long.
    """

    def __init__(self, url: str, *, timeout_s: float = 30.0) -> None:
        self._calls = ServerCalls(url, timeout_s=timeout_s)

    def load(self, name: str, path: Path) -> None:
        """POST /v1/load_lora_adapter; a name that already serves this path is left alone."""
        served = self._calls.roots().get(name)
        if served is None:
            answer = self._calls.call("POST", LOAD, {"lora_name": name, "lora_path": str(path.absolute())})
            if answer.status == 200:
                return
            served = self._calls.roots().get(name)  # somebody else, or a request for the name, was quicker
            if served is None:
                raise SchemaError(f"serving refuses {name}: {answer.body}", status=answer.status)
        if Path(served).absolute() != path.absolute():
            raise StaleError(f"{name} serves {served}, it cannot become {path}: use a new name")

    def unload(self, name: str) -> None:
        """POST /v1/unload_lora_adapter."""
        answer = self._calls.call("POST", UNLOAD, {"lora_name": name})
        if answer.status not in (200, 404) and name in self._calls.roots():
            raise SchemaError(f"serving does not unload {name}: {answer.body}", status=answer.status)

    def loaded(self) -> list[str]:
        """GET /v1/models."""
        return sorted(self._calls.roots())

    def probe(self, name: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """POST /v1/completions with the prompts as token ids."""
        return self._calls.scores(name, prompts)
