"""The forest of one orchestration's operations: parents resolved, cycles cut, gaps known, nearest agent and
tool.

Invariants: the result depends on the set of operations only, never on their order; no recursion; linear
time after one sort.
"""

from __future__ import annotations

from collections.abc import Iterable

from spanloop.pipeline.dialects.operation import Operation

__all__ = ["Tree", "build_tree"]


class Tree:
    """Operations sorted by (start, longest first, trace, span), and what their places say. Indices are
    into ``ops``."""

    def __init__(self, ops: list[Operation]) -> None:
        self.ops = ops
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

    def agent_ops(self) -> list[int]:
        """Agent runs in order of start."""
        return [i for i, op in enumerate(self.ops) if op.kind == "agent_run"]


def build_tree(operations: Iterable[Operation]) -> Tree:
    """The forest of ``operations``; each (trace id, span id) occurs once."""
    ops = sorted(operations, key=lambda op: (op.start_ns, -op.end_ns, op.trace_id, op.span_id))
    tree = Tree(ops)
    where = {(op.trace_id, op.span_id): i for i, op in enumerate(ops)}
    for i, op in enumerate(ops):
        if not op.parent_id:
            continue
        above = where.get((op.parent_trace or op.trace_id, op.parent_id), -1)
        if above < 0:
            tree.missing.append(i)
        tree.parent[i] = above
    _cut_cycles(tree)
    _walk(tree)
    _by_run_id(tree)
    return tree


def _cut_cycles(tree: Tree) -> None:
    """Make the operation with the smallest (start, id) of each cycle a root."""
    state = bytearray(len(tree.ops))
    for start in range(len(tree.ops)):
        path = []
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


def _walk(tree: Tree) -> None:
    ops, parent = tree.ops, tree.parent
    children: list[list[int]] = [[] for _ in ops]
    stack = []
    for i in range(len(ops) - 1, -1, -1):
        if parent[i] >= 0:
            children[parent[i]].append(i)
        else:
            stack.append(i)
    while stack:
        node = stack.pop()
        tree.preorder.append(node)
        above = parent[node]
        if above >= 0:
            kind = ops[above].kind
            tree.agent[node] = above if kind == "agent_run" else tree.agent[above]
            if kind in ("tool_call", "handover"):
                tree.tool[node] = above
            elif kind != "agent_run":
                tree.tool[node] = tree.tool[above]
            outer = tree.workflow[above]
            tree.workflow[node] = outer if outer >= 0 else (above if kind == "workflow" else -1)
        stack.extend(children[node])


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
