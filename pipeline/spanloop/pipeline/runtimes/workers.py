"""The partitions that one process has: which stage belongs to a source, taking over and giving up, timers, snapshots, metrics.

Place in the flow: between an engine (Faust, or the plain consumer loop), which says which sources this process has and delivers
their records, and ``Partition``. Engines call from one thread; ``status`` and the watchdog may be asked from others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from spanloop.pipeline.credit.value import ValueStage
from spanloop.pipeline.log.kafka import KafkaLog
from spanloop.pipeline.normalise import NormaliseStage
from spanloop.pipeline.ports import Clock, LogRecord, Stage, topic_of
from spanloop.pipeline.runtimes.partition import Partition
from spanloop.pipeline.shard import ShardStage
from spanloop.pipeline.state.snapshots import Snapshots
from spanloop.schemas import topics
from spanloop.schemas.errors import TransientError
from spanloop.schemas.settings import Settings

__all__ = ["DELIVERED", "Workers"]

DELIVERED = (topics.SPANS, topics.FEEDBACK, topics.OPERATIONS, topics.LESSONS)
"""Topics that engines deliver; ``models`` is read by every process."""
MODELS_EVERY_S = 0.5
LOOK_EVERY_S = 5.0
"""A source without progress for so long is looked at directly on the log."""

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
        self._log = log
        self._clock = clock
        url = settings.process.snapshots or str(settings.workspace / "snapshots")
        self._snapshots = Snapshots(url, settings.archive.endpoint)
        self._count = log.partitions(topics.OPERATIONS)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.partitions: dict[str, Partition] = {}
        """By the source that is delivered."""
        self._expected: list[str] = []
        self._parked: dict[str, Partition] = {}
        self._models_at = 0.0
        self._models = -1
        self._looked_at = 0.0
        self._flushed_at = time.monotonic()

    # ------------------------------------------------------------ which sources

    def expect(self, sources: Sequence[str]) -> None:
        """Note that sources will be this process's; ``tick`` takes them over."""
        self._expected = [*self._expected, *sources]

    def take(self, sources: Sequence[str]) -> None:
        """Take sources over: recover their state and fold what waits. One that only left for a rebalance goes on."""
        for source in sorted(sources):
            if source in self.partitions or topic_of(source)[0] not in DELIVERED:
                continue
            partition = self._parked.pop(source, None)
            if partition is not None and partition.is_newest():
                partition.catch_up()
            else:
                partition = self._partition(source)
                partition.recover()
            with self._lock:
                self.partitions[source] = partition
            if partition.metrics.records:
                _log.info(
                    "%s: folded %d records that waited, in %.1f s",
                    source, partition.metrics.records, partition.metrics.recovery_s,
                )  # fmt: skip

    def give_up(self, sources: Sequence[str]) -> None:
        """Give sources up; what was folded is made durable first, as far as possible."""
        for source in sources:
            with self._lock:
                partition = self.partitions.pop(source, None)
            if partition is not None:
                try:
                    partition.flush()
                    self._parked[source] = partition
                except TransientError as exc:
                    _log.warning("%s: last snapshot was not written: %s", source, exc.message)

    def _partition(self, source: str) -> Partition:
        topic, number = topic_of(source)
        stage: Stage
        pipeline = self._settings.pipeline
        if topic == topics.OPERATIONS:
            stage = ShardStage(pipeline, number, self._count)
        elif topic == topics.LESSONS:
            stage = ValueStage(pipeline, lessons=(source,))
            stage.name = f"value-{number}-of-{self._count}"
        else:
            stage = NormaliseStage(self._count)
        chain = self._snapshots.open(stage.name) if not isinstance(stage, NormaliseStage) else None
        return Partition(
            stage, self._log, chain, self._clock, batch_max=self._settings.process.batch_max,
            stopping=self._stop.is_set, keep_content=self._settings.content.training,
        )  # fmt: skip

    # ------------------------------------------------------------ work

    def offer(self, source: str, records: Sequence[LogRecord]) -> None:
        """Fold delivered records."""
        partition = self.partitions.get(source)
        if partition is None:
            self.take([source])
            partition = self.partitions[source]
        partition.metrics.waiting = len(records)
        partition.offer(records)
        partition.metrics.waiting = 0

    def tick(self) -> None:
        """Timers, news on ``models``, snapshots that are due."""
        now = time.monotonic()
        expected, self._expected = self._expected, []
        self.take(expected)
        if now - self._models_at > MODELS_EVERY_S:
            self._models_at = now
            self._follow_models()
        look = now - self._looked_at > LOOK_EVERY_S
        for source, partition in list(self.partitions.items()):
            if look and topic_of(source)[0] in (topics.OPERATIONS, topics.LESSONS):
                if now - partition.metrics.progress_at > LOOK_EVERY_S:
                    partition.catch_up()  # an engine that forgot a partition after a rebalance costs seconds, not records
                self._looked_at = now
            partition.tick()
        if now - self._flushed_at > self._settings.process.snapshot_every_s:
            self._flushed_at = now
            for partition in list(self.partitions.values()):
                partition.flush()

    def _follow_models(self) -> None:
        """Give news on ``models`` to every shard; each drops what its state contains."""
        shards = [p for p in self.partitions.values() if topics.MODELS in p.stage.topics]
        records = self._log.read([topics.MODELS], {topics.MODELS: self._models}, 100) if shards else []
        if records:
            for partition in shards:
                partition.offer(records)
            self._models = records[-1].offset

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

    def status(self) -> dict[str, Any]:
        """Counters by source, for pipeline.json, metrics and the watchdog."""
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

    def lag(self) -> dict[str, int]:
        """Records behind each source's state. Asks the brokers."""
        found: dict[str, int] = {}
        for source in list(self.partitions):
            partition = self.partitions.get(source)
            if partition is not None and topic_of(source)[0] in (topics.OPERATIONS, topics.LESSONS):
                with contextlib.suppress(TransientError):
                    found[source] = max(0, self._log.end(source) - partition.offsets.get(source, -1))
        return found

    def stalled(self) -> dict[str, float]:
        """Sources whose records wait without progress for longer than process.stall_s, with how long."""
        now = time.monotonic()
        return {
            source: round(now - partition.metrics.progress_at, 1)
            for source, partition in list(self.partitions.items())
            if partition.metrics.waiting
            and now - partition.metrics.progress_at > self._settings.process.stall_s
        }

    def write_status(self, path: Path) -> None:
        """pipeline.json, for ``spanloop up`` and people."""
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_text(
                json.dumps(
                    {
                        "pid": os.getpid(),
                        "t_ns": self._clock.now_ns(),
                        "stages": self.status(),
                        "stalled": self.stalled(),
                    }
                )
            )
            os.replace(temporary, path)
        except OSError as exc:
            _log.warning("cannot write %s: %s", path, exc)
