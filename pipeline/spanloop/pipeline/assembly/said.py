"""Acts that a program states outright (dialect ``spanloop_sdk``): their parties, decisions and events, without inference.

What is said replaces what would have been inferred of the same run: an aggregate or a stop that is told is the run's own, and a
delegation under a told decision makes no second decision. Everything here has rule ``said`` and confidence 1.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from typing import TYPE_CHECKING

from spanloop.pipeline.assembly.tree import Tree
from spanloop.schemas.orchestration import Decision

if TYPE_CHECKING:
    from spanloop.pipeline.assembly.infer import Inference

__all__ = ["SAID", "SaidActs", "add_said_events"]

SAID = "said"
"""Rule of events and delegations that are told."""
_NEVER = 2**64
_ACTS = frozenset({"spawn", "delegate", "message", "receive", "aggregate", "stop", "decision"})


class _Runs:
    """Runs of one name in order of start."""

    def __init__(self) -> None:
        self._runs: list[int] = []
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._last_end: list[int] = []
        """Latest end of a run and all before it."""

    def append(self, run: int, start_ns: int, end_ns: int) -> None:
        end = end_ns if end_ns > 0 else _NEVER
        self._runs.append(run)
        self._starts.append(start_ns)
        self._ends.append(end)
        self._last_end.append(max(end, self._last_end[-1]) if self._last_end else end)

    def alive(self, at_ns: int) -> list[int]:
        """Runs that are open at ``at_ns``, two at most: more are told apart by no name."""
        found: list[int] = []
        place = bisect_right(self._starts, at_ns) - 1
        while place >= 0 and self._last_end[place] >= at_ns and len(found) < 2:
            if self._ends[place] >= at_ns:
                found.append(self._runs[place])
            place -= 1
        return found


class SaidActs:
    """The told acts of one orchestration; empty, and free of cost, where nobody tells."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.indices = [
            i for i in tree.census.said if (said := tree.ops[i].said) is not None and said.act in _ACTS
        ]
        self._by_span: dict[str, int] = {}
        self._run_under: dict[int, int] = {}
        self._inside: dict[int, int] = {}
        """Decision around an operation, within the same agent run."""
        self._named: dict[str, _Runs] = defaultdict(_Runs)
        if not self.indices:
            return
        for i, op in enumerate(tree.ops):
            self._by_span.setdefault(op.span_id, i)
        for i in tree.agent_ops():
            op = tree.ops[i]
            self._named[op.agent].append(i, op.start_ns, op.end_ns)
            if tree.tool[i] >= 0:
                self._run_under.setdefault(tree.tool[i], i)
        for i in tree.preorder:
            above = tree.parent[i]
            if above >= 0 and tree.ops[above].kind != "agent_run":
                around = above if self.act(above) == "decision" else self._inside.get(above, -1)
                if around >= 0:
                    self._inside[i] = around

    def act(self, i: int) -> str:
        """The told act of an operation, empty without one."""
        said = self.tree.ops[i].said if i >= 0 else None
        return said.act if said is not None else ""

    def menu(self, i: int, act: str) -> Decision | None:
        """The decision that operation ``i`` tells as an ``act``."""
        if not self.indices:
            return None
        said = self.tree.ops[i].said if i >= 0 else None
        return said.decision if said is not None and said.act == act else None

    def decision_of(self, i: int) -> int:
        """The told decision that operation ``i`` carries out: the one it names, else the one around it; -1 without one."""
        if i < 0 or not self.indices:
            return -1
        said = self.tree.ops[i].said
        named = self._by_span.get(said.decided_by, -1) if said is not None and said.decided_by else -1
        if self.act(named) == "decision":
            return named
        return self._inside.get(i, -1)

    def target(self, i: int) -> int:
        """The agent run that operation ``i`` names by id: the run itself, or the one that the named act made; -1 without one."""
        said = self.tree.ops[i].said
        named = self._by_span.get(said.target_id, -1) if said is not None and said.target_id else -1
        return self.run_of(named)

    def run_of(self, i: int) -> int:
        """The run that operation ``i`` is, made or addressed."""
        if i < 0 or self.tree.ops[i].kind == "agent_run":
            return i
        made = self._run_under.get(i, -1)
        if made >= 0 or self.act(i) != "delegate":
            return made
        said = self.tree.ops[i].said
        addressed = self._by_span.get(said.target_id, -1) if said is not None else -1
        if addressed >= 0 and self.tree.ops[addressed].kind != "agent_run":
            addressed = self._run_under.get(addressed, -1)
        return addressed

    def addressed(self, i: int) -> int:
        """The run that operation ``i`` speaks to: by id, else the only one of that name alive at its start; -1 without one."""
        target, op = self.target(i), self.tree.ops[i]
        if target >= 0 or op.handover is None or not op.handover.target:
            return target
        alive = self._named[op.handover.target].alive(op.start_ns)
        return alive[0] if len(alive) == 1 else -1

    def sources(self, i: int) -> list[int]:
        """Agent runs whose results aggregate ``i`` names."""
        said = self.tree.ops[i].said
        runs = [self.run_of(self._by_span.get(span, -1)) for span in (said.sources if said else ())]
        return [run for run in dict.fromkeys(runs) if run >= 0]

    def runs_that(self, act: str, work: Inference) -> set[int]:
        """Agent runs that tell ``act``."""
        return {work.agent_of(i) for i in self.indices if self.act(i) == act} - {-1}


def add_said_events(work: Inference) -> None:
    """Events of told acts that the rules for delegations do not make, and which decision each told act carries out."""
    acts, tree = work.acts, work.tree
    if not acts.indices:
        return
    received, calls = _received(work), _CallsBy(work)
    carried_out: dict[int, list[int]] = defaultdict(list)
    told_again: set[int] = set()
    """Decisions that the gateway recorded and the program itself tells around them."""
    for i in acts.indices:
        if (decision := acts.decision_of(i)) < 0:
            continue
        if tree.ops[i].call is not None:
            told_again.add(i)
        else:
            carried_out[decision].append(i)
    decided: dict[int, str] = {}
    for i in acts.indices:
        act = acts.act(i)
        if i in told_again:
            continue
        if act == "decision":
            starts = [tree.ops[done].start_ns for done in carried_out[i]]
            decided[i] = _decision(work, calls, i, starts)
        elif act == "message":
            _message(work, i, received.get(i, []))
        elif act == "aggregate":
            _aggregate(work, calls, i)
        elif act == "stop":
            _stop(work, calls, i)
        elif i not in work.found.tools:
            _unseen(work, i)
    _answers(work)
    for event_id, i in work.operation_of_event.items():
        if (decision := acts.decision_of(i)) in decided and decided[decision] != event_id:
            work.decided_by[event_id] = decided[decision]
    work.told_decisions.update(decided.values())


def _decision(work: Inference, calls: _CallsBy, i: int, starts: list[int]) -> str:
    op = work.tree.ops[i]
    agent = work.agent_of(i)
    t_ns = min(starts) if starts else max(op.end_ns, op.start_ns)
    event = work.add("orchestrator_decision", t_ns, SAID, 1.0, (op.span_id,), agent=agent, name=op.agent,
                     call=calls.deciding(i, agent, t_ns), operation=i, decision=op.said.decision if op.said else None)  # fmt: skip
    return event.id


class _CallsBy:
    """Model calls by the names that a decision may give them, and by the decision that they were made inside of."""

    def __init__(self, work: Inference) -> None:
        self.work = work
        self.named: dict[str, int] = {}
        self.inside: dict[int, int] = {}
        for call, group in enumerate(work.calls.groups):
            for name in (work.calls.response_id(call), *work.calls.span_ids(call)):
                self.named.setdefault(name, call)
            if (decision := work.acts.decision_of(group[0])) >= 0:
                self.inside[decision] = call

    def deciding(self, i: int, agent: int, at_ns: int) -> int:
        """The model call that took told act ``i``: the one it names, one made inside it, else the agent's last before it."""
        said = self.work.tree.ops[i].said
        named = self.named.get(said.call, -1) if said is not None and said.call else -1
        if named >= 0:
            return named
        return self.inside[i] if i in self.inside else self.work.calls.before(agent, at_ns)


def _received(work: Inference) -> dict[int, list[int]]:
    """Where each told message was received, by the message."""
    where = {(op.trace_id, op.span_id): i for i, op in enumerate(work.tree.ops)}
    found: dict[int, list[int]] = defaultdict(list)
    for i in work.acts.indices:
        if work.acts.act(i) == "receive":
            for link in work.tree.ops[i].links:
                if work.acts.act(sent := where.get(link, -1)) == "message":
                    found[sent].append(i)
    return found


def _message(work: Inference, i: int, received: list[int]) -> None:
    op, acts = work.tree.ops[i], work.acts
    sender = work.agent_of(i)
    by_receiver: dict[int, int] = {}
    for at in received:
        by_receiver.setdefault(work.agent_of(at), at)
    by_receiver.pop(-1, None)
    to_name = op.handover.target if op.handover is not None else ""
    if not by_receiver:
        by_receiver[acts.addressed(i)] = -1
    for receiver, at in sorted(by_receiver.items()):
        spans = (op.span_id, work.tree.ops[at].span_id) if at >= 0 else (op.span_id,)
        work.add("message", op.start_ns, SAID, 1.0, spans, agent=sender, name=op.agent, to=receiver, to_name=to_name,
                 operation=i, decision=acts.menu(i, "message"))  # fmt: skip


def _aggregate(work: Inference, calls: _CallsBy, i: int) -> None:
    op = work.tree.ops[i]
    agent = work.agent_of(i)
    runs = work.acts.sources(i) or [
        d.target
        for d in work.found.by_source.get(agent, ())
        if d.delegates and d.mode != "pass_control" and 0 < d.returned(work.tree) <= op.start_ns
    ]
    spans = (op.span_id, *sorted({work.tree.ops[run].span_id for run in runs}))
    work.add("aggregate", op.start_ns, SAID, 1.0, spans, agent=agent, name=op.agent, operation=i,
             call=calls.deciding(i, agent, op.start_ns), decision=work.acts.menu(i, "aggregate"))  # fmt: skip


def _stop(work: Inference, calls: _CallsBy, i: int) -> None:
    op = work.tree.ops[i]
    agent = work.agent_of(i)
    failed = op.status == "error" or (agent >= 0 and work.tree.ops[agent].status == "error")
    work.add("stop", max(op.end_ns, op.start_ns), SAID, 1.0, (op.span_id,), agent=agent, name=op.agent, operation=i,
             call=calls.deciding(i, agent, op.start_ns), status="error" if failed else "ok",
             decision=work.acts.menu(i, "stop"))  # fmt: skip


def _unseen(work: Inference, i: int) -> None:
    """A spawn or delegation whose run sent no span that is here: the other party is a name."""
    op, act = work.tree.ops[i], work.acts.act(i)
    if act not in ("spawn", "delegate") or op.handover is None:
        return
    mode = op.handover.mode if act == "delegate" else ""
    work.add(act, op.start_ns, SAID, 1.0, (op.span_id,), agent=work.agent_of(i), name=op.agent, to_name=op.handover.target,
             operation=i, mode=mode, decision=work.acts.menu(i, act))  # fmt: skip


def _answers(work: Inference) -> None:
    """The end of a told delegation to an agent that was there already: its result is back."""
    for d in work.found.all:
        op = work.tree.ops[d.tool] if d.tool >= 0 else None
        if op is None or op.said is None or d.spawns or d.mode == "pass_control" or op.end_ns <= 0:
            continue
        work.add("return", op.end_ns, SAID, 1.0, (op.span_id,), agent=d.target, to=d.source, to_name=op.agent,
                 status="error" if op.status == "error" else "ok", operation=d.tool)  # fmt: skip
