"""Runs that no operation tells, made of the operations that name them (``Operation.member``).

Such a run begins with its first member and ends with its last. It stands where its members stood: under the tool call
that encloses them, else under the call of its parent run that starts runs and contains it in time, else under that
run. Where an agent's run around the members is there already, nothing is made.

Invariants: a function of the set of operations; a made run has a digest of its key as id and the flag
``agent_without_span``; a parent that never came is counted as before.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from spanloop.pipeline.dialects.operation import Operation
from spanloop.schemas.canonical import digest

__all__ = ["with_runs"]

_Key = tuple[str, str]
_MADE = "agent_without_span"


class _Run:
    """A run that members name."""

    def __init__(self, key: str, members: list[Operation]) -> None:
        self.key = key
        self.members = members
        named = [m.member for m in members if m.member is not None]
        self.name = min((m.name for m in named if m.name), default="agent")
        self.parent_key = min((m.parent for m in named if m.parent), default="")
        self.start_ns = min(op.start_ns for op in members)
        self.end_ns = max(max(op.start_ns, op.end_ns) for op in members)
        self.trace_id = min(op.trace_id for op in members)
        self.place: _Key = (self.trace_id, digest("member_run", key)[:16])
        """(trace id, span id) of the run's operation."""
        self.under: _Key | None = None
        self.made = True


def with_runs(ops: list[Operation]) -> list[Operation]:
    """``ops`` with the missing runs, members put under them."""
    members: dict[str, list[Operation]] = defaultdict(list)
    for op in ops:
        if op.member is not None:
            members[op.member.key].append(op)
    if not members:
        return ops
    where = {(op.trace_id, op.span_id): op for op in ops}
    told = {
        op.run_id: (op.trace_id, op.span_id) for op in reversed(ops) if op.kind == "agent_run" and op.run_id
    }
    runs = {key: _Run(key, members[key]) for key in sorted(members)}
    for run in runs.values():
        around = told.get(run.key) or (_around(run, where) if not run.parent_key else None)
        if around is not None:
            run.made, run.place = False, around
    found = []
    for op in ops:
        run = runs.get(op.member.key) if op.member is not None else None
        found.append(_under(op, run, where) if run is not None else op)
    _places(runs, where)
    return [*found, *(_operation(run) for run in runs.values() if run.made)]


def _parent(op: Operation, where: dict[_Key, Operation]) -> Operation | None:
    return where.get((op.parent_trace or op.trace_id, op.parent_id)) if op.parent_id else None


def _around(run: _Run, where: dict[_Key, Operation]) -> _Key | None:
    """The agent run around the members, nearest to the first that has one; spans only: a record names the span in
    which it was logged, which may be anybody's."""
    for op in run.members:
        steps = 0
        above = _parent(op, where) if not op.event else None
        while above is not None and steps < len(where):
            if above.kind == "agent_run":
                return above.trace_id, above.span_id
            above, steps = _parent(above, where), steps + 1
    return None


def _under(op: Operation, run: _Run, where: dict[_Key, Operation]) -> Operation:
    """A member under its run, unless something of the same run (or a span that it describes) is above it."""
    above = _parent(op, where)
    if above is not None:
        own = above.member is not None and above.member.key == run.key
        if own or not run.made or op.kind == "note":
            return op
        run.under = min(run.under or (above.trace_id, above.span_id), (above.trace_id, above.span_id))
    elif op.parent_id and not op.event:
        if not run.made:
            return op
        flags = (*op.flags, "orphan_spans")
        return msgspec.structs.replace(op, parent_id=run.place[1], parent_trace=run.place[0], flags=flags)
    return msgspec.structs.replace(op, parent_id=run.place[1], parent_trace=run.place[0])


def _places(runs: dict[str, _Run], where: dict[_Key, Operation]) -> None:
    """Put made runs that stand nowhere under what started them: each starting call starts one run, in order."""
    starters: dict[str, _Starters] = {}
    for run in sorted(runs.values(), key=lambda r: (r.start_ns, r.key)):
        if not run.made or run.under is not None or not run.parent_key:
            continue
        parent = runs.get(run.parent_key)
        if parent is None:
            continue
        if parent.key not in starters:
            starters[parent.key] = _Starters(parent)
        call = starters[parent.key].take(run)
        run.under = _key(call) if call is not None else parent.place


class _Starters:
    """The calls of a run that start others, those that are open; asked in order of the others' starts."""

    def __init__(self, parent: _Run) -> None:
        starts = [m for m in parent.members if m.kind == "tool_call" and m.member and m.member.starts]
        self._waiting = sorted(starts, key=lambda op: (op.start_ns, op.span_id), reverse=True)
        self._open: list[Operation] = []

    def take(self, run: _Run) -> Operation | None:
        """The first call around ``run`` that started nothing so far."""
        while self._waiting and self._waiting[-1].start_ns <= run.start_ns:
            self._open.append(self._waiting.pop())
        self._open = [op for op in self._open if op.end_ns >= run.start_ns]
        found = next((op for op in self._open if run.end_ns <= op.end_ns), None)
        if found is not None:
            self._open.remove(found)
        return found


def _key(op: Operation) -> _Key:
    return op.trace_id, op.span_id


def _operation(run: _Run) -> Operation:
    first = run.members[0]
    task = next((op.run for op in run.members if op.run is not None), None)
    return Operation(
        trace_id=run.place[0],
        span_id=run.place[1],
        parent_id=run.under[1] if run.under else "",
        parent_trace=run.under[0] if run.under else "",
        kind="agent_run",
        start_ns=run.start_ns,
        end_ns=run.end_ns,
        name=run.name,
        agent=run.name,
        layer=first.layer,
        run_id=run.key,
        conversation=first.conversation,
        flags=(_MADE,),
        run=task,
    )
