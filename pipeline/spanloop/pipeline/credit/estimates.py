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
from collections.abc import Set as AbstractSet
from itertools import pairwise
from typing import cast as as_type

from spanloop.pipeline.credit.anchors import (
    DEFAULT,
    ENVIRONMENT,
    UNIDENTIFIED,
    UNKNOWN,
    Anchored,
    CallValues,
    Choice,
    Estimates,
    Lesson,
    Value,
    exact,
    settle_environment,
)
from spanloop.pipeline.credit.cast import Cast
from spanloop.pipeline.credit.leave_one_out import leave_one_out
from spanloop.pipeline.credit.progress import Plain, StepValues
from spanloop.pipeline.credit.reconcile import reconcile
from spanloop.pipeline.credit.states import (
    RAW,
    Encoder,
    State,
    by_token,
    has_menus,
    has_tokens,
    is_asked,
    is_forced,
)
from spanloop.pipeline.credit.structural import Kept, estimate_steps, lessons_of, workers_of
from spanloop.schemas.ids import policy_number
from spanloop.schemas.orchestration import Agent, MenuOption, ModelCall

__all__ = [
    "ENVIRONMENT",
    "Anchored",
    "CallValues",
    "Choice",
    "Estimates",
    "Lesson",
    "Value",
    "estimate",
    "lessons",
]


def estimate(
    cast: Cast,
    reward: int,
    value: Value | None,
    encode: Encoder = RAW,
    *,
    choice: Choice = DEFAULT,
    kept: Kept | None = None,
    touched: AbstractSet[str] | None = None,
) -> Estimates:
    """Estimates for one orchestration.

    Args:
        cast: Who took part.
        reward: The team's reward, micro-units.
        value: The value model; None before the first version.
        encode: How it reads token states.
        choice: Which estimators.
        kept: What was found for its last revision under the same value model; taken and brought up to date.
        touched: With ``kept``: as in ``estimate_steps``.
    """
    if value is None:
        return Estimates(level="team")
    valued = _valued(cast)
    if valued:
        return _from_tokens(cast, valued, reward, _Reader(value, encode))
    # not isinstance: a protocol's members are looked up anew at each question, which costs as much as an estimate
    values = as_type(StepValues, value) if hasattr(value, "members") else Plain(value)
    return estimate_steps(cast, reward, values, choice, kept=kept, touched=touched)


def lessons(cast: Cast, encode: Encoder = RAW) -> tuple[Lesson, ...]:
    """What a value model learns from an orchestration and its outcome: its states in order, and for each the states
    that the next decision could have led to. A token that was the only option is no decision."""
    valued = _valued(cast)
    if not valued:
        return lessons_of(cast)
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
    return tuple(found)


def _valued(cast: Cast) -> list[ModelCall]:
    """The orchestrator's turns that decided something; empty unless all that did not fail have tokens. Where it asks the policy
    for decisions outright, these are the turns that decide: what a model of somebody else says in between is work like any other."""
    asked = [call for call in cast.line if is_asked(call)]
    if asked:
        return [call for call in asked if has_tokens(call) and _decisions(call)]
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
        tokens, starts = [0] * len(response), [0] * len(response)
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
            tokens[i], starts[i] = after - start, start
            ends.append((start, after))
        drift = sum(later[0] - earlier[1] for earlier, later in pairwise(ends))
        options_of = tuple(menus) if known else ()
        return CallValues(ends[0][0], ends[-1][1], drift, tuple(tokens), options_of, tuple(starts))


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
        found.messages[call.id] = exact(values.decided)
        leftover += values.drift
    found.baseline = found.calls[valued[0].id].start
    workers = workers_of(cast, valued)
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
    settle_environment(found, leftover)
    for agent in cast.others:
        trained = _trained(cast, agent)
        for call in trained:
            found.calls[call.id] = values = read.call(call)
            found.messages[call.id] = exact(values.decided)
        if trained:
            found.reports[agent.id] = UNKNOWN
    return found


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
