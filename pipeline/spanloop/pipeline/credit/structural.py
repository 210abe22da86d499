"""Estimates of an orchestration without token ids: V is of the set of finished steps (METHODS 3.4).

A turn of the orchestrator gets what it added. What happened between two turns is shared by those that worked there (``sharing``).
Inside an agent each step gets what it added, averaged over the orders that its partial order allows; its variance, by which the
agent's interaction with others is split over its steps, is that of the value model's members about it.
Invariants: baseline + all estimates + environment = reward; control flow does not depend on values; what a gap gives is a function
of (state before it, what was done in it), so that it can be kept (``Kept``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from spanloop.pipeline.credit.anchors import (
    VALUE_DIFFERENCE,
    Anchored,
    Choice,
    Estimates,
    exact,
    settle_environment,
)
from spanloop.pipeline.credit.cast import Cast, role_of
from spanloop.pipeline.credit.estimators.gae import gae
from spanloop.pipeline.credit.progress import Bag, Plain, StepValues, features_of, written_out
from spanloop.pipeline.credit.sharing import (
    COALITIONS_ALL,
    COALITIONS_MAX,
    EXACT_MAX,
    IDLE,
    Amounts,
    CoalitionValues,
    Level,
    Work,
    split,
)
from spanloop.pipeline.credit.states import COUNT_MAX, State
from spanloop.schemas.canonical import MICRO
from spanloop.schemas.orchestration import Agent, ModelCall, OrchestrationEvent

__all__ = ["Kept", "estimate_steps", "states_of", "workers_of"]

Floats = NDArray[np.float64]

LINK = 32
"""Features after which a chain gets a new link."""


class Gap(msgspec.Struct, frozen=True, eq=False):
    """What a gap of the line gave."""

    key: int
    """Of the state before it."""
    works: tuple[Work, ...]
    budget: int
    """Coalitions that it might have valued."""
    spent: int
    """What its units got."""
    added: tuple[int, ...]
    """Features that it adds."""
    key_after: int
    units: dict[str, Anchored]
    messages: dict[str, Anchored]
    reports: dict[str, Anchored]
    tools: dict[str, Anchored]


class Kept:
    """What was found for the last revision of an orchestration, to be used again where the inputs are the same objects."""

    def __init__(self) -> None:
        self.works: dict[str, tuple[object, Work]] = {}
        self.gaps: dict[str, Gap] = {}


def workers_of(cast: Cast, line: Sequence[ModelCall]) -> list[list[str]]:
    """Agents and orchestrator's tool calls by gap of ``line``; those of a turn that is not on it go to the one before."""
    position: list[int] = []
    kept = {call.id for call in line}
    at = -1
    for call in cast.line:
        at += call.id in kept
        position.append(max(0, at))
    workers: list[list[str]] = [[] for _ in range(max(1, len(line)))]
    for unit, gap in cast.gap_of.items():
        workers[position[gap] if position else 0].append(unit)
    return workers


class Steps:
    """Kinds of finished steps: of the orchestrator's turns and of all that others did."""

    def __init__(self, cast: Cast, kept: Kept | None = None) -> None:
        self.cast = cast
        self._kept = kept.works if kept is not None else None
        self._agents = {agent.id: agent for agent in cast.others}
        self._tools: dict[str, Work] = {}
        self.turn_kinds: dict[str, str] = {}
        for agent in cast.orchestrators:
            role = role_of(agent)
            for call in cast.turns.get(agent.id, ()):
                self.turn_kinds[call.id] = _turn_kind(role, call)
                for event in cast.tools.get(call.id, ()):
                    self._add_tool(event.id, role, event.tool)
            for event in cast.loose_tools.get(agent.id, ()):
                self._add_tool(event.id, role, event.tool)

    def _add_tool(self, event_id: str, role: str, tool: str) -> None:
        status = self.cast.tool_status.get(event_id, "")
        known = self._kept.get(event_id) if self._kept is not None else None
        if known is not None and known[0] == (role, tool, status):
            self._tools[event_id] = known[1]
            return
        kind = f"tool/{role}/{tool}/{status}"
        work = Work(event_id, (((event_id, kind),),), {kind: 1}, frozenset(), f"tool/{role}/{tool}", "")
        self._tools[event_id] = work
        if self._kept is not None:
            self._kept[event_id] = ((role, tool, status), work)

    def work(self, unit: str) -> Work:
        """What a unit did."""
        agent = self._agents.get(unit)
        if agent is None:
            return self._tools[unit]
        cast = self.cast
        calls = cast.turns.get(unit, ())
        tools = [cast.tools.get(call.id, ()) for call in calls]
        loose = cast.loose_tools.get(unit, ())
        status = cast.tool_status
        if self._kept is None:
            return _work_of(agent, calls, tools, loose, status)
        inputs = (
            agent, calls, tools, loose, [status.get(e.id, "") for of_call in (*tools, loose) for e in of_call]
        )  # fmt: skip
        known = self._kept.get(unit)
        if known is not None and known[0] == inputs:
            return known[1]
        made = _work_of(agent, calls, tools, loose, status)
        self._kept[unit] = (inputs, made)
        return made


def _turn_kind(role: str, call: ModelCall) -> str:
    return f"turn/{role}/{call.status}/" + "+".join(t.name for t in call.tool_calls)


def _work_of(
    agent: Agent,
    calls: Sequence[ModelCall],
    tools: Sequence[Sequence[OrchestrationEvent]],
    loose: Sequence[OrchestrationEvent],
    status: Mapping[str, str],
) -> Work:
    role = role_of(agent)
    levels: list[Level] = []

    def level(events: Sequence[OrchestrationEvent]) -> None:
        if events:
            levels.append(tuple((e.id, f"tool/{role}/{e.tool}/{status.get(e.id, '')}") for e in events))

    for call, events in zip(calls, tools, strict=True):
        levels.append(((call.id, _turn_kind(role, call)),))
        level(events)
    level(loose)
    levels.append(((f"return:{agent.id}", f"return/{role}/{agent.status}"),))
    amounts: Amounts = Counter(kind for steps in levels for _, kind in steps)
    return Work(
        agent.id,
        tuple(levels),
        dict(amounts),
        frozenset(call.id for call in calls),
        role,
        agent.parent_id,
    )


# ---------------------------------------------------------------- one gap


class _Room:
    """How many finished steps of each kind a state has, capped; and what further ones add."""

    def __init__(self, values: StepValues) -> None:
        self._values = values
        self.counts: Amounts = {}
        self.bag = Bag(None, 0, ())
        self.loose: list[int] = []
        self.key = 0
        self.add({"start": 1})

    def value(self) -> int:
        """V of the state as it is."""
        return self._values.at(self.bag, self.key, self.loose)

    def add(self, amounts: Amounts) -> list[int]:
        """Finish steps; returns the features that are new."""
        new: list[int] = []
        counts = self.counts
        for kind, amount in amounts.items():
            have = counts.get(kind, 0)
            if have < COUNT_MAX:
                upto = min(have + amount, COUNT_MAX)
                counts[kind] = upto
                for feature, number in features_of(kind)[have:upto]:
                    new.append(feature)
                    self.key += number
        self._extend(new)
        return new

    def skip(self, gap: Gap) -> None:
        """Finish what a gap that is known already finished."""
        counts = self.counts
        for work in gap.works:
            for kind, amount in work.amounts.items():
                have = counts.get(kind, 0)
                if have < COUNT_MAX:
                    counts[kind] = min(have + amount, COUNT_MAX)
        self.key = gap.key_after
        self._extend(gap.added)

    def _extend(self, new: Sequence[int]) -> None:
        if new:
            self.loose = [*self.loose, *new]
            if len(self.loose) >= LINK:
                self.link()

    def link(self) -> Bag:
        """The state as a bag."""
        if self.loose:
            self.bag = Bag(self.bag, self.key, self.loose)
            self.loose = []
        return self.bag


# ---------------------------------------------------------------- inside an agent


def _inside(values: StepValues, base: Bag, room: Amounts, work: Work, *, active: bool) -> dict[str, Anchored]:
    """What each step of a sub-agent added to the state before the gap, averaged over the orders that its partial order allows:
    as listed, and with each level reversed."""
    if not active:
        return {step: IDLE for level in work.levels for step, _ in level}
    added: dict[str, int] = {}
    spreads: dict[str, Floats] = {}
    voices = True
    orders = [list(work.levels)]
    if any(len(level) > 1 for level in work.levels):
        orders.append([level[::-1] for level in work.levels])
    for order in orders:
        have: Amounts = {}
        bag, loose, key = base, list[int](), base.key
        previous, told = values.at(bag, key, loose), values.members(key)
        for step, kind in (pair for level in order for pair in level):
            n = have.get(kind, room.get(kind, 0))
            if n < COUNT_MAX:
                have[kind] = n + 1
                feature, number = features_of(kind)[n]
                key += number
                loose = [*loose, feature]
                current, now = values.at(bag, key, loose), values.members(key)
                if now is None or told is None:
                    voices = False
                else:
                    spreads[step] = spreads.get(step, 0.0) + (now - told)
                added[step] = added.get(step, 0) + current - previous
                previous, told = current, now
                if len(loose) >= LINK:
                    bag, loose = Bag(bag, key, loose), []
            else:
                added.setdefault(step, 0)
    if len(orders) > 1:
        carry = 0
        for level in work.levels:
            for step, _ in level:
                added[step], carry = divmod(added[step] + carry, 2)
    found: dict[str, Anchored] = {}
    for step, amount in added.items():
        variance = 0.0
        if voices and step in spreads:
            variance = float(np.var(spreads[step] / len(orders), ddof=1))
            variance = 0.0 if variance < 1e-24 else variance
        weight = variance if voices else (amount / MICRO) ** 2
        found[step] = Anchored(amount, weight, amount, variance, VALUE_DIFFERENCE)
    return found


# ---------------------------------------------------------------- the whole


def estimate_steps(
    cast: Cast, reward: int, values: StepValues, choice: Choice, kept: Kept | None = None
) -> Estimates:
    """Estimates of an orchestration without token ids."""
    found = Estimates(level="message")
    steps = Steps(cast, kept)
    room = _Room(values)
    found.baseline = room.value()
    line = cast.line
    gaps = [tuple(map(steps.work, units)) for units in workers_of(cast, line)]
    sampled = sum(len(works) > EXACT_MAX for works in gaps)
    budget = min(COALITIONS_MAX, COALITIONS_ALL // max(1, sampled))
    starts: list[int] = []
    turns: list[Anchored] = []
    known = kept.gaps if kept is not None else {}
    fresh: dict[str, Gap] = {}
    spent = 0
    for k, works in enumerate(gaps):
        name = line[k].id if line else ""
        if line:
            before = room.value()
            starts.append(before)
            room.add({steps.turn_kinds[name]: 1})
            turns.append(exact(room.value() - before))
        if not works:
            continue
        gap = known.get(name)
        if gap is None or gap.key != room.key or gap.works != works or gap.budget != budget:
            misses = values.misses
            gap = _gap(values, room, works, choice, budget)
            if values.misses == misses:
                fresh[name] = gap
        else:
            room.skip(gap)
            fresh[name] = gap
        found.agents.update(gap.units)
        found.tools.update(gap.tools)
        found.messages.update(gap.messages)
        found.reports.update(gap.reports)
        spent += gap.spent
    room.value()
    if choice.turns == "gae" and starts:
        turns = _smoothed(starts, reward, choice.smoothing)
    for call, item in zip(line, turns, strict=False):
        found.messages[call.id] = item
        spent += item.anchor or 0
    settle_environment(found, reward - found.baseline - spent)
    if kept is not None:
        kept.gaps = fresh
    return found


def _gap(values: StepValues, room: _Room, works: tuple[Work, ...], choice: Choice, budget: int) -> Gap:
    """What was done between two turns; ``room`` then is the state after it."""
    base, key, start = room.link(), room.key, room.value()
    counts = {kind: room.counts.get(kind, 0) for work in works for kind in work.amounts}
    game = CoalitionValues(values, base, counts, works)
    added: list[int] = []
    for work in works:
        added += room.add(work.amounts)
    units = split(game, works, room.value() - start, choice, budget)
    messages: dict[str, Anchored] = {}
    reports: dict[str, Anchored] = {}
    tools = {work.unit: units[work.unit] for work in works if work.role.startswith("tool/")}
    for work, active in zip(works, game.active, strict=True):
        if sum(map(len, work.levels)) < 2:
            continue
        for step, item in _inside(values, base, counts, work, active=active).items():
            if step in work.calls:
                messages[step] = item
            elif step.startswith("return:"):
                reports[work.unit] = item
            else:
                tools[step] = item
    spent = sum(item.anchor or 0 for item in units.values())
    return Gap(key, works, budget, spent, tuple(added), room.key, units, messages, reports, tools)


def _smoothed(starts: Sequence[int], reward: int, smoothing: float) -> list[Anchored]:
    """Turn-level GAE of the orchestrator's turns; V before each is ``starts``, the reward comes with the last."""
    rewards = [0.0] * (len(starts) - 1) + [reward / MICRO]
    found = gae(rewards, [value / MICRO for value in starts], smoothing=smoothing)
    return [Anchored(amount, 0.0, amount, 0.0, "gae/1") for amount in (round(a * MICRO) for a in found)]


def states_of(cast: Cast) -> list[State]:
    """The states that an orchestration was in: before its first step, after each turn and after what followed it."""
    steps = Steps(cast)
    room = _Room(Plain(lambda _: 0))
    seen = [written_out(room.bag, room.loose)]
    for k, units in enumerate(workers_of(cast, cast.line)):
        if cast.line:
            room.add({steps.turn_kinds[cast.line[k].id]: 1})
            seen.append(written_out(room.link(), ()))
        if units:
            for unit in units:
                room.add(steps.work(unit).amounts)
            seen.append(written_out(room.link(), ()))
    return seen
