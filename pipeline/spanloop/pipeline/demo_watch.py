"""What the demo shows while it runs, read from the workspace's log as it grows: tickets, returns, versions, lag.

Place: ``demo`` polls it about once a second for its live display and keeps its history for the report. It only reads. A ticket is an
orchestration with samples: its reward is known and every call's policy version is recorded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec

from spanloop.pipeline.ports import Log, LogRecord, StateStore
from spanloop.schemas import topics
from spanloop.schemas.canonical import MICRO
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    BatchCommitted,
    CanaryFinished,
    CanaryStarted,
    CandidateRegistered,
    Event,
    GateEvaluated,
    PolicyCommandFinished,
    PolicyPromoted,
    PolicyRolledBack,
    RoutingChanged,
    decode,
)
from spanloop.schemas.ids import policy_number

__all__ = ["Band", "Served", "Watch", "band"]

WINDOW = 500
"""Tickets in a return."""
READ_RECORDS = 2_000
STAGES = {"assembly": topics.SPANS, "signal": topics.ORCHESTRATIONS}


class _Spans(msgspec.Struct):
    spans: list[msgspec.Raw] = []


class _Row(msgspec.Struct):
    policy_version: str = ""


class _Samples(msgspec.Struct):
    orchestration_id: str = ""
    revision: int = 1
    reward: int = 0
    rows: list[_Row] = []


_spans = msgspec.json.Decoder(_Spans)
_samples = msgspec.json.Decoder(_Samples)


class Band(msgspec.Struct, frozen=True):
    """Mean return of the newest tickets with a 95 % interval; ``count`` 0: none yet."""

    count: int
    mean: float = 0.0
    low: float = 0.0
    high: float = 0.0


class Served(msgspec.Struct, frozen=True):
    """A ticket with its outcome."""

    orchestration_id: str
    version: int
    """-1: more than one version answered."""
    value: float
    champion: int
    """Who was champion when the outcome was known."""
    known_ns: int
    """When its samples were appended."""


def band(values: Iterable[float]) -> Band:
    """Mean and 95 % interval (normal approximation).

    >>> band([0.0, 1.0]).mean, band([]).count
    (0.5, 0)
    """
    found = list(values)
    if not found:
        return Band(0)
    mean = math.fsum(found) / len(found)
    spread = math.fsum((v - mean) ** 2 for v in found) / max(1, len(found) - 1)
    error = 1.96 * math.sqrt(spread / len(found))
    return Band(len(found), mean, mean - error, mean + error)


class Watch:
    """A reader of one workspace's log.

    Args:
        log: The workspace's log.
        state: The stages' state, for their offsets.
    """

    def __init__(self, log: Log, state: StateStore) -> None:
        self._log = log
        self._state = state
        self._after: dict[str, int] = {}
        self._revisions: dict[str, int] = {}
        self.num_spans = 0
        self.served: dict[str, Served] = {}
        """By orchestration id, in the order of their first outcome; a revision replaces the value."""
        self.policy_events: list[tuple[Event, int]] = []
        """Events of the policies topic with the time of their append."""
        self.champion = -1
        self.epoch = 0
        self.routing: RoutingChanged | None = None
        self.canary: CanaryStarted | None = None
        self.candidates: dict[int, CandidateRegistered] = {}
        self.batches = 0
        self._by_champion: deque[float] = deque(maxlen=WINDOW)
        self._by_candidate: deque[float] = deque(maxlen=WINDOW)
        self._lags: deque[int] = deque(maxlen=WINDOW)

    def poll(self) -> None:
        """Read what is new."""
        for event, at in self._new_policy_events():
            self.policy_events.append((event, at))
            self._apply(event)
        for record in self._new(topics.SPANS):
            self.num_spans += len(_spans.decode(record.value).spans)
        for record in self._new(topics.SAMPLES):
            self._take(_samples.decode(record.value), record.appended_ns)

    def _new(self, topic: str) -> Iterable[LogRecord]:
        while records := self._log.read([topic], {topic: self._after.get(topic, -1)}, READ_RECORDS):
            yield from records
            self._after[topic] = records[-1].offset

    def _new_policy_events(self) -> Iterable[tuple[Event, int]]:
        for record in self._new(topics.POLICIES):
            try:
                yield decode(record.value), record.appended_ns
            except SchemaError:
                continue

    def _apply(self, event: Event) -> None:
        match event:
            case PolicyPromoted():
                self.champion, self.epoch = event.version, event.epoch
                self._by_champion.clear()
            case PolicyRolledBack():
                self.champion, self.epoch = event.to, event.epoch
            case RoutingChanged():
                self.routing = event
            case CanaryStarted():
                self.canary = event
            case CanaryFinished():
                self.canary = None
            case CandidateRegistered():
                self.candidates[event.version] = event
            case BatchCommitted():
                self.batches = max(self.batches, event.batch)
            case _:
                pass

    def _take(self, samples: _Samples, at_ns: int) -> None:
        name = samples.orchestration_id
        if not samples.rows or self._revisions.get(name, 0) >= samples.revision:
            return
        is_first = name not in self._revisions
        self._revisions[name] = samples.revision
        versions = {policy_number(row.policy_version) for row in samples.rows}
        version = versions.pop() if len(versions) == 1 else -1
        value = samples.reward / MICRO
        self.served[name] = Served(name, version, value, self.champion, at_ns)
        if not is_first or version < 0:
            return
        if version == self.champion:
            self._by_champion.append(value)
        else:
            self._by_candidate.append(value)
            acted = self.candidates.get(version)
            if acted is not None and not acted.injected:
                self._lags.append(self.batches - acted.batch)

    @property
    def champion_return(self) -> Band:
        """Newest tickets that the present champion served."""
        return band(self._by_champion)

    @property
    def candidate_return(self) -> Band:
        """Newest tickets that candidates served."""
        return band(self._by_candidate)

    @property
    def staleness(self) -> float:
        """Mean number of updates that the acting candidate was behind when its outcome was known."""
        return sum(self._lags) / len(self._lags) if self._lags else 0.0

    def lag_s(self, now_ns: int) -> float:
        """Age of the oldest record that a stage has not taken in yet; 0 when none waits."""
        oldest = now_ns
        for stage, topic in STAGES.items():
            after = self._state.offsets(stage).get(topic, -1)
            if after < self._log.end(topic):
                waiting = self._log.read([topic], {topic: after}, 1)
                if waiting:
                    oldest = min(oldest, waiting[0].appended_ns)
        return (now_ns - oldest) / 1e9

    def newest(self, kind: type[Event], **fields: Any) -> Any:
        """The last event of a type with these field values, None without one."""
        for event, _ in reversed(self.policy_events):
            if isinstance(event, kind) and all(getattr(event, k) == v for k, v in fields.items()):
                return event
        return None

    def injected(self) -> CandidateRegistered | None:
        """The newest candidate that was put there by hand."""
        return next((c for c in reversed(self.candidates.values()) if c.injected), None)

    def command_result(self, command_id: str) -> PolicyCommandFinished | None:
        """What became of a command."""
        return self.newest(PolicyCommandFinished, command_id=command_id)

    def gate_of(self, version: int) -> GateEvaluated | None:
        """The last evaluation of a version by the gate."""
        return self.newest(GateEvaluated, version=version)
