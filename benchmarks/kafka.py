"""The Kafka log against bare confluent-kafka clients: records of 1 kB appended and read, latency between two processes' logs,
and what the SDK exporter costs its host. Each figure is the median of ROUNDS, the two sides by turns.

Run: .venv/bin/python benchmarks/kafka.py    (a broker of its own; SPANLOOP_TEST_BOOTSTRAP_SERVERS names another one)
"""

from __future__ import annotations

import statistics
import sys
import time
import uuid
from pathlib import Path

from _harness import write
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from spanloop.collectors.span_exporter import KafkaSpanExporter
from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.pipeline.ports import NewRecord
from spanloop.schemas.settings import Kafka, Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

RECORDS, BATCH, ROUNDS, PARTITIONS = 40_000, 500, 3, 4
VALUE = b"x" * 1000


def ours(servers: str) -> dict[str, float]:
    """Append and read through KafkaLog."""
    settings = Kafka(prefix=f"b{uuid.uuid4().hex[:8]}.", partitions=PARTITIONS)
    writer, reader = KafkaLog(servers, settings), KafkaLog(servers, settings)
    records = [NewRecord("spans", f"t/{n % 997}", f"e{n}", VALUE) for n in range(RECORDS)]
    began, cpu = time.perf_counter(), time.process_time()
    for first in range(0, RECORDS, BATCH):
        writer.append(records[first : first + BATCH])
    appended, append_cpu = time.perf_counter() - began, time.process_time() - cpu
    began, cpu = time.perf_counter(), time.process_time()
    position: dict[str, int] = {}
    count = 0
    while count < RECORDS:
        page = reader.read(["spans"], position, BATCH)
        count += len(page)
        position.update({record.source: record.offset for record in page})
    read, read_cpu = time.perf_counter() - began, time.process_time() - cpu
    seen = []
    for n in range(50):
        began = time.perf_counter()
        writer.append([NewRecord("spans", "t/1", f"late{n}", VALUE)])
        while not (page := reader.read(["spans"], position, BATCH)):
            pass
        seen.append(time.perf_counter() - began)
        position.update({record.source: record.offset for record in page})
    began = time.perf_counter()
    for _ in range(50):
        reader.read(["spans"], position, BATCH)
    idle = (time.perf_counter() - began) / 50
    began = time.perf_counter()
    for n in range(50):
        writer.append([NewRecord("policies", "p", f"p{n}", b"{}")])
    exact = (time.perf_counter() - began) / 50
    writer.close()
    reader.close()
    return {
        "append_per_s": RECORDS / appended, "read_per_s": RECORDS / read,
        "append_cpu_us": 1e6 * append_cpu / RECORDS, "read_cpu_us": 1e6 * read_cpu / RECORDS, "append_to_read_ms": 1e3 * statistics.median(seen),
        "idle_read_ms": 1e3 * idle, "exact_append_ms": 1e3 * exact,
    }  # fmt: skip


def bare(servers: str) -> dict[str, float]:
    """The same with plain clients: same acks, idempotence, compression, headers and batches."""
    topic = f"b{uuid.uuid4().hex[:8]}"
    admin = AdminClient({"bootstrap.servers": servers, "log_level": 0})
    next(iter(admin.create_topics([NewTopic(topic, PARTITIONS, 1)]).values())).result()
    common = {"bootstrap.servers": servers, "log_level": 0}
    producer = Producer(
        {**common, "acks": "all", "enable.idempotence": True, "compression.type": "lz4", "linger.ms": 1}
    )
    began, cpu = time.perf_counter(), time.process_time()
    for first in range(0, RECORDS, BATCH):
        for n in range(first, first + BATCH):
            headers: list[tuple[str, str | bytes | None]] = [
                ("event_id", b"e%d" % n),
                ("appended_ns", b"1790000000000000000"),
            ]
            producer.produce(
                topic, VALUE, key=b"t/%d" % (n % 997), headers=headers, on_delivery=lambda *_: None
            )
        producer.flush()
    appended, append_cpu = time.perf_counter() - began, time.process_time() - cpu
    consumer = Consumer({**common, "group.id": "bench", "fetch.wait.max.ms": 10})
    began, cpu = time.perf_counter(), time.process_time()
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    count = 0
    while count < RECORDS:
        for message in consumer.consume(BATCH, 0.02):
            if not message.error():
                count += 1
                message.value(), message.key(), message.headers(), message.timestamp()
    read, read_cpu = time.perf_counter() - began, time.process_time() - cpu
    consumer.close()
    return {
        "append_per_s": RECORDS / appended, "read_per_s": RECORDS / read,
        "append_cpu_us": 1e6 * append_cpu / RECORDS, "read_cpu_us": 1e6 * read_cpu / RECORDS,
    }  # fmt: skip


def exporter(servers: str) -> dict[str, float]:
    """What ``on_end`` of a SimpleSpanProcessor costs the host, and how many spans a second arrive."""
    settings = Settings(kafka=Kafka(prefix=f"b{uuid.uuid4().hex[:8]}.", partitions=PARTITIONS))
    sink = KafkaSpanExporter(servers, settings=settings)
    provider = TracerProvider(shutdown_on_exit=False)
    processor = SimpleSpanProcessor(sink)
    tracer = provider.get_tracer("bench")
    spans = []
    for n in range(10_000):
        with tracer.start_as_current_span(f"chat {n % 7}") as span:
            span.set_attributes(
                {
                    "gen_ai.operation.name": "chat",
                    "gen_ai.usage.input_tokens": n,
                    "gen_ai.input.messages": "m" * 800,
                }
            )
        spans.append(span)
    processor.on_end(spans.pop())  # connects and makes the topic
    sink.force_flush(60_000)
    times = []
    began, cpu = time.perf_counter(), time.process_time()
    for span in spans:
        at = time.perf_counter()
        processor.on_end(span)
        times.append(time.perf_counter() - at)
    if not sink.force_flush(60_000):
        raise SystemExit("the broker did not take the spans")
    took, cpu = time.perf_counter() - began, time.process_time() - cpu
    result = {
        "host_median_us": 1e6 * statistics.median(times),
        "host_p99_us": 1e6 * sorted(times)[int(0.99 * len(times))],
        "spans_per_s": len(spans) / took,
        "cpu_us_per_span": 1e6 * cpu / len(spans),
        "dropped": float(sink.dropped),
    }
    sink.shutdown()
    return result


def main() -> None:
    """Run and write benchmarks/results/kafka.json."""
    from kafka_broker import broker

    rows: dict[str, list[dict[str, float]]] = {"log": [], "bare": [], "exporter": []}
    with broker() as servers:
        for n in range(ROUNDS):
            for name, measure in (("log", ours), ("bare", bare), ("exporter", exporter)):
                rows[name].append(measure(servers))
                print(n, name, {k: round(v, 1) for k, v in rows[name][-1].items()}, flush=True)
    medians = {
        name: {key: round(statistics.median(row[key] for row in found), 1) for key in found[0]}
        for name, found in rows.items()
    }
    ratios = {key: round(medians["log"][key] / medians["bare"][key], 2) for key in medians["bare"]}
    write("kafka", ".venv/bin/python benchmarks/kafka.py", {"records": RECORDS, "bytes": len(VALUE), "partitions": PARTITIONS, "rounds": ROUNDS, **medians, "ratio": ratios})  # fmt: skip


if __name__ == "__main__":
    main()
