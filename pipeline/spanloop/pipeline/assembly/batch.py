"""Assembly of a closed set of spans: the reference that the stage must agree with."""

from __future__ import annotations

from collections.abc import Iterable

from spanloop.pipeline.assembly.join import Component, Joiner
from spanloop.pipeline.assembly.revise import build_content
from spanloop.pipeline.dialects import encode_operation, operation_of
from spanloop.schemas.orchestration import OrchestrationContent
from spanloop.schemas.spans import Span

__all__ = ["assemble_spans", "join_spans"]


def join_spans(spans: Iterable[Span], tenant: str, source: str = "import") -> list[Component]:
    """The components of ``spans`` that are orchestrations, by first trace id."""
    joiner = Joiner()
    for span in spans:
        operation = operation_of(span, source)
        joiner.add(tenant, operation, encode_operation(operation))
    return [component for component in joiner.components() if component.relevant]


def assemble_spans(spans: Iterable[Span], tenant: str, source: str = "import") -> list[OrchestrationContent]:
    """Orchestrations of ``spans``, by start and id. ``source`` as in SpansReceived: "gateway" and
    "import" are believed where they say which policy version answered."""
    contents = [build_content(component) for component in join_spans(spans, tenant, source)]
    return sorted(contents, key=lambda content: (content.started_ns, content.orchestration_id))
