"""Which spans are one model call where no response id says so: the gateway's span and the framework's.

Many instrumentations drop the response id. Then the trace context of the request names the framework's span (perhaps below the span of
an HTTP client), else time and text do: the gateway's call lies within the framework's, of the same model, with the same first user
message and the same answer. Invariants: pairs do not depend on the order of operations; no span is in two pairs; framework spans that
know their response id are never paired by text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from spanloop.pipeline.assembly.tree import Tree
from spanloop.pipeline.dialects.operation import CallFacts, Operation
from spanloop.schemas.canonical import digest

__all__ = ["above_call", "pairs_by_text", "text_ends"]

_LOOK_BACK = 16
"""Calls with the same texts that are looked at for one call of the gateway, the latest begun first."""
_HTTP_DEPTH = 4
"""Spans of HTTP clients between the framework's span and the gateway's."""


def above_call(tree: Tree, i: int) -> int:
    """The operation in whose context ``i`` was asked for: the parent; for the gateway's span, past spans of which nothing is known
    (HTTP clients). -1 without one."""
    above = tree.parent[i]
    call = tree.ops[i].call
    if call is None or call.gateway is None:
        return above
    for _ in range(_HTTP_DEPTH):
        if above < 0 or tree.ops[above].kind != "unknown":
            break
        above = tree.parent[above]
    return above


def text_ends(operation: Operation) -> Iterator[tuple[str, Operation, int]]:
    """(evidence key, what of the operation its comparison needs, side) by which a gateway's call without a trace context and a
    framework's call without a response id find each other. Side 0 contains side 1 in time (``join.match``)."""
    call = operation.call
    if call is None or operation.kind != "model_call" or not call.task_hash or not call.answer_hash:
        return
    if call.gateway is None:
        if call.response_id:
            return
        side = 0
    elif operation.parent_id:
        return
    else:
        side = 1
    bare = Operation(
        operation.trace_id,
        operation.span_id,
        operation.parent_id,
        operation.kind,
        operation.start_ns,
        operation.end_ns,
    )
    for model in sorted(_models(call)) if call.gateway is not None else _alias(call.model):
        yield f"c/{digest('call', model, call.task_hash, call.answer_hash)[:24]}", bare, side


def pairs_by_text(tree: Tree, members: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Groups of operations that are one call by time and text: head of the gateway's group -> head of the framework's.

    Args:
        tree: of the orchestration.
        members: operations of each group that is known so far, by its head.
    """
    alone, open_calls = [], defaultdict[tuple[str, str], list[tuple[int, int]]](list)
    for head, group in members.items():
        facts = [call for i in group if (call := tree.ops[i].call) is not None]
        if all(call.gateway is not None for call in facts):
            alone.append(head)
        elif not any(call.gateway is not None or call.response_id for call in facts):
            texts = (_first(facts, "task_hash"), _first(facts, "answer_hash"))
            if any(texts):
                open_calls[texts].append((tree.ops[head].start_ns, head))
    if not alone or not open_calls:
        return {}
    for starts in open_calls.values():
        starts.sort()
    pairs: dict[int, int] = {}
    taken: set[int] = set()
    for head in sorted(alone):
        found = _containing(tree, head, open_calls, taken)
        if found >= 0:
            pairs[head] = found
            taken.add(found)
    return pairs


def _containing(
    tree: Tree, head: int, open_calls: Mapping[tuple[str, str], Sequence[tuple[int, int]]], taken: set[int]
) -> int:
    """The framework's call that contains the gateway's, the latest begun of several; -1 without one."""
    inner, call = tree.ops[head], tree.ops[head].call
    if call is None:
        return -1
    best = (-1, -1)
    for texts in {(call.task_hash, call.answer_hash), (call.task_hash, ""), ("", call.answer_hash)}:
        starts = open_calls.get(texts, ()) if any(texts) else ()
        end = bisect_right(starts, (inner.start_ns, len(tree.ops)))
        for start, other in reversed(starts[max(0, end - _LOOK_BACK) : end]):
            outer = tree.ops[other]
            if other in taken or outer.call is None or inner.end_ns > outer.end_ns:
                continue
            if tree.agent[head] not in (-1, tree.agent[other]):
                continue
            if outer.call.model and not _models(call) & _models(outer.call):
                continue
            best = max(best, (start, other))
            break
    return best[1]


def _models(call: CallFacts) -> frozenset[str]:
    """Names of a call's model; versions of a policy go by their alias."""
    if call.gateway is None:
        return frozenset(_alias(call.model))
    return frozenset((*_alias(call.model), *_alias(call.gateway.asked_model)))


def _alias(model: str) -> tuple[str, ...]:
    """A model's name without its version; none of an empty one."""
    return (model.partition("@v")[0],) if model else ()


def _first(facts: Sequence[msgspec.Struct], name: str) -> str:
    return next((value for call in facts if (value := getattr(call, name))), "")
