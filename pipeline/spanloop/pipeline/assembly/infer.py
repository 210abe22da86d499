"""Events of one orchestration, each with evidence, rule and confidence.

What counts as which event: a decision is a model turn that delegates and expects the result back, or in
which the entry agent hands over; ``delegate`` each delegation, ``spawn`` where it makes a run that was not
there; ``tool_call`` and ``tool_result`` only for leaf tools that ran; ``return`` to whoever gets the
result; ``aggregate`` the turn that first saw two or more results; ``stop`` the end of a run that nobody
delegated. Source: DIALECTS 3.
"""

from __future__ import annotations

from collections.abc import Iterable

from spanloop.pipeline.assembly.calls import Calls
from spanloop.pipeline.assembly.delegations import Delegation, Delegations, above
from spanloop.pipeline.assembly.doubt import lower_confidence
from spanloop.pipeline.assembly.human import add_human
from spanloop.pipeline.assembly.interventions import add_told_interventions
from spanloop.pipeline.assembly.logged import LoggedEvents, add_logged_events, logged_agents
from spanloop.pipeline.assembly.messages import add_messages, tree_end
from spanloop.pipeline.assembly.returns import USER, add_returns
from spanloop.pipeline.assembly.safety import add_safety, failed
from spanloop.pipeline.assembly.said import add_said_events
from spanloop.pipeline.assembly.tree import Tree
from spanloop.pipeline.dialects.operation import Operation
from spanloop.schemas.canonical import Framed, bytes_hash, digest
from spanloop.schemas.orchestration import Agent, Decision, OrchestrationEvent

__all__ = ["RANK", "USER", "Inference", "infer_events"]

RANK = {
    name: rank
    for rank, name in enumerate(
        ("orchestrator_decision", "delegate", "spawn", "message", "safety_event", "tool_call", "tool_result", "return",
         "despawn", "aggregate", "human_intervention", "stop")
    )
}  # fmt: skip
"""Order of events at the same nanosecond: causes before effects."""
_FRAMED = Framed()
_KIND_FRAMED = {kind: _FRAMED["event"] + _FRAMED[kind] for kind in RANK}
"""How the parts of an event's id begin."""
_UNNAMED = _FRAMED[""]
_NOBODY = _UNNAMED + _UNNAMED
_SPAN_MARK = _FRAMED["." * 16][:-16]
"""What stands before a span id of the usual length."""


class Inference:
    """Builds the events; holds the names and ids of the agents."""

    def __init__(self, tree: Tree, calls: Calls, found: Delegations) -> None:
        self.tree, self.calls, self.found, self.acts = tree, calls, found, found.acts
        self.runs = sorted([i for i in tree.agent_ops() if i not in found.same_run] + found.engines)
        seen: set[str] = set()
        self.agent_ids: dict[int, str] = {}
        self._names: dict[int, str] = {}
        self._framed = Framed()
        self._parties: dict[int, tuple[str, str, bytes]] = {}
        """(id, name, both framed for ids of events) of each agent run."""
        for i in self.runs:
            op = tree.ops[i]
            own = op.span_id if op.span_id not in seen else f"{op.trace_id}:{op.span_id}"
            seen.add(op.span_id)
            name = tree.name(i)
            self.agent_ids[i], self._names[i] = own, name
            self._parties[i] = (own, name, self._framed[name] + self._framed[own])
        self.turns = _loop_turns(tree)
        """Structure directly in each run: the turns of its loop."""
        self.events: list[OrchestrationEvent] = []
        self.logged = LoggedEvents()
        self._ids: dict[str, int] = {}
        self.call_of_event: dict[str, int] = {}
        """Call that took or saw an event, where one is known."""
        self.operation_of_event: dict[str, int] = {}
        """Tool call or delegation operation of an event."""
        self.decided_by: dict[str, str] = {}
        """Event of the decision that an event's act carries out, where no model call connects them."""
        self.wave_of: dict[tuple[int, int], str] = {}
        """Decision event of a delegation (tool, target) that was taken without a model call."""
        self.told_decisions: set[str] = set()

    def agent_of(self, i: int) -> int:
        """Agent run that operation ``i`` belongs to, -1 unknown."""
        return above(self.tree, self.found, i)

    def name(self, agent: int, fallback: str = "") -> str:
        """Name of an agent run; of an unknown one what the span says."""
        if agent < 0:
            return fallback
        return self._names[agent] if agent in self._names else self.tree.name(agent)

    def _party(self, agent: int, fallback: str) -> tuple[str, str, bytes]:
        """(id, name, both framed) of a party that has no run here."""
        name = self.name(agent, fallback)
        return "", name, self._framed[name] + _UNNAMED if name else _NOBODY

    def add(self, kind: str, t_ns: int, rule: str, confidence: float, evidence: Iterable[str], *, agent: int,
            name: str = "", to: int = -1, to_name: str = "", tool: str = "", call: int = -1, operation: int = -1,
            status: str = "", mode: str = "", triggered: bool | None = None,
            decision: Decision | None = None) -> OrchestrationEvent:  # fmt: skip
        """Record an event; parties are agent runs (index) or, where there is none, names."""
        spans = evidence if type(evidence) is tuple else tuple(evidence)
        framed, parties = self._framed, self._parties
        agent_id, actor, one = parties[agent] if agent in parties else self._party(agent, name)
        to_id, other, two = parties[to] if to in parties else self._party(to, to_name)
        told = [_KIND_FRAMED[kind], one, two, framed[tool] if tool else _UNNAMED]
        for span in spans:
            told.append(
                _SPAN_MARK + span.encode() if len(span) == 16 and span.isascii() else _framed_once(span)
            )
        event_id = bytes_hash(b"".join(told))[:20]
        if event_id in self._ids:  # two traces repeat each other's span ids
            self._ids[event_id] += 1
            event_id = digest(event_id, self._ids[event_id])[:20]
        else:
            self._ids[event_id] = 1
        call_id = ""
        if call >= 0:
            call_id = self.calls.id(call)
            self.call_of_event[event_id] = call
        if operation >= 0:
            self.operation_of_event[event_id] = operation
        event = OrchestrationEvent(
            event_id, kind, actor, t_ns if t_ns > 0 else 0, confidence, rule, spans, agent_id, other, to_id, tool, status,
            triggered, mode, call_id, decision,
        )  # fmt: skip
        self.events.append(event)
        return event

    def agents(self) -> tuple[Agent, ...]:
        """Agent instances by start and id."""
        listed = []
        for i in self.runs:
            op = self.tree.ops[i]
            into = self.found.into.get(i)
            name = self._names[i]
            listed.append(
                Agent(
                    id=self.agent_ids[i],
                    name=name,
                    role=name.lower(),
                    parent_id=self.agent_ids.get(into.source, "") if into else "",
                    span_id=op.span_id,
                    started_ns=op.start_ns,
                    ended_ns=max(op.end_ns, 0),
                    status="error" if op.status == "error" else "ok",
                    harness=op.said.harness if op.said is not None else "",
                    virtual=i in self.tree.virtual,
                )
            )
        listed += logged_agents(self)
        return tuple(sorted(listed, key=lambda a: (a.started_ns, a.id)))


def infer_events(tree: Tree, calls: Calls, found: Delegations) -> Inference:
    """All events of an orchestration, sorted by (time, rank, id)."""
    work = Inference(tree, calls, found)
    _delegations(work)
    _aggregates(work)
    add_returns(work)
    _tools(work)
    add_safety(work)
    add_messages(work)
    add_human(work)
    _stops(work)
    add_said_events(work)
    add_logged_events(work)
    add_told_interventions(work)
    lower_confidence(work)
    work.events.sort(key=lambda e: (e.t_ns, RANK[e.type], e.id))
    return work


def _framed_once(span: str) -> bytes:
    """An odd span id as a part of an event's id; of spans there are too many to keep what is framed."""
    return Framed()[span]


def _loop_turns(tree: Tree) -> dict[int, list[int]]:
    """Operations that say nothing right below each agent's run."""
    ops, parent, census = tree.ops, tree.parent, tree.census
    turns: dict[int, list[int]] = {}
    quiet = census.kind("unknown")
    if census.nodes:  # some of which are no agents after all
        quiet = sorted([*quiet, *census.kind("agent_run")])
    for i in quiet:
        if parent[i] >= 0 and ops[parent[i]].kind == "agent_run" and ops[i].kind == "unknown":
            turns.setdefault(tree.agent[i], []).append(i)
    return turns


def _span(work: Inference, *indices: int) -> tuple[str, ...]:
    ops = work.tree.ops
    spans = [ops[i].span_id for i in indices if i >= 0]
    if len(spans) < 2 or (len(spans) == 2 and spans[0] != spans[1]):
        return tuple(spans)
    return tuple(dict.fromkeys(spans))


def _pair(work: Inference, tool: int, run: int) -> tuple[str, ...]:
    """``_span`` of a delegation's two operations."""
    ops = work.tree.ops
    if tool < 0 or run < 0:
        return (ops[max(tool, run)].span_id,) if tool >= 0 or run >= 0 else ()
    one, two = ops[tool].span_id, ops[run].span_id
    return (one, two) if one != two else (one,)


def _delegations(work: Inference) -> None:
    """Decisions with their delegations and spawns."""
    told = bool(work.acts.indices)
    for source, delegations in work.found.by_source.items():
        decisions: dict[int, list[Delegation]] = {}
        deciding = [_deciding_call(work, d) if d.delegates else -1 for d in delegations]
        for d, call in zip(delegations, deciding, strict=True):
            if d.delegates:
                decisions.setdefault(call, []).append(d)
        for call, taken in decisions.items():
            untold = [d for d in taken if work.acts.decision_of(d.tool) < 0] if told else taken
            _decision(work, source, call, untold)
            for d in taken:
                _delegate(work, d, call)
        for d, call in zip(delegations, deciding, strict=True):
            if d.spawns:
                work.add("spawn", d.run_began(work.tree), d.rule, d.confidence, _pair(work, d.tool, d.target), agent=source,
                         name=d.source_name(work.tree), to=d.target, call=call, operation=d.tool,
                         decision=work.acts.menu(d.tool, "spawn") if told else None)  # fmt: skip


def _deciding_call(work: Inference, d: Delegation) -> int:
    if d.source < 0:
        return -1
    op = work.tree.ops[d.tool if d.tool >= 0 else d.target]
    return work.calls.asker(d.source, op.tool.call_id if op.tool else "", op.start_ns)


def _decision(work: Inference, source: int, call: int, taken: list[Delegation]) -> None:
    """One decision for the turn; without model spans one for delegations that overlap."""
    into = work.found.into.get(source)
    entry = into is None or into.rule == "node_of_engine"
    counted = taken if entry else [d for d in taken if d.mode != "pass_control"]
    if not counted:
        return
    name = counted[0].source_name(work.tree)
    if source < 0 and not name:
        return
    if call >= 0:
        work.add("orchestrator_decision", work.calls.end(call), "call_delegates",
                 min([d.confidence for d in counted]), work.calls.span_ids(call), agent=source, name=name,
                 call=call)  # fmt: skip
        return
    wave: list[Delegation] = []
    back = 0
    for d in [*sorted(counted, key=lambda d: d.begins(work.tree)), None]:
        if d is not None and (not wave or d.begins(work.tree) < back):
            back = min(back, d.returned(work.tree)) if wave else d.returned(work.tree)
            wave.append(d)
            continue
        if wave:
            first = wave[0].begins(work.tree)
            event = work.add("orchestrator_decision", first, "delegations_without_calls", 0.7,
                             _span(work, *(w.tool if w.tool >= 0 else w.target for w in wave)), agent=source,
                             name=name)  # fmt: skip
            work.wave_of.update(((w.tool, w.target), event.id) for w in wave)
        if d is not None:
            wave, back = [d], d.returned(work.tree)


def _delegate(work: Inference, d: Delegation, call: int) -> None:
    begins = d.run_began(work.tree) if d.spawns else d.begins(work.tree)
    event = work.add("delegate", begins, d.rule, d.confidence, _pair(work, d.tool, d.target if d.spawns else -1),
                     agent=d.source, name=d.source_name(work.tree), to=d.target, call=call, operation=d.tool,
                     mode=d.mode,
                     decision=work.acts.menu(d.tool, "delegate") if work.acts.indices else None)  # fmt: skip
    if work.wave_of and (wave := work.wave_of.get((d.tool, d.target))):
        work.decided_by[event.id] = wave


def _aggregates(work: Inference) -> None:
    """The turn that first saw two or more results; each wave of results that came back together has its own."""
    told = work.acts.runs_that("aggregate", work)
    for source, delegations in work.found.by_source.items():
        if source < 0 or len(delegations) < 2 or source in told:
            continue
        results = [
            (d, back)
            for d in delegations
            if d.delegates and d.spawns and d.mode != "pass_control" and (back := d.returned(work.tree))
        ]
        if len(results) < 2:
            continue
        seen: dict[int, list[Delegation]] = {}
        for d, back in results:
            seen.setdefault(work.calls.after(source, back), []).append(d)
        unseen = seen.pop(-1, [])
        waves = {call: ds for call, ds in seen.items() if len(ds) > 1}
        if not waves and seen and not unseen:
            waves = {max(seen): [d for d, _ in results]}
        for call, ds in waves.items():
            evidence = (*work.calls.span_ids(call), *sorted(_span(work, *[d.target for d in ds])))
            work.add("aggregate", work.calls.start(call), "call_sees_results", min([d.confidence for d in ds]), evidence,
                     agent=source, call=call)  # fmt: skip
        if work.calls.last(source) < 0:
            work.add("aggregate", max([back for _, back in results]), "results_without_calls", 0.5,
                     sorted(_span(work, *[d.target for d, _ in results])), agent=source)  # fmt: skip


def _tools(work: Inference) -> None:
    tree = work.tree
    views = _views(tree)
    delegating = work.found.tools | {outer for i in work.found.tools for outer in views.get(i, ())}
    broken = {outer for i, outers in views.items() if tree.ops[i].status == "error" for outer in outers}
    for i in tree.census.tools:
        op = tree.ops[i]
        if op.kind != "tool_call" or op.tool is None or op.tool.role or i in delegating or i in views:
            continue
        agent = work.agent_of(i)
        call = work.calls.asker(agent, op.tool.call_id, op.start_ns) if agent >= 0 else -1
        work.add("tool_call", op.start_ns, "tool_span", 1.0, (op.span_id,), agent=agent, name=op.agent,
                 tool=op.tool.tool, call=call, operation=i)  # fmt: skip
        if op.end_ns > 0:
            status = "error" if op.status == "error" or i in broken else "ok"
            work.add("tool_result", op.end_ns, "tool_span", 1.0, (op.span_id,), agent=agent, name=op.agent,
                     tool=op.tool.tool, call=call, operation=i, status=status)  # fmt: skip


def _views(tree: Tree) -> dict[int, list[int]]:
    """Tool calls that another instrumentation recorded around them too, and those outer views, nearest first. A
    failure told by the inner one is a failure: the outer one may only have seen the text that it was turned into."""
    found: dict[int, list[int]] = {}
    ops, parent = tree.ops, tree.parent
    inner = {i for i in tree.census.tools if parent[i] >= 0 and _repeats(ops[parent[i]], ops[i])}
    for i in tree.preorder if inner else ():
        if i in inner and ops[i].kind == "tool_call":
            found[i] = [parent[i], *found.get(parent[i], ())]
    return found


def _repeats(outer: Operation, inner: Operation) -> bool:
    """Whether two nested tool spans are two instrumentations' views of one execution."""
    if outer.tool is None or inner.tool is None or outer.layer == inner.layer or outer.tool.role == "ghost":
        return False
    if outer.tool.call_id and outer.tool.call_id == inner.tool.call_id:
        return True
    return outer.tool.tool == inner.tool.tool


def _stops(work: Inference) -> None:
    """The end of each run that nobody delegated; runs in one workflow stop once, with it. A run whose
    parent never arrived counts where it is the only one: then the parent is usually a caller that sends
    its spans elsewhere."""
    done: set[int] = set()
    missing = set(work.tree.missing)
    entries = [i for i in work.runs if i not in work.found.into]
    told = work.acts.runs_that("stop", work)
    for i in entries:
        op = work.tree.ops[i]
        if i in told:
            continue
        if i in missing and len(entries) > 1:
            continue
        flow = work.tree.workflow[i]
        if flow >= 0:
            if flow in done:
                continue
            done.add(flow)
            op = work.tree.ops[flow]
        else:
            op = tree_end(work.found, work.tree, i)
        if op.end_ns <= 0:
            continue
        work.add("stop", op.end_ns, "end_of_entry_run", 0.5 if i in missing else 1.0, (op.span_id,), agent=i,
                 call=work.calls.last(i), status="error" if op.status == "error" or failed(work, i) else "ok")  # fmt: skip
