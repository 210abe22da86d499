"""Decisions that programs told, with what they may have depended on: the rows that decision models learn from.

A *group* is what can be compared: the kind of decision, the decider's role and the menu. A *context* is what the decision could depend
on within it: how many such decisions the agent had taken, how many of its delegations were open, and the state that the program told.
Invariants: pure; a row depends on the content's events only, in their order.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from spanloop.schemas.orchestration import Decision, ModelCall, OrchestrationContent, OrchestrationEvent

__all__ = [
    "CODES",
    "Prices",
    "Told",
    "all_of",
    "chains",
    "context_of",
    "features_of",
    "group_of",
    "has_told",
    "label_of",
    "menu_key",
    "stop_propensity",
    "stops_at",
    "told_of",
    "was_asked",
]

CODES = {"spawn": "O1", "delegate": "O2", "message": "O3", "aggregate": "O4", "stop": "O5"}
STOP = "stop"
COST = "cost"
"""Name of a told state that is no feature but what was spent, units of reward."""
ROUNDS_MAX = 3
OPEN_MAX = 2
STATES_MAX = 4
OPTIONS_MAX = 12
"""Of a menu that effects are estimated for; a longer one says so."""


class Told(msgspec.Struct, frozen=True):
    """A told decision and where it stood."""

    event: OrchestrationEvent
    decision: Decision
    role: str
    round: int
    """How many decisions of this kind the agent had told before."""
    open: int
    """Delegations of the agent that had not come back."""
    spent_tokens: int | None
    """Of all calls that had ended; None: not known of some."""
    elapsed_s: float
    """Since the orchestration began."""


def has_told(content: OrchestrationContent) -> bool:
    """Whether a program told a decision."""
    return any(event.decision is not None for event in content.events)


def told_of(content: OrchestrationContent) -> list[Told]:
    """Told decisions in the order of the events."""
    return situated(content, lambda event: event.decision) if has_told(content) else []


def was_asked(call: ModelCall | None) -> bool:
    """Whether a call is a decision that the policy was asked for: no model read or wrote a token."""
    return call is not None and call.input_tokens == 0 and call.output_tokens == 0


def all_of(content: OrchestrationContent) -> list[Told]:
    """Told decisions, and the acts of O1 to O5 that no program told a decision of, in the order of the events. An act that
    carries out a decision told apart is that decision; who asks the policy for decisions of a kind asks for all of them, so its
    acts of that kind are no further decisions."""
    apart = {
        event.id: event.decision.kind
        for event in content.events
        if event.type == "orchestrator_decision" and event.decision is not None
    }
    calls = {call.id: call for call in content.calls}
    asks = {
        (event.agent_id, apart[event.id])
        for event in content.events
        if event.id in apart and was_asked(calls.get(event.call_id))
    }
    done = {
        (edge.dst, apart[edge.src]) for edge in content.edges if edge.type == "causal" and edge.src in apart
    }

    def decided(event: OrchestrationEvent) -> Decision | None:
        if event.decision is not None:
            return event.decision
        if (event.agent_id, event.type) in asks:
            return None
        if event.type in CODES and (event.id, event.type) not in done:
            return Decision(event.type, event.to or event.tool or event.type)
        return None

    return situated(content, decided)


def situated(
    content: OrchestrationContent, decided: Callable[[OrchestrationEvent], Decision | None]
) -> list[Told]:
    """The events that ``decided`` takes for decisions, and where each stood."""
    roles = {agent.id: agent.role or agent.name.lower() for agent in content.agents}
    spending = _Spending(content)
    before: Counter[tuple[str, str]] = Counter()
    opened: dict[str, int] = defaultdict(int)
    found: list[Told] = []
    for event in content.events:
        decision = decided(event)
        if decision is not None:
            key = (event.agent_id, decision.kind)
            found.append(
                Told(
                    event, decision, roles.get(event.agent_id, event.agent.lower()), before[key], opened[event.agent_id],
                    spending.until(event.t_ns), max(0.0, (event.t_ns - content.started_ns) / 1e9),
                )
            )  # fmt: skip
            before[key] += 1
        if event.type == "delegate" and event.mode != "pass_control":
            opened[event.agent_id] += 1
        elif event.type == "return" and opened[event.to_id]:
            opened[event.to_id] -= 1
    return found


class _Spending:
    """Tokens of the calls that had ended, asked for at times that do not go back."""

    def __init__(self, content: OrchestrationContent) -> None:
        self._ends = sorted(
            (call.end_ns, call.input_tokens + call.output_tokens)
            for call in content.calls
            if call.input_tokens is not None and call.output_tokens is not None
        )
        self._known = len(self._ends) == len(content.calls)
        self._place = self._spent = 0

    def until(self, t_ns: int) -> int | None:
        while self._place < len(self._ends) and self._ends[self._place][0] <= t_ns:
            self._spent += self._ends[self._place][1]
            self._place += 1
        return self._spent if self._known else None


def stops_at(event: OrchestrationEvent, decision: Decision) -> bool:
    """Whether an O5 decision was to stop."""
    return STOP in (event.type, decision.chosen)


def stop_propensity(event: OrchestrationEvent, decision: Decision) -> float | None:
    """With which the decider stopped here; None: not told."""
    if not decision.propensities:
        return None
    if STOP in decision.options:
        return decision.propensities[decision.options.index(STOP)]
    if decision.chosen not in decision.options:
        return None
    own = decision.propensities[decision.options.index(decision.chosen)]
    return own if stops_at(event, decision) else 1.0 - own


def label_of(number: float) -> str:
    """A state's number as a context: one significant digit.

    >>> label_of(0.4321), label_of(12), label_of(-0.0)
    ('0.4', '1e+01', '0')
    """
    return f"{number:.1g}" if number and math.isfinite(number) else "0"


def group_of(told: Told) -> str:
    """What a decision can be compared with: kind, role and menu."""
    return menu_key(told.decision.kind, told.role, told.decision.options)


def menu_key(kind: str, role: str, options: Iterable[str]) -> str:
    """``group_of`` by its parts; readable, and equal for a menu in any order."""
    return "|".join((kind, role, *sorted(options)))


def context_of(told: Told) -> str:
    """What a decision could depend on within its group."""
    parts = [f"round={min(told.round, ROUNDS_MAX)}", f"open={min(told.open, OPEN_MAX)}"]
    state = [(name, value) for name, value in told.decision.state if name != COST]
    parts += [f"{name}={label_of(value)}" for name, value in state[:STATES_MAX]]
    return " ".join(parts)


def features_of(told: Told) -> tuple[tuple[str, float], ...]:
    """What learned stopping sees of a decision point; what the trace does not hold is missing."""
    found: dict[str, float] = {"round": float(told.round), "open_subtasks": float(told.open)}
    if told.spent_tokens is not None:
        found["spent_tokens"] = float(told.spent_tokens)
    found.update({name: value for name, value in told.decision.state if name != COST})
    return tuple(sorted(found.items()))


class Prices(msgspec.Struct, frozen=True):
    """What a decision point has cost, units of reward, where the program does not tell ``cost`` itself."""

    token: float = 0.0
    """Of 1,000 tokens."""
    second: float = 0.0
    round: float = 0.0
    """Of one decision to go on."""

    def of(self, told: Told) -> float:
        """Spent before the decision."""
        said: Mapping[str, float] = dict(told.decision.state)
        if COST in said:
            return said[COST]
        return (
            self.token * (told.spent_tokens or 0) / 1000.0
            + self.second * told.elapsed_s
            + self.round * told.round
        )


def chains(told: Sequence[Told]) -> dict[str, list[Told]]:
    """O5 decisions by the agent that took them."""
    found: dict[str, list[Told]] = {}
    for item in told:
        if item.decision.kind == STOP:
            found.setdefault(item.event.agent_id, []).append(item)
    return found
