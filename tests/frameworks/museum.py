"""The scene that every framework plays: a curator prepares a loan, with an archivist, a registrar and a docent."""

from __future__ import annotations

import importlib.metadata
import json
import os
from collections.abc import Callable
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from scripted_model import Play

TASK = "Prepare the loan of the bronze astrolabe."


def catalogue(item: str) -> str:
    """Look an item up in the catalogue."""
    return f"{item}: shelf 12, 1 kg"


def appraise(item: str, insurer: str) -> str:
    """Ask an insurer for the value of an item."""
    if insurer == "closed":
        raise ValueError("the insurer is closed today")
    return f"{item} is worth 900 with {insurer}"


def team(**more: Any) -> Play:
    """A curator asks two sub-agents at once, one of whose tools fails once, and hands over to the docent."""
    return Play(
        entry="curator",
        asks={"ask_archivist": "archivist", "ask_registrar": "registrar"},
        passes={"transfer_to_docent": "docent"},
        turns={
            "curator": [
                [
                    ("ask_archivist", {"input": "where is the astrolabe kept"}),
                    ("ask_registrar", {"input": "what does insuring the astrolabe cost"}),
                ],
                [("transfer_to_docent", {})],
            ],
            "archivist": [[("catalogue", {"item": "astrolabe"})], "It is kept on shelf 12 and weighs 1 kg."],
            "registrar": [
                [("appraise", {"item": "astrolabe", "insurer": "closed"})],
                [("appraise", {"item": "astrolabe", "insurer": "harbour"})],
                "Insured for 900 with harbour.",
            ],
            "docent": ["Label: bronze astrolabe, shelf 12, insured for 900."],
        },
        **more,
    )


class _Seen(SpanProcessor):
    """Notes which traces there were."""

    def __init__(self) -> None:
        self.traces: set[str] = set()

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Note the trace of a span."""
        self.traces.add(f"{span.get_span_context().trace_id:032x}")


def perform(scenes: dict[str, Callable[[TracerProvider], Play]], *packages: str) -> None:
    """Play every scene and print, as the last line, the truth and the trace ids of each.

    Spans go to every receiver of MUSEUM_RECEIVERS, a comma between them.
    """
    traces = TracerProvider(resource=Resource.create({"service.name": "museum"}))
    seen = _Seen()
    traces.add_span_processor(seen)
    for url in os.environ["MUSEUM_RECEIVERS"].split(","):
        traces.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url + "/v1/traces")))
    trace.set_tracer_provider(traces)
    told = {}
    for name, play in scenes.items():
        seen.traces = set()
        told[name] = play(traces).truth() | {"traces": sorted(seen.traces)}
    traces.shutdown()
    versions = {name: importlib.metadata.version(name) for name in packages}
    print("\n" + json.dumps({"scenes": told, "versions": versions}))
