"""The partitions that one process has: which stage belongs to a source, taking over and giving up, timers, snapshots.

Place in the flow: between an engine (Faust, or the plain consumer loop), which says which sources this process has and delivers
their records, and ``Partition``. All but ``expect``, ``leave``, ``ends``, ``stop`` and the status is called from one thread.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from confluent_kafka import KafkaException
from confluent_kafka.admin import OffsetSpec  # type: ignore[reportPrivateImportUsage]

from spanloop.pipeline.credit.value import ValueStage
from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.pipeline.normalise import NormaliseStage
from spanloop.pipeline.ports import Clock, LogRecord, Stage, alone, source_of, topic_of
from spanloop.pipeline.runtimes.counting import PartitionMetrics
from spanloop.pipeline.runtimes.partition import Partition
from spanloop.pipeline.sealing.opening import open_vault
from spanloop.pipeline.shard import ShardStage
from spanloop.pipeline.state.snapshots import Snapshots
from spanloop.schemas import topics
from spanloop.schemas.errors import TransientError
from spanloop.schemas.settings import Settings

__all__ = ["DELIVERED", "POLLED", "Workers", "kind_of"]

DELIVERED = (topics.SPANS, topics.FEEDBACK, topics.OPERATIONS, topics.LESSONS)
"""Topics that engines deliver; ``models`` is read by every process."""
POLLED = (topics.OPERATIONS,)
"""Of these an engine that hands over single records says only whose they are, and ``Workers.poll`` reads them in batches: there
is more than half a message a span."""
MODELS_EVERY_S = 0.5
OUTPUTS_EVERY_S = 2.0
_KINDS = {
    topics.SPANS: "normalise",
    topics.FEEDBACK: "normalise",
    topics.OPERATIONS: "shard",
    topics.LESSONS: "value",
}
LOOK_EVERY_S = 5.0
"""A source without progress for so long, of which it is not known that it is at its end, is looked at directly."""

_log = logging.getLogger("spanloop.process")


class Workers:
    """All partitions of this process.

    Args:
        settings: of the deployment.
        log: of the deployment.
        clock: processing time.
    """

    def __init__(self, settings: Settings, log: KafkaLog, clock: Clock) -> None:
        self._settings = settings
        self._vault = open_vault(settings)
        self._log = log
        self._clock = clock
        url = settings.process.snapshots or str(settings.workspace / "snapshots")
        self._snapshots = Snapshots(url.rstrip("/") + "/" + settings.process.group, settings.archive.endpoint)
        self._count = log.partitions(topics.OPERATIONS)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.partitions: dict[str, Partition] = {}
        """By the source that is delivered."""
        self._expected: dict[str, None] = {}
        """Assigned and not taken over yet."""
        self._leaving: set[str] = set()
        """Being taken away: their recovery ends early."""
        self._parked: dict[str, Partition] = {}
        self._looked: dict[str, float] = {}
        self._models_at = self._outputs_at = 0.0
        self._models = -1
        self._flushed_at = time.monotonic()
        self._retired: dict[str, PartitionMetrics] = {kind: PartitionMetrics() for kind in _KINDS.values()}
        self._ticked_at = 0.0
        self.thread_id = 0
        """Of the thread that folds."""
        self.recoveries = 0
        """Partitions taken over since the start ..."""
        self.recovery_s = 0.0
        """... and the seconds that the slowest took."""

    # ------------------------------------------------------------ which sources

    def expect(self, sources: Sequence[str]) -> None:
        """Note that sources are this process's; ``tick`` takes them over. May be called from any thread."""
        with self._lock:
            for source in sources:
                self._leaving.discard(source)
                if topic_of(source)[0] in DELIVERED and source not in self.partitions:
                    self._expected[source] = None

    def leave(self, sources: Sequence[str]) -> None:
        """Note that sources are being taken away; ``give_up`` follows. May be called from any thread."""
        with self._lock:
            self._leaving.update(sources)
            for source in sources:
                self._expected.pop(source, None)

    def give_up(self, sources: Sequence[str]) -> None:
        """Give sources up; what was folded is made durable first, as far as possible. A rebalance takes all away and gives
        most back: they are kept aside until it is known which."""
        self.leave(sources)
        for source in sources:
            with self._lock:
                partition = self.partitions.pop(source, None)
            if partition is not None:
                flushed = partition.flush()
                self._retired[kind_of(source)].add(partition.metrics)
                partition.metrics = PartitionMetrics(snapshot_at=partition.metrics.snapshot_at)
                if flushed:
                    self._parked[source] = partition

    def _take_expected(self) -> None:
        """Take over what was assigned: recover the state and fold what waits. What only left for a rebalance goes on."""
        while self._expected and not self._stop.is_set():
            source = min(self._expected, key=_order)
            self._looked[source] = time.monotonic()
            partition = self._parked.pop(source, None)
            if partition is None or not partition.is_newest():
                partition = self._partition(source)
                with self._lock:
                    self.partitions[source] = partition
                self._recover(source, partition)
            else:
                with self._lock:
                    self.partitions[source] = partition
                partition.catch_up()
            with self._lock:
                if source in self._leaving:
                    self.partitions.pop(source, None)
                self._expected.pop(source, None)
            if not self._expected:
                self._parked.clear()

    def _recover(self, source: str, partition: Partition) -> None:
        try:
            partition.recover()
        except BaseException:
            with self._lock:
                self.partitions.pop(source, None)
            raise
        self.recoveries += 1
        self.recovery_s = max(self.recovery_s, partition.metrics.recovery_s)
        if partition.metrics.records:
            _log.info(
                "%s: folded %d records that waited, in %.1f s",
                source, partition.metrics.records, partition.metrics.recovery_s,
            )  # fmt: skip

    def _partition(self, source: str) -> Partition:
        topic, number = topic_of(source)
        stage: Stage
        pipeline = self._settings.pipeline
        name, inputs = "", (source,)
        if topic == topics.OPERATIONS:
            stage = ShardStage(pipeline, number, self._count, vault=self._vault)
            inputs = (source, topics.MODELS)
        elif topic == topics.LESSONS:
            stage = ValueStage(pipeline, lessons=(alone(source),), vault=self._vault)
            name = f"value-{number}-of-{self._count}"
        else:
            stage = NormaliseStage(self._count)
            name = f"normalise-{topic}-{number}"
        return Partition(
            inputs, stage, self._log, self._snapshots.open(name or stage.name), self._clock,
            batch_max=self._settings.process.batch_max,
            stopping=lambda: self._stop.is_set() or source in self._leaving,
            keep_content=self._settings.content.clear,
        )  # fmt: skip

    # ------------------------------------------------------------ work

    def offer(self, source: str, records: Sequence[LogRecord]) -> None:
        """Fold delivered records. Those of a source that is not (or no more, or not yet) taken over are left to the log."""
        partition = self.partitions.get(source)
        if partition is not None:
            partition.offer(records)

    def ends(self, ends: Mapping[str, int]) -> None:
        """Take note of the last offsets on sources as an engine knows them."""
        for source, end in ends.items():
            partition = self.partitions.get(source)
            if partition is not None:
                partition.sees(end)

    def poll(self) -> bool:
        """Read and fold what waits on this process's sources of ``POLLED`` topics; returns whether there is more."""
        mine = {s: p for s, p in self.partitions.items() if topic_of(s)[0] in POLLED}
        if not mine:
            return False
        after = {s: p.offsets[s] for s, p in mine.items() if s in p.offsets}
        limit = self._settings.process.batch_max * 4
        try:
            records = self._log.read([alone(source) for source in mine], after, limit)
        except TransientError as exc:
            if not self._stop.is_set():
                _log.warning("%s; tried again", exc.message)
            return False
        by_source: dict[str, list[LogRecord]] = {}
        for record in records:
            by_source.setdefault(record.source, []).append(record)
        more = len(records) >= limit
        for source, partition in mine.items():
            found = by_source.get(source, [])
            if found:
                partition.sees(found[-1].offset + more)
                partition.offer(found)
            elif not more:
                partition.sees(partition.offsets.get(source, -1))
        return more

    def tick(self) -> None:
        """Take over what was assigned; timers, news on ``models``, snapshots that are due."""
        self.thread_id, self._ticked_at = threading.get_ident(), time.monotonic()
        try:
            self._take_expected()
            now = time.monotonic()
            if now - self._models_at > MODELS_EVERY_S:
                self._models_at = now
                self._follow_models()
            if now - self._outputs_at > OUTPUTS_EVERY_S:
                self._outputs_at = now
                self._look_at_outputs()
            for source, partition in list(self.partitions.items()):
                self._look(source, partition, now)
                partition.tick()
        except TransientError as exc:
            if not self._stop.is_set():
                _log.warning("%s; tried again", exc.message)
        if time.monotonic() - self._flushed_at > self._settings.process.snapshot_every_s:
            self.flush()

    def flush(self) -> None:
        """Write a snapshot of every partition that changed."""
        for partition in list(self.partitions.values()):
            partition.flush()
        self._flushed_at = time.monotonic()

    def _look(self, source: str, partition: Partition, now: float) -> None:
        """An engine that forgot a partition after a rebalance costs seconds, not records."""
        quiet_since = max(partition.metrics.since, self._looked.get(source, 0.0))
        if partition.is_at_end() or now - quiet_since < LOOK_EVERY_S:
            return
        self._looked[source] = now
        found = partition.catch_up()
        if found:
            _log.warning("%s: %d records were read from the log that nobody delivered", source, found)

    def _follow_models(self) -> None:
        """Give news on ``models`` to every shard; each drops what its state contains."""
        shards = [p for p in self.partitions.values() if topics.MODELS in p.stage.topics]
        after = {topics.MODELS: self._models} if self._models >= 0 else {}
        records = self._log.read([topics.MODELS], after, 100) if shards else []
        if records:
            for partition in shards:
                partition.offer(records)
            self._models = records[-1].offset

    def _look_at_outputs(self) -> None:
        """Notice what a former owner wrote, also while this process writes nothing itself."""
        shards = [partition for partition in self.partitions.values() if partition.own]
        sources = {
            source: self._log.cluster.at(source, 0) for partition in shards for source in partition.own
        }
        if not sources:
            return
        asked: dict[Any, Any] = {place: OffsetSpec.latest() for place in sources.values()}
        ends: dict[str, int] = {}
        for place, future in self._log.cluster.admin().list_offsets(asked, request_timeout=5).items():
            with contextlib.suppress(KafkaException):
                source = source_of(place.topic.removeprefix(self._settings.kafka.prefix), place.partition)
                ends[source] = future.result().offset - 1
        for partition in shards:
            partition.see_outputs(ends)

    def committable(self) -> dict[str, int]:
        """Offsets that the consumer group may remember."""
        found: dict[str, int] = {}
        for source, partition in list(self.partitions.items()):
            offset = partition.committable().get(source)
            if offset is not None:
                found[source] = offset
        return found

    def stop(self) -> None:
        """Stop trying again; ``close`` follows."""
        self._stop.set()

    def close(self) -> None:
        """Give everything up, with a last snapshot."""
        self.give_up(list(self.partitions))

    # ------------------------------------------------------------ watching

    def metrics(self) -> dict[str, PartitionMetrics]:
        """Counters by source."""
        with self._lock:
            return {source: partition.metrics for source, partition in self.partitions.items()}

    def totals(self) -> dict[str, PartitionMetrics]:
        """Counters since the start by kind of stage, of partitions that were given up too."""
        with self._lock:
            found = {}
            for kind, retired in self._retired.items():
                found[kind] = PartitionMetrics()
                found[kind].add(retired)
            for source, partition in self.partitions.items():
                found[kind_of(source)].add(partition.metrics)
        return found

    def status(self) -> dict[str, Any]:
        """Counters by source, for pipeline.json."""
        with self._lock:
            partitions = dict(self.partitions)
        return {
            source: {
                "stage": p.stage.name,
                "offset": p.offsets.get(source, -1),
                **msgspec.to_builtins(p.metrics),
            }
            for source, p in partitions.items()
        }

    def stalled(self) -> dict[str, float]:
        """Sources with work and without progress for longer than process.stall_s, with how long; under the empty name the
        engine, where it does not come round and no source says why."""
        now, patience_s = time.monotonic(), self._settings.process.stall_s
        waits = {source: now - m.since for source, m in self.metrics().items() if m.since}
        found = {source: round(wait, 1) for source, wait in waits.items() if wait > patience_s}
        alive_at = max([self._ticked_at, *(now - wait for wait in waits.values())])
        if not found and self._ticked_at and not self._stop.is_set() and now - alive_at > patience_s:
            found[""] = round(now - alive_at, 1)
        return found

    def write_status(self, path: Path) -> None:
        """pipeline.json, for ``spanloop up`` and people."""
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        status = {
            "pid": os.getpid(),
            "t_ns": self._clock.now_ns(),
            "recoveries": self.recoveries,
            "recovery_s": round(self.recovery_s, 3),
            "totals": {kind: msgspec.to_builtins(m) for kind, m in self.totals().items()},
            "stages": self.status(),
            "stalled": self.stalled(),
        }
        try:
            temporary.write_text(json.dumps(status))
            os.replace(temporary, path)
        except OSError as exc:
            _log.warning("cannot write %s: %s", path, exc)


def kind_of(source: str) -> str:
    """The stage that takes a source."""
    return _KINDS[topic_of(source)[0]]


def _order(source: str) -> tuple[int, str]:
    """What others wait for comes last: a shard's backlog is longest."""
    return DELIVERED.index(topic_of(source)[0]), source
