"""A log with partitions in memory, and a seeded scheduler that runs the partitioned stages over it as a careless cluster would.

Workers take batches in any interleaving, time passes in between, records come twice or again much later, a worker dies with
part of its outputs appended, goes on from an older snapshot, and may not know that it is dead.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Iterator, Sequence

import msgspec

from spanloop.pipeline.normalise import NormaliseStage
from spanloop.pipeline.ports import (
    LogRecord,
    NewRecord,
    Stage,
    StageOutput,
    output_records,
    source_of,
    topic_of,
)
from spanloop.pipeline.shard import ShardStage
from spanloop.schemas import topics
from spanloop.schemas.settings import Pipeline

__all__ = ["Faults", "PartitionedLog", "Partitions"]

S = 10**9
CRASHES_MAX = 6
"""Of one world: with more it would hardly come to an end, as each throws it back."""
OWNED = (topics.ORCHESTRATIONS, topics.REWARDS, topics.CREDITS)


class Faults(msgspec.Struct, frozen=True, kw_only=True):
    """Chances of each fault at a step."""

    repeat: float = 0.0
    """Of an appended record: it is appended twice, the second time at once or at some later step."""
    crash: float = 0.0
    """A worker loses its memory, after all or none of the outputs of its last step were appended."""
    torn: bool = False
    """A crash may leave a part of the outputs of a step appended, of each source another one."""
    zombie: float = 0.0
    """Of a crash: the old worker goes on for some steps beside the new one."""
    time: float = 0.2
    """Up to two minutes pass."""


class PartitionedLog:
    """At-least-once: nothing is deduplicated."""

    def __init__(self, partitions: int) -> None:
        self.partitions = partitions
        self.records: dict[str, list[LogRecord]] = {}
        self.now_ns = 0

    def append(self, new: Sequence[NewRecord]) -> None:
        for record in new:
            source = self.source(record)
            held = self.records.setdefault(source, [])
            held.append(
                LogRecord(
                    record.topic, len(held), record.key, record.event_id, record.value, self.now_ns, topic_of(source)[1]
                )
            )  # fmt: skip

    def source(self, record: NewRecord) -> str:
        if record.topic in topics.SINGLE:
            return record.topic
        if record.partition is not None:
            return source_of(record.topic, record.partition)
        return source_of(record.topic, zlib.crc32(record.key.encode()) % self.partitions)

    def sources(self, name: str) -> list[str]:
        if "/" in name:
            return [source_of(*topic_of(name))]
        if name in topics.SINGLE:
            return [name]
        return [source_of(name, n) for n in range(self.partitions)]

    def after(self, source: str, offset: int) -> list[LogRecord]:
        return self.records.get(source, [])[offset + 1 :]

    def end(self, source: str) -> int:
        return len(self.records.get(source, [])) - 1

    def all(self, topic: str) -> list[LogRecord]:
        return [r for s in self.sources(topic) for r in self.records.get(s, [])]


class _Snapshot(msgspec.Struct):
    offsets: dict[str, int]
    entries: dict[str, bytes]
    written: dict[str, int]


class _Worker:
    """A stage as a runtime carries it: offsets, state, snapshots, and the ends of its own outputs."""

    def __init__(self, log: PartitionedLog, fresh: Callable[[], Stage], snapshots: list[_Snapshot]) -> None:
        self.log, self.fresh, self.snapshots = log, fresh, snapshots
        self.stage = fresh()
        kept = snapshots[-1]
        self.offsets, self.entries = dict(kept.offsets), dict(kept.entries)
        self.written = dict(kept.written)
        self.stage.restore(self.entries)
        own = getattr(self.stage, "output_partition", None)
        self.own = [] if own is None else [source_of(topic, own) for topic in OWNED]
        self.observe()
        if self.own:
            for record in log.after(topics.SAMPLES, self.written.get(topics.SAMPLES, -1)):
                self._observe(record)
        self.behind = {source: log.end(source) for source in self.sources()}
        """Ends of the inputs when it started: before it has these it does not tick."""
        self.steps_left = -1

    def sources(self) -> Iterator[str]:
        for name in self.stage.topics:
            yield from self.log.sources(name)

    def _observe(self, record: LogRecord) -> None:
        assert isinstance(self.stage, ShardStage)
        self.stage.observe(record)

    def observe(self) -> None:
        """Take note of own outputs that somebody else wrote."""
        for source in self.own:
            for record in self.log.after(source, self.written.get(source, -1)):
                self._observe(record)
            self.written[source] = self.log.end(source)

    def wrote(self, source: str) -> None:
        """An own output is on the log: what stands between it and the one before was written by somebody else."""
        for record in self.log.after(source, self.written.get(source, -1))[:-1]:
            self._observe(record)
        self.written[source] = self.log.end(source)

    def pending(self) -> list[tuple[str, list[LogRecord]]]:
        waiting = (
            (source, self.log.after(source, self.offsets.get(source, -1))) for source in self.sources()
        )
        return [(source, records) for source, records in waiting if records]

    def caught_up(self) -> bool:
        return all(self.offsets.get(source, -1) >= end for source, end in self.behind.items())

    def due(self, now_ns: int) -> bool:
        timer = self.stage.next_timer_ns()
        return timer is not None and timer <= now_ns and self.caught_up()

    def commit(self, output: StageOutput) -> None:
        for key, value in output.writes.items():
            if value is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = value

    def snapshot(self) -> None:
        written = {**self.written, topics.SAMPLES: self.log.end(topics.SAMPLES)}
        self.snapshots.append(_Snapshot(dict(self.offsets), dict(self.entries), written))


class Partitions:
    """Normalise and P shards over one log.

    Args:
        settings: of the pipeline.
        partitions: P.
        seed: of the interleaving.
        faults: what goes wrong.
    """

    def __init__(
        self, settings: Pipeline, partitions: int, seed: int = 0, faults: Faults | None = None
    ) -> None:
        self.log = PartitionedLog(partitions)
        self.random = random.Random(seed)
        self.faults = faults or Faults()
        self.num_crashes = self.num_zombies = 0
        self.again: list[NewRecord] = []
        self.zombies: list[_Worker] = []
        fresh: list[Callable[[], Stage]] = [lambda: NormaliseStage(partitions)]
        fresh += [lambda n=n: ShardStage(settings, n, partitions) for n in range(partitions)]
        self.workers = [_Worker(self.log, make, [_Snapshot({}, {}, {})]) for make in fresh]

    @property
    def now_ns(self) -> int:
        return self.log.now_ns

    def _happens(self, chance: float) -> bool:
        return chance > 0 and self.random.random() < chance

    # ------------------------------------------------------------ outputs

    def _append(self, records: list[NewRecord]) -> None:
        self.log.append(records)
        for record in records:
            if self._happens(self.faults.repeat):
                self.again.append(record)
        while self.again and self._happens(0.5):
            late = self.again.pop(self.random.randrange(len(self.again)))
            if late.topic not in OWNED:  # an owned topic has one writer, that notices what it did not write
                self.log.append([late])

    def _emit(self, worker: _Worker, output: StageOutput) -> bool:
        """Outputs on the log, then state; False where the worker died in between."""
        records = output_records(worker.stage, output.events)
        if worker.steps_left < 0 and self.num_crashes < CRASHES_MAX and self._happens(self.faults.crash):
            by_source: dict[str, list[NewRecord]] = {}
            for record in records:
                by_source.setdefault(self.log.source(record), []).append(record)
            whole = self._happens(0.5)
            for part in by_source.values():  # each source in order, as far as it came
                count = self.random.randint(0, len(part)) if self.faults.torn else len(part) * whole
                self._append(part[:count])
            self._restart(worker)
            return False
        for record in records:
            self._append([record])
            source = self.log.source(record)
            if source in worker.own:
                worker.wrote(source)
        worker.commit(output)
        return True

    def _restart(self, worker: _Worker) -> None:
        """Lose everything since some snapshot; outputs stay on the log and are observed."""
        self.num_crashes += 1
        if self._happens(self.faults.zombie):
            self.num_zombies += 1
            worker.steps_left = self.random.randint(1, 12)
            self.zombies.append(worker)
        kept = worker.snapshots[: self.random.randint(1, len(worker.snapshots))]
        self.workers[self.workers.index(worker)] = _Worker(self.log, worker.fresh, kept)

    # ------------------------------------------------------------ steps

    def step(self) -> bool:
        """One worker takes one batch, or time passes; False when nobody has anything."""
        if self._happens(self.faults.time):
            self.pass_time(self.random.choice([1, 2, 60, 120]) * S // 2)
        busy = [w for w in (*self.workers, *self.zombies) if w.pending()]
        if not busy:
            self.zombies.clear()
            return False
        worker = self.random.choice(busy)
        self._batch(worker)
        if worker.steps_left > 0:
            worker.steps_left -= 1
            if not worker.steps_left:
                self.zombies.remove(worker)
        return True

    def _batch(self, worker: _Worker) -> None:
        source, behind = self.random.choice(worker.pending())
        batch = behind[: self.random.randint(1, 6)]
        output = worker.stage.process(batch, self.now_ns)
        if not self._emit(worker, output):
            return
        worker.offsets[source] = batch[-1].offset
        if self._happens(self.faults.repeat / 4):  # a stage that sees a batch again
            self._emit(worker, worker.stage.process(batch, self.now_ns))
        elif worker.steps_left < 0 and self._happens(0.15):
            worker.snapshot()

    def pass_time(self, ns: int) -> None:
        self.log.now_ns += ns
        for worker in [*self.workers, *self.zombies]:
            if worker.due(self.now_ns):
                self._emit(worker, worker.stage.tick(self.now_ns))

    def tick(self) -> None:
        """Tick every shard, due or not: tombstones have no timer of their own."""
        for worker in self.workers:
            self._emit(worker, worker.stage.tick(self.now_ns))

    def deliver(self) -> None:
        """Deliver everything, also what is still to be repeated; then faults are over."""
        while self.step():
            pass
        self.faults = Faults(time=0.0)
        self.log.append([r for r in self.again if r.topic not in OWNED])
        self.again.clear()
        while self.step():
            pass

    def settle(self, horizon_ns: int = 3600 * S) -> None:
        """Deliver everything without further faults, let time pass until nothing is due within the horizon, deliver again."""
        quiet = Faults(time=0.0)
        end = self.now_ns + horizon_ns
        for _ in range(10_000):
            while self.step():
                pass
            self.faults = quiet
            self.log.append([r for r in self.again if r.topic not in OWNED])
            self.again.clear()
            for worker in self.workers:
                if any(self.log.end(s) > worker.written.get(s, -1) for s in worker.own):
                    worker.observe()
            timers = [t for w in self.workers if (t := w.stage.next_timer_ns()) is not None]
            due = [max(t, self.now_ns) for t in timers if t < end]
            if not due and not any(w.pending() for w in self.workers):
                return
            if due:
                self.pass_time(min(due) - self.now_ns)
        raise AssertionError("messages or timers without end")
