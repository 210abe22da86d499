"""Metrics of ``spanloop process``: what its partitions count, as Prometheus text and as OpenTelemetry metrics.

Place in the flow: reads ``Workers``, changes nothing; folding pays nothing for it. One list of families feeds both exporters, and
docs/metrics.md names them (a test compares). Labels come from small fixed sets: stage, topic, partition; never from content.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from spanloop.pipeline.ports import topic_of
from spanloop.pipeline.runtimes.counting import FOLD_BUCKETS, PartitionMetrics
from spanloop.pipeline.runtimes.workers import Workers
from spanloop.schemas.errors import TransientError

__all__ = ["Family", "families", "serve", "start_otel"]

_log = logging.getLogger("spanloop.process")
_OTEL_ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_COUNTERS = {
    "records": "Records folded.",
    "spans": "Spans read in their dialects.",
    "events": "Events written to the log.",
    "duplicates": "Records delivered again and dropped, because the state contained them.",
    "gaps": "Records read from the log because they were not delivered.",
    "foreign": "Outputs that a former owner wrote after it lost the partition; they were checked.",
    "dead_letters": "Records, spans and feedback set aside.",
    "retries": "Calls tried again: brokers or snapshot store away.",
}

_Sample = tuple[dict[str, str], float]


class Family(NamedTuple):
    """One metric with its values now."""

    name: str
    kind: str
    """counter, gauge or histogram."""
    text: str
    samples: list[_Sample]
    buckets: tuple[tuple[dict[str, str], list[int], float], ...] = ()
    """Of a histogram: labels, counts by bucket of FOLD_BUCKETS and above, sum."""


def families(workers: Workers) -> Iterator[Family]:
    """All metrics of a process, as they are now."""
    totals = workers.totals()
    for field, text in _COUNTERS.items():
        samples = [({"stage": stage}, float(getattr(m, field))) for stage, m in totals.items()]
        yield Family(f"spanloop_process_{field}", "counter", text, samples)
    yield Family(
        "spanloop_process_fold_seconds", "histogram", "Time of one fold, outputs written.", [],
        tuple(({"stage": stage}, m.fold_counts, m.fold_s) for stage, m in totals.items()),
    )  # fmt: skip
    now = time.monotonic()
    partitions = workers.metrics()
    yield _by_source("lag_records", "Records behind, as far as is known.", partitions, lambda m: m.lag)
    yield _by_source(
        "snapshot_age_seconds", "Age of the last snapshot: so much is folded again after a kill.", partitions,
        lambda m: now - m.snapshot_at if m.snapshot_at else 0.0,
    )  # fmt: skip
    yield _by_source(
        "lateness_seconds", "Time from a span's end (else a record's append) to its fold, of the last fold.", partitions,
        lambda m: m.lateness_s,
    )  # fmt: skip
    stalled = workers.stalled()
    yield Family(
        "spanloop_process_stalled_seconds", "gauge", "How long there was work without progress; 0 below process.stall_s.",
        [(_place(source), stalled.get(source, 0.0)) for source in partitions]
        + [({"topic": "", "partition": ""}, stalled.get("", 0.0))],
    )  # fmt: skip
    yield Family(
        "spanloop_process_recoveries", "counter", "Partitions taken over.", [({}, workers.recoveries)]
    )
    yield Family(
        "spanloop_process_recovery_seconds", "gauge", "Slowest take-over since the start.", [({}, workers.recovery_s)]
    )  # fmt: skip


def _by_source(
    name: str,
    text: str,
    partitions: Mapping[str, PartitionMetrics],
    value: Callable[[PartitionMetrics], float],
) -> Family:
    samples = [(_place(source), float(value(m))) for source, m in partitions.items()]
    return Family(f"spanloop_process_{name}", "gauge", text, samples)


def _place(source: str) -> dict[str, str]:
    topic, partition = topic_of(source)
    return {"topic": topic, "partition": str(partition)}


# ---------------------------------------------------------------- Prometheus


class _Collector:
    """Gives the families to the Prometheus client when it is asked."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def collect(self) -> Iterable[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        for family in families(self._workers):
            names = list(next(iter(family.samples or family.buckets), ({},))[0])
            if family.kind == "histogram":
                shown: Any = HistogramMetricFamily(family.name, family.text, labels=names)
                for labels, counts, total in family.buckets:
                    shown.add_metric(list(labels.values()), _cumulative(counts), total)
            else:
                kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
                shown = kind(family.name, family.text, labels=names)
                for labels, value in family.samples:
                    shown.add_metric(list(labels.values()), value)
            yield shown


def _cumulative(counts: list[int]) -> list[tuple[str, float]]:
    found: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*map(str, FOLD_BUCKETS), "+Inf"), counts, strict=True):
        total += count
        found.append((bound, total))
    return found


def serve(host: str, port: int, workers: Workers) -> Callable[[], None]:
    """Answer on http://host:port/metrics, not at all where ``port`` is 0; returns what stops it.

    Raises:
        TransientError: the port is taken.
    """
    if not port:
        return lambda: None
    from prometheus_client import CollectorRegistry, start_http_server

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(workers))
    try:
        server, thread = start_http_server(port, host, registry=registry)
    except OSError as exc:
        reason = "is in use by another process" if exc.errno == errno.EADDRINUSE else str(exc)
        raise TransientError(
            f"metrics cannot be served on {host}:{port}: {reason}; set another "
            "process.metrics_port (SPANLOOP_PROCESS__METRICS_PORT), 0 for none"
        ) from exc

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join(timeout=2)

    return stop


# ---------------------------------------------------------------- OpenTelemetry


def start_otel(workers: Workers, reader: Any = None) -> Callable[[], None]:
    """Push the same metrics by OTLP where the environment names an endpoint; returns what ends it.

    Args:
        workers: to be observed.
        reader: another reader than the one that OTEL_* variables ask for (tests).
    """
    endpoint = any(os.environ.get(name) for name in _OTEL_ENDPOINTS)
    off = os.environ.get("OTEL_METRICS_EXPORTER") == "none" or os.environ.get("OTEL_SDK_DISABLED") == "true"
    if reader is None and (not endpoint or off):
        return lambda: None
    try:
        from opentelemetry.metrics import CallbackOptions, Observation
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource

        if reader is None:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

            reader = PeriodicExportingMetricReader(OTLPMetricExporter())
    except ImportError as exc:
        _log.warning(
            "no OpenTelemetry metrics: %s is not installed; pip install 'spanloop[process,agent]'", exc.name
        )
        return lambda: None
    provider = MeterProvider([reader], Resource.create({"service.name": "spanloop-process"}))
    meter = provider.get_meter("spanloop.process")

    def observed(name: str, suffix: str) -> Callable[[CallbackOptions], list[Observation]]:
        def observe(_: CallbackOptions) -> list[Observation]:
            family = next(f for f in families(workers) if f.name == name)
            if suffix == "sum":
                return [Observation(total, labels) for labels, _, total in family.buckets]
            if suffix == "count":
                return [Observation(sum(counts), labels) for labels, counts, _ in family.buckets]
            return [Observation(value, labels) for labels, value in family.samples]

        return observe

    for family in families(workers):
        name = family.name.replace("spanloop_process_", "spanloop.process.")
        if family.kind == "histogram":
            for suffix in ("sum", "count"):
                meter.create_observable_counter(
                    f"{name}.{suffix}", [observed(family.name, suffix)], "", family.text
                )
        elif family.kind == "counter":
            meter.create_observable_counter(name, [observed(family.name, "")], "", family.text)
        else:
            meter.create_observable_gauge(name, [observed(family.name, "")], "", family.text)
    return provider.shutdown
