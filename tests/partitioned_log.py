"""A log with partitions in memory, and a seeded scheduler that runs the partitioned stages over it in any interleaving."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence

from spanloop.pipeline.normalise import NormaliseStage
from spanloop.pipeline.ports import LogRecord, NewRecord, Stage, output_records, source_of, topic_of
from spanloop.pipeline.shard import ShardStage
from spanloop.schemas import topics
from spanloop.schemas.settings import Pipeline

__all__ = ["PartitionedLog", "Partitions"]

CRASHES_MAX = 8
"""A world whose workers lose half of their work at every seventh step never gets anywhere."""


class PartitionedLog:
    """At-least-once: nothing is deduplicated."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self.records: dict[str, list[LogRecord]] = {}
        self.num_appended = 0

    def append(self, new: Sequence[NewRecord]) -> None:
        for record in new:
            if record.topic in topics.SINGLE:
                partition = 0
            elif record.partition is not None:
                partition = record.partition
            else:
                partition = zlib.crc32(record.key.encode()) % self.partitions
            source = source_of(record.topic, partition)
            held = self.records.setdefault(source, [])
            self.num_appended += 1
            held.append(
                LogRecord(
                    record.topic,
                    len(held),
                    record.key,
                    record.event_id,
                    record.value,
                    self.num_appended,
                    partition,
                )
            )

    def sources(self, name: str) -> list[str]:
        topic, partition = topic_of(name)
        if "/" in name or topic in topics.SINGLE:
            return [source_of(topic, partition)]
        return [source_of(topic, n) for n in range(self.partitions)]

    def all(self, topic: str) -> list[LogRecord]:
        return [r for s in self.sources(topic) for r in self.records.get(s, [])]


class _Worker:
    """A stage with its offsets, its state, and older snapshots of both."""

    def __init__(self, stage: Stage, fresh) -> None:
        self.stage = stage
        self.fresh = fresh
        self.offsets: dict[str, int] = {}
        self.entries: dict[str, bytes] = {}
        self.snapshots: list[tuple[dict[str, int], dict[str, bytes], dict[str, int]]] = [({}, {}, {})]


class Partitions:
    """Normalise and P shards over one log.

    Args:
        settings: of the pipeline.
        partitions: P.
        seed: of the interleaving.
        repeat: chance that a batch is delivered again.
        crash: chance that a worker loses its memory at a step.
    """

    def __init__(
        self, settings: Pipeline, partitions: int, seed: int = 0, repeat: float = 0.0, crash: float = 0.0
    ):
        self.log = PartitionedLog(partitions)
        self.random = random.Random(seed)
        self.repeat, self.crash = repeat, crash
        self.now_ns = 0
        self.num_crashes = 0
        self.workers = [_Worker(NormaliseStage(partitions), lambda: NormaliseStage(partitions))]
        for n in range(partitions):
            make = lambda n=n: ShardStage(settings, n, partitions)  # noqa: E731
            self.workers.append(_Worker(make(), make))
        for worker in self.workers:
            worker.stage.restore({})

    def _pending(self, worker: _Worker) -> list[tuple[str, list[LogRecord]]]:
        found = []
        for name in worker.stage.topics:
            for source in self.log.sources(name):
                behind = self.log.records.get(source, [])[worker.offsets.get(source, -1) + 1 :]
                if behind:
                    found.append((source, behind))
        return found

    def _emit(self, worker: _Worker, output) -> None:
        self.log.append(output_records(worker.stage, output.events))
        for key, value in output.writes.items():
            if value is None:
                worker.entries.pop(key, None)
            else:
                worker.entries[key] = value

    def step(self) -> bool:
        """One worker takes one batch; False when nobody has anything."""
        busy = [w for w in self.workers if self._pending(w)]
        if not busy:
            return False
        worker = self.random.choice(busy)
        source, behind = self.random.choice(self._pending(worker))
        batch = behind[: self.random.randint(1, 5)]
        self._emit(worker, worker.stage.process(batch, self.now_ns))
        worker.offsets[source] = batch[-1].offset
        if self.random.random() < self.repeat:
            self._emit(worker, worker.stage.process(batch, self.now_ns))
        if self.random.random() < 0.2:
            ends = {s: len(r) for s, r in self.log.records.items()}
            worker.snapshots.append((dict(worker.offsets), dict(worker.entries), ends))
        if self.num_crashes < CRASHES_MAX and self.random.random() < self.crash:
            self._restart(worker)
        return True

    def _restart(self, worker: _Worker) -> None:
        """Lose everything since some snapshot; outputs stay on the log and are observed."""
        self.num_crashes += 1
        kept = self.random.randrange(len(worker.snapshots))
        worker.snapshots = worker.snapshots[: kept + 1]
        offsets, entries, ends = worker.snapshots[-1]
        worker.offsets, worker.entries = dict(offsets), dict(entries)
        worker.stage = worker.fresh()
        worker.stage.restore(worker.entries)
        own = getattr(worker.stage, "output_partition", None)
        if own is None:
            return
        for topic in (topics.ORCHESTRATIONS, topics.REWARDS, topics.CREDITS):
            source = source_of(topic, own)
            for record in self.log.records.get(source, [])[ends.get(source, 0) :]:
                worker.stage.observe(record)
        for record in self.log.records.get(topics.SAMPLES, [])[ends.get(topics.SAMPLES, 0) :]:
            worker.stage.observe(record)

    def settle(self) -> None:
        """Deliver everything, let time pass until nothing is due within a day, and deliver again."""
        for _ in range(10_000):
            while self.step():
                pass
            due = [
                t for w in self.workers if (t := w.stage.next_timer_ns()) is not None and t < 80_000 * 10**9
            ]
            if not due:
                return
            self.now_ns = max(self.now_ns, min(due))
            for worker in self.workers:
                timer = worker.stage.next_timer_ns()
                if timer is not None and timer <= self.now_ns:
                    self._emit(worker, worker.stage.tick(self.now_ns))
        raise AssertionError("timers without end")
