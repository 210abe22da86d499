"""OTLP records (traces and logs) of the OpenTelemetry Collector's Kafka exporter, into the topic ``spans``.

Place in the flow: beside the receiver, for deployments whose spans are on Kafka already. A record is one export request,
``otlp_proto`` or ``otlp_json``, keyed or not, of any number of traces; limits, allow-list and redaction are the receiver's.

Invariants: offsets are committed after the append, so that a kill costs a repetition (which readers skip), never a span; a
record that cannot be read becomes a dead letter with topic, partition and offset, and its neighbours go on; records that are
gone before they were read stop the process, or are skipped with a warning where that was asked for.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence

import msgspec
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from spanloop.collectors.batches import Intake
from spanloop.collectors.deadletters import dead_letter
from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.pipeline.log.kafka_cluster import Cluster
from spanloop.pipeline.log.kafka_read import fetched_end
from spanloop.pipeline.otlp.decode_any import decode_any_json, decode_any_protobuf
from spanloop.pipeline.otlp.decoded import DecodedBatch, Rejected
from spanloop.pipeline.ports import NewRecord, new_record
from spanloop.schemas.errors import (
    ConfigError,
    SchemaError,
    SpanloopError,
    TerminalError,
    TransientError,
)
from spanloop.schemas.settings import Settings

__all__ = ["DEFAULT_TOPICS", "ENCODINGS", "Ingested", "Ingestor", "read_request"]

DEFAULT_TOPICS = ("otlp_spans",)
"""Where the Collector's Kafka exporter writes traces unless told otherwise."""
ENCODINGS = ("auto", "otlp_proto", "otlp_json")
BATCH_RECORDS = 100
WAIT_S = 0.2
PAUSE_MAX_S = 10.0
_JSON_SPACE = b" \t\r\n"

_log = logging.getLogger("spanloop.ingest")


class Ingested(msgspec.Struct):
    """What became of the records."""

    records: int = 0
    """Records of the Collector."""
    spans: int = 0
    """Spans appended."""
    refused: int = 0
    """Spans or whole records that became dead letters."""
    skipped: int = 0
    """Records that were gone before they were read."""


def read_request(value: bytes, encoding: str, max_nesting: int) -> DecodedBatch:
    """Spans or log records of one record.

    Args:
        value: an ExportTraceServiceRequest or ExportLogsServiceRequest (or TracesData, LogsData, the same on the wire).
        encoding: one of ENCODINGS; auto looks at the bytes.
        max_nesting: levels in one attribute value.

    Raises:
        SchemaError: it is no such request at all.
    """
    if encoding == "otlp_json" or (encoding == "auto" and _looks_like_json(value)):
        return decode_any_json(value, max_nesting)
    return decode_any_protobuf(value, max_nesting)


def _looks_like_json(value: bytes) -> bool:
    """A request in protobuf begins with byte 10, which JSON may have too, as a line feed: then the end decides as well."""
    if value[:1] == b"{":
        return True
    return value.lstrip(_JSON_SPACE)[:1] == b"{" and value.rstrip(_JSON_SPACE)[-1:] == b"}"


class Ingestor:
    """Consumes the Collector's topics.

    Args:
        settings: limits, tenant, Kafka.
        log: where spans go.
        intake: the collector's rules.
        topics: names of topics, as they are (without our prefix).
        encoding: one of ENCODINGS.
        group: consumer group: several processes of one group share the partitions.
        on_lost: "raise" or "skip", where records are gone before they were read.
    """

    def __init__(
        self,
        settings: Settings,
        log: KafkaLog,
        intake: Intake,
        *,
        topics: Sequence[str],
        encoding: str = "auto",
        group: str = "ingest",
        on_lost: str = "raise",
    ) -> None:
        self._settings = settings
        self._log = log
        self._intake = intake
        self._topics = tuple(topics)
        self._encoding = encoding
        self._skip = on_lost == "skip"
        self._cluster: Cluster = log.cluster
        session_ms = int(settings.process.session_timeout_s * 1000)
        self._consumer: Consumer = self._cluster.consumer(
            settings.kafka.prefix + group,
            **{
                "enable.partition.eof": True,
                "session.timeout.ms": session_ms,
                "heartbeat.interval.ms": session_ms // 3,
                "max.poll.interval.ms": 3_600_000,
                "topic.metadata.refresh.interval.ms": 5_000,
            },
        )
        self._ended: set[tuple[str, int]] = set()
        self._problem: SpanloopError | None = None
        self.done = Ingested()

    def follow(self, stop: threading.Event, progress: Callable[[Ingested], None] = lambda _: None) -> None:
        """Share the partitions with the group's other members until ``stop``.

        Raises:
            TerminalError: records are gone before they were read.
            ConfigError: Kafka refuses the credentials.
        """
        self._consumer.subscribe(list(self._topics), on_assign=lambda _, places: self._assigned(places))
        while not stop.is_set():
            self._step(stop)
            progress(self.done)

    def once(self, stop: threading.Event, progress: Callable[[Ingested], None] = lambda _: None) -> None:
        """All partitions up to their ends.

        Raises:
            ConfigError: a topic does not exist.
            TerminalError: records are gone before they were read.
            TransientError: no broker answers.
        """
        places = self._places()
        self._assigned(places)
        wanted = {(place.topic, place.partition) for place in places}
        while not stop.is_set() and not self._ended >= wanted:
            self._step(stop)
            progress(self.done)

    def close(self) -> None:
        """Leave the group."""
        self._consumer.close()

    # ------------------------------------------------------------ places

    def _places(self) -> list[TopicPartition]:
        try:
            known = self._cluster.admin().list_topics(timeout=10).topics
        except KafkaException as exc:
            raise self._cluster.translated(exc) from exc
        missing = [topic for topic in self._topics if topic not in known or not known[topic].partitions]
        if missing:
            raise ConfigError(
                f"no topic {', '.join(missing)} on {self._cluster.servers}: name the topics that the Collector's Kafka "
                "exporter writes to with --topic or kafka.otlp_topics"
            )
        return [
            TopicPartition(topic, partition)
            for topic in self._topics
            for partition in known[topic].partitions
        ]

    def _assigned(self, places: list[TopicPartition]) -> None:
        """Start each partition behind what was committed, or at the first record there is."""
        try:
            committed = self._consumer.committed(places, timeout=10)
            self._consumer.assign([self._start(place) for place in committed])
        except KafkaException as exc:
            self._problem = self._cluster.translated(exc)
        except SpanloopError as exc:
            self._problem = exc
        self._ended.clear()

    def _start(self, place: TopicPartition) -> TopicPartition:
        low, high = self._watermarks(place)
        wanted = place.offset
        if wanted < 0:
            wanted = low
        elif wanted < low:
            self._gone(place, wanted, low)
            wanted = low
        elif wanted > high:  # some brokers list an end that lags
            other = self._cluster.consumer("spanloop-ends", **{"enable.partition.eof": True})
            try:
                end = fetched_end(other, place) + 1
            finally:
                other.close()
            if wanted > end:
                raise TerminalError(
                    f"{place.topic}/{place.partition} ends before offset {wanted - 1}, which was read already: did Kafka lose "
                    "its data? Give another --group to read it from the start (docs/kafka.md)"
                )
        return TopicPartition(place.topic, place.partition, wanted)

    def _watermarks(self, place: TopicPartition) -> tuple[int, int]:
        low, high = self._consumer.get_watermark_offsets(place, timeout=10)
        return low, high

    def _gone(self, place: TopicPartition, wanted: int, low: int) -> None:
        text = f"{place.topic}/{place.partition}: records {wanted} to {low - 1} were deleted (retention) before they were read"
        if not self._skip:
            raise TerminalError(
                f"{text}: their spans are lost. Go on behind them with --on-lost skip; lengthen the topic's retention",
                wanted=wanted,
                first=low,
            )
        self.done.skipped += low - wanted
        _log.warning("%s and are skipped", text)

    # ------------------------------------------------------------ records

    def _step(self, stop: threading.Event) -> None:
        """One batch: decode, append, commit."""
        messages = self._consumer.consume(BATCH_RECORDS, WAIT_S) or []
        if self._problem is not None:
            raise self._problem
        good = [message for message in messages if self._is_record(message)]
        if not good:
            return
        records: list[NewRecord] = []
        spans = refused = 0
        for message in good:
            batch, place = self._decoded(message)
            prepared = self._intake.prepare(batch, tenant=self._settings.tenant, source="ingest", place=place)
            records += prepared.records
            spans += prepared.num_spans
            refused += len(batch.rejected)
        if not self._append(records, stop):
            return  # stopped while Kafka did not answer: read again next time
        self._commit(good)
        self.done.records += len(good)
        self.done.spans += spans
        self.done.refused += refused

    def _is_record(self, message: Message) -> bool:
        error = message.error()
        here = (message.topic() or "", message.partition() or 0)
        if error is None:
            self._ended.discard(here)
            return True
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            self._ended.add(here)
        elif code in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            at = next(iter(self._consumer.position([TopicPartition(*here)])))
            self._consumer.seek(self._start(at))
        elif code in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC):
            _log.info("waiting for topic %s", here[0])
        elif error.fatal() or code in (
            KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED,
        ):  # fmt: skip
            raise self._cluster.translated(KafkaException(error))
        else:
            _log.warning("Kafka: %s", error.str())
        return False

    def _decoded(self, message: Message) -> tuple[DecodedBatch, dict[str, object]]:
        """Spans of a record and where it stands; a record that cannot be read is one refusal."""
        found = message.value() or b""
        value = found if isinstance(found, bytes) else found.encode()
        place: dict[str, object] = {
            "topic": message.topic() or "",
            "partition": message.partition() or 0,
            "offset": message.offset() or 0,
        }
        limits = self._settings.collector
        if len(value) > limits.max_expanded_bytes:
            reason = f"the record has {len(value)} bytes, at most {limits.max_expanded_bytes} (collector.max_expanded_bytes)"
            return DecodedBatch([], [Rejected(reason, value, "limit")]), place
        if not value:
            return DecodedBatch([], [Rejected("the record is empty", value, "request")]), place
        try:
            return read_request(value, self._encoding, limits.max_nesting), place
        except SchemaError as exc:
            return DecodedBatch([], [Rejected(exc.message, value, "request")]), place

    def _append(self, records: list[NewRecord], stop: threading.Event) -> bool:
        """Until Kafka has them; False when stopped before."""
        pause_s = 0.25
        while True:
            try:
                self._log.append(records)
                return True
            except SchemaError as exc:  # one of them is larger than the brokers take
                if len(records) == 1:
                    self._refuse(records[0], exc)
                    return True
                return all(self._append([record], stop) for record in records)
            except TransientError as exc:
                _log.warning("spans wait for Kafka (again in %.1f s): %s", pause_s, exc.message)
            if stop.wait(pause_s):
                return False
            pause_s = min(2 * pause_s, PAUSE_MAX_S)

    def _refuse(self, record: NewRecord, problem: SchemaError) -> None:
        self.done.refused += 1
        letter = dead_letter(
            Rejected(problem.message, record.value, "limit"), tenant=self._settings.tenant, source="ingest", keep_content=False
        )  # fmt: skip
        self._log.append([new_record(letter)])

    def _commit(self, messages: Iterable[Message]) -> None:
        last = {(m.topic() or "", m.partition() or 0): (m.offset() or 0) + 1 for m in messages}
        places = [TopicPartition(topic, partition, offset) for (topic, partition), offset in last.items()]
        try:
            self._consumer.commit(offsets=places, asynchronous=False)
        except (
            KafkaException
        ) as exc:  # given to another member meanwhile: it reads them again, which costs time only
            _log.warning("offsets were not committed, their records may be read again: %s", exc.args[0].str())
