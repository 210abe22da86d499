"""From the operations of one component to the content of its next revision, and when that is worth an event.

Content is a pure function of the set of operations. A revision is published when the content changed, or
when a provisional one turned out to be complete as it was.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from spanloop.pipeline.assembly.calls import collect_calls, model_call, token_usage
from spanloop.pipeline.assembly.delegations import Delegations, find_delegations
from spanloop.pipeline.assembly.edges import build_edges
from spanloop.pipeline.assembly.infer import Inference, infer_events
from spanloop.pipeline.assembly.join import Component, Emitted
from spanloop.pipeline.assembly.joined import joined_flags
from spanloop.pipeline.assembly.log_events import fold_log_events
from spanloop.pipeline.assembly.tree import Tree, build_tree
from spanloop.pipeline.ports import Written
from spanloop.schemas.canonical import bytes_hash, canonical_json
from spanloop.schemas.events import OrchestrationRevised, encode
from spanloop.schemas.orchestration import ModelCall, OrchestrationContent

__all__ = ["build_content", "merged_events", "next_revision"]


def build_content(component: Component) -> OrchestrationContent:
    """The orchestration that the component's operations tell."""
    tree = build_tree(fold_log_events(component.operations()))
    calls = collect_calls(tree)
    found = find_delegations(tree, calls)
    work = infer_events(tree, calls, found)
    model_calls = _model_calls(work, found)
    tokens, rolled_up = token_usage(model_calls, tree)
    flags = _flags(component, tree)
    flags.update(joined_flags(tree, calls, found))
    if rolled_up:
        flags["usage_from_rollup"] = 0
    return OrchestrationContent(
        orchestration_id=component.orchestration_id,
        tenant=component.tenant,
        trace_ids=tuple(sorted(component.traces)),
        events=tuple(work.events),
        edges=build_edges(work),
        agents=work.agents(),
        calls=model_calls,
        tokens=tokens,
        started_ns=_started(tree),
        ended_ns=max([tree.ops[-1].start_ns, *[op.end_ns for op in tree.ops]]),
        flags=tuple(sorted(f"{name}:{count}" if count else name for name, count in flags.items())),
    )


def _started(tree: Tree) -> int:
    """First start, ns. A start of 1 ns belongs to a record without times, which counts where there is no other."""
    return next((op.start_ns for op in tree.ops if op.start_ns != 1), 1)


def _model_calls(work: Inference, found: Delegations) -> tuple[ModelCall, ...]:
    tree, calls = work.tree, work.calls
    became: dict[int, dict[str, str]] = {}
    for i in tree.census.tools:
        op = tree.ops[i]
        if op.tool is not None and op.tool.call_id:
            status = op.tool.role if op.tool.role in ("rejected", "deferred") else op.status or "ok"
            became.setdefault(work.agent_of(i), {}).setdefault(op.tool.call_id, status)
    only = _only_root_run(tree, found)
    listed = []
    for call in range(len(calls.groups)):
        agent = calls.agent[call]
        while agent in found.same_run:
            agent = found.same_run[agent]
        if agent < 0 and tree.parent[calls.groups[call][0]] < 0 and calls.groups[call][0] in tree.missing:
            agent = only
        listed.append(model_call(calls, call, work.agent_ids.get(agent, ""), became.get(agent, {})))
    return tuple(sorted(listed, key=lambda c: (c.start_ns, c.id)))


def _only_root_run(tree: Tree, found: Delegations) -> int:
    """The one run that nobody delegated, -1 if there is none or more: calls under a missing parent are its."""
    roots = [i for i in tree.agent_ops() if i not in found.into and i not in found.same_run]
    return roots[0] if len(roots) == 1 else -1


def _flags(component: Component, tree: Tree) -> Counter[str]:
    flags: Counter[str] = Counter()
    flags["orphan_spans"] = len(tree.missing)
    flags["cycle"] = tree.cycles
    flags["truncated_spans"] = component.overflow
    flags["conflicting_spans"] = sum(len(b.conflicts) for b in component.traces.values())
    ops, census = tree.ops, tree.census
    for i in census.flagged:
        for flag in ops[i].flags:
            flags[flag] += 1
    for op in ops:
        if op.end_ns <= 0:
            flags["unfinished_spans"] += 1
        elif op.end_ns < op.start_ns:
            flags["negative_durations"] += 1
    traces = component.traces
    flags["joined_by_link"] = sum(
        any(t != ops[i].trace_id and t in traces for t, _ in ops[i].links) for i in census.linked
    )
    flags["joined_by_response_id"] = _joined_by_response(tree)
    flags = +flags
    if not any(b.rooted for b in component.traces.values()):
        flags["missing_root"] = 0
    return flags


def _joined_by_response(tree: Tree) -> int:
    """Calls whose answer a gateway's span in another trace has too."""
    found = [
        (tree.ops[i].trace_id, call) for i in tree.census.calls if (call := tree.ops[i].call) is not None
    ]
    gateway = {call.response_id: trace_id for trace_id, call in found if call.gateway is not None}
    if not gateway:
        return 0
    return sum(gateway.get(call.response_id, trace_id) != trace_id for trace_id, call in found)


def next_revision(component: Component, written: Written | None = None) -> OrchestrationRevised | None:
    """The next revision of a component that is due, None when there is nothing new to say; notes it as
    published, and puts its bytes into ``written``: the content was encoded for its hash."""
    if not component.relevant:
        return None
    content = build_content(component)
    encoded = canonical_json(content)
    new_hash = bytes_hash(encoded)
    complete = component.complete
    last = component.emitted.get(content.orchestration_id)
    if last is not None and last.content_hash == new_hash and (last.complete or not complete):
        return None
    revision = last.revision + 1 if last else 1
    component.emitted[content.orchestration_id] = Emitted(revision, new_hash, complete)
    event = OrchestrationRevised(
        tenant=component.tenant,
        orchestration_id=content.orchestration_id,
        revision=revision,
        complete=complete,
        content_hash=new_hash,
        content=content,
    )
    if written is not None:
        written[id(event)] = (event, encode(msgspec.structs.replace(event, content=msgspec.Raw(encoded))))
    return event


def merged_events(component: Component) -> list[OrchestrationRevised]:
    """A last revision for each published id that the component no longer goes by; notes them as published. An id that was merged
    into one that was never published itself, before that too was lost, is told again where it went."""
    if not component.emitted:
        return []
    current = component.orchestration_id
    events = []
    for lost, last in sorted(component.emitted.items()):
        if current not in (lost, last.merged_into) and last.merged_into not in component.emitted:
            last.revision += 1
            last.merged_into = current
            events.append(
                OrchestrationRevised(
                    tenant=component.tenant, orchestration_id=lost, revision=last.revision, complete=last.complete,
                    merged_into=current,
                )
            )  # fmt: skip
    return events
