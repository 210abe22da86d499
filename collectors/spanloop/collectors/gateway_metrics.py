"""Counters of the gateway and their Prometheus text. Held by the event loop only."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

__all__ = ["GatewayMetrics"]

BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class GatewayMetrics:
    """Requests by route and status, and how long they took."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._seconds = [0] * (len(BUCKETS_S) + 1)
        self._sum_s = 0.0

    def observe(self, route: str, status: int, seconds: float) -> None:
        """Count one finished request."""
        self._requests[route, status] += 1
        self._seconds[bisect_left(BUCKETS_S, seconds)] += 1
        self._sum_s += seconds

    def text(
        self, gauges: Mapping[str, tuple[str, str, float]], lost: Mapping[str, int] | None = None
    ) -> str:
        """Prometheus exposition; ``gauges`` adds name -> (type, help, value), ``lost`` the calls lost by reason."""
        lines = [
            "# HELP spanloop_gateway_requests_total Finished requests.",
            "# TYPE spanloop_gateway_requests_total counter",
        ]
        lines += [
            f'spanloop_gateway_requests_total{{route="{route}",status="{status}"}} {count}'
            for (route, status), count in sorted(self._requests.items())
        ]
        lines += [
            "# HELP spanloop_gateway_request_seconds Time from request to the end of the response.",
            "# TYPE spanloop_gateway_request_seconds histogram",
        ]
        total = 0
        for bound, count in zip((*BUCKETS_S, "+Inf"), self._seconds, strict=True):
            total += count
            lines.append(f'spanloop_gateway_request_seconds_bucket{{le="{bound}"}} {total}')
        lines.append(f"spanloop_gateway_request_seconds_sum {self._sum_s:.6f}")
        lines.append(f"spanloop_gateway_request_seconds_count {total}")
        if lost is not None:
            lines += [
                "# HELP spanloop_gateway_lost_calls_total Calls never recorded, by reason.",
                "# TYPE spanloop_gateway_lost_calls_total counter",
            ]
            lines += [
                f'spanloop_gateway_lost_calls_total{{reason="{reason}"}} {count}'
                for reason, count in sorted(lost.items())
            ]
        for name, (kind, about, value) in gauges.items():
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}", f"{name} {value:g}"]
        return "\n".join(lines) + "\n"
