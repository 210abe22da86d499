"""The exporter against a real broker: what arrives is what the receiver would write; the host never waits or fails."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from importlib.metadata import entry_points

import pytest
from kafka_broker import Broker, free_port
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExportResult

from spanloop.collectors.span_exporter import KafkaSpanExporter
from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.events import SpansReceived, decode
from spanloop.schemas.settings import Content, Kafka, Settings

KEY = "a long random text of this test"


def settings_of(kafka: Kafka, **content):
    return Settings(kafka=kafka, content=Content(hmac_key=KEY, **content), tenant="acme")


def provider_of(exporter, processor=BatchSpanProcessor):
    provider = TracerProvider(resource=Resource.create({"service.name": "agents"}), shutdown_on_exit=False)
    provider.add_span_processor(processor(exporter))
    return provider


def run_agent(provider, turns=3):
    tracer = provider.get_tracer("test")
    for _ in range(turns):
        with tracer.start_as_current_span("invoke_agent planner") as agent:
            agent.set_attribute("gen_ai.operation.name", "invoke_agent")
            with tracer.start_as_current_span("chat m") as chat:
                chat.set_attributes(
                    {"gen_ai.usage.input_tokens": 7, "gen_ai.input.messages": "my secret prompt"}
                )
                chat.set_attribute("spanloop.policy.version", "policy@v9")


def events_of(log):
    return [decode(record.value) for record in log.read(["spans"], {}, 1_000)]


@pytest.mark.parametrize("processor", [BatchSpanProcessor, SimpleSpanProcessor])
def test_spans_arrive_redacted_and_keyed_by_trace(bootstrap_servers, kafka_settings, processor):
    exporter = KafkaSpanExporter(bootstrap_servers, settings=settings_of(kafka_settings))
    provider = provider_of(exporter, processor)
    run_agent(provider)
    assert provider.force_flush()
    assert exporter.force_flush(10_000)
    provider.shutdown()
    assert (exporter.exported, exporter.dropped, exporter.pending) == (6, 0, 0)
    log = KafkaLog(bootstrap_servers, kafka_settings)
    try:
        records = log.read(["spans"], {}, 1_000)
    finally:
        log.close()
    events = [decode(record.value) for record in records]
    assert all(isinstance(event, SpansReceived) and event.tenant == "acme" for event in events)
    assert {record.key for record in records} == {f"acme/{event.trace_id}" for event in events}
    spans = [span for event in events for span in event.spans]
    assert len(spans) == 6
    assert len({span.trace_id for span in spans}) == 3
    chat = next(span for span in spans if span.name == "chat m")
    assert chat.attributes["gen_ai.usage.input_tokens"] == 7
    assert chat.resource["service.name"] == "agents"
    assert "spanloop.policy.version" not in chat.attributes
    assert all(b"my secret prompt" not in record.value for record in records)
    assert all(b"redacted" in record.value for record in records if b"input.messages" in record.value)


def test_content_is_kept_where_the_deployment_says_so(bootstrap_servers, kafka_settings):
    exporter = KafkaSpanExporter(bootstrap_servers, settings=settings_of(kafka_settings, training=True))
    provider = provider_of(exporter)
    run_agent(provider, 1)
    provider.shutdown()
    log = KafkaLog(bootstrap_servers, kafka_settings)
    try:
        assert b"my secret prompt" in log.read(["spans"], {}, 1_000)[0].value
    finally:
        log.close()


def test_it_makes_only_the_topics_that_it_needs(bootstrap_servers, kafka_settings):
    exporter = KafkaSpanExporter(bootstrap_servers, settings=settings_of(kafka_settings))
    provider = provider_of(exporter)
    run_agent(provider, 1)
    provider.shutdown()
    from spanloop.pipeline.log.kafka_cluster import Cluster

    assert set(Cluster(bootstrap_servers, kafka_settings).partitions()) == {"spans", "dead_letters"}


def test_a_host_without_broker_never_waits_and_memory_is_bounded(caplog):
    kafka = Kafka(prefix="p.")
    exporter = KafkaSpanExporter(
        f"127.0.0.1:{free_port()}", settings=settings_of(kafka), spans_max=50, bytes_max=2**20
    )
    provider = provider_of(exporter, SimpleSpanProcessor)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING, "spanloop.exporter"):
        run_agent(provider, 100)
        assert time.monotonic() - began < 2
        assert exporter.pending <= 50
        assert exporter.dropped >= 150
        assert exporter.force_flush(50) is False
        assert exporter.export([]) is SpanExportResult.SUCCESS
        exporter.shutdown(timeout_millis=100)
    assert time.monotonic() - began < 4
    assert (exporter.exported, exporter.dropped, exporter.pending) == (0, 200, 0)
    assert sum("were not sent to Kafka" in line for line in caplog.messages) == 2  # the queue, and the end
    assert exporter.export([]) is SpanExportResult.SUCCESS


def test_spans_wait_for_a_broker_that_comes_later():
    own = Broker()
    settings = settings_of(Kafka(prefix="p.", partitions=1, client={"socket.timeout.ms": "2000"}))
    exporter = KafkaSpanExporter(own.bootstrap, settings=settings)
    provider = provider_of(exporter, SimpleSpanProcessor)
    run_agent(provider, 2)
    time.sleep(0.5)
    own.start()
    try:
        assert exporter.force_flush(30_000)
        assert (exporter.exported, exporter.dropped) == (4, 0)
        log = KafkaLog(own.bootstrap, settings.kafka)
        assert sum(len(event.spans) for event in events_of(log)) == 4
        log.close()
        provider.shutdown()
    finally:
        own.stop()


def test_after_shutdown_spans_are_refused_and_counted(bootstrap_servers, kafka_settings):
    exporter = KafkaSpanExporter(bootstrap_servers, settings=settings_of(kafka_settings))
    provider = provider_of(exporter, SimpleSpanProcessor)
    run_agent(provider, 1)
    exporter.shutdown()
    exporter.shutdown()
    assert exporter.exported == 2
    run_agent(provider, 1)
    assert exporter.dropped == 2


def test_a_span_that_cannot_be_encoded_is_dropped_alone(bootstrap_servers, kafka_settings, monkeypatch):
    exporter = KafkaSpanExporter(bootstrap_servers, settings=settings_of(kafka_settings))
    original = exporter._encoded

    def encoded(spans):
        if any(span.name == "chat m" for span in spans):
            raise ValueError("odd")
        return original(spans)

    monkeypatch.setattr(exporter, "_encoded", encoded)
    provider = provider_of(exporter)
    run_agent(provider, 2)
    provider.shutdown()
    assert (exporter.exported, exporter.dropped) == (2, 2)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_sends_its_own_spans_and_not_its_parents(bootstrap_servers, kafka_settings):
    code = f"""
import os, sys
sys.path.insert(0, "tests")
from spanloop.schemas.settings import Kafka
from integration.test_kafka_exporter import settings_of, provider_of, run_agent, KafkaSpanExporter, SimpleSpanProcessor
exporter = KafkaSpanExporter({bootstrap_servers!r}, settings=settings_of(Kafka(prefix={kafka_settings.prefix!r}, partitions=4)))
provider = provider_of(exporter, SimpleSpanProcessor)
run_agent(provider, 2)
exporter.force_flush()
child = os.fork()
run_agent(provider, 3)
exporter.shutdown()
assert exporter.dropped == 0
if child == 0:
    assert exporter.exported >= 6, exporter.exported
    os._exit(0)
_, status = os.waitpid(child, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    log = KafkaLog(bootstrap_servers, kafka_settings)
    try:
        spans = [span for event in events_of(log) for span in event.spans]
    finally:
        log.close()
    assert len(spans) == len({span.span_id for span in spans}) == 16


def test_without_servers_it_says_what_to_set(monkeypatch):
    monkeypatch.delenv("SPANLOOP_BOOTSTRAP_SERVERS", raising=False)
    with pytest.raises(ConfigError, match="SPANLOOP_BOOTSTRAP_SERVERS"):
        KafkaSpanExporter()


def test_opentelemetry_finds_it_by_name():
    (found,) = entry_points(group="opentelemetry_traces_exporter", name="spanloop_kafka")
    assert found.load() is KafkaSpanExporter


def test_the_import_is_light():
    code = (
        "import sys, spanloop.collectors.span_exporter\n"
        "heavy = {'torch', 'numpy', 'aiohttp', 'duckdb', 'pyarrow', 'mlflow', 'pandas', 'requests', 'faust'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)
