"""Port of the gateway: who records finished calls. ``Recorder`` does it in this process, ``Sender`` in one of its own."""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from spanloop.collectors.gateway_finished import Finished

__all__ = ["Recording"]


class Recording(Protocol):
    """Takes calls, never waits, counts what it loses."""

    @property
    def runs(self) -> bool:
        """Calls go further than this process's memory."""
        ...

    @property
    def num_starts(self) -> int:
        """Recorders that were started."""
        ...

    @property
    def num_recorded(self) -> int:
        """Calls on the log."""
        ...

    @property
    def num_failed_appends(self) -> int:
        """Appends the log refused."""
        ...

    @property
    def num_failed_writes(self) -> int:
        """Writes the spool's disk refused."""
        ...

    @property
    def log_fails(self) -> bool:
        """The last append to the log failed."""
        ...

    def running(self) -> AbstractAsyncContextManager[None]:
        """Record while the block runs; closes at its end."""
        ...

    def begin(self) -> None:
        """A call goes to an upstream; it will be ``put`` when it has ended, whatever becomes of it."""
        ...

    def put(self, call: Finished, /) -> bool:
        """Hand over a finished call; False: there is no room and the call is counted as lost."""
        ...

    @property
    def depth(self) -> int:
        """Calls that wait in memory."""
        ...

    @property
    def waiting(self) -> int:
        """Calls that are not on the log yet."""
        ...

    @property
    def spooled(self) -> bool:
        """Calls wait on disk, not in memory."""
        ...

    @property
    def spool_bytes(self) -> int:
        """Size of the spool on the disk."""
        ...

    @property
    def lost(self) -> Counter[str]:
        """Calls that never reach the log, by reason; an earlier gateway's among them, where they were found out at the start."""
        ...

    @property
    def num_lost(self) -> int:
        """Sum of ``lost``."""
        ...
