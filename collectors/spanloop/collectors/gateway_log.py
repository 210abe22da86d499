"""A log that is opened when it is first there: the gateway answers from its start on, whether the log can be reached or not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from spanloop.pipeline.ports import Appended, Log, LogRecord, NewRecord
from spanloop.schemas.errors import TransientError

__all__ = ["LateLog"]

RETRY_S = 1.0
"""Between two attempts to open it."""
CLOSE_S = 3.0
"""An end waits for it no longer."""


class LateLog:
    """The part of a Log that the gateway uses; TransientError until it is open.

    Args:
        opened: Opens the log; whatever it raises is tried again.
        now_s: Monotonic seconds.
    """

    def __init__(self, opened: Callable[[], Log], *, now_s: Callable[[], float] = time.monotonic) -> None:
        self._opened = opened
        self._now_s = now_s
        self._turn = threading.Lock()
        self._log: Log | None = None
        self._tried_s = -RETRY_S
        self._why = "the log is not open yet"

    def _get(self) -> Log:
        found = self._log
        if found is not None:
            return found
        with self._turn:
            if self._log is None:
                if self._now_s() - self._tried_s < RETRY_S:
                    raise TransientError(self._why)
                try:
                    self._log = self._opened()
                except Exception as exc:
                    self._tried_s = self._now_s()
                    self._why = f"the log cannot be opened: {exc}"
                    raise TransientError(self._why) from exc
            return self._log

    def append(self, records: Sequence[NewRecord]) -> list[Appended]:
        """See ``Log``."""
        return self._get().append(records)

    def read(self, topic_names: Sequence[str], after: Mapping[str, int], limit: int) -> list[LogRecord]:
        """See ``Log``."""
        return self._get().read(topic_names, after, limit)

    def end(self, source: str) -> int:
        """See ``Log``."""
        return self._get().end(source)

    def sources(self, topic: str) -> tuple[str, ...]:
        """See ``Log``."""
        return self._get().sources(topic)

    def commit(self, group: str, offsets: Mapping[str, int]) -> None:
        """See ``Log``."""
        self._get().commit(group, offsets)

    def committed(self, group: str) -> dict[str, int]:
        """See ``Log``."""
        return self._get().committed(group)

    def close(self) -> None:
        """Close it where it was opened; one that hangs is left behind."""
        if self._log is not None:
            closing = threading.Thread(target=self._log.close, daemon=True)
            closing.start()
            closing.join(CLOSE_S)
