"""What a worker shows of itself: Prometheus, OpenTelemetry, the watchdog; and docs/metrics.md names exactly that."""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from spanloop.pipeline.runtimes.counting import PartitionMetrics
from spanloop.pipeline.runtimes.metrics import families, serve, start_otel
from spanloop.pipeline.runtimes.watchdog import Watchdog, where_is
from spanloop.schemas.errors import TransientError

DOCS = Path(__file__).resolve().parents[2] / "docs/metrics.md"


class Shown:
    """Counters as ``Workers`` gives them."""

    recoveries, recovery_s, thread_id = 3, 1.5, threading.get_ident()

    def __init__(self):
        self.partitions = {
            "spans": PartitionMetrics(records=10, spans=40, fold_s=0.2, fold_counts=[1, 1, 0, 0, 0, 0, 0, 0]),
            "operations/3": PartitionMetrics(
                records=5, lag=7, dead_letters=1, snapshot_at=time.monotonic() - 5, doing="append"
            ),
        }
        self.stalls: dict[str, float] = {}

    def metrics(self):
        return dict(self.partitions)

    def totals(self):
        return {
            "normalise": self.partitions["spans"],
            "shard": self.partitions["operations/3"],
            "value": PartitionMetrics(),
        }

    def stalled(self):
        return dict(self.stalls)

    def write_status(self, path):
        path.write_text(json.dumps({"stalled": self.stalls}))


def _port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def test_the_documentation_names_every_metric_with_its_kind_and_labels():
    documented = {
        row[1]: (row[2], tuple(filter(None, re.split(r", ?", row[3]))))
        for row in re.finditer(
            r"^\| `(spanloop_process_\w+)` \| (\w+) \| ([\w, ]*) ?\|", DOCS.read_text(), re.M
        )
    }
    shown = {f.name: (f.kind, tuple((list(f.samples) or list(f.buckets))[0][0])) for f in families(Shown())}
    assert {
        name: (kind, tuple(x.strip() for x in labels)) for name, (kind, labels) in documented.items()
    } == shown


def test_prometheus_gets_counters_gauges_and_the_histogram():
    port = _port()
    stop = serve("127.0.0.1", port, Shown())
    try:
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        with pytest.raises(TransientError, match=r"process\.metrics_port"):
            serve("127.0.0.1", port, Shown())
    finally:
        stop()
    for line in (
        'spanloop_process_records_total{stage="shard"} 5.0',
        'spanloop_process_spans_total{stage="normalise"} 40.0',
        'spanloop_process_lag_records{partition="3",topic="operations"} 7.0',
        'spanloop_process_fold_seconds_bucket{le="0.03",stage="normalise"} 2.0',
        'spanloop_process_fold_seconds_sum{stage="normalise"} 0.2',
        "spanloop_process_recoveries_total 3.0",
    ):
        assert line in text
    assert serve("127.0.0.1", 0, Shown())() is None


def test_opentelemetry_gets_the_same():
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    stop = start_otel(Shown(), reader)
    (resource,) = reader.get_metrics_data().resource_metrics
    (scope,) = resource.scope_metrics
    points = {
        m.name: {tuple(p.attributes.values()): p.value for p in m.data.data_points} for m in scope.metrics
    }
    stop()
    assert resource.resource.attributes["service.name"] == "spanloop-process"
    assert points["spanloop.process.records"][("shard",)] == 5
    assert points["spanloop.process.lag_records"][("operations", "3")] == 7
    assert points["spanloop.process.fold_seconds.count"][("normalise",)] == 2
    assert set(points["spanloop.process.recoveries"].values()) == {3}


def test_opentelemetry_is_off_without_an_endpoint(monkeypatch):
    for name in ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    assert start_otel(Shown())() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    assert start_otel(Shown())() is None


def test_the_watchdog_names_a_stall_once_and_says_that_it_ended(tmp_path, caplog):
    shown = Shown()
    watchdog = Watchdog(shown, tmp_path / "pipeline.json")
    with caplog.at_level(logging.WARNING):
        watchdog.look()
        shown.stalls = {"operations/3": 31.0, "": 40.0}
        watchdog.look()
        watchdog.look()
        shown.stalls = {}
        watchdog.look()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 4
    assert messages[0].startswith("stalled: operations/3 has work and made no progress for 31 s (append, at ")
    assert "the engine" in messages[1]
    assert sorted(messages[2:]) == ["operations/3 goes on", "the engine goes on"]
    assert json.loads((tmp_path / "pipeline.json").read_text()) == {"stalled": {}}


def test_the_watchdog_thread_ends(tmp_path):
    watchdog = Watchdog(Shown(), tmp_path / "pipeline.json")
    watchdog.start()
    watchdog.stop()
    assert not watchdog.is_alive()
    assert (tmp_path / "pipeline.json").exists()
    assert where_is(0) == "no thread"
