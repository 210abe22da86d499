"""What the gateway says of its recording: in /healthz and in /metrics."""

from __future__ import annotations

from typing import Any

from spanloop.collectors.gateway_recording import Recording

__all__ = ["health", "recording"]


def health(recorder: Recording, champion: str | None, *, from_file: bool) -> dict[str, Any]:
    """The body of /healthz.

    Args:
        recorder: Where calls wait.
        champion: Serving name that answers for the policy; None: there is none yet.
        from_file: Routing is an earlier process's, as the log cannot be read.
    """
    told: dict[str, Any] = {
        "status": "ok",
        "champion": champion,
        "queue": recorder.waiting,
        "lost": recorder.num_lost,
    }
    if recorder.num_lost:
        told["lost_by_reason"] = dict(sorted(recorder.lost.items()))
    if recorder.log_fails or from_file:
        told["log"] = "away: calls wait on the spool" if recorder.spooled else "away: calls wait in memory"
    if not recorder.runs:
        told["recorder"] = "is being started: calls wait in memory"
    return told


def recording(recorder: Recording) -> dict[str, tuple[str, str, float]]:
    """Metrics: name -> (type, help, value)."""
    return {
        "spanloop_gateway_queue": ("gauge", "Calls that wait for the log.", recorder.waiting),
        "spanloop_gateway_queue_memory": ("gauge", "Of them, calls that wait in memory.", recorder.depth),
        "spanloop_gateway_spool_bytes": ("gauge", "Size of the spool.", recorder.spool_bytes),
        "spanloop_gateway_recorded_total": ("counter", "Calls on the log.", recorder.num_recorded),
        "spanloop_gateway_recorder_starts_total": ("counter", "Starts of the recorder's process.", recorder.num_starts),
        "spanloop_gateway_lost_total": ("counter", "Calls never recorded.", recorder.num_lost),
        "spanloop_gateway_failed_appends_total": ("counter", "Appends the log refused.", recorder.num_failed_appends),
        "spanloop_gateway_failed_writes_total": ("counter", "Writes the spool's disk refused.", recorder.num_failed_writes),
    }  # fmt: skip
