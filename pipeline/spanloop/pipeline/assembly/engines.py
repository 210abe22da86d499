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
    ops, parent = tree.ops, tree.parent
    runs = [i for i, op in enumerate(ops) if op.kind == "agent_run"]
    if len(runs) < 2:
        return
    acts = [i for i, op in enumerate(ops) if op.kind in _ACTS]
    busy = {parent[i] for i in acts}
    if all(i in busy or ops[i].call is not None for i in runs):
        return
    above, direct = _nearest(tree)
    acting = {i for i in runs if ops[i].call is not None}
    acting.update([above[i] for i in acts])
    calling = {above[i] for i in acts if ops[i].kind == "model_call"}
    engines: dict[int, bool] = {}
    for i in reversed(runs):
        op, agent = ops[i], above[i]
        if agent < 0 or agent in acting or not direct[i]:
            continue
        outer = ops[agent]
        repeats = outer.layer != op.layer or folded(outer.agent) == folded(op.agent)
        engines[agent] = engines.get(agent, True) and (i in calling or engines.get(i, False)) and not repeats
    for agent, is_engine in engines.items():
        run = ops[agent].run
        if is_engine and run is not None and not run.engine and ops[agent].said is None:
            ops[agent] = msgspec.structs.replace(ops[agent], run=msgspec.structs.replace(run, engine=True))


def _nearest(tree: Tree) -> tuple[list[int], bytearray]:
    """For each operation the nearest agent run above or -1, and whether no tool call lies between."""
    ops, parent = tree.ops, tree.parent
    nearest, direct = [-1] * len(ops), bytearray(b"\1") * len(ops)
    for i in tree.preorder:
        outer = parent[i]
        if outer < 0:
            continue
        kind = ops[outer].kind
        if kind == "agent_run":
            nearest[i] = outer
        else:
            nearest[i] = nearest[outer]
            direct[i] = 0 if kind in ("tool_call", "handover") else direct[outer]
    return nearest, direct
