"""What joining over partitions costs: normalise, shards and value stage in one process, against the embedded stages.

Both fold the same SpansReceived and outcomes (workload of pipeline.py) from a log in memory and commit to a state in memory; the
clock moves on as there, so that quiet orchestrations close while others arrive. Only the stages and their logs are inside the clock.
``with gateway``: each model call has also the gateway's span, in a trace of its own, as where agents send no trace context.
Run: .venv/bin/python benchmarks/shards.py [--orchestrations 2000]
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from heapq import merge
from itertools import islice
from typing import Any

from _harness import write
from pipeline import PER_REQUEST, REQUESTS, SECONDS, workload

from spanloop.collectors.batches import Intake
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.credit.value import ValueStage
from spanloop.pipeline.log.memory import MemoryLog
from spanloop.pipeline.normalise import NormaliseStage
from spanloop.pipeline.otlp.decode_protobuf import decode_protobuf
from spanloop.pipeline.ports import (
    Appended,
    Clock,
    Log,
    LogRecord,
    NewRecord,
    Stage,
    new_record,
    source_of,
    topic_of,
)
from spanloop.pipeline.runtimes.collecting import collect_rarely
from spanloop.pipeline.runtimes.embedded import EmbeddedRuntime
from spanloop.pipeline.runtimes.process import build_stages
from spanloop.pipeline.shard import ShardStage
from spanloop.pipeline.state.memory import MemoryState
from spanloop.schemas import topics
from spanloop.schemas.events import SpansReceived, decode
from spanloop.schemas.ids import gateway_span_id, gateway_trace_id
from spanloop.schemas.settings import Pipeline, load_settings
from spanloop.schemas.spans import Span

COMMAND = ".venv/bin/python benchmarks/shards.py"


class PartitionedLog:
    """A log with partitions in memory, without deduplication."""

    def __init__(self, clock: Clock, partitions: int) -> None:
        self._clock = clock
        self._partitions = partitions
        self.records: dict[str, list[LogRecord]] = {}

    def append(self, records: Sequence[NewRecord]) -> list[Appended]:
        """Append each to its partition."""
        done = []
        for new in records:
            partition = new.partition
            if new.topic in topics.SINGLE:
                partition = 0
            elif partition is None:
                partition = zlib.crc32(new.key.encode()) % self._partitions
            held = self.records.setdefault(source_of(new.topic, partition), [])
            held.append(
                LogRecord(
                    new.topic, len(held), new.key, new.event_id, new.value, self._clock.now_ns(), partition
                )
            )
            done.append(Appended(len(held) - 1, duplicate=False, partition=partition))
        return done

    def read(self, topic_names: Sequence[str], after: Mapping[str, int], limit: int) -> list[LogRecord]:
        """Sources merged by time of append."""
        names = [source for name in topic_names for source in self.sources(name)]
        parts = [
            islice(self.records.get(s, ()), after.get(s, -1) + 1, after.get(s, -1) + 1 + limit) for s in names
        ]
        return list(islice(merge(*parts, key=lambda record: record.appended_ns), limit))

    def end(self, source: str) -> int:
        """Offset of the last record."""
        return len(self.records.get(source, ())) - 1

    def sources(self, topic: str) -> tuple[str, ...]:
        """All partitions of a topic, or the one that is named."""
        if "/" in topic:
            return (source_of(*topic_of(topic)),)
        count = 1 if topic in topics.SINGLE else self._partitions
        return tuple(source_of(topic, n) for n in range(count))

    def commit(self, group: str, offsets: Mapping[str, int]) -> None:
        """Nobody asks."""

    def committed(self, group: str) -> dict[str, int]:
        """Nothing."""
        return {}

    def close(self) -> None:
        """Nothing to release."""


def shards(settings: Pipeline, partitions: int) -> list[Stage]:
    """The stages of the partitioned runtime."""
    return [
        NormaliseStage(partitions),
        *(ShardStage(settings, n, partitions) for n in range(partitions)),
        ValueStage(settings, lessons=(topics.LESSONS,)),
    ]


def run(
    stages: list[Stage], log: Log, clock: ManualClock, rounds: list[tuple[list[NewRecord], list[NewRecord]]]
) -> float:
    """CPU seconds until everything is credited."""
    runtime = EmbeddedRuntime(stages, log, MemoryState(log), clock, batch_max=500)
    runtime.restore()
    begin = time.process_time()
    for spans, outcomes in rounds:
        log.append(spans)
        log.append(outcomes)
        clock.advance(seconds=SECONDS)
        while runtime.step():
            pass
    clock.advance(seconds=60.0)
    while runtime.step():
        pass
    return time.process_time() - begin


def gateway_spans(records: list[NewRecord]) -> list[NewRecord]:
    """The gateway's side of every model call in records of spans."""
    made = []
    for record in records:
        event = decode(record.value)
        for span in event.spans if isinstance(event, SpansReceived) else ():
            response = span.attributes.get("gen_ai.response.id")
            if response:
                trace = gateway_trace_id(response)
                own = Span(
                    trace, gateway_span_id(response), "chat", span.start_ns, span.end_ns, scope="spanloop.gateway",
                    attributes={
                        "gen_ai.operation.name": "chat", "gen_ai.response.id": response, "spanloop.policy.version": "policy@v1",
                    },
                )  # fmt: skip
                made.append(new_record(SpansReceived(trace_id=trace, spans=(own,), source="gateway")))
    return made


def measure(settings: Pipeline, rounds: list[tuple[list[NewRecord], list[NewRecord]]]) -> dict[str, Any]:
    """Embedded, one partition, four."""
    events = [decode(record.value) for records, _ in rounds for record in records]
    spans = sum(len(event.spans) for event in events if isinstance(event, SpansReceived))
    size = sum(len(record.value) for records, _ in rounds for record in records)
    clock = ManualClock()
    embedded = run(build_stages(settings), MemoryLog(clock), clock, rounds)
    result: dict[str, Any] = {
        "spans": spans, "bytes_per_span": round(size / spans), "embedded_spans_per_cpu_s": round(spans / embedded),
    }  # fmt: skip
    for partitions in (1, 4):
        clock = ManualClock()
        log = PartitionedLog(clock, partitions)
        seconds = run(shards(settings, partitions), log, clock, rounds)
        messages = [r for s in log.sources(topics.OPERATIONS) for r in log.records.get(s, ())]
        lessons = [r for s in log.sources(topics.LESSONS) for r in log.records.get(s, ())]
        kinds = Counter(type(decode(record.value)).__name__ for record in messages)
        result[f"partitions_{partitions}"] = {
            "spans_per_cpu_s": round(spans / seconds),
            "of_embedded": round(embedded / seconds, 2),
            "messages_per_span": round(len(messages) / spans, 2),
            "message_bytes_per_span": round(sum(len(r.value) for r in messages) / spans),
            "lesson_bytes_per_span": round(sum(len(r.value) for r in lessons) / spans),
            "messages_per_span_by_kind": {k: round(n / spans, 3) for k, n in kinds.most_common()},
            "credited": sum(len(log.records.get(s, ())) for s in log.sources(topics.CREDITS)),
        }
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orchestrations", type=int, default=2_000)
    options = parser.parse_args()
    settings = load_settings()
    intake = Intake(
        Redactor(settings.content, b"0123456789abcdef"),
        settings.collector.max_attribute_bytes,
        keep_content=False,
    )
    requests, outcomes = workload(options.orchestrations)
    rounds, with_gateway = [], []
    for first in range(0, len(requests), REQUESTS):
        records: list[NewRecord] = []
        for body in requests[first : first + REQUESTS]:
            records += intake.prepare(decode_protobuf(body), tenant="default", source="otlp").records
        scored = outcomes[first * PER_REQUEST : (first + REQUESTS) * PER_REQUEST]
        rounds.append((records, scored))
        with_gateway.append(([*records, *gateway_spans(records)], scored))
    collect_rarely()
    figures = {
        "agents": measure(settings.pipeline, rounds),
        "with_gateway": measure(settings.pipeline, with_gateway),
    }
    write("shards", COMMAND, figures)


if __name__ == "__main__":
    main()
