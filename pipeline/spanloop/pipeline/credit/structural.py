"""Estimates of an orchestration without token ids: V is of the set of finished steps (METHODS 3.4).

A turn of the orchestrator gets what it added. What happened between two turns is shared by those that worked there (``sharing``).
Inside an agent each step gets what it added, averaged over the orders that its partial order allows; its variance, by which the
agent's interaction with others is split over its steps, is that of the value model's members about it.
Invariants: baseline + all estimates + environment = reward; control flow does not depend on values; what a gap gives is a function
of (state before it, what was done in it), so that it can be kept (``Kept``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

import msgspec
import numpy as np
from numpy.typing import NDArray

from spanloop.pipeline.credit.anchors import (
    VALUE_DIFFERENCE,
    Anchored,
    Choice,
    Estimates,
    Lesson,
    exact,
    settle_environment,
)
from spanloop.pipeline.credit.cast import UNATTRIBUTED, Cast, role_of
from spanloop.pipeline.credit.estimators.gae import gae
from spanloop.pipeline.credit.progress import Bag, Plain, StepValues, features_of, variance_of, written_out
from spanloop.pipeline.credit.sharing import (
    COALITIONS_ALL,
    COALITIONS_MAX,
    EXACT_MAX,
    IDLE,
    Amounts,
    CoalitionValues,
    Found,
    Level,
    Work,
    settled,
    split,
)
from spanloop.pipeline.credit.states import COUNT_MAX
from spanloop.schemas.canonical import MICRO
from spanloop.schemas.orchestration import Agent, ModelCall, OrchestrationEvent

__all__ = ["Coalitions", "Kept", "coalitions_of", "estimate_steps", "lessons_of", "workers_of"]

Floats = NDArray[np.float64]

MARKS = 32
"""Rows from one mark to the next."""
LINK = 32
"""Features after which a chain gets a new link."""


class Gap(msgspec.Struct, frozen=True, eq=False):
    """What a gap of the line gave."""

    key: int
    """Of the state before it."""
    works: tuple[Work, ...]
    budget: int
    """Coalitions that it might have valued."""
    sure: bool
    """No value was missing when it was found."""
    spent: int
    """What its units got."""
    added: tuple[int, ...]
    """Features that it adds."""
    key_after: int
    units: dict[str, Anchored]
    messages: dict[str, Anchored]
    reports: dict[str, Anchored]
    tools: dict[str, Anchored]
    inside: dict[str, dict[str, Anchored]]
    """What each step of an agent added, by agent."""
    found: Found | None
    """The same whoever did it; None: not known to hold for others."""


class _Row:
    """A turn of the line and the gap after it."""

    __slots__ = ("gap", "key", "start", "sure", "turn", "works")

    def __init__(self, works: tuple[Work, ...]) -> None:
        self.works = works
        self.key = -1
        """Of the state before the turn."""
        self.start = 0
        """V before it."""
        self.turn: Anchored | None = None
        self.gap: Gap | None = None
        self.sure = False
        """No value was missing when it was found."""

    def sure_of(self, key: int, budget: int) -> bool:
        """Whether its gap is what it would be found to be again."""
        gap = self.gap
        return (
            gap is not None
            and gap.sure
            and gap.key == key
            and gap.works == self.works
            and gap.budget == budget
        )


class Kept:
    """What was found for the last revision of an orchestration under one value model and choice, to be used again.

    Its ``found`` is brought up to date in place.
    """

    def __init__(self) -> None:
        self.works: dict[str, tuple[object, Work]] = {}
        self.rows: list[_Row] = []
        self.line: tuple[ModelCall, ...] = ()
        self.budget = 0
        self.marks: dict[int, _Mark] = {}
        self.found = Estimates(level="message")
        self.spent = 0
        self.renewed: list[Gap] | None = None
        """Gaps that the last estimate found anew; None: any may be new."""


class _Mark(msgspec.Struct, frozen=True, eq=False):
    """The room before a row."""

    counts: Amounts
    bag: Bag
    loose: Sequence[int]
    key: int


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

    def __init__(self, cast: Cast, kept: Kept | None = None, *, all_turns: bool = True) -> None:
        self.cast = cast
        self._kept = kept.works if kept is not None else None
        self._agents = {agent.id: agent for agent in cast.others}
        self._tools: dict[str, Work] = {}
        self._roles = {agent.id: role_of(agent) for agent in cast.orchestrators}
        for agent in cast.orchestrators if all_turns else ():
            role = role_of(agent)
            for call in cast.turns.get(agent.id, ()):
                for event in cast.tools.get(call.id, ()):
                    self._add_tool(event.id, role, event.tool)
            for event in cast.loose_tools.get(agent.id, ()):
                self._add_tool(event.id, role, event.tool)

    def turn_kind(self, call: ModelCall) -> str:
        """Kind of a turn of the orchestrator's."""
        return _turn_kind(self._roles.get(call.agent_id or UNATTRIBUTED, UNATTRIBUTED), call)

    def _add_tool(self, event_id: str, role: str, tool: str) -> None:
        status = self.cast.tool_status.get(event_id, "")
        known = self._kept.get(event_id) if self._kept is not None else None
        if known is not None and known[0] == (role, tool, status):
            self._tools[event_id] = known[1]
            return
        kind = f"tool/{role}/{tool}/{status}"
        shown = f"tool/{role}/{tool}"
        work = Work(event_id, (((event_id, kind),),), {kind: 1}, frozenset(), shown, "", (shown, (kind,)))
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
    asked = call.tool_calls
    names = "+".join([t.name for t in asked]) if asked else ""
    return f"turn/{role}/{call.status}/{names}"


def _work_of(
    agent: Agent,
    calls: Sequence[ModelCall],
    tools: Sequence[Sequence[OrchestrationEvent]],
    loose: Sequence[OrchestrationEvent],
    status: Mapping[str, str],
) -> Work:
    role = role_of(agent)
    levels: list[Level] = []
    for call, events in zip(calls, tools, strict=True):
        levels.append(((call.id, _turn_kind(role, call)),))
        if events:
            levels.append(_tool_level(role, events, status))
    if loose:
        levels.append(_tool_level(role, loose, status))
    levels.append(((f"return:{agent.id}", f"return/{role}/{agent.status}"),))
    kinds = [tuple([kind for _, kind in level]) for level in levels]
    amounts: Amounts = {}
    for level in kinds:
        for kind in level:
            amounts[kind] = amounts.get(kind, 0) + 1
    return Work(
        agent.id,
        tuple(levels),
        amounts,
        frozenset([call.id for call in calls]),
        role,
        agent.parent_id,
        (role, *kinds),
    )


def _tool_level(role: str, events: Sequence[OrchestrationEvent], status: Mapping[str, str]) -> Level:
    return tuple([(e.id, f"tool/{role}/{e.tool}/{status.get(e.id, '')}") for e in events])


class _Plan(msgspec.Struct, frozen=True, eq=False):
    """What was done, turn by turn."""

    turns: tuple[str, ...]
    """Kinds of the orchestrator's turns."""
    rows: tuple[tuple[Work, ...], ...]
    """What was done after each; one row where there are no turns."""
    shape: tuple[object, ...] | None
    """All that the states and their values depend on, where it is small enough to be compared."""


PLAN_MAX = 256
"""Turns and works of an orchestration up to which it is compared with others as a whole."""


def _plan_of(cast: Cast) -> _Plan:
    known = cast.made.get("plan")
    if known is None:
        known = cast.made["plan"] = _new_plan(cast)
    assert isinstance(known, _Plan)  # noqa: S101
    return known


def _new_plan(cast: Cast) -> _Plan:
    steps = Steps(cast)
    turns = tuple([steps.turn_kind(call) for call in cast.line])
    rows = tuple([tuple(map(steps.work, units)) for units in workers_of(cast, cast.line)])
    shape: tuple[object, ...] | None = None
    if len(turns) + sum(map(len, rows)) <= PLAN_MAX:
        shape = (turns, tuple([tuple(_placed(works)) for works in rows]))
    return _Plan(turns, rows, shape)


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

    def mark(self) -> _Mark:
        """The state, to go back to."""
        return _Mark(dict(self.counts), self.bag, tuple(self.loose), self.key)

    def back(self, mark: _Mark) -> None:
        """Be as at ``mark``."""
        self.counts, self.bag, self.loose, self.key = dict(mark.counts), mark.bag, list(mark.loose), mark.key

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
            variance = variance_of(spreads[step] / len(orders))
            variance = 0.0 if variance < 1e-24 else variance
        weight = variance if voices else (amount / MICRO) ** 2
        found[step] = Anchored(amount, weight, amount, variance, VALUE_DIFFERENCE)
    return found


# ---------------------------------------------------------------- the whole


def estimate_steps(
    cast: Cast,
    reward: int,
    values: StepValues,
    choice: Choice,
    *,
    kept: Kept | None = None,
    touched: AbstractSet[str] | None = None,
) -> Estimates:
    """Estimates of an orchestration without token ids.

    Args:
        cast: Who took part.
        reward: The team's reward, micro-units.
        values: The value model.
        choice: Which estimators.
        kept: What was found for its last revision with the same ``values`` and ``choice``; its estimates are brought up to date
            and returned.
        touched: The sub-agents whose work may have changed since, where nothing else has; None: anything may have.
    """
    if kept is None:
        return _estimate_afresh(cast, reward, values, choice)
    return _estimate_kept(cast, reward, values, choice, kept=kept, touched=touched)


class _Whole(msgspec.Struct, frozen=True, eq=False):
    """What an orchestration of one shape is always found to give."""

    baseline: int
    starts: tuple[int, ...]
    """V before each turn."""
    turns: tuple[Anchored, ...]
    gaps: tuple[Found | None, ...]


def _estimate_afresh(cast: Cast, reward: int, values: StepValues, choice: Choice) -> Estimates:
    """Of an orchestration of which nothing is kept; what others of its shape were found to give is recalled."""
    plan = _plan_of(cast)
    shape = None if choice.agents == "leave_one_out" else plan.shape
    whole = values.recall(shape) if shape is not None else None
    if whole is not None:
        return _estimate_recalled(cast, plan, whole, reward, choice)
    kept, misses = Kept(), values.misses
    found = _estimate_kept(cast, reward, values, choice, kept=kept, touched=None)
    gaps = [row.gap.found if row.gap is not None else None for row in kept.rows]
    told = all(gap is not None or not row.works for gap, row in zip(gaps, kept.rows, strict=True))
    if shape is not None and told and values.misses == misses:
        turns = tuple([row.turn for row in kept.rows if row.turn is not None])
        starts = tuple([row.start for row in kept.rows])
        values.remember(shape, _Whole(found.baseline, starts, turns, tuple(gaps)))
    return found


def _estimate_recalled(cast: Cast, plan: _Plan, whole: _Whole, reward: int, choice: Choice) -> Estimates:
    found = Estimates(level="message", baseline=whole.baseline)
    turns = whole.turns
    if choice.turns == "gae" and turns:
        turns = tuple(_smoothed(whole.starts, reward, choice.smoothing))
    amount = reward - whole.baseline
    for call, turn in zip(cast.line, turns, strict=bool(cast.line)):
        found.messages[call.id] = turn
        amount -= turn.anchor or 0
    for works, gap in zip(plan.rows, whole.gaps, strict=True):
        if gap is not None and gap.shares is not None:
            playing = [i for i, on in enumerate(gap.active) if on]
            units = settled([work.unit for work in works], playing, gap.shares, gap.total)
            inside = [
                dict(zip([step for level in work.levels for step, _ in level], steps, strict=True))
                if steps
                else {}
                for work, steps in zip(works, gap.inside, strict=True)
            ]
            messages, reports, tools = _by_step(works, units, inside)
            found.agents.update(units)
            found.tools.update(tools)
            found.messages.update(messages)
            found.reports.update(reports)
            amount -= sum([item.anchor or 0 for item in units.values()])
    settle_environment(found, amount)
    return found


def _estimate_kept(
    cast: Cast,
    reward: int,
    values: StepValues,
    choice: Choice,
    *,
    kept: Kept,
    touched: AbstractSet[str] | None,
) -> Estimates:
    if not kept.rows:
        touched = None
    steps = Steps(cast, kept, all_turns=touched is None)
    kept.renewed = None
    if touched is None:
        first, last = 0, _renew_rows(cast, steps, kept)
    else:
        first, last = _renew_works(cast, steps, kept, touched)
        kept.renewed = []
    found, room = kept.found, _Room(values)
    if not first:
        found.baseline = room.value()
    at = first // MARKS * MARKS
    if at in kept.marks:
        room.back(kept.marks[at])
    else:
        at = 0
    for k in range(at, len(kept.rows)):
        row = kept.rows[k]
        if k > last and row.sure and row.key == room.key:
            break  # from here on everything is as it was
        if k % MARKS == 0:
            kept.marks[k] = room.mark()
        misses = values.misses
        turn = (cast.line[k], steps) if cast.line else None
        _estimate_row(values, room, row, kept, choice, turn=turn)
        row.sure = values.misses == misses
    turns = [row.turn for row in kept.rows if row.turn is not None]
    amount = reward - found.baseline - kept.spent
    if choice.turns == "gae" and turns:
        smooth = _smoothed([row.start for row in kept.rows], reward, choice.smoothing)
        for call, turn, item in zip(cast.line, turns, smooth, strict=True):
            found.messages[call.id] = item
            amount += (turn.anchor or 0) - (item.anchor or 0)
    settle_environment(found, amount)
    return found


def _renew_rows(cast: Cast, steps: Steps, kept: Kept) -> int:
    """Rows of an orchestration of which anything may have changed; gaps that are as they were keep what was found."""
    old = {call.id: row for call, row in zip(kept.line, kept.rows, strict=False)} if kept.line else {}
    gaps = [tuple(map(steps.work, units)) for units in workers_of(cast, cast.line)]
    sampled = sum(len(works) > EXACT_MAX for works in gaps)
    kept.budget = min(COALITIONS_MAX, COALITIONS_ALL // max(1, sampled))
    kept.rows = [_Row(works) for works in gaps]
    for call, row in zip(cast.line, kept.rows, strict=False):
        before = old.get(call.id)
        if before is not None and before.sure:
            row.gap = before.gap
    kept.line, kept.spent, kept.marks = cast.line, 0, {}
    kept.found = Estimates(level="message")
    return len(kept.rows)


def _renew_works(cast: Cast, steps: Steps, kept: Kept, touched: AbstractSet[str]) -> tuple[int, int]:
    """New work of some sub-agents; returns the first row that has to be looked at, and the last that must be."""
    rows = [k for k, row in enumerate(kept.rows) if not row.sure]
    for unit in touched:
        k = cast.gap_of[unit]
        row = kept.rows[k]
        work = steps.work(unit)
        row.works = tuple(work if before.unit == unit else before for before in row.works)
        rows.append(k)
    return (min(rows), max(rows)) if rows else (len(kept.rows), -1)


def _estimate_row(
    values: StepValues,
    room: _Room,
    row: _Row,
    kept: Kept,
    choice: Choice,
    *,
    turn: tuple[ModelCall, Steps] | None,
) -> None:
    """What a turn and the gap after it gave; ``room`` then is the state after both."""
    row.key = room.key
    if turn is not None:
        call, steps = turn
        if row.turn is not None and kept.renewed is not None:
            kept.spent -= row.turn.anchor or 0
        row.start = room.value()
        room.add({steps.turn_kind(call): 1})
        row.turn = kept.found.messages[call.id] = exact(room.value() - row.start)
        kept.spent += row.turn.anchor or 0
    gap = row.gap
    if gap is not None and row.sure_of(room.key, kept.budget):
        room.skip(gap)
        if kept.renewed is None:
            _enter(kept, gap)
        return
    if gap is not None and kept.renewed is not None:
        _leave(kept, gap)
    row.gap = None
    if row.works:
        row.gap = gap = _gap(values, room, row.works, choice, kept.budget, before=gap)
        _enter(kept, gap)
        if kept.renewed is not None:
            kept.renewed.append(gap)


def _enter(kept: Kept, gap: Gap) -> None:
    found = kept.found
    found.agents.update(gap.units)
    found.tools.update(gap.tools)
    found.messages.update(gap.messages)
    found.reports.update(gap.reports)
    kept.spent += gap.spent


def _leave(kept: Kept, gap: Gap) -> None:
    found = kept.found
    for of_all, own in (
        (found.agents, gap.units),
        (found.tools, gap.tools),
        (found.messages, gap.messages),
        (found.reports, gap.reports),
    ):
        for key in own:
            of_all.pop(key, None)
    kept.spent -= gap.spent


def _gap(
    values: StepValues,
    room: _Room,
    works: tuple[Work, ...],
    choice: Choice,
    budget: int,
    *,
    before: Gap | None,
) -> Gap:
    """What was done between two turns; ``room`` then is the state after it. ``before`` is what was found for its last revision."""
    misses = values.misses
    base, key, start = room.link(), room.key, room.value()
    counts = {kind: room.counts.get(kind, 0) for work in works for kind in work.amounts}
    shape = _shape(key, works, choice) if before is None else None
    remembered = values.recall(shape) if shape is not None else None
    game = CoalitionValues(values, base, counts, works) if remembered is None else None
    added: list[int] = []
    for work in works:
        added += room.add(work.amounts)
    total = room.value() - start
    if remembered is not None and remembered.shares is not None:
        active_ = remembered.active
        playing = [i for i, on in enumerate(active_) if on]
        units = settled([work.unit for work in works], playing, remembered.shares, total)
        shares = None
    else:
        assert game is not None  # noqa: S101  # what is remembered has shares
        active_ = tuple(game.active)
        units, shares = split(game, works, total, choice, budget)
    usable = before is not None and before.sure and before.key == key
    known = {work: before.inside.get(work.unit) for work in before.works} if before and usable else {}
    inside: dict[str, dict[str, Anchored]] = {}
    for place, (work, active) in enumerate(zip(works, active_, strict=True)):
        if sum(map(len, work.levels)) < 2:
            continue
        found = known.get(work)
        if found is None and remembered is not None:
            steps = [step for level in work.levels for step, _ in level]
            found = dict(zip(steps, remembered.inside[place], strict=True))
        if found is None:
            found = _inside(values, base, counts, work, active=active)
        inside[work.unit] = found
    steps_of = [inside.get(work.unit, {}) for work in works]
    messages, reports, tools = _by_step(works, units, steps_of)
    if shape is not None and shares is not None and values.misses == misses:
        told = tuple([tuple(steps.values()) for steps in steps_of])
        remembered = Found(active_, tuple(shares), told, total)
        values.remember(shape, remembered)
    return Gap(
        key=key,
        works=works,
        budget=budget,
        sure=values.misses == misses,
        spent=sum(item.anchor or 0 for item in units.values()),
        added=tuple(added),
        key_after=room.key,
        units=units,
        messages=messages,
        reports=reports,
        tools=tools,
        inside=inside,
        found=remembered,
    )


_Items = dict[str, Anchored]


def _by_step(
    works: Sequence[Work], units: Mapping[str, Anchored], inside: Sequence[Mapping[str, Anchored]]
) -> tuple[_Items, _Items, _Items]:
    """Estimates of calls, of returns (by agent) and of tool calls."""
    messages: _Items = {}
    reports: _Items = {}
    tools = {work.unit: units[work.unit] for work in works if work.role.startswith("tool/")}
    for work, steps in zip(works, inside, strict=True):
        for step, item in steps.items():
            if step in work.calls:
                messages[step] = item
            elif step.startswith("return:"):
                reports[work.unit] = item
            else:
                tools[step] = item
    return messages, reports, tools


def _shape(key: int, works: Sequence[Work], choice: Choice) -> tuple[object, ...] | None:
    """All that the shares of a gap and of the steps inside it depend on; None where they also depend on who it was: sampled
    orders are seeded by ids."""
    if len(works) > EXACT_MAX or choice.agents == "leave_one_out":
        return None
    return key, *_placed(works)


def _placed(works: Sequence[Work]) -> list[tuple[int, tuple[object, ...]]]:
    """What works depend on: who among them spawned each, and its shape."""
    place = {work.unit: i for i, work in enumerate(works)}
    return [(place.get(work.parent, -1), work.shape) for work in works]


def _smoothed(starts: Sequence[int], reward: int, smoothing: float) -> list[Anchored]:
    """Turn-level GAE of the orchestrator's turns; V before each is ``starts``, the reward comes with the last."""
    rewards = [0.0] * (len(starts) - 1) + [reward / MICRO]
    found = gae(rewards, [value / MICRO for value in starts], smoothing=smoothing)
    return [Anchored(amount, 0.0, amount, 0.0, "gae/1") for amount in (round(a * MICRO) for a in found)]


def lessons_of(cast: Cast) -> tuple[Lesson, ...]:
    """The states that an orchestration was in: before its first step, after each turn and after what followed it."""
    plan = _plan_of(cast)
    if plan.shape is None:
        return _lessons_of(plan)
    known = _lessons.get(plan.shape)
    if known is None:
        if len(_lessons) >= LESSONS_MAX:
            _lessons.clear()
        known = _lessons[plan.shape] = _lessons_of(plan)
    return known


LESSONS_MAX = 1_024
"""Shapes whose lessons are remembered: orchestrations of a deployment do the same again and again."""
_lessons: dict[tuple[object, ...], tuple[Lesson, ...]] = {}


def _lessons_of(plan: _Plan) -> tuple[Lesson, ...]:
    room = _Room(Plain(lambda _: 0))
    seen = [written_out(room.bag, room.loose)]
    for k, works in enumerate(plan.rows):
        if plan.turns:
            room.add({plan.turns[k]: 1})
            seen.append(written_out(room.link(), ()))
        if works:
            for work in works:
                room.add(work.amounts)
            seen.append(written_out(room.link(), ()))
    return tuple([Lesson(state, ()) for state in seen])


class Coalitions(msgspec.Struct, frozen=True):
    """V of the state before a gap with the work of each set of those that it was shared by."""

    units: tuple[str, ...]
    values: tuple[tuple[tuple[str, ...], int], ...]
    """(units whose work is in it, micro-units), by size."""


def coalitions_of(cast: Cast, values: StepValues) -> list[Coalitions]:
    """The games that were shared exactly, of two workers and more."""
    steps, room = Steps(cast), _Room(values)
    found: list[Coalitions] = []
    for k, units in enumerate(workers_of(cast, cast.line)):
        if cast.line:
            room.add({steps.turn_kind(cast.line[k]): 1})
        works = [steps.work(unit) for unit in units]
        counts = {kind: room.counts.get(kind, 0) for work in works for kind in work.amounts}
        game = CoalitionValues(values, room.link(), counts, works)
        playing = [i for i, active in enumerate(game.active) if active]
        if 2 <= len(playing) <= EXACT_MAX:
            sets = sorted(range(1 << len(playing)), key=lambda mask: (bin(mask).count("1"), mask))
            chosen = [[i for n, i in enumerate(playing) if mask >> n & 1] for mask in sets]
            found.append(
                Coalitions(
                    tuple(units[i] for i in playing),
                    tuple((tuple(units[i] for i in some), game.at(some)[0]) for some in chosen),
                )
            )
        for work in works:
            room.add(work.amounts)
    return found
