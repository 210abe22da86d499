"""The StateStore in memory, over any Log: the reference for the contract suite, and what batch runs use.

The store outlives the stages that use it, so that a test can drop a stage (a crash) and restore another.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from spanloop.pipeline.ports import Log, NewRecord

__all__ = ["MemoryState"]


class MemoryState:
    """Dicts by stage; outputs go to ``log`` before the state changes, idempotent by event id."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lock = threading.RLock()
        self._entries: dict[str, dict[str, bytes]] = {}
        self._offsets: dict[str, dict[str, int]] = {}

    def load(self, stage: str) -> dict[str, bytes]:
        """All entries of a stage."""
        with self._lock:
            return dict(self._entries.get(stage, {}))

    def offsets(self, stage: str) -> dict[str, int]:
        """Input offsets contained in the state, by topic."""
        with self._lock:
            return dict(self._offsets.get(stage, {}))

    def commit(
        self,
        stage: str,
        *,
        writes: Mapping[str, bytes | None],
        offsets: Mapping[str, int],
        outputs: Sequence[NewRecord] = (),
    ) -> None:
        """Append outputs, then write entries and offsets; if the append fails nothing has changed."""
        with self._lock:
            if outputs:
                self._log.append(outputs)
            entries = self._entries.setdefault(stage, {})
            for key, value in writes.items():
                if value is None:
                    entries.pop(key, None)
                else:
                    entries[key] = value
            self._offsets.setdefault(stage, {}).update(offsets)

    def close(self) -> None:
        """Nothing to release."""
