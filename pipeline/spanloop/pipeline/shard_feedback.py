"""Feedback on its way to the home of its target.

A trace's owner knows its home, a response's owner the traces that it was seen in, an orchestration id's owner a trace of it.
Feedback on a span whose trace the scorer does not name goes to every partition; the one that has the span tells the one that
answers for the feedback, which sends it to the span's trace. Whoever lets feedback wait dead-letters it when the retention is over, so
that this happens once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from spanloop.pipeline.held import Store, expired
from spanloop.pipeline.shard_tables import Broadcast, Evidence, Fold, Place, Tables, add_waiting
from spanloop.pipeline.signal import SignalStage
from spanloop.schemas.events import Event, FeedbackReceived
from spanloop.schemas.operations import FeedbackClaimed, FeedbackRouted, OrchestrationPlaced

__all__ = ["FeedbackRoutes"]


class FeedbackRoutes:
    """The feedback side of a shard.

    Args:
        tables: of the shard.
        signal: its signal stage, which holds the feedback that is at home here.
        parent: tenant, trace, time -> the trace that it was joined to; empty: at home here.
        partition: of the shard.
        retention_ns: how long feedback waits.
        placed_ns: how long it is remembered where an orchestration is, after it was last said or asked.
    """

    def __init__(
        self,
        tables: Tables,
        signal: SignalStage,
        parent: Callable[[str, str, int], str],
        *,
        partition: int,
        retention_ns: int,
        placed_ns: int,
    ) -> None:
        self._tables = tables
        self._signal = signal
        self._parent = parent
        self._partition = partition
        self._retention_ns, self._placed_ns = retention_ns, placed_ns
        self._asked: dict[str, list[str]] = {}
        for key, entry in tables.all("b").items():
            self._ask(key, entry)

    def _ask(self, key: str, entry: Broadcast) -> None:
        if entry.feedback is not None and not entry.trace_id:
            self._asked.setdefault(_span_of(entry.feedback), []).append(key)

    @property
    def _store(self) -> Store:
        return self._signal.store

    # ------------------------------------------------------------ messages

    def routed(self, event: FeedbackRouted, fold: Fold) -> None:
        """Feedback has come one step further."""
        until_ns = fold.now_ns + self._retention_ns
        if event.to.startswith("span/"):
            self._broadcast(event, until_ns, fold)
        elif event.to.startswith("r/"):
            evidence = self._tables.get("e", event.key) or Evidence(until_ns)
            if evidence.ends:
                self._send(event.feedback, min(trace for trace, _, _ in evidence.ends), fold)
            elif add_waiting(evidence.waiting, event.feedback):
                self._tables.put("e", event.key, evidence)
        elif event.to.startswith("orchestration/"):
            place = self._tables.get("p", event.key) or Place(until_ns)
            if place.trace_id:
                self._send(event.feedback, place.trace_id, fold)
                place.until_ns = fold.now_ns + self._placed_ns
                self._tables.put("p", event.key, place)
            elif add_waiting(place.waiting, event.feedback):
                self._tables.put("p", event.key, place)
        else:
            parent = self._parent(event.tenant, event.to, fold.now_ns)
            if parent:
                self._send(event.feedback, parent, fold)
            else:
                fold.incoming.append(event.feedback)

    def _send(self, feedback: FeedbackReceived, trace_id: str, fold: Fold) -> None:
        fold.events.append(FeedbackRouted(tenant=feedback.tenant, feedback=feedback, to=trace_id))

    def placed(self, event: OrchestrationPlaced, fold: Fold) -> None:
        """An orchestration id is known from here on."""
        place = self._tables.get("p", event.key) or Place(0)
        for item in place.waiting:
            self._send(item, event.trace_id, fold)
        until_ns = fold.now_ns + self._placed_ns
        self._tables.put("p", event.key, Place(until_ns, event.trace_id))

    def flush_waiting(self, evidence: Evidence, trace_id: str, fold: Fold) -> bool:
        """Send feedback that waited for a response on its way; False when there is none."""
        for item in evidence.waiting:
            self._send(item, trace_id, fold)
        found, evidence.waiting = bool(evidence.waiting), []
        return found

    # ------------------------------------------------------------ feedback that every partition got

    def _broadcast(self, event: FeedbackRouted, until_ns: int, fold: Fold) -> None:
        item = event.feedback
        key = f"{item.tenant}/{item.feedback_id}"
        known = self._tables.get("b", key)
        if known is not None and known.feedback is not None:
            return
        trace_id = known.trace_id if known is not None else ""
        entry = Broadcast(until_ns, item, event.answers, trace_id)
        self._tables.put("b", key, entry)
        if trace_id:
            self._send(item, trace_id, fold)
        else:
            self._ask(key, entry)
            self.offer([_span_of(item)], fold)

    def offer(self, targets: Iterable[str], fold: Fold) -> None:
        """Say where spans are that feedback was asking for, if they are here."""
        if not self._asked:
            return
        for target in targets:
            owner = self._store.owner(target) if target in self._asked else None
            if owner is None:
                continue
            traces = [t for t in self._store.held[owner].targets if "/trace/" in t]
            for key in self._asked.pop(target):
                self._answer(key, min(traces).rpartition("/")[2], fold)

    def offer_all(self, fold: Fold) -> None:
        """``offer`` for everything that is held."""
        self.offer(list(self._asked), fold)

    def _answer(self, key: str, trace_id: str, fold: Fold) -> None:
        entry: Broadcast | None = self._tables.get("b", key)
        if entry is None or entry.feedback is None or entry.trace_id:
            return
        item = entry.feedback
        if entry.answers == self._partition:
            self._send(item, trace_id, fold)
        else:
            fold.events.append(
                FeedbackClaimed(
                    tenant=item.tenant, feedback_id=item.feedback_id, to=f"span/{item.target_id}", partition=entry.answers,
                    trace_id=trace_id,
                )
            )  # fmt: skip
        self._tables.put("b", key, Broadcast(entry.until_ns, item, entry.answers, trace_id))

    def claimed(self, event: FeedbackClaimed, fold: Fold) -> None:
        """Somebody has the span of feedback that this partition answers for."""
        key = f"{event.tenant}/{event.feedback_id}"
        if self._tables.get("b", key) is None:
            until_ns = fold.now_ns + self._retention_ns
            self._tables.put("b", key, Broadcast(until_ns, None, self._partition, event.trace_id))
        else:
            self._answer(key, event.trace_id, fold)

    # ------------------------------------------------------------ time

    def given_up(self, kind: str, key: str, entry: object) -> list[Event]:
        """Dead letters of an entry that was forgotten."""
        if isinstance(entry, Evidence | Place):
            return [expired(item) for item in entry.waiting]
        if not isinstance(entry, Broadcast) or entry.feedback is None or entry.trace_id:
            return []
        target = _span_of(entry.feedback)
        keys = self._asked.get(target, [])
        if key in keys:
            keys.remove(key)
            if not keys:
                del self._asked[target]
        return [expired(entry.feedback)] if entry.answers == self._partition else []


def _span_of(item: FeedbackReceived) -> str:
    return f"{item.tenant}/span/{item.target_id}"
