"""The forest of one orchestration's operations: parents resolved, cycles cut, gaps known, nearest agent and
tool.

Invariants: the result depends on the set of operations only, never on their order; no recursion; linear
time after one sort.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from spanloop.pipeline.assembly.census import Census
from spanloop.pipeline.assembly.engines import mark_engines
from spanloop.pipeline.assembly.names import folded
from spanloop.pipeline.assembly.nodes import Routed, resolve_nodes
from spanloop.pipeline.assembly.turns import merge_turns
from spanloop.pipeline.dialects.operation import Operation

__all__ = ["Tree", "build_tree"]


class Tree:
    """Operations sorted by (start, longest first, trace, span), and what their places say. Indices are
    into ``ops``."""

    def __init__(self, ops: list[Operation]) -> None:
        self.ops = ops
        self.census = Census(ops)
        n = len(ops)
        self.parent = [-1] * n
        """Index of the parent, -1: a root or one whose parent is missing."""
        self.missing: list[int] = []
        """Operations whose parent never arrived."""
        self.cycles = 0
        self.preorder: list[int] = []
        self.agent = [-1] * n
        """Nearest agent run strictly above."""
        self.tool = [-1] * n
        """Nearest tool call or hand-over above, within the same agent run."""
        self.workflow = [-1] * n
        """Outermost workflow above."""
        self.turns: dict[int, list[Operation]] = {}
        """Turns as they were of an agent with more than one, by the agent's first run."""
        self.turn_of: dict[int, int] = {}
        """The first run of the agent that a later turn belongs to."""
        self.same_run: dict[int, int] = {}
        """Agent runs that are a part or another view of the run around them, and that run."""
        self.virtual: set[int] = set()
        """Tool calls that stand for the run of an agent without a span of its own, which the hand-over names."""
        self.routed: dict[int, Routed] = {}
        """Nodes that another node's result sent the engine to."""
        self.follows: list[tuple[int, int]] = []
        """(before, after): runs of nodes that follow each other by an edge, nobody deciding."""
        self.owner: dict[int, int] = {}
        """Nodes that are no agents, and the run whose step they are."""
        self.runs: list[int] = []
        """Agent runs in order of start, those without a span of their own among them."""

    def turns_of(self, i: int) -> list[Operation]:
        """The turns of an agent run in order; most agents have one."""
        return self.turns.get(i) or [self.ops[i]]

    def agent_ops(self) -> list[int]:
        """Agent runs in order of start, those without a span of their own among them."""
        return self.runs

    def name(self, i: int) -> str:
        """Name of agent run ``i``."""
        op = self.ops[i]
        if i in self.virtual and op.handover is not None:
            return op.handover.target
        return op.agent or op.name or "agent"


def build_tree(operations: Iterable[Operation]) -> Tree:
    """The forest of ``operations``; each (trace id, span id) occurs once."""
    ops = _in_order(operations)
    tree = Tree(ops)
    where: dict[str, dict[str, int]] = {}
    trace_id, here = "", {}
    for i, op in enumerate(ops):
        if op.trace_id != trace_id:
            trace_id = op.trace_id
            here = where.setdefault(trace_id, {})
        here[op.span_id] = i
    nothing: dict[str, int] = {}
    parent, trace_id = tree.parent, ""
    for i, op in enumerate(ops):
        parent_id = op.parent_id
        if not parent_id:
            continue
        if (op.parent_trace or op.trace_id) != trace_id:
            trace_id = op.parent_trace or op.trace_id
            here = where.get(trace_id, nothing)
        above = here.get(parent_id, -1)
        if above < 0:
            tree.missing.append(i)
        parent[i] = above
    _order(tree)
    if len(tree.preorder) < len(ops):
        _cut_cycles(tree)
        _order(tree)
    if tree.census.nodes:
        resolve_nodes(tree)
    mark_engines(tree)
    merge_turns(tree)
    _find_virtual(tree)
    tree.runs = _runs(tree)
    _place(tree)
    _by_run_id(tree)
    _same_runs(tree)
    return tree


def _runs(tree: Tree) -> list[int]:
    """Agent runs in order; only nodes and turns become runs, or cease to be some, after the dialect."""
    if tree.census.nodes:
        return [i for i, op in enumerate(tree.ops) if op.kind == "agent_run" or i in tree.virtual]
    runs = tree.census.kind("agent_run")
    if tree.turn_of:
        runs = [i for i in runs if i not in tree.turn_of]
    return sorted([*runs, *tree.virtual]) if tree.virtual else runs


def _in_order(operations: Iterable[Operation]) -> list[Operation]:
    """By start, longest first, trace and span. Most starts differ, and numbers alone are compared much faster than tuples."""
    ops = sorted(operations, key=attrgetter("start_ns"))
    if len({op.start_ns for op in ops}) < len(ops):
        ops.sort(key=lambda op: (op.start_ns, -op.end_ns, op.trace_id, op.span_id))
    return ops


def _cut_cycles(tree: Tree) -> None:
    """Make the operation with the smallest (start, id) of each cycle a root."""
    state = bytearray(len(tree.ops))
    for start in range(len(tree.ops)):
        path: list[int] = []
        node = start
        while node >= 0 and not state[node]:
            state[node] = 1
            path.append(node)
            node = tree.parent[node]
        if node >= 0 and state[node] == 1:
            cycle = path[path.index(node) :]
            first = min(
                cycle, key=lambda i: (tree.ops[i].start_ns, tree.ops[i].trace_id, tree.ops[i].span_id)
            )
            tree.parent[first] = -1
            tree.cycles += 1
        for visited in path:
            state[visited] = 2


def _order(tree: Tree) -> None:
    """Parents before children; what is in a cycle, or below one, is left out."""
    children: dict[int, list[int]] = {}
    stack: list[int] = []
    for i in range(len(tree.parent) - 1, -1, -1):
        above = tree.parent[i]
        if above < 0:
            stack.append(i)
        elif above in children:
            children[above].append(i)
        else:
            children[above] = [i]
    preorder: list[int] = []
    while stack:
        node = stack.pop()
        preorder.append(node)
        if node in children:
            stack += children[node]
    tree.preorder = preorder


def _place(tree: Tree) -> None:
    """Nearest agent, tool and workflow of each operation."""
    ops, parent, agent, tool, workflow = tree.ops, tree.parent, tree.agent, tree.tool, tree.workflow
    usual = not (tree.turn_of or tree.virtual or tree.owner)
    for node in tree.preorder:
        above = parent[node]
        if above < 0:
            continue
        kind = ops[above].kind
        if usual:
            run = above if kind == "agent_run" else -1
        else:
            run = tree.turn_of.get(above, above if kind == "agent_run" or above in tree.virtual else -1)
            run = tree.turn_of.get(tree.owner[above], tree.owner[above]) if above in tree.owner else run
        if run >= 0:
            agent[node] = run
        else:
            agent[node] = agent[above]
            tool[node] = above if kind in ("tool_call", "handover") else tool[above]
        outer = workflow[above]
        workflow[node] = outer if outer >= 0 or kind != "workflow" else above


def _find_virtual(tree: Tree) -> None:
    """Rule (f): a delegation tool that names an agent and holds no run stands for that agent's run."""
    named = [
        i
        for i in tree.census.handovers
        if (op := tree.ops[i]).kind == "tool_call" and op.handover is not None and op.handover.target
        and op.handover.mode == "return_to_caller" and op.said is None
    ]  # fmt: skip
    if not named:
        return
    holds = bytearray(len(tree.ops))
    for i in reversed(tree.preorder):
        if tree.parent[i] >= 0 and (holds[i] or tree.ops[i].kind == "agent_run"):
            holds[tree.parent[i]] = 1
    tree.virtual.update(i for i in named if not holds[i])


def _by_run_id(tree: Tree) -> None:
    """Where a missing parent hides the agent, the framework's run id still names it."""
    if not tree.missing:
        return
    runs: dict[str, int] = {}
    for i in tree.agent_ops():
        if tree.ops[i].run_id:
            runs.setdefault(tree.ops[i].run_id, i)
    for i, op in enumerate(tree.ops):
        if tree.agent[i] < 0 and op.run_id and op.kind != "agent_run":
            tree.agent[i] = runs.get(op.run_id, -1)


def _same_runs(tree: Tree) -> None:
    """Runs that are a part or another view of the run around them: what is theirs is that one's."""
    for i in tree.agent_ops():
        outer = tree.agent[i]
        if outer >= 0 and outer != i and tree.tool[i] < 0 and _repeats(tree, outer, i):
            tree.same_run[i] = tree.same_run.get(outer, outer)
    if tree.same_run:
        tree.agent = [tree.same_run.get(i, i) for i in tree.agent]


def _repeats(tree: Tree, outer: int, inner: int) -> bool:
    """Whether run ``inner``, within ``outer`` without a tool between, is a part or another view of it."""
    one, two = tree.ops[outer], tree.ops[inner]
    if two.run is not None and two.run.guessed:
        return True
    direct = tree.parent[inner] == outer
    return direct and one.layer != two.layer and folded(tree.name(outer)) == folded(tree.name(inner))
