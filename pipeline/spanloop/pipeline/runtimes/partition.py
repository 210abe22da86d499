"""One partition of one stage in a worker: records in, outputs on the log, state in snapshots, and the way back after a kill.

Place in the flow: the Faust app and the plain consumer loop give records to these; both only decide who has which partition. What
was folded is known from the state alone: a record that it contains is dropped, records missing before one that was
delivered are read from the log. So nothing rests on what a consumer group remembers or skips.

Order of a commit: outputs on the log, then state in memory, some seconds later the snapshot. After a kill the outputs since the
snapshot are observed first, so that nothing equal is published again and revisions rise. Outputs of an owned partition must
follow each other on the log; a gap was written by a former owner that does not know yet that it lost the partition: it is
read and observed, and what it made wrong is published again. Timers see the time up to which the input was folded: while a
backlog waits, quiet periods are not counted.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from spanloop.pipeline.ports import (
    Clock,
    Log,
    LogRecord,
    NewRecord,
    Stage,
    StageOutput,
    alone,
    output_records,
    source_of,
)
from spanloop.pipeline.runtimes.counting import FOLD_BUCKETS, PartitionMetrics
from spanloop.pipeline.runtimes.folding import fold, where
from spanloop.pipeline.state.snapshots import Chain
from spanloop.schemas import topics
from spanloop.schemas.errors import SchemaError, SpanloopError, TerminalError, TransientError
from spanloop.schemas.events import DeadLettered, Event
from spanloop.schemas.operations import OperationsRead

__all__ = ["Partition"]

T = TypeVar("T")

OUTPUTS = "out:"
"""Prefix of own outputs' offsets in a snapshot."""
RETRY_MAX_S = 5.0
_OWNED = (topics.ORCHESTRATIONS, topics.REWARDS, topics.CREDITS)
_log = logging.getLogger("spanloop.process")


class Partition:
    """A stage over its sources.

    Args:
        inputs: sources; the first is the one that an engine delivers, others are offered by whoever reads them.
        stage: over them.
        log: inputs and outputs.
        chain: snapshots.
        clock: processing time.
        batch_max: records that are folded at once.
        stopping: asked while something is tried again, and between batches of a recovery.
        keep_content: whether dead letters keep the refused bytes.
    """

    def __init__(
        self,
        inputs: Sequence[str],
        stage: Stage,
        log: Log,
        chain: Chain,
        clock: Clock,
        *,
        batch_max: int,
        stopping: Callable[[], bool] = lambda: False,
        keep_content: bool = False,
    ) -> None:
        self.source = inputs[0]
        self.stage = stage
        self.metrics = PartitionMetrics()
        self.offsets: dict[str, int] = {}
        self._inputs = tuple(inputs)
        self._log = log
        self._chain = chain
        self._clock = clock
        self._batch_max = batch_max
        self._stopping = stopping
        self._keep_content = keep_content
        self._written: dict[str, int] = {}
        self._loaded: dict[str, int] = {}
        """Outputs that the loaded snapshot knew of: those behind them were observed."""
        self._end = -1
        """Last offset that is known to be on the source."""
        own: int | None = getattr(stage, "output_partition", None)
        self.own = [] if own is None else [source_of(topic, own) for topic in _OWNED]
        """Sources that this partition alone writes to."""

    # ------------------------------------------------------------ taking over

    def recover(self) -> None:
        """Become the state of the newest snapshot, know what was published since, and fold what waits on the log."""
        begin = time.monotonic()
        self._begin("recover")
        for name, offset in self._chain.offsets.items():
            if name.startswith(OUTPUTS):
                self._written[name.removeprefix(OUTPUTS)] = offset
            else:
                self.offsets[name] = offset
        self._loaded = dict(self._written)
        self._restore()
        self.catch_up()
        self.metrics.recovery_s = time.monotonic() - begin
        self.metrics.snapshot_at = self.metrics.snapshot_at or begin
        self._idle()

    def _restore(self) -> None:
        """Become what was committed, and take note of everything that was published behind the snapshot."""
        stage: Any = self.stage
        stage.restore(self._chain.entries)
        if getattr(stage, "observe", None) is None:
            return
        known, self._written = self._written, dict(self._loaded)
        for source in (*self.own, topics.SAMPLES):  # others' samples are among them
            end = self._retry(lambda source=source: self._log.end(source))
            self._observe(source, max(end, known.get(source, -1)))
        if getattr(stage, "catch_up", None) is not None:
            ends = {
                source: self._retry(lambda source=source: self._log.end(source)) for source in self._inputs
            }
            stage.catch_up({s: end for s, end in ends.items() if end > self.offsets.get(s, -1)})

    def _observe(self, source: str, upto: int) -> int:
        """Take note of what stands on a source behind what is known; returns how many records that were."""
        stage: Any = self.stage
        seen, after = 0, self._written.get(source, -1)
        while after < upto:
            place = {source: after} if after >= 0 else {}
            records = self._retry(lambda place=place: self._log.read([alone(source)], place, 500))
            if not records:
                break
            for record in records:
                if record.offset <= upto:
                    self._note(stage, record)
                    seen += 1
            after = records[-1].offset
        self._written[source] = max(self._written.get(source, -1), upto)
        return seen

    def _note(self, stage: Any, record: LogRecord) -> None:
        """Take note of one output. What is no event was written by somebody else: it is nobody's output, and no reason to stand still."""
        try:
            stage.observe(record)
        except SchemaError as exc:
            _log.warning("%s offset %d is passed over: %s", record.source, record.offset, exc.message[:200])

    def catch_up(self) -> int:
        """Fold what is on the log behind the state, without waiting for it to be delivered."""
        count = 0
        names = [alone(source) for source in self._inputs]
        while not self._stopping():
            records = self._retry(lambda: self._log.read(names, self.offsets, self._batch_max))
            if not records:
                self._end = max(self._end, self.offsets.get(self.source, -1))
                break
            self._fold(records)
            count += len(records)
            self._tick(records[-1].appended_ns)  # else a long backlog would be held open until its end
        return count

    # ------------------------------------------------------------ records

    def offer(self, records: Sequence[LogRecord]) -> None:
        """Fold delivered records of one source; fills gaps before them from the log, drops what is contained."""
        source = records[0].source
        if source == self.source:
            self.sees(records[-1].offset)
        fresh = [record for record in records if record.offset > self.offsets.get(source, -1)]
        self.metrics.duplicates += len(records) - len(fresh)
        for start in range(0, len(fresh), self._batch_max):
            part = fresh[start : start + self._batch_max]
            self._fill_gap(source, part[0].offset)
            part = [record for record in part if record.offset > self.offsets.get(source, -1)]
            if part:
                self._fold(part)
        self._idle()

    def sees(self, end: int) -> None:
        """Take note of the last offset that an engine knows to be on the source."""
        self._end = max(self._end, end)
        self.metrics.lag = max(0, self._end - self.offsets.get(self.source, -1))
        if self.metrics.lag and not self.metrics.since:
            self.metrics.since = time.monotonic()

    def _fill_gap(self, source: str, upto: int) -> None:
        """Fold what comes before offset ``upto``."""
        while self.offsets.get(source, -1) + 1 < upto and not self._stopping():
            place = {source: self.offsets[source]} if source in self.offsets else {}
            records = self._retry(lambda place=place: self._log.read([alone(source)], place, self._batch_max))
            missing = [record for record in records if record.offset < upto]
            if not missing:  # offsets that hold no record
                return
            self.metrics.gaps += len(missing)
            self._fold(missing)

    def _fold(self, records: Sequence[LogRecord]) -> None:
        begin, now_ns = time.monotonic(), self._clock.now_ns()
        self._begin("fold")
        metrics = self.metrics
        for part, output in fold(self.stage, records, now_ns, self._restore):
            self._emit(output, {record.source: record.offset for record in part})
            metrics.records += len(part)
        seconds = time.monotonic() - begin
        metrics.fold_s += seconds
        metrics.fold_counts[bisect_left(FOLD_BUCKETS, seconds)] += 1
        metrics.appended_ns = max(metrics.appended_ns, records[-1].appended_ns)
        newest_ns = getattr(self.stage, "newest_ns", 0) or records[-1].appended_ns
        metrics.lateness_s = max(0.0, (now_ns - newest_ns) / 1e9)
        metrics.lag = max(0, self._end - self.offsets.get(self.source, -1))
        metrics.since = begin + seconds

    # ------------------------------------------------------------ time

    def tick(self) -> None:
        """Fire timers that are due."""
        now_ns = self._clock.now_ns()
        self._tick(min(now_ns, self.metrics.appended_ns) if self.metrics.lag else now_ns)

    def _tick(self, now_ns: int) -> None:
        timer = self.stage.next_timer_ns()
        if timer is None or timer > now_ns:
            return
        self._begin("tick")
        try:
            output = self.stage.tick(now_ns)
        except SpanloopError:
            raise
        except Exception as exc:
            raise TerminalError(
                f"stage {self.stage.name} raised {type(exc).__name__} at {where(exc)} while firing timers, and no "
                "record can be set aside for that: please report this bug with the lines above"
            ) from exc
        if output.events or output.writes:
            self._emit(output, {})
        self._idle()

    # ------------------------------------------------------------ outputs

    def _emit(self, output: StageOutput, offsets: dict[str, int]) -> None:
        """Outputs on the log, then state."""
        metrics = self.metrics
        for event in output.events:
            if isinstance(event, DeadLettered):
                metrics.dead_letters += 1
            elif isinstance(event, OperationsRead) and not event.home:
                metrics.spans += len(event.operations)
        events = output.events if self._keep_content else [_without_data(event) for event in output.events]
        records = output_records(self.stage, events)
        if records:
            doing, metrics.doing = metrics.doing, "append"
            self._append(records)
            metrics.doing = doing
        metrics.events += len(records)
        self.offsets.update(offsets)
        written = {OUTPUTS + source: offset for source, offset in self._written.items()}
        self._chain.commit(output.writes, {**offsets, **written})

    def _append(self, records: Sequence[NewRecord]) -> None:
        done = self._retry(lambda: self._log.append(records))
        for record, appended in zip(records, done, strict=True):
            source = source_of(record.topic, appended.partition)
            if source not in self.own:
                continue
            self._check_outputs(source, appended.offset - 1)
            self._written[source] = max(appended.offset, self._written.get(source, -1))

    def see_outputs(self, ends: Mapping[str, int]) -> None:
        """Take note of where own outputs end: what stands there and was not written here, another owner wrote."""
        for source in self.own:
            self._check_outputs(source, ends.get(source, -1))

    def _check_outputs(self, source: str, upto: int) -> None:
        if upto > self._written.get(source, -1):
            foreign = self._observe(source, upto)
            self.metrics.foreign += foreign
            if foreign:
                _log.warning(
                    "%s: another owner wrote %d records up to offset %d; they are checked",
                    source,
                    foreign,
                    upto,
                )

    # ------------------------------------------------------------ durability

    def flush(self) -> bool:
        """Write a snapshot; False where the store refuses for now: then more is folded again after a kill, no less."""
        if not getattr(self.stage, "caught_up", True):
            return False
        self._begin("flush")
        try:
            self._chain.flush()
        except TransientError as exc:
            self.metrics.retries += 1
            _log.warning("%s: no snapshot: %s", self.stage.name, exc.message)
            return False
        else:
            self.metrics.snapshot_at = time.monotonic()
            return True
        finally:
            self._idle()

    def is_at_end(self) -> bool:
        """Whether an engine has said where the source ends, and that was folded."""
        return 0 <= self._end <= self.offsets.get(self.source, -1)

    def is_newest(self) -> bool:
        """Whether nobody has taken this partition's state over since."""
        return self._chain.is_newest()

    def committable(self) -> dict[str, int]:
        """Offsets that a consumer group may remember: what a snapshot contains."""
        return {name: offset for name, offset in self._chain.durable.items() if not name.startswith(OUTPUTS)}

    # ------------------------------------------------------------ progress

    def _begin(self, doing: str) -> None:
        self.metrics.doing = doing
        self.metrics.since = self.metrics.since or time.monotonic()

    def _idle(self) -> None:
        self.metrics.doing = ""
        self.metrics.since = time.monotonic() if self.metrics.lag else 0.0

    def _retry(self, call: Callable[[], T]) -> T:
        pause = 0.05
        while True:
            try:
                return call()
            except TransientError as exc:
                self.metrics.retries += 1
                if self._stopping():
                    raise
                _log.warning("%s waits %.2f s: %s", self.stage.name, pause, exc.message)
                time.sleep(pause)
                pause = min(pause * 2, RETRY_MAX_S)


def _without_data(event: Event) -> Event:
    """A dead letter without the refused bytes: they may be content, and stand on the log where the letter says."""
    return (
        msgspec.structs.replace(event, data="") if isinstance(event, DeadLettered) and event.data else event
    )
