"""What a partition counts: plain numbers that folding raises, and that status, metrics and watchdog read from other threads."""

from __future__ import annotations

import msgspec

__all__ = ["FOLD_BUCKETS", "PartitionMetrics"]

FOLD_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper bounds of the histogram of fold times, seconds."""


class PartitionMetrics(msgspec.Struct):
    """Counters of one partition since it was taken."""

    records: int = 0
    spans: int = 0
    """Spans read in their dialects: of the first stage only."""
    events: int = 0
    dead_letters: int = 0
    duplicates: int = 0
    """Records that the state contained already."""
    gaps: int = 0
    """Records that were read from the log because they were not delivered."""
    foreign: int = 0
    """Outputs that a former owner wrote."""
    retries: int = 0
    fold_s: float = 0.0
    fold_counts: list[int] = msgspec.field(default_factory=lambda: [0] * (len(FOLD_BUCKETS) + 1))
    """Folds by duration, see FOLD_BUCKETS."""
    recovery_s: float = 0.0
    lag: int = 0
    """Records known to be on the source and not folded yet."""
    lateness_s: float = 0.0
    """Age of the last record when it was folded; of the first stage, time since its newest span ended."""
    appended_ns: int = 0
    """When the newest folded record was appended."""
    snapshot_at: float = 0.0
    """Monotonic time of the last snapshot."""
    since: float = 0.0
    """Monotonic time since when there is something to do and nothing was done; 0: idle."""
    doing: str = ""
    """recover, fold, append, tick, flush, or empty."""

    def add(self, other: PartitionMetrics) -> None:
        """Count what another counted."""
        for name in (
            "records",
            "spans",
            "events",
            "dead_letters",
            "duplicates",
            "gaps",
            "foreign",
            "retries",
            "fold_s",
        ):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.fold_counts = [a + b for a, b in zip(self.fold_counts, other.fold_counts, strict=True)]
