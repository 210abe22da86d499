"""The watch: recent orchestrations against a reference, signal by signal. A pure reducer.

The reference is the first ``window`` orchestrations that a policy acted, and again the last ones when somebody unfreezes: who
unfreezes accepts what is. A signal is raised when the recent ones lie beyond its limit with confidence while their outcome is
not better with confidence: a change that the outcome pays for is learning, not hacking.

Invariants: the order within the reference and within a window decides nothing but membership; an orchestration counts once,
with its last revision at the time; nothing is raised twice until it is unfrozen.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import NormalDist

import msgspec

from spanloop.learner.sentinels.signals import SIGNALS, Signal

__all__ = ["Alarm", "Memory", "Observation", "Watch"]

OFFENDERS = 5
"""Orchestrations that an alarm names."""
PAID = 0.95
"""Confidence with which a better outcome excuses a change."""


class Observation(msgspec.Struct, frozen=True):
    """One orchestration."""

    orchestration_id: str
    version: int
    """Newest policy version that acted in it."""
    outcome: float
    """R1, units."""
    signals: dict[str, float]


class Alarm(msgspec.Struct, frozen=True):
    """A signal beyond its limit."""

    sentinel: str
    version: int
    """Newest version among the recent."""
    value: float
    """Mean of the recent ..."""
    reference: float
    """... and of the reference."""
    limit: float
    n: int
    orchestrations: tuple[str, ...]
    """Those that moved it most."""

    @property
    def reason(self) -> str:
        """A sentence for people."""
        return (
            f"{self.sentinel}: {self.value:.4g} over the last {self.n} orchestrations, {self.reference:.4g} before "
            f"(limit {self.limit:.4g}), and the outcome is not better"
        )


class Memory(msgspec.Struct):
    """State of a watch."""

    reference: list[Observation] = []
    recent: list[Observation] = []
    """Oldest first."""
    new: int = 0
    """Orchestrations since the last look."""
    raised: list[str] = []


class Watch:
    """Reference and recent window.

    Args:
        window: Orchestrations of each.
        confidence: One-sided, of each look at each signal.
        every: New orchestrations between two looks.
    """

    def __init__(self, *, window: int, confidence: float, every: int = 25) -> None:
        self._window = window
        self._z = NormalDist().inv_cdf(confidence)
        self._every = every
        self._reference: dict[str, Observation] = {}
        self._recent: dict[str, Observation] = {}
        self._order: deque[str] = deque()
        self._new = 0
        self._raised: set[str] = set()

    def add(self, seen: Observation) -> list[Alarm]:
        """Take an orchestration, or a later revision of it; returns what it raised."""
        if seen.orchestration_id in self._reference:
            self._reference[seen.orchestration_id] = seen
            return []
        if len(self._reference) < self._window:
            self._reference[seen.orchestration_id] = seen
            return []
        if seen.orchestration_id not in self._recent:
            self._order.append(seen.orchestration_id)
            self._new += 1
        self._recent[seen.orchestration_id] = seen
        while len(self._order) > self._window:
            self._recent.pop(self._order.popleft(), None)
        if len(self._order) < self._window or self._new < self._every:
            return []
        self._new = 0
        return self._look()

    def accept(self) -> None:
        """What is recent is the reference from now on; every sentinel may be raised again."""
        if self._recent:
            self._reference = dict(self._recent)
        self._recent, self._order, self._new = {}, deque(), 0
        self._raised = set()

    def memory(self) -> Memory:
        """All it knows: what ``restore`` takes."""
        recent = [self._recent[name] for name in self._order]
        return Memory(list(self._reference.values()), recent, self._new, sorted(self._raised))

    def restore(self, known: Memory) -> None:
        """Go on exactly from there."""
        self._reference = {o.orchestration_id: o for o in known.reference}
        self._recent = {o.orchestration_id: o for o in known.recent}
        self._order = deque(self._recent)
        self._new = known.new
        self._raised = set(known.raised)

    def _look(self) -> list[Alarm]:
        before, now = list(self._reference.values()), list(self._recent.values())
        excused = _better([o.outcome for o in before], [o.outcome for o in now])
        found: list[Alarm] = []
        for name, signal in SIGNALS.items():
            if name in self._raised or excused:
                continue
            alarm = self._compare(name, signal, before, now)
            if alarm is not None:
                self._raised.add(name)
                found.append(alarm)
        return found

    def _compare(
        self, name: str, signal: Signal, before: Sequence[Observation], now: Sequence[Observation]
    ) -> Alarm | None:
        old = [o.signals[name] for o in before if name in o.signals]
        new = [o.signals[name] for o in now if name in o.signals]
        if min(len(old), len(new)) < max(2, self._window // 2):
            return None
        down = signal.factor < 1.0
        sign = -1.0 if down else 1.0
        reference, value = _mean(old), _mean(new)
        limit = reference * signal.factor + sign * signal.margin
        error = math.sqrt(signal.factor**2 * _variance(old) / len(old) + _variance(new) / len(new))
        if sign * (value - limit) <= self._z * error or sign * (value - reference) <= 0.0:
            return None
        worst = sorted(now, key=lambda o: (-sign * o.signals.get(name, -sign * math.inf), o.orchestration_id))
        ids = tuple(o.orchestration_id for o in worst[:OFFENDERS])
        version = max(o.version for o in now)
        return Alarm(name, version, value, reference, limit, len(new), ids)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.fsum((v - mean) ** 2 for v in values) / max(1, len(values) - 1)


def _better(before: Sequence[float], now: Sequence[float]) -> bool:
    """Whether the outcome rose with confidence ``PAID``."""
    error = math.sqrt(_variance(before) / len(before) + _variance(now) / len(now))
    return _mean(now) - _mean(before) > NormalDist().inv_cdf(PAID) * error
