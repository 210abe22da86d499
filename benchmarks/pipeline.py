"""Spans a second from the durable log to credited orchestrations, on one core, with the SQLite log and state.

The input is a recording of the dispatch desk's agents (tests/golden/assembly/desk.otlp.jsonl) copied with fresh ids, and one
outcome for each trace. The ratio to beat is the receiver's rate: see receiver.json. Run: .venv/bin/python benchmarks/pipeline.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import msgspec
from _harness import ROOT, peak_rss_mib, write

from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.otlp.files import read_spans
from spanloop.pipeline.ports import new_record
from spanloop.pipeline.runtimes.embedded import run_to_end
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.state.sqlite import SqliteState
from spanloop.schemas import topics
from spanloop.schemas.canonical import digest
from spanloop.schemas.events import FeedbackReceived, SpansReceived
from spanloop.schemas.settings import load_settings
from spanloop.schemas.spans import Span

COPIES = 1_000
RESPONSE = "gen_ai.response.id"


def copied(span: Span, number: int) -> Span:
    """The span with ids of its own."""
    attributes = dict(span.attributes)
    for key in (RESPONSE, "gen_ai.conversation.id", "gen_ai.agent.call.id"):
        if key in attributes:
            attributes[key] = digest(number, attributes[key])
    parent = digest(number, span.parent_span_id)[:16] if span.parent_span_id else None
    return msgspec.structs.replace(
        span,
        trace_id=digest(number, span.trace_id),
        span_id=digest(number, span.span_id)[:16],
        parent_span_id=parent,
        attributes=attributes,
    )


def main() -> None:
    recorded = [
        span for batch in read_spans(ROOT / "tests/golden/assembly/desk.otlp.jsonl") for span in batch.spans
    ]
    settings = load_settings()
    with tempfile.TemporaryDirectory() as folder:
        clock = ManualClock()
        path = Path(folder) / "spanloop.db"
        log = SqliteLog(path, clock=clock)
        state = SqliteState(path, clock=clock)
        count = 0
        for first in range(0, COPIES, 50):
            records = []
            for number in range(first, min(first + 50, COPIES)):
                by_trace: dict[str, list[Span]] = {}
                for span in recorded:
                    copy = copied(span, number)
                    by_trace.setdefault(copy.trace_id, []).append(copy)
                for trace_id, spans in by_trace.items():
                    count += len(spans)
                    records.append(new_record(SpansReceived(trace_id=trace_id, spans=tuple(spans))))
                    records.append(
                        new_record(
                            FeedbackReceived(
                                feedback_id=trace_id,
                                target_kind="trace",
                                target_id=trace_id,
                                value=(number % 7) / 7,
                            )
                        )
                    )
            log.append(records)
        begin, cpu = time.perf_counter(), time.process_time()
        run_to_end(build_stages(settings.pipeline), log, state, clock)
        elapsed, used = time.perf_counter() - begin, time.process_time() - cpu
        credited = log.end(topics.CREDITS) >= 0 and log.counts()
        log.close()
    write(
        "pipeline",
        ".venv/bin/python benchmarks/pipeline.py",
        {
            "spans": count,
            "credited_orchestrations": credited[topics.CREDITS] if credited else 0,
            "spans_per_s": round(count / elapsed),
            "orchestrations_per_s": round(COPIES / elapsed),
            "cpu_s_per_1000_spans": round(used / count * 1000, 4),
            "peak_rss_mib": peak_rss_mib(),
        },
    )


if __name__ == "__main__":
    main()
