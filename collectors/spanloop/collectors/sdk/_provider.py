"""A TracerProvider from OpenTelemetry's own variables, for a host that has none.

OTEL_TRACES_EXPORTER (names of entry points, ``otlp`` by default, ``none``), OTEL_EXPORTER_OTLP_PROTOCOL, OTEL_EXPORTER_OTLP_*,
OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES, OTEL_SDK_DISABLED and the batch processor's variables mean what they mean elsewhere.
"""

from __future__ import annotations

import os
import platform
from importlib import metadata

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor

from spanloop.collectors.sdk._failures import failed

__all__ = ["provider_of_host"]

_GROUP = "opentelemetry_traces_exporter"


def provider_of_host() -> trace.TracerProvider:
    """The provider that the host has set; else one made from the environment, which becomes the global one."""
    current = trace.get_tracer_provider()
    if not isinstance(current, trace.ProxyTracerProvider):
        return current
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return trace.NoOpTracerProvider()
    provider = TracerProvider(
        resource=Resource.create(
            {
                "process.runtime.name": platform.python_implementation().lower(),
                "process.runtime.version": platform.python_version(),
            }
        )
    )
    for name in _exporters():
        try:
            (found,) = metadata.entry_points(group=_GROUP, name=name)
            exporter = found.load()()
        except Exception as exc:
            failed(
                f"the exporter {name[:32]}"
                if name in _KNOWN
                else "an exporter that OTEL_TRACES_EXPORTER names",
                exc,
            )
            continue
        processor = SimpleSpanProcessor if name == "console" else BatchSpanProcessor
        provider.add_span_processor(processor(exporter))
    trace.set_tracer_provider(provider)
    return trace.get_tracer_provider()


_KNOWN = ("otlp_proto_http", "otlp_proto_grpc", "console", "spanloop_kafka")


def _exporters() -> list[str]:
    wanted = os.environ.get("OTEL_TRACES_EXPORTER", "").strip() or "otlp"
    protocol = (
        os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL")
        or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "http/protobuf"
    ).strip()
    otlp = "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"
    names = [name.strip() for name in wanted.split(",")]
    return [otlp if name == "otlp" else name for name in names if name and name != "none"]
