"""The Kafka runtime, on the test broker: Faust against a plain consumer loop with the same stages, two workers against one,
latency at half load, and how long a killed worker's partitions stand still.

Throughput counts from the first append to the last credit, with workers that had taken the partitions over before, so that all
is delivered and joining a group is not in it; the quiet period (200 ms) is. The broker and this script run on the same cores as the
workers: ratios say more than rates, and CPU seconds say what two workers would do with cores of their own.
Run: .venv/bin/python benchmarks/stream.py [--orchestrations 2000]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from _harness import ROOT, percentile, write

sys.path.insert(0, str(ROOT / "tests"))
from kafka_broker import broker
from pipeline import workload

from spanloop.collectors.batches import Intake
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.pipeline.otlp.decode_protobuf import decode_protobuf
from spanloop.pipeline.ports import NewRecord
from spanloop.schemas import topics
from spanloop.schemas.settings import Kafka, load_settings

COMMAND = ".venv/bin/python benchmarks/stream.py"
PARTITIONS = 4
SETTLE_S = 12.0
"""Until a group of workers has shared the partitions and taken them over."""
WARM_S = 3.0
"""Of load before latencies count: the first append of a worker waits for its producer to connect."""


class World:
    """A broker with topics of its own, a workload, and workers."""

    def __init__(self, bootstrap: str, prefix: str, folder: Path) -> None:
        self.folder = folder
        self.kafka = Kafka(prefix=prefix, partitions=PARTITIONS)
        self.log = KafkaLog(bootstrap, self.kafka)
        self.environment = os.environ | {
            "SPANLOOP_BOOTSTRAP_SERVERS": bootstrap,
            "SPANLOOP_KAFKA__PREFIX": prefix,
            "SPANLOOP_KAFKA__PARTITIONS": str(PARTITIONS),
            "SPANLOOP_PIPELINE__QUIET_S": "0.2",
            "SPANLOOP_WORKSPACE": str(folder),
            "OMP_NUM_THREADS": "1",
        }
        self.workers: list[subprocess.Popen[bytes]] = []
        settings = load_settings()
        self._intake = Intake(
            Redactor(settings.content, b"0123456789abcdef"),
            settings.collector.max_attribute_bytes,
            keep_content=False,
        )

    def prepared(self, orchestrations: int) -> tuple[list[list[NewRecord]], list[NewRecord], int]:
        """Records of spans by request, outcomes, and how many spans."""
        requests, outcomes = workload(orchestrations)
        parts = [
            self._intake.prepare(decode_protobuf(body), tenant="default", source="otlp") for body in requests
        ]
        return [p.records for p in parts], outcomes, sum(p.num_spans for p in parts)

    def start(self, engine: str, name: str) -> subprocess.Popen[bytes]:
        """Start a worker and wait until it is ready."""
        command = [
            sys.executable,
            "-m",
            "spanloop.pipeline.runtimes.worker",
            "--engine",
            engine,
            "--worker",
            name,
        ]
        worker = subprocess.Popen(
            command, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert worker.stdout is not None
        worker.stdout.readline()
        self.workers.append(worker)
        return worker

    def stop(self) -> None:
        """End all workers."""
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                worker.wait(30)
            worker.kill()
        self.workers = []
        self.log.close()


@contextlib.contextmanager
def world(prefix: str) -> Iterator[World]:
    """A fresh broker each time: it keeps everything in memory."""
    with broker() as bootstrap, tempfile.TemporaryDirectory() as folder:
        made = World(bootstrap, prefix, Path(folder))
        try:
            yield made
        finally:
            made.stop()


def _credits(made: World, wanted: int, limit_s: float) -> tuple[dict[str, float], float, float]:
    """When each orchestration was credited for the first time; first and last of these times."""
    begin = time.monotonic()
    position: dict[str, int] = {}
    seen: dict[str, float] = {}
    while len(seen) < wanted and time.monotonic() - begin < limit_s:
        for record in made.log.read([topics.CREDITS], position, 2_000):
            position[record.source] = record.offset
            seen.setdefault(record.key, record.appended_ns / 1e9)
    times = sorted(seen.values()) or [0.0]
    return seen, times[0], times[-1]


def _cpu_s(process: subprocess.Popen[bytes]) -> float:
    """CPU seconds that a process has used."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def throughput(engine: str, workers: int, orchestrations: int) -> dict[str, Any]:
    """Spans a second from the first append to the last credit, of workers that had taken everything over before."""
    with world("throughput.") as made:
        requests, outcomes, spans = made.prepared(orchestrations)
        started = [made.start(engine, str(number)) for number in range(workers)]
        time.sleep(SETTLE_S)
        before = [_cpu_s(process) for process in started]
        begin = time.time()
        for number, records in enumerate(requests):
            made.log.append(outcomes[number * 10 : number * 10 + 10])
            made.log.append(records)
        appended_s = time.time() - begin
        seen, _, last = _credits(made, orchestrations, 300)
        cpu = [_cpu_s(process) - b for process, b in zip(started, before, strict=True)]
        return {
            "spans": spans,
            "credited": len(seen),
            "append_s": round(appended_s, 2),
            "seconds": round(last - begin, 2),
            "spans_per_s": round(spans * len(seen) / orchestrations / (last - begin)),
            "cpu_s": [round(seconds, 2) for seconds in cpu],
            "cpu_us_per_span": round(sum(cpu) / spans * 1e6),
        }


def latency(engine: str, spans_per_s: float, seconds: float) -> dict[str, float]:
    """Milliseconds from the append of an orchestration's last span to its credit, at a given load (quiet period 200 ms)."""
    with world("latency.") as made:
        made.start(engine, "0")
        count = int(spans_per_s * (WARM_S + seconds) / 19) // 10 * 10
        requests, outcomes, spans = made.prepared(count)
        time.sleep(SETTLE_S)
        sent: dict[str, float] = {}
        begin, begin_s = time.monotonic(), time.time()
        for number, records in enumerate(requests):
            due = begin + number * (WARM_S + seconds) / len(requests)
            time.sleep(max(0.0, due - time.monotonic()))
            made.log.append(outcomes[number * 10 : number * 10 + 10])
            made.log.append(records)
            for record in records:
                sent[record.key.partition("/")[2]] = time.time()
        seen, _, _ = _credits(made, count, 60)
        from spanloop.schemas.ids import orchestration_id

        warm = begin_s + WARM_S
        delays = [
            (seen[f"default/{name}"] - at) * 1e3
            for trace, at in sent.items()
            if at >= warm and f"default/{(name := orchestration_id('default', [trace]))}" in seen
        ]
        return {
            "load_spans_per_s": round(spans / (WARM_S + seconds)),
            "credited": len(seen),
            "of": count,
            "counted": len(delays),
            "p50_ms": round(percentile(delays, 0.5)),
            "p99_ms": round(percentile(delays, 0.99)),
        }


def recovery(engine: str) -> dict[str, float]:
    """Two workers under load, one killed with -9: the longest that an orchestration waited for its credit."""
    with world("recovery.") as made:
        first = made.start(engine, "0")
        made.start(engine, "1")
        requests, outcomes, _ = made.prepared(600)
        time.sleep(SETTLE_S)
        killed_at = 0.0
        sent: dict[str, float] = {}
        for number, records in enumerate(requests):
            if number == 15:
                os.kill(first.pid, signal.SIGKILL)
                killed_at = time.time()
            made.log.append(records)
            made.log.append(outcomes[number * 10 : number * 10 + 10])
            for record in records:
                sent[record.key.partition("/")[2]] = time.time()
            time.sleep(0.25)
        seen, _, last = _credits(made, 600, 90)
        from spanloop.schemas.ids import orchestration_id

        waits = [
            seen[name] - at
            for trace, at in sent.items()
            if (name := f"default/{orchestration_id('default', [trace])}") in seen
        ]
        return {
            "credited": len(seen),
            "of": 600,
            "longest_wait_s": round(max(waits), 1),
            "seconds_after_kill_until_all_credited": round(last - killed_at, 1),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orchestrations", type=int, default=2_000)
    options = parser.parse_args()
    figures: dict[str, Any] = {}

    def measure(name: str, value: dict[str, Any]) -> dict[str, Any]:
        figures[name] = value
        print(name, json.dumps(value), flush=True)
        return value

    loop = measure("loop", throughput("loop", 1, options.orchestrations))
    faust = measure("faust", throughput("faust", 1, options.orchestrations))
    two = measure("faust_two_workers", throughput("faust", 2, options.orchestrations))
    figures["faust_over_loop"] = round(faust["spans_per_s"] / loop["spans_per_s"], 2)
    figures["two_over_one"] = round(two["spans_per_s"] / faust["spans_per_s"], 2)
    figures["two_over_one_by_cpu"] = round(faust["cpu_s"][0] / max(two["cpu_s"]), 2)
    measure("latency_at_half_load", latency("faust", faust["spans_per_s"] / 2, 20.0))
    measure("recovery", recovery("faust"))
    write("stream", COMMAND, figures)


if __name__ == "__main__":
    main()
