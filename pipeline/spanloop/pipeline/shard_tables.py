"""What a shard remembers beside orchestrations and feedback: entries by kind and key, each with the time at which it is forgotten.

Invariants: every change is in ``take_writes``; ``restore`` of what was written gives the same tables and timers.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import islice
from typing import Any

import msgspec

from spanloop.pipeline.assembly.join import Emitted
from spanloop.pipeline.ports import StageOutput
from spanloop.pipeline.signal import SignalStage
from spanloop.schemas.events import Event, FeedbackReceived, RewardsComputed

__all__ = ["FAR_NS", "Broadcast", "Evidence", "Fold", "Joined", "Observed", "Place", "Tables", "add_waiting"]

FAR_NS = 2**62
WAITING_MAX = 256
"""Feedbacks that wait for one response or orchestration id; those with the smallest (observed_ns, feedback_id) go first."""


class Joined(msgspec.Struct, frozen=True, array_like=True):
    """A trace that was joined to another: everything about it goes there."""

    until_ns: int
    parent: str


class Evidence(msgspec.Struct, array_like=True):
    """A piece of evidence with the ends that were seen; for a response also the feedback that waits for its trace."""

    until_ns: int
    ends: list[tuple[str, int, bytes]] = []
    """Trace, side, operation."""
    waiting: list[FeedbackReceived] = []


class Place(msgspec.Struct, array_like=True):
    """Where an orchestration id is at home, and feedback that waits to know."""

    until_ns: int
    trace_id: str = ""
    waiting: list[FeedbackReceived] = []


class Broadcast(msgspec.Struct, array_like=True):
    """Feedback on a span of an unknown trace."""

    until_ns: int
    feedback: FeedbackReceived | None
    """None: the answer was here before the question."""
    answers: int
    trace_id: str = ""
    """Of the span, once somebody has it."""


class Observed(msgspec.Struct, array_like=True):
    """An orchestration's last outputs as found on the log behind the state that was restored."""

    until_ns: int
    trace_id: str = ""
    """Its smallest trace."""
    revision: int = 0
    content_hash: str = ""
    complete: bool = False
    merged_into: str = ""
    rewards: RewardsComputed | None = None
    """If the value stage learns from them."""

    def emitted(self) -> Emitted:
        """As the joiner keeps it."""
        return Emitted(self.revision, self.content_hash, self.complete, self.merged_into)


_KINDS: dict[str, type[Any]] = {"j": Joined, "e": Evidence, "p": Place, "b": Broadcast, "w": Observed}
_pack = msgspec.msgpack.encode


class Tables:
    """Entries by kind and key; a kind is one letter."""

    def __init__(self) -> None:
        self._of: dict[str, dict[str, Any]] = {kind: {} for kind in _KINDS}
        self._writes: dict[str, bytes | None] = {}
        self._timers: list[tuple[int, str, str]] = []

    def restore(self, entries: Mapping[str, bytes]) -> None:
        """Fill empty tables; entries of unknown kinds are somebody else's."""
        for name, value in entries.items():
            kind, _, key = name.partition("/")
            if kind in _KINDS:
                entry = self._of[kind][key] = msgspec.msgpack.decode(value, type=_KINDS[kind])
                self._timers.append((entry.until_ns, kind, key))
        self._timers.sort()
        for _, kind, key in self._timers:
            self._of[kind][key] = self._of[kind].pop(key)

    def take_writes(self) -> dict[str, bytes | None]:
        """Changed entries since the last call."""
        writes, self._writes = self._writes, {}
        return writes

    def all(self, kind: str) -> Mapping[str, Any]:
        """Entries of a kind, in the order in which they were last written."""
        return self._of[kind]

    def get(self, kind: str, key: str) -> Any:
        """An entry, or None."""
        return self._of[kind].get(key)

    def put(self, kind: str, key: str, entry: Any) -> None:
        """Write an entry, new or changed."""
        old = self._of[kind].pop(key, None)
        self._of[kind][key] = entry
        if old is None or old is entry or old.until_ns != entry.until_ns:
            heapq.heappush(self._timers, (entry.until_ns, kind, key))
        self._writes[f"{kind}/{key}"] = _pack(entry)

    def drop(self, kind: str, key: str) -> None:
        """Delete an entry."""
        if self._of[kind].pop(key, None) is not None:
            self._writes[f"{kind}/{key}"] = None

    def next_ns(self) -> int | None:
        """When the first entry is too old; timers of entries that changed since are dropped."""
        while self._timers:
            until_ns, kind, key = self._timers[0]
            entry = self._of[kind].get(key)
            if entry is not None and entry.until_ns == until_ns:
                return until_ns if until_ns < FAR_NS else None
            heapq.heappop(self._timers)
        return None

    def take_old(self, now_ns: int) -> list[tuple[str, str, Any]]:
        """Delete and return the entries that are too old: kind, key, entry."""
        old = []
        while (timer := self.next_ns()) is not None and timer <= now_ns:
            _, kind, key = heapq.heappop(self._timers)
            old.append((kind, key, self._of[kind][key]))
            self.drop(kind, key)
        return old

    def take_excess(self, kind: str, most: int) -> list[tuple[str, str, Any]]:
        """Delete and return what is beyond ``most`` entries of a kind, the oldest first."""
        entries = self._of[kind]
        old = [(kind, key, entry) for key, entry in islice(entries.items(), max(0, len(entries) - most))]
        for _, key, _ in old:
            self.drop(kind, key)
        return old


class Fold:
    """What one call of the stage collects."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns
        self.events: list[Event] = []
        """Messages and dead letters."""
        self.touched: dict[tuple[str, str], None] = {}
        """Traces whose components changed."""
        self.assembled = StageOutput([], {})
        self.incoming: list[Event] = []
        """What the signal stage has still to fold."""
        self.signalled = StageOutput([], {})
        self.lessons: list[RewardsComputed] = []
        """Rewards to be taught again."""

    def flush(self, stage: SignalStage) -> None:
        """Let the signal stage fold what waits for it."""
        if self.incoming:
            incoming, self.incoming = self.incoming, []
            self.take(stage.fold(incoming, self.now_ns))

    def take(self, output: StageOutput) -> None:
        """Add what the signal stage gave."""
        self.signalled.events += output.events
        self.signalled.writes.update(output.writes)


def add_waiting(waiting: list[FeedbackReceived], item: FeedbackReceived) -> bool:
    """Let feedback wait; False when it does already."""
    if any(known.feedback_id == item.feedback_id for known in waiting):
        return False
    waiting.append(item)
    if len(waiting) > WAITING_MAX:
        waiting.remove(min(waiting, key=lambda f: (f.observed_ns, f.feedback_id)))
    return True
