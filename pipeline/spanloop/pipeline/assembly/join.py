"""Which traces are one orchestration: incremental union over evidence that two operations give together.

Evidence: a span link into another trace; the gateway's span and a framework's span of one response id, or, where the
framework keeps no id and the request had no trace context, of one model and the same texts, one within the other in time;
inside one conversation, a root run whose task is an argument of a tool call of another trace that contains
it in time, or that is resumed with a tool call that another run put off, or in a node that was interrupted; messages of one team, near in time, that
lost their links. A conversation id alone joins nothing: a conversation has many runs. Two framework spans with
one response id in different traces join nothing either: scripted models repeat their ids.

Invariants: the partition and every buffer depend on the set of operations ever added, never on order or
repetition (up to MAX_SPANS and _MAX_EVIDENCE); each piece of evidence is looked at from both of its ends, so whichever comes
last joins.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from spanloop.pipeline.assembly.delegations import lost_in
from spanloop.pipeline.assembly.human import pause_ends
from spanloop.pipeline.assembly.one_call import text_ends
from spanloop.pipeline.dialects.operation import Operation, decode_operation
from spanloop.schemas.ids import orchestration_id

__all__ = ["MAX_SPANS", "Component", "Emitted", "Joiner", "Seen", "TraceBuffer", "evidence_of", "match"]

MAX_SPANS = 150_000
"""Spans of one orchestration; further ones are counted (flag ``truncated_spans``) and not kept."""
_MAX_EVIDENCE = 64
"""Operations remembered for one piece of evidence; a response id or a text that stands in more is no
evidence."""
ANY = 2
"""Side of evidence all of whose ends belong together."""
_TEAM_NS = 10_000_000_000
"""A team whose messages lost their links is silent no longer than this within one run."""
_TEAM_STRETCHES = 64
RELEVANT = frozenset(
    {"agent_run", "model_call", "tool_call", "handover", "guardrail", "workflow", "message", "logged"}
)
"""Kinds that make an orchestration; traces of anything else are none."""


class Emitted(msgspec.Struct):
    """What was last published under one orchestration id."""

    revision: int
    content_hash: str
    complete: bool
    merged_into: str = ""


class TraceBuffer:
    """The spans of one trace as encoded operations: the winner of each span id, and what is open."""

    def __init__(self) -> None:
        self.spans: dict[str, bytes] = {}
        self.losers: dict[str, set[bytes]] = {}
        """Versions that lost, by span id."""
        self.conflicts: set[str] = set()
        """Span ids with two different finished versions."""
        self.missing: set[str] = set()
        """Parents that have not arrived."""
        self.unfinished: set[str] = set()
        self.rooted = False
        """A finished root that is not the gateway's."""
        self.relevant = False
        """Whether any version of any span is of a kind that makes an orchestration: what was published stays one."""
        self.chunks = 0
        """State entries written for this trace."""
        self.fresh: list[bytes] = []
        """Versions that are not in the state yet."""
        self.keys: list[str] = []
        """Evidence keys under which this trace is indexed."""

    def add(self, operation: Operation, encoded: bytes) -> bool:
        """Take a version of a span; False when it changes nothing. Of several versions the finished one
        with the later end counts, then the larger bytes."""
        span_id, spans = operation.span_id, self.spans
        old = spans.get(span_id)
        if old is None:
            spans[span_id] = encoded
            self.fresh.append(encoded)
            self._count(operation)
            self.missing.discard(span_id)
            return True
        if old == encoded:
            return False
        before = decode_operation(old)
        wins = (operation.end_ns, encoded) > (before.end_ns, old)
        loser = old if wins else encoded
        known = self.losers.setdefault(span_id, set())
        if not wins and loser in known:
            return False
        known.add(loser)
        self.relevant |= operation.kind in RELEVANT
        if min(operation.end_ns, before.end_ns) > 0:
            self.conflicts.add(span_id)
        self.fresh.append(encoded)
        if wins:
            self.spans[span_id] = encoded
            if operation.parent_id == before.parent_id and _is_root(operation) >= _is_root(before):
                self.unfinished.discard(span_id)
                self._count(operation)
            else:
                self._recount()
        return True

    def versions(self) -> list[bytes]:
        """Every version of every span."""
        return [
            *self.spans.values(),
            *(v for span_id in sorted(self.losers) for v in sorted(self.losers[span_id])),
        ]

    def _count(self, operation: Operation) -> None:
        parent_id = operation.parent_id
        if parent_id:
            if parent_id not in self.spans:
                self.missing.add(parent_id)
        elif not self.rooted and _is_root(operation):
            self.rooted = True
        if operation.end_ns <= 0:
            self.unfinished.add(operation.span_id)
        if not self.relevant and operation.kind in RELEVANT:
            self.relevant = True

    def _recount(self) -> None:
        self.missing, self.unfinished, self.rooted = set(), set(), False
        for encoded in self.spans.values():
            self._count(decode_operation(encoded))


def _is_root(operation: Operation) -> bool:
    """Whether it is a finished root that is not the gateway's."""
    if operation.parent_id or operation.end_ns <= 0:
        return False
    return operation.call is None or operation.call.gateway is None


class Component:
    """Traces that are one orchestration, with what was published of them."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.traces: dict[str, TraceBuffer] = {}
        self.linked: set[str] = set()
        """Traces that links name and that have no spans yet."""
        self.emitted: dict[str, Emitted] = {}
        self.deadline_ns = 0
        self.closed = False
        self.size = 0
        """Number of spans; kept by ``Joiner``."""
        self.overflow = 0
        self.meta_key = ""
        """State entry under which this component was last written."""

    @property
    def first_trace(self) -> str:
        """Smallest trace id with spans."""
        return min(self.traces)

    @property
    def orchestration_id(self) -> str:
        """Id under which the component is published now."""
        return orchestration_id(self.tenant, self.traces)

    @property
    def relevant(self) -> bool:
        """Whether it is an orchestration at all."""
        return any(buffer.relevant for buffer in self.traces.values())

    @property
    def complete(self) -> bool:
        """A root has ended, no parent is missing and no span is unfinished."""
        buffers = self.traces.values()
        return any(b.rooted for b in buffers) and not any(b.missing or b.unfinished for b in buffers)

    def operations(self) -> Iterator[Operation]:
        """The winners of all spans."""
        for buffer in self.traces.values():
            for encoded in buffer.spans.values():
                yield decode_operation(encoded)


class Seen(msgspec.Struct, frozen=True, gc=False):
    """An operation as one end of a piece of evidence."""

    trace_id: str
    operation: Operation | None
    side: int
    """0: gateway's span, tool call or paused run; 1: framework's span, run or resumed run. Only ends of different
    sides join; ANY joins all."""


def team_keys(operation: Operation) -> list[str]:
    """Keys of a message whose links were lost: its team, in each stretch of time that it touches or borders on."""
    facts = operation.message
    team = facts.receiver.partition("/")[2] if facts is not None else ""
    if not team:
        return []
    begin, end = operation.start_ns, max(operation.start_ns, operation.end_ns)
    last = min(end // _TEAM_NS + 1, begin // _TEAM_NS + _TEAM_STRETCHES)
    return [f"i/{team}/{stretch}" for stretch in range(begin // _TEAM_NS, last + 1)]


def evidence_of(operation: Operation) -> list[tuple[str, Seen]]:
    """The pieces of evidence that an operation is one end of, with their keys within the tenant."""
    trace_id, call, run = operation.trace_id, operation.call, operation.run
    found: list[tuple[str, Seen]] = []
    if call is not None:
        gateway, response_id = call.gateway is not None, call.response_id
        if response_id:
            found.append((f"r/{response_id}", Seen(trace_id, None, 0 if gateway else 1)))
        if gateway or not response_id:
            found += [(key, Seen(trace_id, bare, end)) for key, bare, end in text_ends(operation)]
    if operation.node is not None or (run is not None and (run.pending or run.resumed)):
        found += [(key, Seen(trace_id, None, end)) for key, end in pause_ends(operation)]
    if operation.message is not None and not operation.links:
        found += [(key, Seen(trace_id, None, ANY)) for key in team_keys(operation)]
    conversation = operation.conversation
    if conversation:
        if operation.tool is not None:
            for text in operation.tool.argument_hashes:
                found.append((f"t/{conversation}/{text}", Seen(trace_id, operation, 0)))
        elif run is not None and run.task_hash and not operation.parent_id:
            found.append((f"t/{conversation}/{run.task_hash}", Seen(trace_id, operation, 1)))
    return found


def match(known: list[Seen], new: Seen) -> tuple[list[str], bool]:
    """Traces that ``new`` joins to its own by one piece of evidence, and whether it was added to ``known``."""
    side, trace_id = new.side, new.trace_id
    others = []
    for seen in known:
        if seen.trace_id != trace_id and (seen.side != side or side == ANY) and _meet(seen, new):
            others.append(seen.trace_id)
    if side == ANY:
        del others[1:]  # those known are one already
    if len(known) < _MAX_EVIDENCE and new not in known:
        known.append(new)
        return others, True
    return others, False


def _meet(one: Seen, two: Seen) -> bool:
    """Whether two ends fit in time, where that matters."""
    tool, run = (one, two) if one.side == 0 else (two, one)
    return tool.operation is None or run.operation is None or lost_in(tool.operation, run.operation)


class Joiner:
    """All components of all tenants.

    Args:
        by_evidence: join by the evidence in the operations; False: only by ``join`` (a partition sees not all evidence).
    """

    def __init__(self, *, by_evidence: bool = True) -> None:
        self._by_evidence = by_evidence
        self.of_trace: dict[tuple[str, str], Component] = {}
        self._evidence: dict[str, dict[str, Seen | list[Seen]]] = {}
        """By tenant and key; most pieces have one end only."""
        self.absorbed: list[Component] = []
        """Components that were merged into others since the caller last emptied this list."""

    def components(self) -> list[Component]:
        """Components with spans, by tenant and first trace."""
        found = {id(c): c for c in self.of_trace.values() if c.traces}
        return sorted(found.values(), key=lambda c: (c.tenant, c.first_trace))

    def add(self, tenant: str, operation: Operation, encoded: bytes) -> Component | None:
        """Add an operation; the component that it changed, or None."""
        trace_id = operation.trace_id
        component = self.of_trace.get((tenant, trace_id))
        if component is None:
            component = self.of_trace[(tenant, trace_id)] = Component(tenant)
        buffer = component.traces.get(trace_id)
        if buffer is None:
            buffer = component.traces[trace_id] = TraceBuffer()
            component.linked.discard(trace_id)
        if component.size >= MAX_SPANS and operation.span_id not in buffer.spans:
            component.overflow += 1
            return component
        before = len(buffer.spans)
        if not buffer.add(operation, encoded):
            return None
        component.size += len(buffer.spans) - before
        if self._by_evidence:
            for other in self._joined_with(tenant, operation, buffer):
                component = self._union(tenant, component, other)
        return component

    def join(self, tenant: str, trace_id: str, other: str) -> Component:
        """Make two traces one component, whether they have spans here or not."""
        component = self.of_trace.get((tenant, trace_id))
        if component is None:
            component = self.of_trace[(tenant, trace_id)] = Component(tenant)
            component.linked.add(trace_id)
        return self._union(tenant, component, other)

    def forget(self, component: Component) -> None:
        """Drop a component and its evidence."""
        evidence = self._evidence.get(component.tenant, {})
        for trace_id, buffer in component.traces.items():
            del self.of_trace[(component.tenant, trace_id)]
            for key in buffer.keys:
                known = evidence.pop(key, None)
                if isinstance(known, list) and (
                    left := [seen for seen in known if seen.trace_id != trace_id]
                ):
                    evidence[key] = left
                elif isinstance(known, Seen) and known.trace_id != trace_id:
                    evidence[key] = known
        if not evidence:
            self._evidence.pop(component.tenant, None)
        for trace_id in component.linked:
            self.of_trace.pop((component.tenant, trace_id), None)

    def _joined_with(self, tenant: str, operation: Operation, buffer: TraceBuffer) -> Iterable[str]:
        """Trace ids that ``operation`` joins to its own."""
        others: set[str] = set()
        if operation.links:
            others.update(trace_id for trace_id, _ in operation.links if trace_id != operation.trace_id)
        pieces = evidence_of(operation)
        if not pieces:
            return others
        evidence = self._evidence.get(tenant)
        if evidence is None:
            evidence = self._evidence[tenant] = {}
        for key, seen in pieces:
            known = evidence.get(key)
            if known is None:
                evidence[key] = seen
                buffer.keys.append(key)
                continue
            if isinstance(known, Seen):
                known = evidence[key] = [known]
            found, added = match(known, seen)
            others.update(found)
            if added:
                buffer.keys.append(key)
        return others

    def num_evidence(self) -> int:
        """Pieces of evidence that are remembered."""
        return sum(map(len, self._evidence.values()))

    def _union(self, tenant: str, one: Component, trace_id: str) -> Component:
        two = self.of_trace.get((tenant, trace_id))
        if two is one:
            return one
        if two is None:
            one.linked.add(trace_id)
            self.of_trace[(tenant, trace_id)] = one
            return one
        if len(one.traces) + len(one.linked) < len(two.traces) + len(two.linked):
            one, two = two, one
        for moved in (*two.traces, *two.linked):
            self.of_trace[(tenant, moved)] = one
        one.traces.update(two.traces)
        one.linked |= two.linked
        one.emitted.update(two.emitted)
        one.size += two.size
        one.overflow += two.overflow
        self.absorbed.append(two)
        return one
