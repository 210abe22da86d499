"""Verbs ``assemble`` (a file of spans or a survey trace -> orchestrations) and ``traces`` (those of a workspace)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import msgspec

from spanloop.pipeline.assembly.batch import assemble_spans
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.orchestration import OrchestrationContent, OrchestrationEvent
from spanloop.schemas.spans import Span

__all__ = ["assemble"]


def orchestration_line(content: OrchestrationContent, revision: int = 1) -> dict[str, Any]:
    """An orchestration as ``assemble`` prints it; times in seconds."""
    return {
        "orchestration_id": content.orchestration_id,
        "revision": revision,
        "events": [_event(event) for event in content.events],
        "edges": [msgspec.to_builtins(edge) for edge in content.edges],
        "agents": [msgspec.to_builtins(agent) for agent in content.agents],
        "tokens": {name: getattr(content.tokens, name) for name in content.tokens.__struct_fields__},
        "traces": list(content.trace_ids),
        "flags": list(content.flags),
    }


def _event(event: OrchestrationEvent) -> dict[str, Any]:
    fields = msgspec.to_builtins(event)
    fields["t"] = fields.pop("t_ns") / 1e9
    return fields


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--ndjson", "form", flag_value="ndjson")
def assemble(path: Path, form: str) -> None:
    from spanloop.pipeline.otlp.files import read_spans
    spans=[]
    for b in read_spans(path): spans.extend(b.spans)
    for c in assemble_spans(spans,"default"):
        click.echo(json.dumps(orchestration_line(c)))
