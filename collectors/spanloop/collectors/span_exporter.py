"""An exporter of the OpenTelemetry SDK that writes spans straight to Kafka, without a receiver in between.

Place in the flow: inside the agent's process, in place of an OTLP exporter; what it writes to the topic ``spans`` is what the
receiver would have written: limits, allow-list and redaction are applied before anything leaves the process.

Invariants: the host never waits for Kafka and never sees an exception; memory is bounded (a full queue drops the newest spans,
counts them and says so now and then); what was queued is sent again until the brokers have it, so a record may come twice and
counts once. A forked child starts with an empty queue: its parent sends what was in it.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from opentelemetry.context import _SUPPRESS_INSTRUMENTATION_KEY, attach, set_value
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from spanloop.collectors.batches import Intake
from spanloop.collectors.redaction import Redactor
from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.pipeline.ports import NewRecord
from spanloop.schemas import topics
from spanloop.schemas.errors import ConfigError, SpanloopError
from spanloop.schemas.settings import Settings, load_settings

__all__ = ["KafkaSpanExporter"]

NEEDS = (topics.SPANS, topics.DEAD_LETTERS)
SPANS_MAX = 20_000
BYTES_MAX = 64 * 2**20
BATCH_SPANS = 1_000
DELIVERY_S = 10.0
PAUSE_FIRST_S = 0.25
PAUSE_MAX_S = 15.0
REPORT_S = 10.0
"""Drops are reported this often at most."""

_log = logging.getLogger("spanloop.exporter")
_abandoned: list[object] = []
"""Clients of a parent process: their threads are not here, so that closing them would wait for ever."""


class KafkaSpanExporter(SpanExporter):
    """Sends ended spans to the topic ``spans`` of a Kafka cluster.

    Args:
        bootstrap_servers: ``host:port,...``; empty: the settings'.
        settings: content rules, limits, tenant, names of topics. Default: defaults and SPANLOOP_ variables.
        tenant: of the spans. Default: the settings' tenant.
        spans_max: spans that wait for Kafka at most.
        bytes_max: roughly their bytes.

    Raises:
        ConfigError: there are no bootstrap servers, or a setting is wrong. Nothing else is ever raised.

    Example::

        provider.add_span_processor(BatchSpanProcessor(KafkaSpanExporter("kafka:9092")))
    """

    def __init__(
        self,
        bootstrap_servers: str = "",
        *,
        settings: Settings | None = None,
        tenant: str = "",
        spans_max: int = SPANS_MAX,
        bytes_max: int = BYTES_MAX,
    ) -> None:
        self._settings = settings or load_settings()
        self._servers = bootstrap_servers or self._settings.bootstrap_servers
        if not self._servers:
            raise ConfigError(
                "no Kafka to export spans to: give bootstrap_servers, or set SPANLOOP_BOOTSTRAP_SERVERS=host:port"
            )
        self._tenant = tenant or self._settings.tenant
        content = self._settings.content
        self._intake = Intake(
            Redactor(content, _hash_key(self._settings)),
            self._settings.collector.max_attribute_bytes,
            keep_content=content.clear,
        )
        self._spans_max = spans_max
        self._bytes_max = bytes_max
        self._reported = 0
        self._report_at = 0.0
        self.exported = 0
        """Spans that Kafka has acknowledged."""
        self.dropped = 0
        """Spans that were never sent: the queue was full, they could not be encoded, or the process ended."""
        self._log: KafkaLog | None = None
        self._reset()
        os.register_at_fork(after_in_child=_method(weakref.WeakMethod(self._forked)))

    def _reset(self) -> None:
        self._queue: deque[tuple[ReadableSpan, int]] = deque()
        self._bytes = 0
        self._busy = 0
        """Spans that are being sent."""
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closing = False

    def _forked(self) -> None:
        _abandoned.append(self._log)
        self._log = None
        self._reset()

    @property
    def pending(self) -> int:
        """Spans that wait or are being sent."""
        return len(self._queue) + self._busy

    # ------------------------------------------------------------ the host's side

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Queue spans; never waits. FAILURE when some had to be dropped."""
        dropped = 0
        with self._changed:
            for span in spans:
                size = _rough_size(span)
                full = (
                    len(self._queue) + self._busy >= self._spans_max or self._bytes + size > self._bytes_max
                )
                if full or self._closing:
                    dropped += 1
                    continue
                self._queue.append((span, size))
                self._bytes += size
            self.dropped += dropped
            if self._thread is None and self._queue:
                self._thread = threading.Thread(target=self._work, name="spanloop-exporter", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if dropped:
            self._report("the queue is full" if not self._closing else "the exporter is shut down")
        return SpanExportResult.FAILURE if dropped else SpanExportResult.SUCCESS

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Wait until Kafka has all that was queued; False when that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.pending, timeout_millis / 1000)

    def shutdown(self, timeout_millis: int = 10_000) -> None:
        """Send what waits, for so long at most; what is left then is dropped and counted."""
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout_millis / 1000)
        with self._changed:
            left = self.pending
            self.dropped += left
            self._queue.clear()
            self._bytes = self._busy = 0
        if left:
            self._report("the process ended before Kafka took them", always=True)

    def _report(self, why: str, *, always: bool = False) -> None:
        now = time.monotonic()
        if not always and now < self._report_at:
            return
        self._report_at = now + REPORT_S
        fresh, self._reported = self.dropped - self._reported, self.dropped
        _log.warning("%d spans were not sent to Kafka at %s: %s", fresh, self._servers, why)

    # ------------------------------------------------------------ the thread's side

    def _work(self) -> None:
        attach(set_value(_SUPPRESS_INSTRUMENTATION_KEY, True))
        while True:
            batch = self._take()
            if batch is None:
                break
            sent = self._send(self._records(batch))
            with self._changed:
                if not sent:
                    break
                self.exported += self._busy
                self._busy = 0
                self._changed.notify_all()
        if self._log is not None:
            self._log.close()

    def _take(self) -> list[ReadableSpan] | None:
        """The next spans; None: shut down and nothing waits."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                return None
            batch = []
            while self._queue and len(batch) < BATCH_SPANS:
                span, size = self._queue.popleft()
                self._bytes -= size
                batch.append(span)
            self._busy = len(batch)
            return batch

    def _records(self, spans: list[ReadableSpan]) -> list[NewRecord]:
        """Records of spans; one that cannot be encoded is dropped alone."""
        try:
            return self._encoded(spans)
        except Exception as exc:
            if len(spans) > 1:
                return [record for span in spans for record in self._records([span])]
            with self._changed:
                self.dropped += 1
                self._busy -= 1
            self._report(f"cannot be encoded ({type(exc).__name__})")
            return []

    def _encoded(self, spans: list[ReadableSpan]) -> list[NewRecord]:
        request, most = encode_spans(spans).SerializeToString(), self._settings.collector.max_nesting
        return self._intake.take_protobuf(
            request, tenant=self._tenant, source="sdk", max_nesting=most
        ).records

    def _send(self, records: list[NewRecord]) -> bool:
        """Send until Kafka has all; False: the exporter is shut down and Kafka does not answer."""
        pause_s = PAUSE_FIRST_S
        while records:
            try:
                if self._log is None:
                    self._log = KafkaLog(
                        self._servers, self._settings.kafka, delivery_s=DELIVERY_S, needs=NEEDS
                    )
                self._log.append(records)
                return True
            except Exception as exc:
                message = exc.message if isinstance(exc, SpanloopError) else type(exc).__name__
                if self._closing:
                    return False
                _log.warning("spans wait for Kafka (again in %.1f s): %s", pause_s, message)
            with self._changed:
                self._changed.wait_for(lambda: self._closing, pause_s)
            pause_s = min(2 * pause_s, PAUSE_MAX_S)
        return True


def _rough_size(span: ReadableSpan) -> int:
    """Bytes that a span holds, about."""
    size = 500
    for part in (span.attributes, *(event.attributes for event in span.events)):
        for key, value in (part or {}).items():
            size += len(key) + 16 + (len(value) if isinstance(value, str | bytes | list | tuple) else 0)
    return size


def _hash_key(settings: Settings) -> bytes:
    """The deployment's key where it is known here; else one of this process."""
    given = settings.content.hmac_key.get_secret_value()
    if given or (settings.workspace / "hmac.key").exists():
        from spanloop.collectors.redaction import workspace_key

        return workspace_key(settings)
    if not settings.content.clear:
        _log.warning(
            "content.hmac_key is not set: the hashes of dropped texts are comparable within this process only; set "
            "SPANLOOP_CONTENT__HMAC_KEY to the same long random text in all agents"
        )
    return secrets.token_hex(32).encode()


def _method(weak: weakref.WeakMethod[Callable[[], None]]) -> Callable[[], None]:
    def call() -> None:
        method = weak()
        if method is not None:
            method()

    return call
