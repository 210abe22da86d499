"""From decoded spans to records of the log: limits and redaction applied, one event per trace of the request."""

from __future__ import annotations

import msgspec

from spanloop.collectors.deadletters import dead_letter
from spanloop.collectors.limits import cut_span
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.otlp.decoded import DecodedBatch
from spanloop.pipeline.ports import NewRecord, new_record
from spanloop.schemas.events import SpansReceived
from spanloop.schemas.spans import Span

__all__ = ["MAX_EVENT_BYTES", "Intake", "Prepared"]

MAX_EVENT_BYTES = 640 * 1024
"""A trace with more in one request becomes several events, so that a record stays under a broker's usual 1 MB."""


class Prepared(msgspec.Struct):
    """The records of one request, ready to append."""

    records: list[NewRecord]
    """Spans first, then dead letters."""
    num_spans: int
    trace_ids: list[str]


class Intake:
    """Makes records of decoded batches, by the rules of one deployment.

    Args:
        redactor: what may be written.
        max_attribute_bytes: longer values are cut.
        keep_content: whether dead letters keep the refused bytes.
    """

    def __init__(self, redactor: Redactor, max_attribute_bytes: int, *, keep_content: bool) -> None:
        self._redactor = redactor
        self._max_attribute_bytes = max_attribute_bytes
        self._keep_content = keep_content

    def prepare(self, batch: DecodedBatch, *, tenant: str, source: str) -> Prepared:
        """Records of ``batch``; the same batch gives the same records, hence the same event ids."""
        traces: dict[str, list[tuple[Span, int]]] = {}
        for raw in batch.spans:
            sized = cut_span(self._redactor.span(raw), self._max_attribute_bytes)
            traces.setdefault(raw.trace_id, []).append(sized)
        records = [
            new_record(SpansReceived(tenant=tenant, trace_id=trace_id, spans=part, source=source))
            for trace_id, spans in traces.items()
            for part in _parts(spans)
        ]
        for rejected in batch.rejected:
            letter = dead_letter(rejected, tenant=tenant, source=source, keep_content=self._keep_content)
            records.append(new_record(letter))
        return Prepared(records, len(batch.spans), list(traces))


def _parts(spans: list[tuple[Span, int]]) -> list[tuple[Span, ...]]:
    """``spans`` (each with its size) in order, split where an event would grow over MAX_EVENT_BYTES."""
    parts: list[tuple[Span, ...]] = []
    part: list[Span] = []
    total = 0
    for span, size in spans:
        if part and total + size > MAX_EVENT_BYTES:
            parts.append(tuple(part))
            part, total = [], 0
        part.append(span)
        total += size
    parts.append(tuple(part))
    return parts
