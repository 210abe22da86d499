"""One partition of one stage in a worker: records in, outputs on the log, state in snapshots, and the way back after a kill.

Place in the flow: the Faust app and the plain consumer loop give records to these; both only decide who has which partition. What
was folded is known from the state alone: a record that it contains is dropped, records missing before one that was
delivered are read from the log. So nothing rests on what a consumer group remembers or skips.

Order of a commit: outputs on the log, then state in memory, some seconds later the snapshot. After a kill the outputs since the
snapshot are observed first, so that nothing equal is published again and revisions rise. Outputs of an owned partition must
follow each other on the log; a gap was written by a former owner that does not know yet that it lost the partition: it is
read and observed, and what it made wrong is published again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from spanloop.pipeline.ports import (
    Clock,
    Log,
    LogRecord,
    NewRecord,
    Stage,
    StageOutput,
    output_records,
    source_of,
)
from spanloop.pipeline.runtimes.folding import fold, is_cornered
from spanloop.pipeline.state.snapshots import Chain
from spanloop.schemas import topics
from spanloop.schemas.errors import TransientError
from spanloop.schemas.events import DeadLettered, Event

__all__ = ["Partition", "PartitionMetrics"]

OUTPUTS = "out:"
"""Prefix of own outputs' offsets in a snapshot."""
RETRY_MAX_S = 5.0
_OWNED = (topics.ORCHESTRATIONS, topics.REWARDS, topics.CREDITS)
_log = logging.getLogger("spanloop.process")


class PartitionMetrics(msgspec.Struct):
    """Counters of one partition since it was taken."""

    records: int = 0
    events: int = 0
    dead_letters: int = 0
    duplicates: int = 0
    """Records that the state contained already."""
    gaps: int = 0
    """Records that were read from the log because they were not delivered."""
    foreign: int = 0
    """Outputs that a former owner wrote."""
    retries: int = 0
    fold_s: float = 0.0
    recovery_s: float = 0.0
    lateness_s: float = 0.0
    """Age of the last record when it was folded."""
    progress_at: float = 0.0
    """Monotonic time of the last progress."""
    waiting: int = 0
    """Records offered and not folded yet."""
    spans: int = 0
    event_time_ns: int = 0
    """When the newest folded record was appended."""
    snapshot_at: float = 0.0
    """Monotonic time of the last snapshot."""
    doing: str = ""
    """fold, append, flush, recover, or empty."""


class Observing(Protocol):
    """A stage that takes note of its own outputs."""

    def observe(self, record: LogRecord) -> None: ...


class Partition:
    """A stage over its sources.

    Args:
        stage: its ``topics`` are the sources; the first is the one that is delivered.
        log: inputs and outputs.
        chain: snapshots; None: a stage without state.
        clock: processing time.
        stopping: asked while something is tried again.
    """

    def __init__(
        self,
        stage: Stage,
        log: Log,
        chain: Chain | None,
        clock: Clock,
        *,
        batch_max: int,
        stopping: Callable[[], bool],
        keep_content: bool = True,
    ) -> None:
        self._keep_content = keep_content
        self.stage = stage
        self.metrics = PartitionMetrics(progress_at=time.monotonic())
        self.offsets: dict[str, int] = {}
        self._log = log
        self._chain = chain
        self._clock = clock
        self._batch_max = batch_max
        self._stopping = stopping
        self._written: dict[str, int] = {}

    # ------------------------------------------------------------ taking over

    def recover(self) -> None:
        """Become the state of the newest snapshot, know what was published since, and fold what waits on the log."""
        begin = time.monotonic()
        self.metrics.doing = "recover"
        if self._chain is not None:
            self.stage.restore(self._chain.entries)
            for name, offset in self._chain.offsets.items():
                if name.startswith(OUTPUTS):
                    self._written[name.removeprefix(OUTPUTS)] = offset
                else:
                    self.offsets[name] = offset
            self._observe_outputs()
            self.catch_up()
        self.metrics.recovery_s = time.monotonic() - begin
        self.metrics.doing = ""

    def _own_sources(self) -> list[str]:
        own: int | None = getattr(self.stage, "output_partition", None)
        return [] if own is None else [source_of(topic, own) for topic in _OWNED]

    def _observe_outputs(self) -> None:
        """Read own outputs behind the snapshot; on the samples' topic others' are among them."""
        if getattr(self.stage, "observe", None) is None:
            return
        for source in (*self._own_sources(), topics.SAMPLES):
            end = self._retry(lambda source=source: self._log.end(source))
            self._observe(source, end)

    def _observe(self, source: str, upto: int) -> int:
        """Take note of what stands on a source behind what is known; returns how many records that were."""
        stage: Any = self.stage
        seen, after = 0, self._written.get(source, -1)
        while after < upto:
            records = self._retry(lambda after=after: self._log.read([source], {source: after}, 500))
            if not records:
                break
            for record in records:
                if record.offset <= upto:
                    stage.observe(record)
                    seen += 1
            after = records[-1].offset
        self._written[source] = max(self._written.get(source, -1), upto)
        return seen

    def catch_up(self) -> int:
        """Fold what is on the log behind the state, without waiting for it to be delivered."""
        count = 0
        while not self._stopping():
            records = self._retry(lambda: self._log.read(self.stage.topics, self.offsets, self._batch_max))
            if not records:
                return count
            self._fold(records)
            count += len(records)
        return count

    # ------------------------------------------------------------ records

    def offer(self, records: Sequence[LogRecord]) -> None:
        """Fold delivered records of one source; fills gaps before them from the log, drops what is contained."""
        source = records[0].source
        fresh = [record for record in records if record.offset > self.offsets.get(source, -1)]
        self.metrics.duplicates += len(records) - len(fresh)
        for start in range(0, len(fresh), self._batch_max):
            part = fresh[start : start + self._batch_max]
            if self._chain is not None:
                self._fill_gap(source, part[0].offset)
                part = [record for record in part if record.offset > self.offsets.get(source, -1)]
            if part:
                self._fold(part)

    def _fill_gap(self, source: str, upto: int) -> None:
        while self.offsets.get(source, -1) + 1 < upto and not self._stopping():
            after = self.offsets.get(source, -1)
            records = self._retry(
                lambda after=after: self._log.read([source], {source: after}, self._batch_max)
            )
            missing = [record for record in records if record.offset < upto]
            if not missing:  # offsets that hold no record
                self.offsets[source] = upto - 1
                return
            self.metrics.gaps += len(missing)
            self._fold(missing)

    def _fold(self, records: Sequence[LogRecord]) -> None:
        begin, now_ns = time.monotonic(), self._clock.now_ns()
        self.metrics.doing = "fold"
        for part, output in fold(self.stage, records, now_ns, self._restore):
            self._emit(output, {record.source: record.offset for record in part})
            self.metrics.records += len(part)
        done = time.monotonic()
        self.metrics.fold_s += done - begin
        self.metrics.lateness_s = max(0.0, (now_ns - records[-1].appended_ns) / 1e9)
        self.metrics.progress_at = done
        self.metrics.event_time_ns = max(self.metrics.event_time_ns, records[-1].appended_ns)
        self.metrics.doing = ""

    def _restore(self) -> None:
        self.stage.restore(self._chain.entries if self._chain is not None else {})

    def tick(self) -> None:
        """Fire timers that are due."""
        now_ns = self._clock.now_ns()
        timer = self.stage.next_timer_ns()
        if timer is not None and timer <= now_ns:
            output = self.stage.tick(now_ns)
            if output.events or output.writes:
                self._emit(output, {})

    def _emit(self, output: StageOutput, offsets: dict[str, int]) -> None:
        """Outputs on the log, then state."""
        if not self._keep_content:
            output.events = [_without_data(event) for event in output.events]
        records = output_records(self.stage, output.events)
        if records:
            self._append(records)
        self.metrics.events += len(records)
        self.metrics.dead_letters += sum(
            isinstance(event, DeadLettered) or is_cornered(event) for event in output.events
        )
        self.offsets.update(offsets)
        if self._chain is not None:
            written = {OUTPUTS + source: offset for source, offset in self._written.items()}
            self._chain.commit(output.writes, {**offsets, **written})

    def _append(self, records: Sequence[NewRecord]) -> None:
        done = self._retry(lambda: self._log.append(records))
        own = set(self._own_sources())
        for record, appended in zip(records, done, strict=True):
            source = source_of(record.topic, appended.partition)
            if source not in own:
                continue
            known = self._written.get(source)
            if known is not None and appended.offset > known + 1:
                self.metrics.foreign += self._observe(source, appended.offset - 1)
                _log.warning("%s: a former owner wrote up to %d", source, appended.offset - 1)
            self._written[source] = max(appended.offset, self._written.get(source, -1))

    # ------------------------------------------------------------ durability

    def flush(self) -> None:
        """Write a snapshot."""
        if self._chain is not None:
            self.metrics.doing = "flush"
            self._retry(self._chain.flush)
            self.metrics.snapshot_at, self.metrics.doing = time.monotonic(), ""

    def is_newest(self) -> bool:
        """Whether nobody has taken this partition's state over since."""
        return self._chain is None or self._chain.is_newest()

    def committable(self) -> dict[str, int]:
        """Offsets that a consumer group may remember: what a snapshot contains."""
        if self._chain is None:
            return dict(self.offsets)
        return {name: offset for name, offset in self._chain.durable.items() if not name.startswith(OUTPUTS)}

    def _retry(self, call: Callable[[], Any]) -> Any:
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
