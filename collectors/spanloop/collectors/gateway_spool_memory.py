"""What a spool hands out, and the spool without a disk."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice

import msgspec

from spanloop.collectors.gateway_counters import Counters

__all__ = ["Batch", "MemorySpool"]


class Batch(msgspec.Struct):
    """Records that were read, oldest first."""

    segment: int
    """Names the segment."""
    payloads: list[bytes]
    sequences: list[int]
    ends: list[int]
    """Offset behind each record."""


class MemorySpool:
    """The same in memory, where no folder can be used: what waits ends with the process."""

    in_memory = True
    num_bytes = 0

    def __init__(self) -> None:
        self._records: deque[bytes] = deque()
        self.lost: Counter[str] = Counter()
        self.counters: Counters | None = None

    @property
    def waiting(self) -> int:
        """Records that are not on the log yet."""
        return len(self._records)

    def append(self, payloads: Sequence[bytes]) -> None:
        """Keep records."""
        self._records.extend(payloads)

    def read(self, limit: int) -> Batch | None:
        """The oldest records, up to ``limit``; None: nothing waits."""
        payloads = list(islice(self._records, limit))
        return Batch(0, payloads, [], []) if payloads else None

    def done(self, batch: Batch, count: int) -> None:
        """The first ``count`` records of ``batch`` are on the log, or will never be."""
        del batch
        for _ in range(count):
            self._records.popleft()

    def sync(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """What waits is lost."""
        self.lost["no_spool"] += len(self._records)
        self._records.clear()
