"""The serving port: what the learner needs from whatever serves its versions.

Adapters: ``http.HttpServing`` (the embedded server), ``vllm.VllmServing`` (vLLM servers) and ``memory.MemoryServing`` (in process,
for tests and experiments); ``vllm.serving_of`` chooses by settings; all pass ``tests/contract/test_serving_port.py``. Invariants: a name is one artifact for ever;
``load`` and ``unload`` may be repeated; what ``load`` refuses is not served.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

__all__ = ["ServingPort"]


class ServingPort(Protocol):
    """Loads, lists and probes versions. Calls block."""

    def load(self, name: str, path: Path) -> None:
        """Serve the artifact ``path`` as ``name`` from now on.

        Raises:
            SchemaError: the server refuses the artifact: missing, corrupt, other vocabulary.
            StaleError: the name serves another artifact.
            TransientError: the server cannot be reached or is busy.
        """
        ...

    def unload(self, name: str) -> None:
        """Stop serving ``name``; requests in flight finish on it. Nothing happens when it is not loaded."""
        ...

    def loaded(self) -> list[str]:
        """Names that are served now, sorted."""
        ...

    def probe(self, name: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities (nats) that ``name`` gives each prompt's tokens after the first.

        Entry [i][t] belongs to token t + 1 of prompt i, under the softmax of the raw logits over the vocabulary. Compared
        with the learner's own numbers it proves that the weights that serve are the ones that were trained.
        """
        ...
