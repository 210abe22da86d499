"""Agents that decide nothing: a run without a model call or tool of its own, directly above runs that have calls
or are such engines, only runs them (ADK's sequential, parallel and loop agents), as an engine runs its nodes.

Where no model calls are recorded at all nothing is concluded: then their absence says nothing. Nor of a run that its own program
tells outright.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from spanloop.pipeline.assembly.names import folded

if TYPE_CHECKING:
    from spanloop.pipeline.assembly.tree import Tree

__all__ = ["mark_engines"]

_ACTS = frozenset({"model_call", "tool_call", "handover"})


def mark_engines(tree: Tree) -> None:
    """Note on each such run that it is an engine; before turns are merged and places are looked up."""
    ops = tree.ops
    if sum(op.kind == "agent_run" for op in ops) < 2:
        return
    above = _nearest(tree)
    acting = {above[i][0] for i, op in enumerate(ops) if op.kind in _ACTS}
    acting |= {i for i, op in enumerate(ops) if op.kind == "agent_run" and op.call is not None}
    calling = {above[i][0] for i, op in enumerate(ops) if op.kind == "model_call"}
    engines: dict[int, bool] = {}
    for i in range(len(ops) - 1, -1, -1):
        op, (agent, direct) = ops[i], above[i]
        if op.kind != "agent_run" or agent < 0 or agent in acting or not direct:
            continue
        outer = ops[agent]
        repeats = outer.layer != op.layer or folded(outer.agent) == folded(op.agent)
        engines[agent] = engines.get(agent, True) and (i in calling or engines.get(i, False)) and not repeats
    for agent, is_engine in engines.items():
        run = ops[agent].run
        if is_engine and run is not None and not run.engine and ops[agent].said is None:
            ops[agent] = msgspec.structs.replace(ops[agent], run=msgspec.structs.replace(run, engine=True))


def _nearest(tree: Tree) -> list[tuple[int, bool]]:
    """For each operation (nearest agent run above or -1, whether no tool call lies between)."""
    ops, parent = tree.ops, tree.parent
    found: list[tuple[int, bool] | None] = [None] * len(ops)
    for start in range(len(ops)):
        path: list[int] = []
        node = start
        while found[node] is None:
            path.append(node)
            if parent[node] < 0:
                break
            node = parent[node]
        for i in reversed(path):
            outer = parent[i]
            if outer < 0:
                found[i] = (-1, True)
            elif ops[outer].kind == "agent_run":
                found[i] = (outer, True)
            else:
                agent, direct = found[outer] or (-1, True)
                found[i] = (agent, direct and ops[outer].kind not in ("tool_call", "handover"))
    return [place or (-1, True) for place in found]
