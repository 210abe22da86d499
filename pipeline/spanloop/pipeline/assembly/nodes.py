"""Which nodes of an engine (a graph) are agents, and which node's result had the engine run them.

An engine in which at most one node calls models is one agent: its nodes are steps of the usual loop of model and
tools. Otherwise each node that calls models, or sends the engine to one that does, is an agent; other nodes are
steps of the agent before them. Control goes by supersteps: a node runs because a result of the superstep before
named it, or by an edge. An engine that comes back to a node whose work led to the present one returns there; any
other run of a node is a new one. Rule (d) of DIALECTS 3.

Invariants: depends on the set of operations only; linear time after sorting the nodes.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

import msgspec

from spanloop.pipeline.assembly.names import folded
from spanloop.pipeline.dialects.operation import AgentFacts, NodeFacts, Operation

if TYPE_CHECKING:
    from spanloop.pipeline.assembly.tree import Tree

__all__ = ["Routed", "resolve_nodes"]

_ENGINE = "graph"
"""What an engine of nodes is called as an agent."""
_UNTOLD = 1 << 30
"""Superstep of a node that tells none: such nodes run one after another."""


class Routed(msgspec.Struct, frozen=True):
    """Why an engine ran a node that is an agent."""

    source: int
    """Run whose result sent the engine there."""
    rule: str
    confidence: float
    returns: bool
    """The engine came back to the source afterwards."""


class _Engine(msgspec.Struct):
    """The executions of one engine's nodes."""

    op: int
    """Operation that runs them, -1: its span is missing."""
    nodes: list[int]
    inside: int
    """Execution of another engine's node that this engine is in, -1 without one."""


def resolve_nodes(tree: Tree) -> None:
    """Give the nodes of ``tree`` their kinds, and note who sent the engine where."""
    around, executions = _executions(tree)
    if not executions:
        return
    models, tools = _below(tree)
    goto = _gotos(tree, around, executions)
    engines = _engines(tree, around, executions)
    interrupted = _interrupted(tree, engines)
    for number, engine in enumerate(engines):
        runs = [engines[k] for k in interrupted.get(number, (number,))]
        agents = set().union(*(_agents_among(tree, run, models, tools, goto) for run in runs))
        if len(agents) < 2:
            goes_on = len(runs) > 1 and any(models[i] for run in runs for i in run.nodes)
            _one_agent(tree, engine, models, goes_on=goes_on)
        elif engine is runs[0]:
            whole, again = _as_one(tree, runs)
            _many_agents(tree, whole, agents, goto, again)


def _executions(tree: Tree) -> tuple[list[int], list[int]]:
    """(the node's execution around each operation, itself included; -1 without one; all executions in order)."""
    around = [-1] * len(tree.ops)
    found = []
    for i in tree.preorder:
        above = tree.parent[i]
        outer = around[above] if above >= 0 else -1
        node = tree.ops[i].node
        if node is None or (outer >= 0 and node.instance and node.instance == _node(tree, outer).instance):
            around[i] = outer
        else:
            around[i] = i
            found.append(i)
    return around, sorted(found)


def _node(tree: Tree, i: int) -> NodeFacts:
    node = tree.ops[i].node
    return node if node is not None else NodeFacts("")


def _below(tree: Tree) -> tuple[bytearray, bytearray]:
    """Whether model calls, and tool calls, stand below each operation; what is within a tool is the tool's."""
    models, tools = bytearray(len(tree.ops)), bytearray(len(tree.ops))
    for i in reversed(tree.preorder):
        above = tree.parent[i]
        if above < 0:
            continue
        op = tree.ops[i]
        if op.kind in ("tool_call", "handover"):
            tools[above] = 1
            continue
        own = op.kind == "model_call" or (op.kind == "agent_run" and op.node is None)
        models[above] |= own or models[i]
        tools[above] |= tools[i]
    return models, tools


def _gotos(tree: Tree, around: list[int], executions: list[int]) -> dict[int, set[str]]:
    """Names, folded, that each execution's results and hand-overs send its engine, or one further out, to."""
    found: dict[int, set[str]] = {i: set() for i in executions}
    for i, op in enumerate(tree.ops):
        inside = around[i]
        if inside < 0:
            continue
        if op.node is not None:
            found[inside].update(folded(name) for name in op.node.goto)
        target = folded(op.handover.target) if op.handover is not None else ""
        while target and inside >= 0:
            found[inside].add(target)
            above = tree.parent[inside]
            inside = around[above] if above >= 0 else -1
    return found


def _engines(tree: Tree, around: list[int], executions: list[int]) -> list[_Engine]:
    """Executions by what runs them, in order of superstep and start."""
    grouped: dict[tuple[str, str], list[int]] = defaultdict(list)
    for i in executions:
        grouped[(tree.ops[i].trace_id, tree.ops[i].parent_id)].append(i)
    engines = []
    for nodes in grouped.values():
        op = tree.parent[nodes[0]]
        nodes.sort(key=lambda i: (_step(tree, i), i))
        engines.append(_Engine(op, nodes, _inside(tree, around, op)))
    return engines


def _interrupted(tree: Tree, engines: list[_Engine]) -> dict[int, list[int]]:
    """Engines (numbers) that are runs of one: a node of one was interrupted and goes on in the other."""
    paused = {
        (op.conversation, op.node.instance)
        for op in tree.ops
        if op.node is not None and op.node.paused and op.node.instance
    }
    groups: dict[int, list[int]] = {}
    first: dict[tuple[str, str], int] = {}
    for number, engine in enumerate(engines if paused else ()):
        for i in engine.nodes:
            key = (tree.ops[i].conversation, _node(tree, i).instance)
            if key not in paused:
                continue
            other = first.setdefault(key, number)
            one, two = groups.setdefault(other, [other]), groups.setdefault(number, [number])
            if one is not two:
                one += two
                groups.update(dict.fromkeys(two, one))
    return groups


def _as_one(tree: Tree, runs: list[_Engine]) -> tuple[_Engine, dict[int, int]]:
    """The runs of an engine that was interrupted as one, and which executions only go on with an earlier one."""
    nodes = sorted((i for run in runs for i in run.nodes), key=lambda i: (_step(tree, i), i))
    first: dict[str, int] = {}
    again = {}
    for i in nodes:
        if instance := _node(tree, i).instance:
            earlier = first.setdefault(instance, i)
            if earlier != i:
                again[i] = earlier
    op = min((run.op for run in runs if run.op >= 0), default=-1)
    if op >= 0:
        ends = [tree.ops[run.op].end_ns for run in runs if run.op >= 0]
        tree.ops[op] = msgspec.structs.replace(tree.ops[op], end_ns=max(ends) if min(ends) > 0 else 0)
    inside = max(run.inside for run in runs)
    return _Engine(op, [i for i in nodes if i not in again], inside), again


def _inside(tree: Tree, around: list[int], op: int) -> int:
    """Execution that engine ``op`` is a part of; one that a tool runs is a part of none."""
    if op < 0 or around[op] < 0:
        return -1
    i = op
    while i != around[op]:
        if tree.ops[i].kind in ("tool_call", "handover"):
            return -1
        i = tree.parent[i]
    return i


def _step(tree: Tree, i: int) -> int:
    step = _node(tree, i).step
    return step if step is not None else _UNTOLD


def _agents_among(
    tree: Tree, engine: _Engine, models: bytearray, tools: bytearray, goto: dict[int, set[str]]
) -> set[str]:
    """Folded names of the engine's nodes that are agents."""
    names = {i: folded(_node(tree, i).name) for i in engine.nodes}
    agents = {names[i] for i in engine.nodes if models[i]}
    routers = {
        names[i] for i in engine.nodes if not tools[i] and not models[i] and goto[i] & agents - {names[i]}
    }
    return agents | routers


def _one_agent(tree: Tree, engine: _Engine, models: bytearray, *, goes_on: bool = False) -> None:
    """The engine itself is the agent, or the node that it stands in, or the run that it is a part of. ``goes_on``: it is a part of a
    run that was interrupted, and agents' models may be asked in another part."""
    op = engine.op
    host = -1
    if op < 0:
        host = next((i for i in engine.nodes if models[i]), -1)
    for i in engine.nodes:
        if op < 0 and models[i]:
            _become_agent(tree, i, _node(tree, i).name, instance=tree.ops[host])
        else:
            _become_step(tree, i)
    if op >= 0 and engine.inside < 0 and tree.ops[op].kind in ("unknown", "workflow") and (
        goes_on or any(models[i] for i in engine.nodes)
    ):  # fmt: skip
        _become_agent(tree, op, tree.ops[op].agent or tree.ops[op].name)


def _become_agent(
    tree: Tree, i: int, name: str, *, instance: Operation | None = None, engine: bool = False
) -> None:
    op = tree.ops[i]
    facts = msgspec.structs.replace(op.run or AgentFacts(), guessed=False, engine=engine)
    tree.ops[i] = msgspec.structs.replace(
        op,
        kind="agent_run",
        agent=name,
        run=facts,
        instance="" if instance is None else f"{instance.trace_id}/{instance.span_id}",
    )


def _become_step(tree: Tree, i: int) -> None:
    if tree.ops[i].kind == "agent_run":
        tree.ops[i] = msgspec.structs.replace(tree.ops[i], kind="unknown")


def _many_agents(
    tree: Tree, engine: _Engine, agents: set[str], goto: dict[int, set[str]], again: dict[int, int]
) -> None:
    """Follow control over the supersteps. ``again``: executions that go on with an earlier one."""
    for i, earlier in again.items():
        goto[earlier] |= goto[i]
    if engine.op >= 0 and tree.ops[engine.op].kind in ("unknown", "agent_run"):
        _become_engine(tree, engine)
    routes = _Routes(tree, goto)
    steps: dict[int, list[int]] = defaultdict(list)
    for number, i in enumerate(engine.nodes):
        step = _step(tree, i)
        steps[step if step < _UNTOLD else _UNTOLD + number].append(i)
    for _, nodes in sorted(steps.items()):
        routes.follow([i for i in nodes if folded(_node(tree, i).name) in agents],
                      [i for i in nodes if folded(_node(tree, i).name) not in agents])  # fmt: skip
    routes.settle()
    for i, earlier in again.items():
        if earlier in routes.run_of:
            run = tree.ops[routes.run_of[earlier]]
            _become_agent(tree, i, _node(tree, i).name, instance=run)
        else:
            _become_step(tree, i)


def _become_engine(tree: Tree, engine: _Engine) -> None:
    """A workflow that may turn out to be an agent; inside another engine's node it is that node."""
    op = tree.ops[engine.op]
    tree.ops[engine.op] = msgspec.structs.replace(
        op, kind="workflow", agent=_ENGINE, run=AgentFacts(engine=True)
    )
    if engine.inside >= 0 and (outer := tree.ops[engine.inside]).run is not None:
        tree.ops[engine.inside] = msgspec.structs.replace(
            outer, run=msgspec.structs.replace(outer.run, engine=True)
        )


class _Routes:
    """Runs of one engine's agents as control passes between them."""

    def __init__(self, tree: Tree, goto: dict[int, set[str]]) -> None:
        self.tree, self.goto = tree, goto
        self.before: list[int] = []
        """Executions of the last superstep with agents."""
        self.run_of: dict[int, int] = {}
        self.name_of: dict[int, str] = {}
        """Name of each run, folded."""
        self.source: dict[int, tuple[int, str, float]] = {}
        """Who had each run start."""
        self.seen: dict[int, list[int]] = defaultdict(list)
        """Supersteps in which each run worked."""
        self.deciders: set[int] = set()
        self.number = 0

    def follow(self, agents: list[int], steps: list[int]) -> None:
        """Take one superstep: its executions of agents, and of nodes that are none."""
        for i in steps:
            _become_step(self.tree, i)
            if self.before:
                self.tree.owner[i] = self.run_of[self.before[0]]
                self.goto[self.before[0]] |= self.goto[i]
        if not agents:
            return
        self.number += 1
        taken = [(i, *self._reason(i)) for i in agents]
        for i, run, reason in taken:
            self.run_of[i] = run if run >= 0 else i
            self.seen[self.run_of[i]].append(self.number)
            if run < 0:
                self.name_of[i] = folded(_node(self.tree, i).name)
            if reason is not None:
                self.source[i] = reason
            name = _node(self.tree, i).name
            facts = self.tree.ops[i].run
            is_engine = facts is not None and facts.engine
            _become_agent(self.tree, i, name, instance=self.tree.ops[self.run_of[i]], engine=is_engine)
            if run < 0 and reason is None:
                self.tree.follows += [(self.run_of[p], i) for p in self.before]
        self.before = agents

    def _reason(self, i: int) -> tuple[int, tuple[int, str, float] | None]:
        """(the run that execution ``i`` continues or -1, who sent the engine there where somebody did)."""
        name = folded(_node(self.tree, i).name)
        named = [p for p in self.before if name in self.goto[p]]
        untold = [p for p in self.before if "" in self.goto[p]]
        for p in named or self.before:
            known = self._on_the_way(p, name)
            if known >= 0:
                return known, None
        if named or untold:
            sender = self.run_of[(named or untold)[0]]
            self.deciders.add(sender)
            return -1, (sender, "goto_then_node", 0.9 if named else 0.7)
        if len(self.before) == 1 and self.run_of[self.before[0]] in self.deciders:
            return -1, (self.run_of[self.before[0]], "node_after_decider", 0.6)
        return -1, None

    def _on_the_way(self, p: int, name: str) -> int:
        """The run called ``name`` among that of execution ``p`` and those that had it start, -1 without one."""
        run = self.run_of[p]
        while run >= 0 and self.name_of[run] != name:
            run = self.source[run][0] if run in self.source else -1
        return run

    def settle(self) -> None:
        """Note the reasons, now that it is known where control came back to."""
        for run, (source, rule, confidence) in self.source.items():
            returns = self.seen[source][-1] > self.seen[run][-1]
            self.tree.routed[run] = Routed(source, rule, confidence, returns)
