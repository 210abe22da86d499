"""The embedded runtime: stages over a Log and a StateStore in one process, no broker.

A shell: it reads, tells the time, folds, commits, waits. Invariants:

- A batch's state, offsets and outputs are one commit; nothing is read again that was committed.
- A stage that raises on a record does not stop the log: the batch is halved until the record stands alone, which
  is dead-lettered; the stage goes on from its committed state.
- Timers see the time up to which the log was read: while a backlog waits, quiet periods are not counted.
- A commit that fails for now (disk full) is tried again with the same outputs; reading waits for it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from spanloop.pipeline.ports import (
    Clock,
    Log,
    LogRecord,
    NewRecord,
    Stage,
    StageOutput,
    StateStore,
    output_records,
)
from spanloop.pipeline.runtimes.folding import fold, is_cornered, where
from spanloop.pipeline.runtimes.passing import Passing
from spanloop.schemas.errors import SpanloopError, TerminalError, TransientError

__all__ = ["EmbeddedRuntime", "StageMetrics", "run_to_end"]

T = TypeVar("T")

WAIT_MIN_S = 0.002
WAIT_MAX_S = 0.05
"""Idle wait: doubles from the first to the second, never past the next timer."""
RETRY_MAX_S = 5.0
"""Longest pause between two attempts of a commit that fails for now."""
IDLE_TICKS_MAX = 10_000
"""Timers in a row that may fire without effect in a batch run before the stage counts as broken."""

_log = logging.getLogger("spanloop.pipeline")


class StageMetrics(msgspec.Struct):
    """Counters of one stage since its start."""

    records: int = 0
    events: int = 0
    commits: int = 0
    dead_letters: int = 0
    retries: int = 0
    lag_ms: float = 0.0
    """Age of the oldest record of the last batch while more wait behind it; 0 when caught up."""


class _Runner:
    """One stage with the offsets that its committed state contains."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.offsets: dict[str, int] = {}
        self.metrics = StageMetrics()


class EmbeddedRuntime:
    """Runs stages in the given order, one thread.

    Args:
        stages: in the order of the flow, so that one round carries a record through all of them.
        log: where inputs are read.
        state: where state, offsets and outputs are committed.
        clock: processing time.
        batch_max: records that a stage folds at once.
        attempts: how often a call that fails for now is tried; 0: until stopped.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        log: Log,
        state: StateStore,
        clock: Clock,
        *,
        batch_max: int = 500,
        attempts: int = 0,
    ) -> None:
        self._runners = [_Runner(stage) for stage in stages]
        self._log = log
        self._state = state
        self._clock = clock
        self._batch_max = batch_max
        self._passing = Passing(stage.topics for stage in stages)
        self._attempts = attempts
        self._stop = threading.Event()

    def restore(self) -> None:
        """Bring every stage to its committed state; call before the first step."""
        for runner in self._runners:
            self._restore(runner)

    def _restore(self, runner: _Runner) -> None:
        name = runner.stage.name
        runner.stage.restore(self._retry(runner, lambda: self._state.load(name)))
        runner.offsets = self._retry(runner, lambda: self._state.offsets(name))

    def step(self) -> int:
        """One round over all stages: returns records folded plus events and writes that timers gave."""
        return sum(self._round(runner) for runner in self._runners)

    def run(self) -> None:
        """Step until ``stop``; then fold what is already on the log, up to one more batch a stage."""
        wait = WAIT_MIN_S
        while not self._stop.is_set():
            if self.step():
                wait = WAIT_MIN_S
                continue
            self._stop.wait(self._until_timer(wait))
            wait = min(wait * 2, WAIT_MAX_S)
        self.step()

    def stop(self) -> None:
        """Make ``run`` return soon; safe from signal handlers and other threads."""
        self._stop.set()

    def metrics(self) -> dict[str, StageMetrics]:
        """Counters by stage name."""
        return {runner.stage.name: runner.metrics for runner in self._runners}

    def next_timer_ns(self) -> int | None:
        """The earliest timer of any stage."""
        timers = [t for runner in self._runners if (t := runner.stage.next_timer_ns()) is not None]
        return min(timers, default=None)

    def fire(self, now_ns: int) -> int:
        """Tick every stage whose timer is due at ``now_ns``: returns events and writes that came of it."""
        return sum(self._tick(runner, now_ns) for runner in self._runners if _due(runner.stage, now_ns))

    def _until_timer(self, wait: float) -> float:
        timer = self.next_timer_ns()
        if timer is None:
            return wait
        return min(wait, max(WAIT_MIN_S, (timer - self._clock.now_ns()) / 1e9))

    def _round(self, runner: _Runner) -> int:
        now_ns = self._clock.now_ns()
        topics, offsets = runner.stage.topics, runner.offsets
        records = self._retry(runner, lambda: self._log.read(topics, offsets, self._batch_max))
        behind = len(records) >= self._batch_max
        runner.metrics.lag_ms = max(0.0, (now_ns - records[0].appended_ns) / 1e6) if behind else 0.0
        horizon_ns = min(now_ns, records[-1].appended_ns) if behind else now_ns
        if records:
            self._fold(runner, self._passing.attach(records), now_ns)
        fired = self._tick(runner, horizon_ns) if _due(runner.stage, horizon_ns) else 0
        return len(records) + fired

    def _fold(self, runner: _Runner, records: list[LogRecord], now_ns: int) -> None:
        """Process and commit; a record on which the stage raises is cornered and dead-lettered."""
        for part, output in fold(runner.stage, records, now_ns, lambda: self._restore(runner)):
            outputs = output_records(runner.stage, output.events, output.written)
            runner.metrics.dead_letters += sum(map(is_cornered, output.events))
            self._commit(runner, output, outputs, {record.source: record.offset for record in part})
            runner.metrics.records += len(part)

    def _tick(self, runner: _Runner, now_ns: int) -> int:
        try:
            output = runner.stage.tick(now_ns)
            outputs = output_records(runner.stage, output.events, output.written)
        except SpanloopError:
            raise
        except Exception as exc:
            raise TerminalError(
                f"stage {runner.stage.name} raised {type(exc).__name__} at {where(exc)} while firing timers, and no "
                "record can be set aside for that: please report this bug with the lines above"
            ) from exc
        if output.events or output.writes:
            self._commit(runner, output, outputs, {})
        return len(output.events) + len(output.writes)

    def _commit(
        self, runner: _Runner, output: StageOutput, outputs: Sequence[NewRecord], offsets: dict[str, int]
    ) -> None:
        name = runner.stage.name
        self._retry(
            runner,
            lambda: self._state.commit(name, writes=output.writes, offsets=offsets, outputs=outputs),
        )
        self._passing.put(output.events, outputs)
        runner.offsets.update(offsets)
        runner.metrics.commits += 1
        runner.metrics.events += len(outputs)

    def _retry(self, runner: _Runner, call: Callable[[], T]) -> T:
        pause, attempt = 0.05, 0
        while True:
            try:
                return call()
            except TransientError as exc:
                attempt += 1
                runner.metrics.retries += 1
                if attempt == self._attempts or self._stop.is_set():
                    raise
                _log.warning("stage %s waits %.2f s: %s", runner.stage.name, pause, exc.message)
                self._stop.wait(pause)
                pause = min(pause * 2, RETRY_MAX_S)


def _due(stage: Stage, now_ns: int) -> bool:
    timer = stage.next_timer_ns()
    return timer is not None and timer <= now_ns


def run_to_end(
    stages: Sequence[Stage],
    log: Log,
    state: StateStore,
    clock: Clock,
    *,
    fire_timers: bool = True,
    batch_max: int = 500,
) -> dict[str, StageMetrics]:
    """Carry the whole log through the stages and return: for files, verification and tests.

    Args:
        stages: in the order of the flow.
        log: inputs; outputs come to it through ``state``.
        state: usually a MemoryState; with a durable one, fired timers are durable too.
        clock: the time that stages see; timers later than it are fired at their own time.
        fire_timers: close what is open, as if time went on for ever.
        batch_max: records that a stage folds at once.

    Raises:
        TerminalError: a stage sets timers without end.
    """
    runtime = EmbeddedRuntime(stages, log, state, clock, batch_max=batch_max, attempts=3)
    runtime.restore()
    idle = 0
    while True:
        while runtime.step():
            pass
        timer = runtime.next_timer_ns()
        if timer is None or not fire_timers:
            return runtime.metrics()
        idle = 0 if runtime.fire(max(timer, clock.now_ns())) else idle + 1
        if idle > IDLE_TICKS_MAX:
            raise TerminalError(
                f"timers fired {idle} times without effect; the next is at {runtime.next_timer_ns()}: "
                "a stage must not set a timer again that had nothing to do"
            )


if __name__ == "__main__":
    from spanloop.pipeline.runtimes.process import main

    main()
