"""Counters of a collector and their Prometheus text. Labels come from small fixed sets, never from content."""

from __future__ import annotations

from collections import defaultdict

__all__ = ["Metrics"]

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_HELP = {
    "spanloop_requests_total": "Requests by route and status.",
    "spanloop_spans_accepted_total": "Spans made durable.",
    "spanloop_log_records_ignored_total": "Log records that say nothing of agents: not stored.",
    "spanloop_spans_rejected_total": "Spans refused one by one, by kind.",
    "spanloop_events_duplicate_total": "Events that were in the log already.",
    "spanloop_feedback_accepted_total": "Feedback made durable.",
    "spanloop_feedback_rejected_total": "Feedback items refused.",
    "spanloop_received_bytes_total": "Bytes of request bodies, as sent.",
    "spanloop_reserved_attributes_removed_total": "Attributes spanloop.* that a sender may not set.",
}


class Metrics:
    """Counters and the histogram of commit times of one process."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], float] = defaultdict(float)
        self._buckets = [0] * (len(_BUCKETS) + 1)
        self._seconds = 0.0
        self._commits = 0

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        """Raise a counter."""
        text = ",".join(f'{k}="{v}"' for k, v in sorted(labels.items()))
        self._counts[name, text] += amount

    def commit(self, seconds: float, requests: int) -> None:
        """Note one group commit."""
        self._seconds += seconds
        self._commits += 1
        at = next((i for i, bound in enumerate(_BUCKETS) if seconds <= bound), len(_BUCKETS))
        self._buckets[at] += 1
        self._counts["spanloop_requests_committed_total", ""] += requests

    def text(self, gauges: dict[str, float]) -> str:
        """Prometheus exposition text with ``gauges`` as they are now."""
        lines: list[str] = []
        for name in sorted({n for n, _ in self._counts}):
            lines += [f"# HELP {name} {_HELP.get(name, name)}", f"# TYPE {name} counter"]
            lines += [
                f"{name}{{{labels}}} {value:.15g}" if labels else f"{name} {value:.15g}"
                for (n, labels), value in sorted(self._counts.items())
                if n == name
            ]
        for name, value in sorted(gauges.items()):
            lines += [f"# TYPE {name} gauge", f"{name} {value:g}"]
        name = "spanloop_commit_seconds"
        lines += [f"# HELP {name} Time of one group commit.", f"# TYPE {name} histogram"]
        total = 0
        for bound, count in zip((*map(str, _BUCKETS), "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        lines += [f"{name}_sum {self._seconds:g}", f"{name}_count {self._commits}", ""]
        return "\n".join(lines)
