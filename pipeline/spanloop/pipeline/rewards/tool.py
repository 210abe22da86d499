"""R5, validity of tool calls, paid only for what was used and only where the outcome is good enough.

r(call) = valid * used * gate(outcome) - price - duplicate_penalty * repeated. ``used`` holds where the result has a path of
non-temporal edges to something that ends the work (aggregate, return, stop, message): a call that nobody read earns nothing,
so that calling more tools is never a way to earn. A tool's price is charged whatever the outcome. A call with invalid
arguments never ran and is no event; it counts as an invalid call of its model call.
Invariants: pure; a call whose result is unknown has no value (missing is not zero); while the outcome is missing so are all values.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from spanloop.pipeline.rewards.inputs import inputs_of
from spanloop.schemas.canonical import micro
from spanloop.schemas.events import Reward
from spanloop.schemas.orchestration import OrchestrationContent, OrchestrationEvent

__all__ = ["ToolTerms", "tool_reward", "tool_rewards"]

CHANNEL = "tool_validity"
ESTIMATOR = "tool_validity/1"
_ENDS = frozenset({"aggregate", "return", "stop", "message", "orchestrator_decision"})


class ToolTerms(msgspec.Struct, frozen=True):
    """What a call costs, in units of reward."""

    price: float = 0.0
    duplicate_penalty: float = 0.0
    """For the same tool with the same arguments again. Arguments are no part of an orchestration's content: it applies
    only where the caller passes their hashes."""


FREE = ToolTerms()
"""Calls cost nothing."""


def tool_reward(*, valid: bool, used: bool, repeated: bool, good: bool, terms: ToolTerms) -> float:
    """Reward of one tool call, in units.

    Args:
        valid: The tool ran without error.
        used: Its result reached something that ends the work.
        repeated: The same call was made before with no change of state in between.
        good: The outcome is at least the floor.
        terms: Price and penalty.

    Source: METHODS 2.6.

    >>> tool_reward(valid=True, used=False, repeated=False, good=True, terms=ToolTerms(price=0.1))
    -0.1
    """
    paid = 1.0 if valid and used and good else 0.0
    return paid - terms.price - (terms.duplicate_penalty if repeated else 0.0)


def tool_rewards(
    content: OrchestrationContent,
    outcome: int | None,
    floor: float,
    *,
    weight: int = 0,
    terms: ToolTerms = FREE,
    arguments: Mapping[str, str] = {},
    status: str = "final",
) -> list[Reward]:
    """One reward a tool call, and their mean as the team's channel (absent where no tool was called).

    Args:
        content: The orchestration.
        outcome: R1 in micro-units, None while missing.
        floor: Least outcome, in units, at which validity is paid.
        weight: Micro-weight of the team's channel in the composite.
        terms: Price and penalty.
        arguments: Hash of the arguments by id of the tool_call event, where known.
        status: What a value can be at most: that of the outcome, provisional while the orchestration is incomplete.
    """
    calls = [event for event in content.events if event.type == "tool_call"]
    rejected = [
        f"{call.id}/{tool.id}"
        for call in content.calls
        for tool in call.tool_calls
        if tool.status == "rejected"
    ]
    if not calls and not rejected:
        return []
    results = _results(content)
    used = _used(content)
    good = outcome is not None and outcome >= micro(floor)
    seen: set[tuple[str, str]] = set()
    rewards: list[Reward] = []
    values: list[int] = []
    worth: dict[tuple[bool, bool, bool], int] = {}
    for call in calls:
        repeated = False
        if call.id in arguments:
            repeated = (call.tool, arguments[call.id]) in seen
            seen.add((call.tool, arguments[call.id]))
        result = results.get(call.id)
        if result is None or outcome is None:
            rewards.append(_missing("tool_call", call.id))
            continue
        found = valid, taken, again = result.status != "error", result.id in used, repeated
        if found not in worth:
            got = tool_reward(valid=valid, used=taken, repeated=again, good=good, terms=terms)
            worth[found] = micro(got)
        values.append(worth[found])
        inputs = inputs_of(call.id, result.id, f"{valid:d}{taken:d}{again:d}{good:d}")
        rewards.append(
            Reward(
                "R5", CHANNEL, "tool_call", call.id, worth[found], status, ESTIMATOR, evidence=(result.id,), inputs_hash=inputs
            )
        )  # fmt: skip
    refused = micro(tool_reward(valid=False, used=False, repeated=False, good=good, terms=terms))
    for name in rejected:
        if outcome is None:
            rewards.append(_missing("tool_call", name))
            continue
        values.append(refused)
        rewards.append(
            Reward(
                "R5", CHANNEL, "tool_call", name, refused, status, ESTIMATOR, inputs_hash=inputs_of(name, "rejected")
            )
        )  # fmt: skip
    if not values:
        return [*rewards, _missing("team", "", weight)]
    team = Reward(
        "R5", CHANNEL, "team", "", round(sum(values) / len(values)), status, ESTIMATOR, weight=weight, scaffold=True,
        inputs_hash=inputs_of(*(r.inputs_hash for r in rewards)),
    )  # fmt: skip
    return [*rewards, team]


def _missing(unit: str, unit_id: str, weight: int = 0) -> Reward:
    team = unit == "team"
    return Reward("R5", CHANNEL, unit, unit_id, None, "missing", ESTIMATOR, weight=weight, scaffold=team)


def _results(content: OrchestrationContent) -> dict[str, OrchestrationEvent]:
    """tool_result by tool_call event: by an edge between them, else by shared evidence (the span of both)."""
    by_id = {event.id: event for event in content.events if event.type == "tool_result"}
    calls = {event.id: event for event in content.events if event.type == "tool_call"}
    found: dict[str, OrchestrationEvent] = {}
    for edge in content.edges:
        if edge.src in calls and edge.dst in by_id and edge.type != "temporal":
            found.setdefault(edge.src, by_id[edge.dst])
    by_span = {span: event for event in reversed(list(by_id.values())) for span in event.evidence}
    for call in calls.values():
        if call.id not in found:
            match = next((by_span[span] for span in call.evidence if span in by_span), None)
            if match is not None:
                found[call.id] = match
    return found


def _used(content: OrchestrationContent) -> set[str]:
    """Events with a path of non-temporal edges to an event that ends or decides the work."""
    into: dict[str, list[str]] = {}
    for edge in content.edges:
        if edge.type != "temporal":
            into.setdefault(edge.dst, []).append(edge.src)
    reached: set[str] = set()
    ends = {event.id for event in content.events if event.type in _ENDS}
    frontier = list(ends)
    while frontier:
        for source in into.get(frontier.pop(), ()):
            if source not in reached:
                reached.add(source)
                frontier.append(source)
    return reached
