"""Who made whom run: delegations between agent runs, with the rule that found each and how sure it is.

Rules in order, the first that holds: (a) an agent's run under a tool call; (b) keys that name a hand-over;
(c) a tool named transfer_to_X, then the next run of X, or just the next run where X is not shown; (d) a node
that another node's result sent the engine to; (f) a delegation tool that names an agent without a run of its
own; nodes of an engine; a run directly under another; (g) a run whose task is the text that a tool call around
it in time passed on; (h) a run under a missing parent within the only root. Several runs of one engine that
nobody had start are started by it. Source: DIALECTS 3.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict

import msgspec

from spanloop.pipeline.assembly.calls import Calls
from spanloop.pipeline.assembly.candidates import Peers, Waiting
from spanloop.pipeline.assembly.clocks import earlier, one_clock, within
from spanloop.pipeline.assembly.messages import first_contacts
from spanloop.pipeline.assembly.names import folded
from spanloop.pipeline.assembly.said import SAID, SaidActs
from spanloop.pipeline.assembly.tree import Tree
from spanloop.pipeline.dialects.operation import Operation

__all__ = ["Delegation", "Delegations", "above", "find_delegations", "lost_in"]


class Delegation(msgspec.Struct):
    """``source`` had ``target`` do something. Indices into ``tree.ops``; -1: unknown."""

    source: int
    target: int
    tool: int
    """Tool call or hand-over operation by which it happened."""
    rule: str
    confidence: float
    mode: str = "return_to_caller"
    spawns: bool = True
    delegates: bool = True
    """False: an engine starts its nodes, nobody decides."""

    def begins(self, tree: Tree) -> int:
        """When it began, ns."""
        return tree.ops[self.tool if self.tool >= 0 else self.target].start_ns

    def returned(self, tree: Tree) -> int:
        """When its result was back with the source, ns; 0: not known. A tool that only asked for the run was back before."""
        run = tree.ops[self.target]
        if self.tool < 0 or self.mode == "pass_control":
            return run.end_ns
        end_ns = tree.ops[self.tool].end_ns
        only_asked = self.tool != self.target and 0 < end_ns < run.start_ns
        return run.end_ns if only_asked and one_clock(run, tree.ops[self.tool]) else end_ns

    def source_name(self, tree: Tree) -> str:
        """Name of the source in the words of its tool or hand-over, empty without one."""
        if self.tool < 0:
            return ""
        op = tree.ops[self.tool]
        return (op.handover.source if op.handover else "") or op.agent

    def run_began(self, tree: Tree) -> int:
        """When its run began, by the source's clock, ns."""
        ops = tree.ops
        told = self.source < 0 or self.tool < 0 or one_clock(ops[self.source], ops[self.target])
        return ops[self.target if told else self.tool].start_ns


class Delegations:
    """All delegations of an orchestration."""

    def __init__(self, tree: Tree) -> None:
        self.all: list[Delegation] = []
        self.into: dict[int, Delegation] = {}
        """The delegation that made an agent run, by the run."""
        self.by_source: dict[int, list[Delegation]] = defaultdict(list)
        self.tools: set[int] = set()
        """Tool calls that delegate and so are no leaf tools."""
        self.same_run = tree.same_run
        self.engines: list[int] = []
        """Workflows that are agents: several runs in them were started by nobody else."""
        self.acts = SaidActs(tree)

    def add(self, found: Delegation) -> None:
        """Record ``found``."""
        self.all.append(found)
        self.by_source[found.source].append(found)
        if found.spawns:
            self.into[found.target] = found
        if found.tool >= 0:
            self.tools.add(found.tool)


def find_delegations(tree: Tree, calls: Calls) -> Delegations:
    """The delegations among the agent runs of ``tree``."""
    found = Delegations(tree)
    agents = tree.agent_ops()
    if tree.same_run:
        agents = [i for i in agents if i not in tree.same_run]
    handed_over = _handovers(tree, agents, found)
    special = bool(tree.virtual or tree.routed)
    roots = []
    for i in agents:
        if i in handed_over or (special and (_virtual(tree, i, found) or _routed(tree, i, found))):
            continue
        if not _by_place(tree, i, found):
            roots.append(i)
    _handed_by(tree, roots, found)
    roots = [i for i in roots if i not in found.into]
    _tasks(tree, calls, roots, found)
    _lost_context(tree, roots, found)
    _contained(tree, [i for i in roots if i not in found.into], found)
    _started_by_engine(tree, [i for i in roots if i not in found.into], found)
    for delegation in found.all:
        delegation.mode = _mode(tree, calls, delegation)
    for message in first_contacts(tree, found):
        found.add(
            Delegation(
                message.sender,
                message.receiver,
                -1,
                "first_contact",
                message.confidence,
                "message",
                delegates=False,
            )
        )
    found.all.sort(key=lambda d: (d.begins(tree), d.target, d.tool))
    for delegations in found.by_source.values():
        delegations.sort(key=lambda d: (d.begins(tree), d.target, d.tool))
    return found


def above(tree: Tree, found: Delegations, i: int) -> int:
    """Agent run above operation ``i``; -1 without one."""
    return tree.agent[i]


def _virtual(tree: Tree, i: int, found: Delegations) -> bool:
    """Rule (f): the tool call is all that shows of the run that it asked for."""
    if i not in tree.virtual:
        return False
    handover = tree.ops[i].handover
    found.add(Delegation(tree.agent[i], i, i, "delegation_tool", handover.confidence if handover else 0.8))
    return True


def _routed(tree: Tree, i: int, found: Delegations) -> bool:
    """Rule (d): a node that another node's result sent the engine to."""
    why = tree.routed.get(i)
    if why is None:
        return False
    found.add(Delegation(why.source, i, -1, why.rule, why.confidence))
    return True


def _handed_by(tree: Tree, roots: list[int], found: Delegations) -> None:
    """Rule (b) without a span of the hand-over: the run names the agent that was in control before it."""
    named = [i for i in roots if (run := tree.ops[i].run) is not None and run.handed_by]
    if not named:
        return
    runs: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i in tree.agent_ops():
        if i not in tree.same_run:
            runs[(tree.ops[i].trace_id, folded(tree.name(i)))].append(i)
    for i in named:
        run = tree.ops[i].run
        before = runs[(tree.ops[i].trace_id, folded(run.handed_by if run else ""))]
        place = bisect_left(before, i)
        if place:
            found.add(Delegation(before[place - 1], i, -1, "parent_node_key", 1.0, "pass_control"))


def _started_by_engine(tree: Tree, roots: list[int], found: Delegations) -> None:
    """Two or more runs in one engine that nobody else had start: the engine is an agent itself."""
    inside: dict[int, list[int]] = defaultdict(list)
    for i in roots:
        flow = tree.parent[i]
        while flow >= 0 and tree.ops[flow].kind != "workflow":
            flow = tree.parent[flow]
        if flow >= 0 and (facts := tree.ops[flow].run) is not None and facts.engine:
            inside[flow].append(i)
    for engine, runs in inside.items():
        if len(runs) > 1:
            found.engines.append(engine)
            for i in runs:
                found.add(Delegation(engine, i, -1, "node_of_engine", 1.0, delegates=False))


def _by_place(tree: Tree, i: int, found: Delegations) -> bool:
    source, tool = above(tree, found, i), tree.tool[i]
    if tree.census.said and (act := found.acts.act(tool)):
        handover = tree.ops[tool].handover
        first = act == "delegate" and tool not in found.tools
        mode = handover.mode if handover is not None and first else "return_to_caller"
        found.add(Delegation(source, i, tool, SAID, 1.0, mode, delegates=first))
        return True
    if tool >= 0:
        found.add(Delegation(source, i, tool, "agent_under_tool", 1.0))
        return True
    if source < 0:
        return False
    run = tree.ops[source].run
    if run is not None and run.engine:
        found.add(Delegation(source, i, -1, "node_of_engine", 1.0, delegates=False))
    else:
        found.add(Delegation(source, i, -1, "agent_under_agent", 0.9))
    return True


def _handovers(tree: Tree, agents: list[int], found: Delegations) -> set[int]:
    """Rules (b) and (c): each transfer claims the next run of its target that no tool call contains."""
    if not tree.census.handovers:
        return set()
    runs: dict[str, list[int]] = defaultdict(list)
    for i in reversed(agents):
        runs[folded(tree.name(i))].append(i)
    first = {name: named[-1] for name, named in runs.items()}
    peers = Peers(tree)
    claimed: set[int] = set()
    inside = {tree.tool[i] for i in agents} | tree.virtual
    for i in tree.census.handovers:
        op = tree.ops[i]
        if op.handover is None or i in inside:
            continue
        source = above(tree, found, i)
        if not op.handover.target:
            target = peers.after(source, i)
            if target >= 0:
                known = target in claimed or target in tree.turn_of
                claimed.add(target)
                found.add(
                    Delegation(source, tree.turn_of.get(target, target), i, "next_agent", op.handover.confidence,
                               op.handover.mode, spawns=not known)
                )  # fmt: skip
            continue
        if act := found.acts.act(i):
            target = found.acts.addressed(i) if act == "delegate" else -1
            if target >= 0:
                found.add(Delegation(source, target, i, SAID, 1.0, op.handover.mode, spawns=False))
            if act != "delegate" or target >= 0 or op.handover.mode != "pass_control":
                continue
        waiting = runs.get(folded(op.handover.target), [])
        known = False
        while waiting and earlier(tree.ops[waiting[-1]], op):
            waiting.pop()
            known = True
        rule, confidence = op.handover.rule, op.handover.confidence
        if waiting and tree.tool[waiting[-1]] < 0 and not known:
            target = waiting.pop()
            claimed.add(target)
            found.add(Delegation(source, target, i, rule, confidence, op.handover.mode))
        elif known or waiting:
            target = first.get(folded(op.handover.target), -1)
            if target >= 0:
                found.add(Delegation(source, target, i, rule, confidence, op.handover.mode, spawns=False))
    return claimed


def _tasks(tree: Tree, calls: Calls, roots: list[int], found: Delegations) -> None:
    """Rule (g) inside one trace: a run outside any other whose task is the argument of a tool call that contains
    it in time; its instrumentation hangs sub-agents off the root."""
    wanted = Waiting(tree)
    for i in roots if tree.census.tools else ():
        run = tree.ops[i].run
        task = run.task_hash if run is not None else ""
        if not task:
            first = calls.of_agent.get(i, [])[:1]
            told = [tree.ops[j].call for c in first for j in calls.groups[c]]
            task = next((f.task_hash for f in told if f is not None and f.task_hash), "")
        if task:
            wanted.add((tree.ops[i].trace_id, task), i)
    if not wanted:
        return
    for tool in reversed(tree.census.tools):
        op = tree.ops[tool]
        if op.tool is None or tool in found.tools:
            continue
        source = above(tree, found, tool)
        inside = (
            (key, i)
            for key in ((op.trace_id, text) for text in op.tool.argument_hashes)
            for i in wanted.around(key, op)
            if i != source and tree.ops[i].end_ns > 0 and within(op, tree.ops[i])
        )
        key, i = next(inside, (("", ""), -1))
        if i >= 0:
            wanted.take(key, i)
            found.add(Delegation(source, i, tool, "task_is_tool_argument", 0.8))


def _lost_context(tree: Tree, roots: list[int], found: Delegations) -> None:
    """Rule (g) inside one conversation: the root run's task is an argument of a tool call that contains
    it in time."""
    wanted = Waiting(tree)
    for i in roots:
        run = tree.ops[i].run
        if run is not None and run.task_hash and tree.ops[i].conversation and i not in found.into:
            wanted.add((tree.ops[i].conversation, run.task_hash), i)
    if not wanted:
        return
    for tool in tree.census.tools:
        op = tree.ops[tool]
        if op.tool is None or not op.conversation:
            continue
        for key in ((op.conversation, text) for text in op.tool.argument_hashes):
            for i in wanted.around(key, op):
                if lost_in(op, tree.ops[i]):
                    wanted.take(key, i)
                    found.add(Delegation(above(tree, found, tool), i, tool, "task_is_tool_argument", 0.8))


def lost_in(tool: Operation, run: Operation) -> bool:
    """Whether ``run``, a root in a trace of its own, lies within the time of ``tool``."""
    return not run.parent_id and run.trace_id != tool.trace_id and within(tool, run)


def _contained(tree: Tree, roots: list[int], found: Delegations) -> None:
    """Rule (h): a run whose parent is missing, within the time of the trace's only root run."""
    missing = set(tree.missing)
    tops: dict[str, list[int]] = defaultdict(list)
    for i in roots:
        if i not in missing:
            tops[tree.ops[i].trace_id].append(i)
    for i in roots:
        top = tops.get(tree.ops[i].trace_id, [])
        if i in missing and len(top) == 1:
            outer, inner = tree.ops[top[0]], tree.ops[i]
            if outer.start_ns <= inner.start_ns and inner.end_ns <= outer.end_ns:
                found.add(Delegation(top[0], i, -1, "contained_in_root", 0.5))


def _mode(tree: Tree, calls: Calls, delegation: Delegation) -> str:
    """Control was passed on when the source ended, well, without another model call after the target's end."""
    if delegation.target in tree.virtual:
        return "return_to_caller"
    if tree.routed and (why := tree.routed.get(delegation.target)) and why.source == delegation.source:
        return "return_to_caller" if why.returns else "pass_control"
    if delegation.mode == "pass_control" and (delegation.tool >= 0 or delegation.rule == "parent_node_key"):
        return "pass_control"
    tool = tree.ops[delegation.tool].tool if delegation.tool >= 0 else None
    if tool is None or delegation.source < 0:
        return "return_to_caller"
    source = tree.ops[delegation.source]
    if tool.role != "output" and (source.end_ns <= 0 or source.status == "error"):
        return "return_to_caller"
    if calls.last(delegation.source) < 0:
        return "pass_control" if tool.role == "output" else "return_to_caller"
    target = tree.ops[delegation.target]
    back = target if one_clock(source, target) else tree.ops[delegation.tool]
    goes_on = calls.after(delegation.source, back.end_ns) >= 0
    return "return_to_caller" if goes_on else "pass_control"
