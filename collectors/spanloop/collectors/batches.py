"""From decoded spans to records of the log: limits and redaction applied, one event per trace of the request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

import msgspec

from spanloop.collectors.deadletters import dead_letter
from spanloop.collectors.direct import DirectWriter
from spanloop.collectors.limits import MAX_SPAN_BYTES, cut_span, fewer_attributes, has_long_keys
from spanloop.collectors.redaction import Redactor
from spanloop.collectors.sealing import Sealer
from spanloop.pipeline.otlp.decode_protobuf import decode_protobuf, parsed
from spanloop.pipeline.otlp.decoded import MAX_NESTING, DecodedBatch, Rejected
from spanloop.pipeline.otlp.log_ids import identified
from spanloop.pipeline.ports import NewRecord, new_record
from spanloop.schemas import topics
from spanloop.schemas.canonical import canonical_json
from spanloop.schemas.events import encode_spans
from spanloop.schemas.spans import Span

__all__ = ["MAX_EVENT_BYTES", "Intake", "Prepared", "label_spans"]

MAX_ATTRIBUTES = 2_048
MAX_EVENT_BYTES = 640 * 1024
"""A trace with more in one request becomes several events, so that a record stays under a broker's usual 1 MB."""


class Prepared(msgspec.Struct):
    """The records of one request, ready to append."""

    records: list[NewRecord]
    """Spans first, then dead letters."""
    num_spans: int
    trace_ids: list[str]
    rejected: list[Rejected]
    ignored: int = 0
    """Log records that say nothing of agents."""


class Intake:
    """Makes records of decoded batches, by the rules of one deployment.

    Args:
        redactor: what may be written.
        max_attribute_bytes: longer values are cut.
        keep_content: whether dead letters keep the refused bytes.
        max_attributes: a span keeps at most so many.
        sealer: keeps what the redactor takes away under keys; None: it is gone.
    """

    def __init__(
        self,
        redactor: Redactor,
        max_attribute_bytes: int,
        *,
        keep_content: bool,
        max_attributes: int = MAX_ATTRIBUTES,
        sealer: Sealer | None = None,
    ) -> None:
        self._sealer = sealer
        self._max_attributes = max_attributes
        self._redactor = redactor
        self._max_attribute_bytes = max_attribute_bytes
        self._keep_content = keep_content
        self._direct: DirectWriter | None = None
        if sealer is None:
            self._direct = DirectWriter(
                redactor,
                self._encoded,
                max_bytes=min(max_attribute_bytes, MAX_SPAN_BYTES),
                max_attributes=max_attributes,
            )

    def take_protobuf(
        self,
        body: bytes,
        *,
        tenant: str,
        source: str,
        max_nesting: int = MAX_NESTING,
        labels: Mapping[str, str] | None = None,
        check: Callable[[int], None] = lambda _: None,
    ) -> Prepared:
        """Records of one OTLP protobuf request of spans: ``decode_protobuf``, then ``prepare``, in one walk where nothing is sealed.

        Args:
            body: the request.
            tenant: of the credential.
            source: which collector it came to.
            max_nesting: levels in one attribute value.
            labels: resource attributes for all of its spans, where they have none of that name.
            check: is told the number of its spans, and may raise.

        Raises:
            SchemaError: it is no such request.
        """
        labels = labels or {}
        request = parsed(body) if self._direct is not None else None
        if request is None or self._direct is None:
            batch = decode_protobuf(body, max_nesting)
            check(len(batch.spans) + len(batch.rejected))
            label_spans(batch, labels)
            return self.prepare(batch, tenant=tenant, source=source)
        check(sum(len(scopes.spans) for group in request.resource_spans for scopes in group.scope_spans))
        written = self._direct.write(request, max_nesting, labels)
        return self._recorded(written.traces, written.rejected, tenant, source, None)

    def prepare(
        self, batch: DecodedBatch, *, tenant: str, source: str, place: Mapping[str, object] | None = None
    ) -> Prepared:
        """Records of ``batch``; the same batch gives the same records, hence the same event ids. ``place``: where it came from,
        for the dead letters."""
        return self.prepare_all([(batch, place)], tenant=tenant, source=source)[0]

    def prepare_all(
        self,
        batches: Sequence[tuple[DecodedBatch, Mapping[str, object] | None]],
        *,
        tenant: str,
        source: str,
    ) -> list[Prepared]:
        """``prepare`` for each batch and its place, with the keys of them all made at once: a key that is durable costs a sync."""
        shown = [[identified(self._redactor.span(raw)) for raw in batch.spans] for batch, _ in batches]
        if self._sealer is not None:
            raw = [span for batch, _ in batches for span in batch.spans]
            sealed = iter(self._sealer.batch(raw, [span for spans in shown for span in spans], tenant))
            shown = [list(islice(sealed, len(spans))) for spans in shown]
        return [
            self._prepared(batch, spans, tenant, source, place)
            for (batch, place), spans in zip(batches, shown, strict=True)
        ]

    def _prepared(
        self,
        batch: DecodedBatch,
        shown: list[Span],
        tenant: str,
        source: str,
        place: Mapping[str, object] | None,
    ) -> Prepared:
        traces: dict[str, list[bytes]] = {}
        for span in shown:
            traces.setdefault(span.trace_id, []).append(self._encoded(span))
        prepared = self._recorded(traces, batch.rejected, tenant, source, place)
        prepared.ignored = batch.ignored
        return prepared

    def _recorded(
        self,
        traces: Mapping[str, list[bytes]],
        rejected: list[Rejected],
        tenant: str,
        source: str,
        place: Mapping[str, object] | None,
    ) -> Prepared:
        records = [
            _record(tenant, trace_id, part, source)
            for trace_id, spans in traces.items()
            for part in _parts(spans)
        ]
        for item in rejected:
            letter = dead_letter(
                item, tenant=tenant, source=source, keep_content=self._keep_content, place=place
            )
            records.append(new_record(letter))
        return Prepared(records, sum(map(len, traces.values())), list(traces), rejected)

    def _encoded(self, span: Span) -> bytes:
        """Canonical JSON of a span within limits. What is small as a whole needs no look inside, but at its keys."""
        if len(span.attributes) > self._max_attributes:
            span = fewer_attributes(span, self._max_attributes)
        encoded = canonical_json(span)
        if len(encoded) <= min(self._max_attribute_bytes, MAX_SPAN_BYTES) and not has_long_keys(span):
            return encoded
        return canonical_json(cut_span(span, self._max_attribute_bytes))


def label_spans(batch: DecodedBatch, labels: Mapping[str, str]) -> None:
    """Give the resources of all spans attributes, where they have none of that name. Spans of one resource share its map."""
    if labels:
        for span in batch.spans:
            for key, value in labels.items():
                span.resource.setdefault(key, value)


def _record(tenant: str, trace_id: str, spans: list[bytes], source: str) -> NewRecord:
    event_id, value = encode_spans(tenant, trace_id, spans, source)
    return NewRecord(topic=topics.SPANS, key=f"{tenant}/{trace_id}", event_id=event_id, value=value)


def _parts(spans: list[bytes]) -> list[list[bytes]]:
    """``spans`` in order, split where an event would grow over MAX_EVENT_BYTES."""
    parts: list[list[bytes]] = []
    part: list[bytes] = []
    total = 0
    for span in spans:
        if part and total + len(span) > MAX_EVENT_BYTES:
            parts.append(part)
            part, total = [], 0
        part.append(span)
        total += len(span)
    parts.append(part)
    return parts
