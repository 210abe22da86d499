"""Replay of an archive against the embedded runtime on the same spans: spans a second, memory, and how time grows with spans.

The input is a recording of the dispatch desk's agents (tests/golden/assembly/desk.otlp.jsonl, 19 spans of 2.3 kB) copied with fresh
ids and times, one outcome for each trace; in every eighth copy the gateway's spans of the policy's calls came without trace
context, so that traces are joined by response ids. Copies are made as bytes and written as the archiver writes them.
Run: .venv/bin/python benchmarks/replay.py [--sizes 100000 300000 1000000] [--spans 10000000] [--workers 2]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import re
import resource
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from _harness import ROOT, write

from spanloop.pipeline.archive import ArchiveStore
from spanloop.pipeline.archive.files import LocalFiles
from spanloop.pipeline.archive.manifest import Range, date_of
from spanloop.pipeline.archive.raw import RAW_SCHEMA
from spanloop.pipeline.archive.writer import TABLES_VERSION, Attempt, save
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.otlp.files import read_spans
from spanloop.pipeline.ports import NewRecord, new_record
from spanloop.pipeline.runtimes.collecting import collect_rarely
from spanloop.pipeline.runtimes.embedded import run_to_end
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.state.memory import MemoryState
from spanloop.schemas import topics
from spanloop.schemas.canonical import digest
from spanloop.schemas.events import FeedbackReceived, SpansReceived
from spanloop.schemas.ids import gateway_trace_id
from spanloop.schemas.settings import load_settings
from spanloop.schemas.spans import Span

COMMAND = ".venv/bin/python benchmarks/replay.py"
PER_RECORD = 5
"""Spans of one record."""
JOINED_EVERY = 8
RANGE_ORCHESTRATIONS = 2_000
"""In one file of the archive: 38,000 spans, 90 MB of values."""
SPACING_NS = 500_000_000
"""Between copies: 1M spans take seven hours."""
T0 = 1_790_000_000_000_000_000
_TOKEN = re.compile(rb"(?<![0-9a-f])[0-9a-f]{16,64}(?![0-9a-f])")
_FRESH = 12
_IDS = ("gen_ai.response.id", "gen_ai.conversation.id", "gen_ai.agent.call.id")


# ---------------------------------------------------------------- input


def _template(*, joined: bool, outcome: float) -> dict[str, list[NewRecord]]:
    """One orchestration's records of spans and feedback."""
    spans, calls = [], []
    for batch in read_spans(ROOT / "tests/golden/assembly/desk.otlp.jsonl"):
        for span in batch.spans:
            attributes = {k: digest(k, v) if k in _IDS else v for k, v in span.attributes.items()}
            spans.append(msgspec.structs.replace(span, attributes=attributes))
            if joined and span.name == "chat policy":
                calls.append(_gateway(spans[-1]))
    trace = spans[0].trace_id
    events = [
        SpansReceived(trace_id=trace, spans=tuple(spans[at : at + PER_RECORD]))
        for at in range(0, len(spans), PER_RECORD)
    ]
    events += [SpansReceived(trace_id=span.trace_id, spans=(span,), source="gateway") for span in calls]
    feedback = FeedbackReceived(
        feedback_id=digest("feedback", trace), target_kind="trace", target_id=trace, value=outcome, scorer="desk", observed_ns=T0
    )  # fmt: skip
    return {topics.SPANS: [new_record(e) for e in events], topics.FEEDBACK: [new_record(feedback)]}


def _gateway(span: Span) -> Span:
    response = span.attributes["gen_ai.response.id"]
    attributes = {
        "gen_ai.operation.name": "chat", "gen_ai.request.model": "policy", "gen_ai.response.model": "policy@v3",
        "gen_ai.response.id": response, "gen_ai.usage.input_tokens": 54, "gen_ai.usage.output_tokens": 4,
        "spanloop.policy.version": "policy@v3", "spanloop.policy.route": "champion", "spanloop.harness": "desk",
        "spanloop.task.key": "desk", "spanloop.prompt_token_ids": list(range(40, 94)),
        "spanloop.response_token_ids": [7, 12, 9, 2], "spanloop.response_logprobs": [-0.25, -0.5, -0.125, -1.0],
    }  # fmt: skip
    return Span(
        trace_id=gateway_trace_id(response), span_id=digest("gateway", span.span_id)[:16], name="chat policy",
        start_ns=span.start_ns, end_ns=span.end_ns, kind=3, attributes=attributes, scope="spanloop.gateway",
    )  # fmt: skip


def _texts(values: list[bytes], numbers: np.ndarray, type_: pa.DataType) -> pa.Array:
    """Copies ``numbers`` of some texts, copy after copy, each id with twelve digits of its own."""
    columns = []
    for text in values:
        out = np.tile(np.frombuffer(text, np.uint8), (len(numbers), 1))
        for found in _TOKEN.finditer(text):
            token, at = found.group(), found.start()
            if token.startswith(b"ffffffff"):  # a gateway's own trace stays one
                token, at = token[8:], at + 8
            if token.isdigit() and len(token) == 19:
                continue
            mixed = np.uint64(int(token[:_FRESH], 16)) ^ (
                numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            )
            with np.errstate(over="ignore"):
                mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
                mixed ^= mixed >> np.uint64(27)
            nibbles = (mixed[:, None] >> np.arange(44, -1, -4, dtype=np.uint64)) & np.uint64(15)
            out[:, at : at + _FRESH] = np.frombuffer(b"0123456789abcdef", np.uint8)[nibbles.astype(int)]
        columns.append(out)
    data = np.concatenate(columns, axis=1)
    offsets = np.concatenate([[0], np.cumsum(np.tile([len(v) for v in values], len(numbers)))])
    large = pa.large_binary() if pa.types.is_binary(type_) else pa.large_string()
    made = pa.Array.from_buffers(
        large, len(offsets) - 1, [None, pa.py_buffer(offsets.astype(np.int64)), pa.py_buffer(data.ravel())]
    )
    return made.cast(type_)


def make_archive(folder: Path, spans: int) -> tuple[ArchiveStore, int]:
    """An archive of about so many spans; returns it and how many orchestrations it has."""
    store = ArchiveStore(LocalFiles(folder), ManualClock(T0))
    made = [_template(joined=n == 0, outcome=n / JOINED_EVERY) for n in range(JOINED_EVERY)]
    orchestrations = max(1, round(spans / 19.4))
    at = dict.fromkeys(made[0], 0)
    for first in range(0, orchestrations, RANGE_ORCHESTRATIONS):
        numbers = np.arange(first, min(first + RANGE_ORCHESTRATIONS, orchestrations))
        for topic in made[0]:
            parts = [
                _raw(topic, template[topic], numbers[numbers % JOINED_EVERY == n])
                for n, template in enumerate(made)
            ]
            table = pa.concat_tables(parts)
            table = table.take(
                pa.array(np.argsort(table["appended_ns"].to_numpy(), kind="stable"))
            ).combine_chunks()
            rows = table.num_rows
            table = table.set_column(2, "offset", pa.array(np.arange(at[topic], at[topic] + rows)))
            attempt = Attempt(store.files, topic, 0, at[topic], at[topic] + rows - 1)
            attempt.add_raw(("default", date_of(int(table["appended_ns"][0].as_py()))), table, rows)
            save(store.files, Range(
                topic, 0, at[topic], at[topic] + rows - 1, rows, T0, value_bytes=table["value"].nbytes, version=TABLES_VERSION,
                files=tuple(attempt.written),
            ))  # fmt: skip
            at[topic] += rows
    return store, orchestrations


def _raw(topic: str, records: list[NewRecord], numbers: np.ndarray) -> pa.Table:
    total = len(records) * len(numbers)
    return pa.Table.from_pydict(
        {
            "topic": pa.array([topic] * total),
            "partition": pa.array(np.zeros(total, np.int32)),
            "offset": pa.array(np.zeros(total, np.int64)),
            "key": _texts([r.key.encode() for r in records], numbers, pa.string()),
            "event_id": _texts([r.event_id.encode() for r in records], numbers, pa.string()),
            "value": _texts([r.value for r in records], numbers, pa.binary()),
            "appended_ns": pa.array(np.repeat(T0 + numbers * SPACING_NS, len(records))),
        },
        schema=RAW_SCHEMA,
    )


# ---------------------------------------------------------------- measuring


class Memory:
    """Peak resident memory of this process and its children together, sampled ten times a second."""

    def __init__(self) -> None:
        self.peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        me = multiprocessing.current_process().pid
        while not self._stop.wait(0.1):
            total = _rss(f"/proc/{me}")
            for child in Path(f"/proc/{me}/task").glob("*/children"):
                total += sum(_rss(f"/proc/{pid}") for pid in child.read_text().split())
            self.peak = max(self.peak, total)


def _rss(path: str) -> int:
    """Resident memory that is the process's own: mapped files can be dropped and count for nobody."""
    try:
        lines = Path(path, "status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon", "RssShmem"))) * 1024


def _cpu() -> float:
    """CPU seconds of this process and its children that ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def _replay(folder: Path, workers: int, name: str) -> dict[str, Any]:
    """One replay in a process of its own, so that memory is its own."""
    from spanloop.pipeline.replay.driver import replay
    from spanloop.pipeline.replay.plan import make_plan

    settings = load_settings(None, {"workspace": folder})
    store = ArchiveStore(LocalFiles(folder / "archive"))
    plan = make_plan(settings, store, name=name)
    phases: dict[str, float] = {}

    def tell(now: Any) -> None:
        phases[now.phase] = round(now.seconds, 1)

    began, cpu = time.perf_counter(), _cpu()
    with Memory() as memory:
        manifest = replay(plan, store, folder / "replays", workers=workers, tell=tell)
    seconds, cpu = time.perf_counter() - began, _cpu() - cpu
    shutil.rmtree(folder / "replays")
    counts = manifest.counts
    return {
        "spans": counts.spans, "orchestrations": counts.orchestrations, "credited": counts.credited, "workers": workers,
        "cpu_s": round(cpu, 1), "cpu_us_per_span": round(cpu / counts.spans * 1e6, 1), "buckets": plan.buckets, "seconds": round(seconds, 1), "spans_per_s": round(counts.spans / seconds),
        "peak_rss_mib": round(memory.peak / 2**20), "phases_s": phases,
        "result_mib": round(sum(part.bytes for part in manifest.parts) / 2**20),
    }  # fmt: skip


def _embedded(folder: Path) -> dict[str, Any]:
    """The embedded runtime over the same records, in memory: no decoding of OTLP, no disk."""
    from spanloop.pipeline.replay.source import plan_chunks, records

    settings, clock = load_settings(), ManualClock(T0)
    log, store = MemoryLog(clock), ArchiveStore(LocalFiles(folder / "archive"))
    for topic in (topics.SPANS, topics.FEEDBACK):
        for chunk in plan_chunks(store, topic):
            log.append(
                [NewRecord(topic, at.key, f"{at.offset}", value) for at, value in records(store, chunk)]
            )
    found: dict[str, Any] = {}
    for label, stages in (
        ("all stages", build_stages(settings.pipeline)),
        ("no value models", build_stages(settings.pipeline)[:2]),
    ):
        own = MemoryLog(clock)
        own._topics, own._offsets, own._next = (
            {k: list(v) for k, v in log._topics.items()},
            dict(log._offsets),
            log._next,
        )
        collect_rarely()
        began, cpu = time.perf_counter(), time.process_time()
        run_to_end(stages, own, MemoryState(own), clock)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        count = len(own.read([topics.ORCHESTRATIONS], {}, 10**9))
        found[label] = {"orchestrations": count, "seconds": round(seconds, 1), "cpu_s": round(cpu, 1)}
    return found


def _in_process(queue: Any, function: Any, arguments: Any) -> None:
    queue.put(function(*arguments))


def _fresh(function: Any, *arguments: Any) -> Any:
    """Run in a fresh process that may have children of its own."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_in_process, args=(queue, function, arguments))
    process.start()
    result = queue.get()
    process.join()
    return result


def _exponent(runs: list[dict[str, Any]], of: str) -> float | None:
    """Slope of log time over log spans; None with one size."""
    if len(runs) < 2:
        return None
    return round(
        float(np.polyfit([math.log(r["spans"]) for r in runs], [math.log(r[of]) for r in runs], 1)[0]), 3
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=[100_000, 300_000, 1_000_000])
    parser.add_argument("--spans", type=int, help="one more size, e.g. 10000000")
    parser.add_argument("--workers", type=int, default=multiprocessing.cpu_count())
    parser.add_argument("--folder", type=Path, help="where to make the archives; default: a temporary folder")
    parser.add_argument("--no-write", action="store_true")
    options = parser.parse_args()
    sizes = [*options.sizes, *([options.spans] if options.spans else [])]
    runs, embedded = [], {}
    compared = sorted(sizes)[min(1, len(sizes) - 1)]
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            folder = Path(name)
            began = time.perf_counter()
            make_archive(folder / "archive", size)
            print(f"made {size} spans in {time.perf_counter() - began:.1f} s", flush=True)
            if size == compared:
                embedded = _fresh(_embedded, folder)
                print(embedded, flush=True)
                runs.append(_fresh(_replay, folder, 1, "one"))
                print(runs[-1], flush=True)
            runs.append(_fresh(_replay, folder, options.workers, "all"))
            print(runs[-1], flush=True)
    many = [run for run in runs if run["workers"] == options.workers]
    figures: dict[str, Any] = {
        "runs": runs,
        "exponent": _exponent(many, "seconds"),
        "exponent_of_cpu": _exponent(many, "cpu_s"),
    }
    single = next(run for run in runs if run["workers"] == 1 and run["spans"] >= compared)
    for run in embedded.values():
        run["spans_per_s"] = round(single["spans"] / run["seconds"])
        run["cpu_us_per_span"] = round(run["cpu_s"] / single["spans"] * 1e6, 1)
        run["replay_on_one_core"] = round(single["spans_per_s"] / run["spans_per_s"], 2)
        run["replay_by_cpu"] = round(run["cpu_us_per_span"] / single["cpu_us_per_span"], 2)
    figures["embedded"] = embedded
    if options.no_write:
        print(msgspec.json.format(msgspec.json.encode(figures)).decode())
    else:
        write("replay", COMMAND, figures)


if __name__ == "__main__":
    main()
