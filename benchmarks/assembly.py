"""Cost of assembly by the size and the shape of an orchestration, and what orchestrations that are still open hold in memory.

For each shape (``_shapes.py``) the CPU time a span, from the decoded span to the published revision, of one large orchestration
over that of 100-span ones of the same shape, a tenth as many spans in all, measured by turns in one process, before and after the
large one; the least of all repeats counts.
``batch`` assembles a closed set. ``stream`` sends the spans to the stage in 20 batches, children before parents, closes it, and
sends one late span after.
Run: .venv/bin/python benchmarks/assembly.py [--scale 0.1] [--repeats 3] [--open 10000]
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import msgspec
from _harness import write
from _shapes import SHAPES

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.pipeline.assembly.stage import AssemblyStage
from spanloop.pipeline.ports import LogRecord, StageOutput
from spanloop.pipeline.runtimes.collecting import collect_rarely
from spanloop.schemas import topics
from spanloop.schemas.events import SpansReceived, encode
from spanloop.schemas.settings import Pipeline, load_settings
from spanloop.schemas.spans import Span

COMMAND = ".venv/bin/python benchmarks/assembly.py"
SMALL = 100
SHARE = 10
"""The small orchestrations have so much less spans in all than the large one."""
LARGEST = 50_000
"""Larger ones are measured once less."""
OPEN_SPANS = 33
"""Of each open orchestration."""
BATCHES = 20
_S = 1_000_000_000
LARGE = {
    "12,000 spans, 3,000 deep": ("deep", 12_000),
    "300 agents, 4,000 delegations, side by side": ("hub", 33_000),
    "300 agents that live on, 4,000 turns": ("team", 33_000),
    "300 agents, hand-overs to a named one": ("relay", 33_000),
    "5 agents, hand-overs to nobody named": ("hidden", 33_000),
    "300 nodes of a graph": ("graph", 33_000),
    "300 nodes that repeat each other": ("nodes", 33_000),
    "4,000 traces, linked": ("traces", 33_000),
    "sub-agents told by their tasks": ("tasks", 33_000),
    "one agent, 100,000 spans": ("flat", 100_000),
    "300 agents, 100,000 spans": ("hub", 100_000),
}


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds of ``work``."""
    gc.collect()
    begin = time.process_time()
    work()
    return time.process_time() - begin


def record(spans: list[Span], offset: int) -> LogRecord:
    """Spans of one trace as the collector appends them."""
    event = SpansReceived(tenant="default", source="otlp", trace_id=spans[0].trace_id, spans=tuple(spans))
    return LogRecord(topics.SPANS, offset, event.key, event.event_id, encode(event), 0)


def batches_of(spans: list[Span]) -> list[list[LogRecord]]:
    """The spans in ``BATCHES`` batches, each with a record a trace."""
    size = -(-len(spans) // BATCHES)
    found = []
    for first in range(0, len(spans), size):
        by_trace: dict[str, list[Span]] = {}
        for span in spans[first : first + size]:
            by_trace.setdefault(span.trace_id, []).append(span)
        found.append([record(part, first + n) for n, part in enumerate(by_trace.values())])
    return found


class Desk:
    """The stage with a clock; what it writes is counted and dropped."""

    def __init__(self, settings: Pipeline) -> None:
        self.stage = AssemblyStage(settings)
        self.stage.restore({})
        self.now = 0
        self.published = self.state_bytes = 0

    def send(self, records: list[LogRecord]) -> None:
        """One batch."""
        self._take(self.stage.process(records, self.now))

    def later(self, seconds: float) -> None:
        """Let so much time pass."""
        self.now += round(seconds * _S)
        self._take(self.stage.tick(self.now))

    def _take(self, output: StageOutput) -> None:
        self.published += len(output.events)
        self.state_bytes += sum(len(value) for value in output.writes.values() if value)


def stream(settings: Pipeline, deliveries: list[list[list[LogRecord]]]) -> Desk:
    """Orchestrations one after the other, each in its batches, then closed."""
    desk = Desk(settings)
    for batches in deliveries:
        for batch in batches:
            desk.send(batch)
    desk.later(settings.timeout_s + 1)
    return desk


def late(desk: Desk, spans: list[list[Span]]) -> float:
    """CPU seconds to take a late span of each orchestration and to publish their next revisions."""
    records = []
    for n, found in enumerate(spans):
        last = max(found, key=lambda span: span.end_ns)
        extra = msgspec.structs.replace(
            last,
            span_id=f"{n + 1:08x}ffffffff",
            parent_span_id=last.span_id,
            name="late",
            start_ns=last.start_ns + 1,
        )
        records.append(record([extra], n))

    def work() -> None:
        desk.send(records)
        desk.later(1000)

    return cpu(work)


def measure(
    made: list[list[Span]], sent: list[list[list[LogRecord]]], settings: Pipeline
) -> dict[str, float]:
    """CPU seconds of each kind of assembly of the orchestrations."""
    desks: list[Desk] = []
    return {
        "batch": cpu(lambda: [assemble_spans(spans, "default") for spans in made]),
        "stream": cpu(lambda: desks.append(stream(settings, sent))),
        "late": late(desks[0], made),
    }


def compare(shape: str, size: int, repeats: int, settings: Pipeline) -> dict:
    """Microseconds a span of one large orchestration and of small ones, and their ratio."""
    large = [SHAPES[shape](0, size)]
    count = max(10, len(large[0]) // SMALL // SHARE)
    made = {"small": [SHAPES[shape](number, SMALL) for number in range(1, count + 1)], "large": large}
    sent = {name: [batches_of(spans) for spans in orchestrations] for name, orchestrations in made.items()}
    found: dict[str, dict[str, float]] = {name: {} for name in made}
    for _ in range(repeats - (size > LARGEST)):
        for name in ("small", "large", "small"):
            for kind, spent in measure(made[name], sent[name], settings).items():
                found[name][kind] = min(found[name].get(kind, spent), spent)
    counts = {name: sum(map(len, orchestrations)) for name, orchestrations in made.items()}
    each = {
        name: {kind: spent / counts[name] * 1e6 for kind, spent in times.items()}
        for name, times in found.items()
    }
    return {
        "shape": shape,
        "spans": counts["large"],
        "us_per_span": {kind: round(value, 1) for kind, value in each["large"].items()},
        "us_per_span_of_100": {kind: round(value, 1) for kind, value in each["small"].items()},
        "ratio": {kind: round(each["large"][kind] / each["small"][kind], 2) for kind in each["large"]},
    }


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def open_ones(count: int, settings: Pipeline) -> dict:
    """What ``count`` open orchestrations cost and hold, and what is left when they are closed and forgotten."""
    desk = Desk(settings)
    spans, spent = 0, 0.0
    gc.collect()
    before = _rss_bytes()
    for first in range(0, count, 100):
        made = [SHAPES["hub"](number, OPEN_SPANS) for number in range(first, min(first + 100, count))]
        spans += sum(map(len, made))
        records = [record(found[:-1], n) for n, found in enumerate(made)]
        spent += cpu(lambda batch=records: desk.send(batch))
    gc.collect()
    held = _rss_bytes() - before
    num_open = len(desk.stage.joiner.components())
    closing = cpu(lambda: desk.later(settings.timeout_s + 1))
    desk.later(settings.retention_s + 1)
    gc.collect()
    return {
        "open": num_open,
        "spans": spans - num_open,
        "us_per_span_taking": round(spent / spans * 1e6, 1),
        "us_per_span_closing": round(closing / spans * 1e6, 1),
        "rss_bytes_per_open_span": round(held / spans),
        "rss_mib_open": round(held / 2**20, 1),
        "state_bytes_per_span": round(desk.state_bytes / spans),
        "components_left": len(desk.stage.joiner.of_trace),
        "evidence_left": desk.stage.joiner.num_evidence(),
    }


def bytes_of_open_span(shape: str, size: int, settings: Pipeline) -> int:
    """Bytes that the stage allocates for a span of an open orchestration, by tracemalloc."""
    batches = batches_of(SHAPES[shape](0, size))
    desk = Desk(settings)
    gc.collect()
    tracemalloc.start()
    for batch in batches:
        desk.send(batch)
    gc.collect()
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    component = desk.stage.joiner.components()[0]
    return round(held / component.size)


def _alone(work: Callable[..., object], *args: object) -> object:
    """Call in a process of its own, so that one measure's memory is not another's."""
    with multiprocessing.get_context("spawn").Pool(1, collect_rarely) as pool:
        return pool.apply(work, args)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the large orchestrations' sizes")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="", help="one shape; nothing else, and no result is written")
    parser.add_argument("--open", type=int, default=10_000, help="orchestrations open at a time")
    options = parser.parse_args()
    settings = load_settings().pipeline
    figures: dict = {"scale": options.scale, "large": {}}
    for name, (shape, size) in LARGE.items():
        if options.only not in ("", shape):
            continue
        figures["large"][name] = _alone(
            compare, shape, round(size * options.scale), options.repeats, settings
        )
        print(name, figures["large"][name], flush=True)
    if options.only:
        return
    ratios = [item["ratio"] for item in figures["large"].values()]
    figures["worst_ratio"] = {
        kind: max(ratio[kind] for ratio in ratios) for kind in ("batch", "stream", "late")
    }
    figures["bytes_per_open_span"] = {
        shape: _alone(bytes_of_open_span, shape, round(10_000 * options.scale), settings) for shape in SHAPES
    }
    figures["open"] = _alone(open_ones, options.open, settings)
    write("assembly", COMMAND, figures)


if __name__ == "__main__":
    main()
