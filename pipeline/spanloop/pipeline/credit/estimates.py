"""Raw estimates: what each turn, token, tool call and agent was worth under a value model, before reconciliation.

Three levels of knowledge, and the account that trains a token at each (METHODS 3.4, one account a token):

- ``token``: every turn of the orchestrator has token ids. A token's estimate is V(prompt + response up to it) less the value
  before it: with a menu the mean of V over its options as the behaviour weighted them (COMA: the estimate is 0 on average),
  without one V(up to the token before). A token that was the only option is exactly 0. Trained from the token's account; in
  a long response from the message's.
- ``message``: no token ids. V is of the set of finished steps; a turn's estimate is what it added. Trained from the message's account.
- ``team``: no value model yet. Trained from the team's account.

From the end of turn k to the start of turn k + 1 (after the last turn: to the reward) nothing is the orchestrator's: the step
goes to the agents and tools that worked in between, by leave-one-out where the value without one of them is known, else by
variance; where nobody worked, and for what the reward adds at the very end, to ``environment``, the account of chance. So
does what the model's own values of two neighbouring states do not agree on.
Invariants: baseline + all estimates = reward exactly, as every sum telescopes; pure; control flow does not depend on values,
so that one pass with a recording ``Value`` finds all the states to ask for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import msgspec

from spanloop.pipeline.credit.cast import Cast, role_of
from spanloop.pipeline.credit.leave_one_out import UNKNOWN_VARIANCE, leave_one_out
from spanloop.pipeline.credit.orders import average_differences
from spanloop.pipeline.credit.reconcile import reconcile
from spanloop.pipeline.credit.states import (
    RAW,
    Encoder,
    State,
    by_token,
    has_menus,
    has_tokens,
    is_forced,
    step_state,
)
from spanloop.schemas.canonical import MICRO
from spanloop.schemas.ids import policy_number
from spanloop.schemas.orchestration import Agent, MenuOption, ModelCall

__all__ = ["ENVIRONMENT", "Anchored", "CallValues", "Estimates", "Lesson", "Value", "estimate", "lessons"]

ENVIRONMENT = "environment"
VALUE_DIFFERENCE = "value_difference/1"


class Value(Protocol):
    """V of a state in micro-units under one version of a value model."""

    def __call__(self, state: State, /) -> int:
        """The value."""
        ...


class Lesson(msgspec.Struct, frozen=True, array_like=True):
    """A state that an orchestration was in."""

    state: State
    options: tuple[State, ...]
    """States that the next decision could have led to; empty: only the outcome says what it was worth."""


class Anchored(msgspec.Struct, frozen=True):
    """An estimate and where the reconciliation starts from: the estimate with its share of its gap's residual."""

    anchor: int | None
    weight: float
    """Share in what the tree above still has to reconcile; 0: exact."""
    raw: int | None
    variance: float
    estimator: str


NULL = Anchored(0, 0.0, 0, 0.0, VALUE_DIFFERENCE)
UNKNOWN = Anchored(None, UNKNOWN_VARIANCE, None, UNKNOWN_VARIANCE, "uniform/1")


UNIDENTIFIED = Anchored(0, 0.0, None, 0.0, "unidentified/1")


class CallValues(msgspec.Struct, frozen=True):
    """Values of a turn, micro-units."""

    start: int
    """Before its first decision."""
    end: int
    """After its last one."""
    drift: int
    """What lies between its decisions: end - start = sum of the tokens' estimates + drift."""
    tokens: tuple[int, ...]
    """Estimate of each response token; empty for a response that is valued as a whole."""
    menus: tuple[tuple[int, ...], ...]
    """For each response token V after each open option, in the menu's order; empty without menus."""

    @property
    def decided(self) -> int:
        """What the turn's own decisions were worth."""
        return self.end - self.start - self.drift


class Estimates(msgspec.Struct):
    """Everything the ledger needs to know; absent keys are unknown."""

    level: str
    baseline: int = 0
    calls: dict[str, CallValues] = {}
    messages: dict[str, Anchored] = {}
    """By call id: what the turn's own text decided."""
    reports: dict[str, Anchored] = {}
    """By agent id: what a sub-agent's return brought beyond its valued decisions."""
    tools: dict[str, Anchored] = {}
    agents: dict[str, Anchored] = {}
    environment: Anchored | None = None


def estimate(cast: Cast, reward: int, value: Value | None, encode: Encoder = RAW) -> Estimates:
    """Estimates for one orchestration.

    Args:
        cast: Who took part.
        reward: The team's reward, micro-units.
        value: The value model; None before the first version.
        encode: How it reads token states.
    """
    if value is None:
        return Estimates(level="team")
    valued = _valued(cast)
    if valued:
        return _from_tokens(cast, valued, reward, _Reader(value, encode))
    return _from_steps(cast, reward, value)


def lessons(cast: Cast, encode: Encoder = RAW) -> list[Lesson]:
    """What a value model learns from an orchestration and its outcome: its states in order, and for each the states
    that the next decision could have led to. A token that was the only option is no decision."""
    valued = _valued(cast)
    if not valued:
        return [Lesson(state, ()) for state in _step_states(cast)]
    found: list[Lesson] = []
    for chain in (valued, *([call] for agent in cast.others for call in _trained(cast, agent))):
        decisions = [(call, i) for call in chain for i in _decisions(call)]
        for at, (call, i) in enumerate(decisions):
            prompt, response = call.prompt_token_ids, call.response_token_ids
            if not has_menus(call) and i == 0:
                found.append(Lesson(encode(prompt, ()), ()))
            said = response[: i + 1] if by_token(call) else response
            options: tuple[State, ...] = ()
            if at + 1 < len(decisions) and has_menus(decisions[at + 1][0]):
                following, j = decisions[at + 1]
                before = following.response_token_ids[:j]
                options = tuple(
                    encode(following.prompt_token_ids, (*before, option.token_id))
                    for option in following.menus[j]
                )
            found.append(Lesson(encode(prompt, said), options))
    return found


def _step_states(cast: Cast) -> list[State]:
    seen: list[State] = []

    def record(state: State) -> int:
        seen.append(state)
        return 0

    steps = _Steps(cast, record)
    done: set[str] = set()
    steps.value(done)
    for k, units in enumerate(_workers(cast, list(cast.line))):
        if cast.line:
            done.add(cast.line[k].id)
            steps.value(done)
        if units:
            done.update(step for unit in units for step in steps.own[unit])
            steps.value(done)
    return seen


def _valued(cast: Cast) -> list[ModelCall]:
    """The orchestrator's turns that decided something; empty unless all that did not fail have tokens."""
    if all(has_tokens(call) or call.status == "error" for call in cast.line):
        return [call for call in cast.line if has_tokens(call) and _decisions(call)]
    return []


def _trained(cast: Cast, agent: Agent) -> list[ModelCall]:
    """A sub-agent's turns that a policy of ours decided."""
    return [
        call
        for call in cast.turns.get(agent.id, ())
        if has_tokens(call) and policy_number(call.policy_version) >= 0 and _decisions(call)
    ]


def _decisions(call: ModelCall) -> list[int]:
    """Positions of a response at which there was something to decide; the first only, where it is valued as a whole."""
    if not by_token(call):
        return [0]
    return [i for i in range(len(call.response_token_ids)) if not is_forced(call, i)]


# ---------------------------------------------------------------- token states


class _Reader:
    """V of the turns of a policy."""

    def __init__(self, value: Value, encode: Encoder) -> None:
        self._value = value
        self._encode = encode

    def call(self, call: ModelCall) -> CallValues:
        """Values of a turn that decided something."""
        prompt, response = call.prompt_token_ids, call.response_token_ids
        if not by_token(call):
            start = self._value(self._encode(prompt, ()))
            return CallValues(start, self._value(self._encode(prompt, response)), 0, (), ())
        known = has_menus(call)
        tokens = [0] * len(response)
        menus: list[tuple[int, ...]] = []
        ends: list[tuple[int, int]] = []
        for i in range(len(response)):
            before = response[:i]
            menu = call.menus[i] if known else ()
            options = [self._value(self._encode(prompt, (*before, o.token_id))) for o in menu]
            menus.append(tuple(options))
            if len(menu) == 1:
                continue
            chosen = next((k for k, o in enumerate(menu) if o.token_id == response[i]), None)
            after = (
                options[chosen]
                if chosen is not None
                else self._value(self._encode(prompt, response[: i + 1]))
            )
            start = _mean(menu, options) if menu else self._value(self._encode(prompt, before))
            tokens[i] = after - start
            ends.append((start, after))
        drift = sum(later[0] - earlier[1] for earlier, later in pairwise(ends))
        return CallValues(ends[0][0], ends[-1][1], drift, tuple(tokens), tuple(menus) if known else ())


def _mean(menu: Sequence[MenuOption], values: Sequence[int]) -> int:
    """Mean value of the options as the behaviour weighted them."""
    weights = [math.exp(min(0.0, option.logprob)) for option in menu]
    total = math.fsum(weights)
    if not math.isfinite(total) or total <= 0.0:
        return round(sum(values) / len(values))
    return round(math.fsum(w * v for w, v in zip(weights, values, strict=True)) / total)


def _from_tokens(cast: Cast, valued: list[ModelCall], reward: int, read: _Reader) -> Estimates:
    found = Estimates(level="token")
    leftover = 0
    for call in valued:
        found.calls[call.id] = values = read.call(call)
        found.messages[call.id] = _exact(values.decided)
        leftover += values.drift
    found.baseline = found.calls[valued[0].id].start
    workers = _workers(cast, valued)
    sub_agents = {agent.id for agent in cast.others}
    for k, call in enumerate(valued):
        before = found.calls[call.id].end
        last = k + 1 == len(valued)
        after = reward if last else found.calls[valued[k + 1].id].start
        units = workers[k]
        if last:
            # What the last turn's tools did is seen in no later state, so the outcome cannot tell them from chance.
            found.tools.update((unit, UNIDENTIFIED) for unit in units if unit not in sub_agents)
            units = [*(unit for unit in units if unit in sub_agents), ENVIRONMENT]
        everyone = frozenset(units)

        def partial(
            done: frozenset[str], everyone: frozenset[str] = everyone, ends: tuple[int, int] = (before, after)
        ) -> int | None:
            return ends[1] if done == everyone else None if done else ends[0]

        leftover += _split_gap(found, units, after - before, partial)
    _settle_environment(found, leftover)
    for agent in cast.others:
        trained = _trained(cast, agent)
        for call in trained:
            found.calls[call.id] = values = read.call(call)
            found.messages[call.id] = _exact(values.decided)
        if trained:
            found.reports[agent.id] = UNKNOWN
    return found


def _exact(amount: int) -> Anchored:
    return Anchored(amount, 0.0, amount, 0.0, VALUE_DIFFERENCE) if amount else NULL


def _workers(cast: Cast, line: list[ModelCall]) -> list[list[str]]:
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


def _split_gap(
    found: Estimates, units: list[str], total: int, value: Callable[[frozenset[str]], int | None]
) -> int:
    """Give ``total`` to ``units`` by leave-one-out and variance; returns what fell to the environment."""
    if not units:
        return total
    estimates = leave_one_out(units, value)
    anchors = reconcile(
        total, [estimates[u].raw for u in units], [estimates[u].variance for u in units], units
    )
    environment = 0
    for unit, anchor in zip(units, anchors, strict=True):
        if unit == ENVIRONMENT:
            environment = anchor
            continue
        item = estimates[unit]
        anchored = Anchored(anchor, 0.0, item.raw, item.variance, item.estimator)
        # A tool call and an agent never share an id: events and agents are digests over different parts.
        found.agents[unit] = found.tools[unit] = anchored
    return environment


def _settle_environment(found: Estimates, amount: int) -> None:
    found.environment = Anchored(amount, UNKNOWN_VARIANCE, None, UNKNOWN_VARIANCE, "residual/1")


# ---------------------------------------------------------------- structural states


class _Steps:
    """Kinds of finished steps, by step id, and V of sets of them."""

    def __init__(self, cast: Cast, value: Value) -> None:
        self._value = value
        self._known: dict[frozenset[str], int] = {}
        self.kinds: dict[str, str] = {}
        self.own: dict[str, list[str]] = {}
        """Steps of each worker in order."""
        self.before: dict[str, set[str]] = {}
        for agent in cast.others:
            self._add_agent(cast, agent)
        for agent in cast.orchestrators:
            role = role_of(agent)
            for call in cast.turns.get(agent.id, ()):
                self.kinds[call.id] = f"turn/{role}/{call.status}/" + "+".join(
                    t.name for t in call.tool_calls
                )
            for event in (
                *(e for call in cast.turns.get(agent.id, ()) for e in cast.tools.get(call.id, ())),
                *cast.loose_tools.get(agent.id, ()),
            ):
                self.kinds[event.id] = f"tool/{role}/{event.tool}/{cast.tool_status.get(event.id, '')}"
                self.own[event.id] = [event.id]

    def _add_agent(self, cast: Cast, agent: Agent) -> None:
        role = role_of(agent)
        own: list[str] = []
        previous: set[str] = set()
        for call in cast.turns.get(agent.id, ()):
            self.kinds[call.id] = f"turn/{role}/{call.status}/" + "+".join(t.name for t in call.tool_calls)
            self.before[call.id] = set(previous)
            own.append(call.id)
            level = {call.id}
            for event in cast.tools.get(call.id, ()):
                self.kinds[event.id] = f"tool/{role}/{event.tool}/{cast.tool_status.get(event.id, '')}"
                self.before[event.id] = {call.id}
                own.append(event.id)
                level.add(event.id)
            previous |= level
        for event in cast.loose_tools.get(agent.id, ()):
            self.kinds[event.id] = f"tool/{role}/{event.tool}/{cast.tool_status.get(event.id, '')}"
            own.append(event.id)
            previous.add(event.id)
        done = f"return:{agent.id}"
        self.kinds[done] = f"return/{role}/{agent.status}"
        self.before[done] = set(previous)
        own.append(done)
        self.own[agent.id] = own

    def value(self, steps: set[str] | frozenset[str]) -> int:
        """V of the state in which ``steps`` are finished; asked for once a set."""
        key = frozenset(steps)
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._value(step_state(["start", *map(self.kinds.__getitem__, key)]))
        return known


def _from_steps(cast: Cast, reward: int, value: Value) -> Estimates:
    found = Estimates(level="message")
    steps = _Steps(cast, value)
    done: set[str] = set()
    found.baseline = steps.value(done)
    workers = _workers(cast, list(cast.line))
    leftover = 0
    for k, units in enumerate(workers):
        if cast.line:
            before = steps.value(done)
            done.add(cast.line[k].id)
            found.messages[cast.line[k].id] = _exact(steps.value(done) - before)
        base = frozenset(done)

        def partial(chosen: frozenset[str], base: frozenset[str] = base) -> int:
            return steps.value(base.union(*(steps.own[unit] for unit in chosen)))

        for unit in units:
            done.update(steps.own[unit])
        leftover += _split_gap(found, units, steps.value(done) - steps.value(base), partial)
        for unit in units:
            if len(steps.own[unit]) > 1:
                _inside_agent(found, steps, unit, base, cast)
    leftover += reward - steps.value(done)
    _settle_environment(found, leftover)
    return found


def _inside_agent(found: Estimates, steps: _Steps, agent: str, base: frozenset[str], cast: Cast) -> None:
    """What each step of a sub-agent added, averaged over the orders that its partial order allows."""
    own = steps.own[agent]
    added = average_differences(own, steps.before, lambda chosen: steps.value(base | chosen))
    calls = {call.id for call in cast.turns.get(agent, ())}
    for step in own:
        amount = added[step]
        item = Anchored(amount, (amount / MICRO) ** 2, amount, 0.0, VALUE_DIFFERENCE)
        if step in calls:
            found.messages[step] = item
        elif step.startswith("return:"):
            found.reports[agent] = item
        else:
            found.tools[step] = item
