"""The first stage of the partitioned runtime: spans as they came -> operations on their way to the owner of their trace.

Stateless, so that any partitioning of ``spans`` is right, also none. Feedback is sent to the owner of what it names; feedback on a
span whose trace the scorer does not name goes to every partition, one of which answers for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping

from spanloop.pipeline.assembly.stage import refused_record, refused_span
from spanloop.pipeline.credit.value import dead_letter
from spanloop.pipeline.dialects import encode_operation, operation_of
from spanloop.pipeline.ports import LogRecord, StageOutput
from spanloop.pipeline.rewards.outcome import is_usable
from spanloop.pipeline.signal import unusable
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import Event, FeedbackReceived, SpansReceived, decode
from spanloop.schemas.operations import FeedbackRouted, OperationsRead

__all__ = ["NormaliseStage", "route"]


class NormaliseStage:
    """``Stage`` without state.

    Args:
        partitions: of the topic ``operations``.
    """

    name = "normalise"

    def __init__(self, partitions: int) -> None:
        self.topics: tuple[str, ...] = (topics.SPANS, topics.FEEDBACK)
        self._partitions = partitions

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """There is no state."""

    def process(self, records: Iterable[LogRecord], now_ns: int) -> StageOutput:
        """Read spans in their dialects and send them on."""
        output = StageOutput()
        for record in records:
            feedback = record.topic == topics.FEEDBACK
            try:
                event = decode(record.value)
            except SchemaError as exc:
                refused = dead_letter if feedback else refused_record
                output.events.append(refused(record, exc.message))
                continue
            if isinstance(event, SpansReceived) and not feedback:
                self._spans(event, output)
            elif isinstance(event, FeedbackReceived) and feedback:
                if is_usable(event.value):
                    output.events += route(event, self._partitions)
                else:
                    output.events.append(dead_letter(record, unusable(event)))
        return output

    def _spans(self, event: SpansReceived, output: StageOutput) -> None:
        by_trace: dict[str, list[bytes]] = {}
        for span in event.spans:
            try:
                operation = operation_of(span, event.source)
                encoded = encode_operation(operation)
            except Exception as exc:
                output.events.append(refused_span(event.tenant, span, exc))
            else:
                by_trace.setdefault(operation.trace_id, []).append(encoded)
        for trace_id, operations in by_trace.items():
            output.events.append(
                OperationsRead(tenant=event.tenant, trace_id=trace_id, operations=tuple(operations))
            )

    def tick(self, now_ns: int) -> StageOutput:
        """No timers."""
        return StageOutput()

    def next_timer_ns(self) -> int | None:
        """No timers."""
        return None


def route(event: FeedbackReceived, partitions: int) -> list[Event]:
    """Feedback to the owner of its target."""
    if event.target_kind == "trace":
        to = event.target_id
    elif event.target_kind == "span" and event.trace_id:
        to = event.trace_id
    elif event.target_kind == "response":
        to = f"r/{event.target_id}"
    elif event.target_kind == "orchestration":
        to = f"orchestration/{event.target_id}"
    else:
        to = f"span/{event.target_id}"
        answers = zlib.crc32(f"{event.tenant}/{to}".encode()) % partitions
        return [
            FeedbackRouted(tenant=event.tenant, feedback=event, to=to, partition=n, answers=answers)
            for n in range(partitions)
        ]
    return [FeedbackRouted(tenant=event.tenant, feedback=event, to=to)]
