"""From the body of an OTLP request to durable events: what HTTP and gRPC share.

Flow: decompress, decode, limits and redaction, group commit. Invariants: ``take`` returns only after the durable
append; a bad item is refused alone and becomes a dead letter; the tenant is the credential's.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import msgspec

from spanloop.collectors.auth import Identity
from spanloop.collectors.batches import Intake, Prepared, label_spans
from spanloop.collectors.bodies import PROTOBUF, ArrivingBodies, Encodings
from spanloop.collectors.commit import GroupCommitter
from spanloop.collectors.evaluations import scores_of
from spanloop.collectors.limits import BodyTooLargeError, expand
from spanloop.collectors.metrics import Metrics
from spanloop.collectors.redaction import Redactor
from spanloop.collectors.sealing import open_sealer
from spanloop.pipeline.otlp.decode_json import decode_json
from spanloop.pipeline.otlp.decode_logs_json import decode_logs_json
from spanloop.pipeline.otlp.decode_logs_protobuf import decode_logs_protobuf
from spanloop.pipeline.otlp.decode_protobuf import decode_protobuf
from spanloop.pipeline.otlp.decoded import DecodedBatch
from spanloop.pipeline.ports import Clock, Log, NewRecord, new_record
from spanloop.schemas import topics
from spanloop.schemas.settings import Settings

__all__ = ["LABEL_HEADERS", "SIGNALS", "Answer", "Reception", "Signal", "labels_of"]

_INLINE_BYTES = 64 * 1024
"""A plain body up to this size is decoded in the event loop; others would keep it for too long."""
_SEEN_TRACES = 100_000
LABEL_HEADERS = {"x-mlflow-experiment-id": "mlflow.experiment_id"}
"""Headers that users' exporters send already, and the resource attribute under which each is kept."""
_LABEL = re.compile(r"[\w.\- ]{1,128}\Z", re.ASCII)


class Signal(NamedTuple):
    """One kind of OTLP request."""

    items: str
    """What it carries, for messages."""
    rejected_field: str
    """Name of the count in partial success, in OTLP/JSON."""
    protobuf: Callable[[bytes, int], DecodedBatch]
    json: Callable[[bytes, int], DecodedBatch]


SIGNALS = {
    "traces": Signal("spans", "rejectedSpans", decode_protobuf, decode_json),
    "logs": Signal("log records", "rejectedLogRecords", decode_logs_protobuf, decode_logs_json),
}


class Answer(msgspec.Struct, frozen=True):
    """What became of an accepted request."""

    rejected: int = 0
    message: str = ""
    """Why some were refused; for the sender only."""


class Reception:
    """Takes OTLP requests into one log.

    Args:
        settings: limits, content rules.
        log: where accepted events go.
        key: key of the hash left where a text was dropped.
        clock: tells when an evaluation arrived.
    """

    def __init__(self, settings: Settings, log: Log, key: bytes, clock: Clock) -> None:
        self.limits = settings.collector
        self._clock = clock
        self.redactor = Redactor(settings.content, key)
        self.metrics = Metrics()
        self.budget = ArrivingBodies(4 * self.limits.max_expanded_bytes)
        self.committer = GroupCommitter(
            log,
            group_s=self.limits.group_commit_ms / 1e3,
            queue_max=self.limits.queue_max,
            observe=self.metrics.commit,
        )
        self._intake = Intake(
            self.redactor,
            self.limits.max_attribute_bytes,
            keep_content=settings.content.clear,
            max_attributes=self.limits.max_attributes,
            sealer=open_sealer(settings),
        )
        self._decoder = ThreadPoolExecutor(1, thread_name_prefix="spanloop-decode")
        self._seen: OrderedDict[tuple[str, str], None] = OrderedDict()

    def start(self) -> None:
        """Start committing; call it inside the event loop."""
        self.committer.start()

    async def close(self) -> None:
        """Append what was accepted, then stop."""
        await self.committer.close()
        self._decoder.shutdown()

    def seen(self, tenant: str, trace_id: str) -> bool:
        """Whether spans of a trace have come lately."""
        return (tenant, trace_id) in self._seen

    async def take(
        self, signal: Signal, body: bytes, coding: Encodings, identity: Identity, labels: Mapping[str, str]
    ) -> Answer:
        """Make the items of one request durable. ``labels``: resource attributes that its headers gave.

        Raises:
            BodyTooLargeError: over a limit, once expanded or by its number of items.
            SchemaError: it is no such request, or not compressed as it says.
            TransientError: the queue is full (QueueFullError), or the log refuses.
        """
        self.committer.check_room()
        self.metrics.add("spanloop_received_bytes_total", len(body))
        if coding.codings or len(body) > _INLINE_BYTES:
            loop = asyncio.get_running_loop()
            prepared = await loop.run_in_executor(
                self._decoder, self._decode, signal, body, coding, identity, labels
            )
        else:
            prepared = self._decode(signal, body, coding, identity, labels)
        appended = await self.committer.append(prepared.records)
        self._count(prepared, sum(a.duplicate for a in appended), identity)
        rejected = len(prepared.rejected)
        if not rejected:
            return Answer()
        reasons = list(dict.fromkeys(r.reason for r in prepared.rejected))
        more = f"; and {len(reasons) - 5} more reasons" if len(reasons) > 5 else ""
        message = f"{rejected} {signal.items} were refused: " + "; ".join(r[:300] for r in reasons[:5]) + more
        return Answer(rejected, message)

    def _decode(
        self, signal: Signal, body: bytes, coding: Encodings, identity: Identity, labels: Mapping[str, str]
    ) -> Prepared:
        for name in coding.codings:
            body = expand(body, name, self.limits.max_expanded_bytes)
        if signal is SIGNALS["traces"] and coding.content_type == PROTOBUF:
            return self._intake.take_protobuf(
                body,
                tenant=identity.tenant,
                source="otlp",
                max_nesting=self.limits.max_nesting,
                labels=labels,
                check=lambda count: self._check_count(count, signal),
            )
        decode = signal.protobuf if coding.content_type == PROTOBUF else signal.json
        batch = decode(body, self.limits.max_nesting)
        self._check_count(len(batch.spans) + len(batch.rejected) + batch.ignored, signal)
        label_spans(batch, labels)
        scores: list[NewRecord] = []
        if signal is SIGNALS["logs"]:
            found = scores_of(batch.spans, identity, self._clock.now_ns(), self.redactor)
            batch.rejected += found.rejected
            scores = [new_record(event) for event in found.events]
        prepared = self._intake.prepare(batch, tenant=identity.tenant, source="otlp")
        prepared.records += scores
        return prepared

    def _check_count(self, count: int, signal: Signal) -> None:
        if count > self.limits.max_spans_per_request:
            raise BodyTooLargeError(
                f"{count} {signal.items} in one request, at most {self.limits.max_spans_per_request} "
                "(collector.max_spans_per_request): send smaller batches"
            )

    def _count(self, prepared: Prepared, duplicates: int, identity: Identity) -> None:
        self.metrics.add("spanloop_spans_accepted_total", prepared.num_spans)
        self.metrics.add("spanloop_events_duplicate_total", duplicates)
        if prepared.ignored:
            self.metrics.add("spanloop_log_records_ignored_total", prepared.ignored)
        if scores := sum(record.topic == topics.FEEDBACK for record in prepared.records):
            self.metrics.add("spanloop_feedback_accepted_total", scores)
        for rejected in prepared.rejected:
            self.metrics.add("spanloop_spans_rejected_total", kind=rejected.kind)
        for trace_id in prepared.trace_ids:
            self._seen[identity.tenant, trace_id] = None
            self._seen.move_to_end((identity.tenant, trace_id))
        while len(self._seen) > _SEEN_TRACES:
            self._seen.popitem(last=False)


def labels_of(headers: Mapping[str, str]) -> dict[str, str]:
    """Resource attributes that the headers of a request give; what is no plain label is left out.

    >>> labels_of({"x-mlflow-experiment-id": "7"})
    {'mlflow.experiment_id': '7'}
    """
    found: dict[str, str] = {}
    for header, key in LABEL_HEADERS.items():
        value = headers.get(header)
        if value is not None and _LABEL.match(value):
            found[key] = value
    return found
