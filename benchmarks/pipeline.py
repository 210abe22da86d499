"""Spans a second from OTLP bytes to credited orchestrations, in one process on one core, and where the time goes.

The input is a recording of the dispatch desk's agents (tests/golden/assembly/desk.otlp.jsonl) copied with fresh ids, encoded
as the protobuf requests that an SDK sends, and one outcome for each trace. Decoding, limits, redaction, the durable append
(SQLite, synchronous=FULL) and all stages are inside the clock; HTTP is not (receiver.json has it).
Run: .venv/bin/python benchmarks/pipeline.py [--orchestrations 10000]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from _harness import ROOT, peak_rss_mib, write
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from spanloop.collectors.batches import Intake
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.log.sqlite import SqliteLog
from spanloop.pipeline.otlp.files import read_spans
from spanloop.pipeline.ports import NewRecord, new_record
from spanloop.pipeline.runtimes.collecting import collect_rarely
from spanloop.pipeline.runtimes.embedded import EmbeddedRuntime
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.state.sqlite import SqliteState
from spanloop.schemas import topics
from spanloop.schemas.canonical import digest
from spanloop.schemas.events import FeedbackReceived
from spanloop.schemas.settings import load_settings
from spanloop.schemas.spans import Span

COMMAND = ".venv/bin/python benchmarks/pipeline.py"
RESPONSE = "gen_ai.response.id"
PER_REQUEST = 10
"""Orchestrations in one request: about 190 spans, a third of what an SDK's batch processor sends at most."""
REQUESTS = 20
TOGETHER = 4
"""Requests of one durable append: as many as wait for the collector's commit thread when four connections send (receiver.json)."""
SECONDS = 2.0
"""After so many requests the clock moves on so far, so that quiet orchestrations close while others arrive."""
_STATUS = {"unset": 0, "ok": 1, "error": 2}


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


def _any(value: Any) -> AnyValue:
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, str):
        return AnyValue(string_value=value)
    found = AnyValue()
    if isinstance(value, list):
        found.array_value.values.extend(_any(item) for item in value)
    return found


def _pairs(attributes: dict[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=key, value=_any(value)) for key, value in attributes.items()]


def request_of(spans: list[Span]) -> bytes:
    """Spans as one OTLP protobuf request."""
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    group.resource.attributes.extend(_pairs(spans[0].resource))
    scope = group.scope_spans.add()
    scope.scope.name, scope.scope.version = spans[0].scope, spans[0].scope_version
    for span in spans:
        raw = scope.spans.add(
            trace_id=bytes.fromhex(span.trace_id),
            span_id=bytes.fromhex(span.span_id),
            parent_span_id=bytes.fromhex(span.parent_span_id or ""),
            name=span.name,
            kind=span.kind,
            start_time_unix_nano=span.start_ns,
            end_time_unix_nano=span.end_ns,
            attributes=_pairs(span.attributes),
        )
        raw.status.code = _STATUS[span.status]  # type: ignore[assignment]
    return request.SerializeToString()


def workload(orchestrations: int) -> tuple[list[bytes], list[NewRecord]]:
    """OTLP requests and the outcomes of their traces."""
    recorded = [
        span for batch in read_spans(ROOT / "tests/golden/assembly/desk.otlp.jsonl") for span in batch.spans
    ]
    requests, outcomes = [], []
    for first in range(0, orchestrations, PER_REQUEST):
        spans = [copied(span, n) for n in range(first, first + PER_REQUEST) for span in recorded]
        requests.append(request_of(spans))
        for number, trace_id in enumerate(dict.fromkeys(span.trace_id for span in spans), first):
            event = FeedbackReceived(
                feedback_id=trace_id, target_kind="trace", target_id=trace_id, value=(number % 7) / 7
            )
            outcomes.append(new_record(event))
    return requests, outcomes


class Stopwatch:
    """Seconds by name; an inner measure is not counted in the outer one."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._open: list[float] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._open.append(0.0)
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] += spent - self._open.pop()
            if self._open:
                self._open[-1] += spent

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Time every call of ``owner.method``."""
        inner: Callable[..., Any] = getattr(owner, method)
        opened, seconds, now = self._open, self.seconds, time.perf_counter

        def timed(*args: Any, **more: Any) -> Any:
            opened.append(0.0)
            start = now()
            try:
                return inner(*args, **more)
            finally:
                spent = now() - start
                seconds[name] += spent - opened.pop()
                if opened:
                    opened[-1] += spent

        setattr(owner, method, timed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orchestrations", type=int, default=10_000)
    options = parser.parse_args()
    settings = load_settings()
    requests, outcomes = workload(options.orchestrations)
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        clock = ManualClock()
        path = Path(folder) / "spanloop.db"
        log, state = SqliteLog(path, clock=clock), SqliteState(path, clock=clock)
        redactor = Redactor(settings.content, b"0123456789abcdef")
        intake = Intake(redactor, settings.collector.max_attribute_bytes, keep_content=False)
        stages = build_stages(settings.pipeline)
        for stage in stages:
            watch.watch(stage, "process", stage.name)
            watch.watch(stage, "tick", stage.name)
        watch.watch(state, "commit", "commit")
        watch.watch(log, "read", "read")
        runtime = EmbeddedRuntime(stages, log, state, clock, batch_max=settings.pipeline.batch_max)
        runtime.restore()
        collect_rarely()
        count = 0
        begin, cpu = time.perf_counter(), time.process_time()
        for first in range(0, len(requests), REQUESTS):
            waiting: list[NewRecord] = []
            for number, body in enumerate(requests[first : first + REQUESTS], start=1):
                with watch("decode, redact, limits"):
                    prepared = intake.take_protobuf(body, tenant="default", source="otlp")
                waiting += prepared.records
                if number % TOGETHER == 0:
                    with watch("append"):
                        log.append(waiting)
                    waiting = []
                count += prepared.num_spans
            with watch("append"):
                log.append(waiting)
                log.append(outcomes[first * PER_REQUEST : (first + REQUESTS) * PER_REQUEST])
            clock.advance(seconds=SECONDS)
            while runtime.step():
                pass
        clock.advance(seconds=60.0)
        while runtime.step():
            pass
        elapsed, used = time.perf_counter() - begin, time.process_time() - cpu
        counts = log.counts()
        log.close()
        state.close()
    write(
        "pipeline",
        COMMAND,
        {
            "spans": count,
            "bytes_per_span": round(sum(map(len, requests)) / count),
            "credited_orchestrations": counts[topics.CREDITS],
            "value_models": counts.get(topics.MODELS, 0),
            "spans_per_s": round(count / elapsed),
            "orchestrations_per_s": round(options.orchestrations / elapsed),
            "cpu_us_per_span": round(used / count * 1e6, 1),
            "us_per_span": {
                name: round(spent / count * 1e6, 1) for name, spent in watch.seconds.most_common()
            },
            "peak_rss_mib": peak_rss_mib(),
        },
    )


if __name__ == "__main__":
    main()
