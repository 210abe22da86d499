"""Every orchestration decision O1 to O5 as one object: who decided what, among what, how likely, what it brought and what else would have.

Place in the flow: made on demand (``spanloop explain decisions``) from what is on the log: the content, the ledger, the samples, and the
version of the decision models that goes with the ledger's value model. Three sources of a menu: the program told it (SDK), the gateway
recorded it at each token, or nobody did. Where the log cannot tell an effect the status is ``unidentified`` and says why.
Invariants: pure; an event is at most one decision; what is not known is None, never zero.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from operator import itemgetter

import msgspec

from spanloop.pipeline.credit.estimators.aipw import LEAST_PROPENSITY
from spanloop.pipeline.decisions.effects import LEVEL, OptionEffect
from spanloop.pipeline.decisions.learner import DecisionModel
from spanloop.pipeline.decisions.told import (
    CODES,
    Told,
    all_of,
    context_of,
    features_of,
    group_of,
    stop_propensity,
    stops_at,
    was_asked,
)
from spanloop.schemas.events import CreditNode, Sample
from spanloop.schemas.ids import policy_number
from spanloop.schemas.orchestration import Decision, ModelCall, OrchestrationContent, OrchestrationEvent

__all__ = ["STATE", "DecisionObject", "Option", "decisions_of"]

STATE = (
    "round", "spent_tokens", "spent_cost", "open_subtasks", "verifier_score", "answer_stability", "vote_margin", "budget_left",
)  # fmt: skip
"""Features that every decision has, None where the trace does not hold them; told ones of other names come beside."""
STOP_MENU = ("stop", "continue")


class Option(msgspec.Struct, frozen=True, omit_defaults=True):
    """One option of a menu."""

    name: str
    propensity: float | None = None
    value: float | None = None
    """Expected reward had it been taken here (counterfactual for all but the choice), units."""
    error: float | None = None
    taken: int | None = None
    """How often the log took it here."""
    source: str = ""
    """Of ``value``: "decision_model", "stopping_model" or "value_model"."""


class DecisionObject(msgspec.Struct, frozen=True):
    """One decision."""

    code: str
    """O1 spawn, O2 delegate, O3 message, O4 aggregate, O5 stop or continue."""
    kind: str
    agent: str
    agent_id: str
    role: str
    decided_by: str
    """policy, other (a rule, an exploration draw, a person), or "" where nobody says."""
    exploration: bool | None
    """The policy did not choose; None: not told."""
    t_ns: int
    event_id: str
    """Empty: a turn that went on, which is no event."""
    evidence: tuple[str, ...]
    call_id: str
    action: tuple[int, ...]
    """Token ids that decided; empty: none known."""
    rule: str
    confidence: float
    state: dict[str, float | None]
    menu: str
    """Where the options come from: told, tokens, implied (stop or continue), or "" where none are known."""
    options: tuple[Option, ...]
    chosen: str
    propensity: float | None
    effect: float | None
    """What the choice brings against what else was taken here, units of reward."""
    low: float | None
    high: float | None
    level: float
    status: str
    """ok, estimated_propensities, model_based (values of a model, no interval) or unidentified."""
    reason: str
    margin: float | None
    """O5: what stopping here brings over going on, under the stopping rule; >= 0 says stop."""
    advantage: float | None
    """O5 credit: the margin of a stop, its negative of a continue."""
    credit: int | None
    """Micro-credits of the account that its call's decision has in the conserved ledger; None: no account of its own."""


def decisions_of(
    content: OrchestrationContent,
    *,
    nodes: Sequence[CreditNode] = (),
    samples: Sequence[Sample] = (),
    model: DecisionModel | None = None,
    words: Sequence[str] = (),
) -> tuple[DecisionObject, ...]:
    """Decisions of an orchestration by time.

    Args:
        content: What happened.
        nodes: Of its ledger.
        samples: Its training rows, which have token menus and their values.
        model: Decision models to ask; None: none was published.
        words: Word of each token id, for the names of options.
    """
    made = _Maker(content, nodes, samples, model, words)
    found = [made.of(item) for item in all_of(content)]
    found += [made.of(item, goes_on=True) for item in _turns_that_went_on(content, found)]
    return tuple(sorted(found, key=lambda item: (item.t_ns, not item.event_id, item.event_id, item.call_id)))


def _turns_that_went_on(content: OrchestrationContent, found: Sequence[DecisionObject]) -> list[Told]:
    """Turns of agents that answer, before their last one: not stopping is a decision, also where nobody told it. Agents whose
    stop decisions were told have told all of them. A decision that was asked for is no turn."""
    told = {item.agent_id for item in found if item.kind == "stop" and item.menu == "told"}
    entries = {agent.id: agent for agent in content.agents if not agent.parent_id and agent.id not in told}
    turns: dict[str, list[ModelCall]] = {}
    for call in sorted(content.calls, key=lambda c: (c.start_ns, c.id)):
        if call.agent_id in entries and not was_asked(call):
            turns.setdefault(call.agent_id, []).append(call)
    opened, closed = _delegations(content)
    ends = sorted((c.end_ns, (c.input_tokens or 0) + (c.output_tokens or 0)) for c in content.calls)
    totals = list(accumulate((tokens for _, tokens in ends), initial=0))
    known = all(c.input_tokens is not None and c.output_tokens is not None for c in content.calls)
    out: list[Told] = []
    for agent_id, calls in turns.items():
        agent = entries[agent_id]
        role = agent.role or agent.name.lower()
        for k, call in enumerate(calls[:-1]):
            at = call.end_ns
            event = OrchestrationEvent(
                "", "stop", agent.name, at, 1.0, "turn_went_on", call.span_ids, agent_id=agent_id, call_id=call.id
            )  # fmt: skip
            spent = totals[bisect_right(ends, at, key=itemgetter(0))] if known else None
            waiting = bisect_right(opened[agent_id], at) - bisect_right(closed[agent_id], at)
            elapsed = max(0.0, (at - content.started_ns) / 1e9)
            out.append(Told(event, Decision("stop", "continue"), role, k, max(0, waiting), spent, elapsed))
    return out


def _delegations(content: OrchestrationContent) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """Times at which an agent delegated and at which something came back, ascending."""
    opened: dict[str, list[int]] = defaultdict(list)
    closed: dict[str, list[int]] = defaultdict(list)
    for event in content.events:
        if event.type == "delegate" and event.mode != "pass_control":
            opened[event.agent_id].append(event.t_ns)
        elif event.type == "return":
            closed[event.to_id].append(event.t_ns)
    return opened, closed


class _Maker:
    """Everything that a decision is looked up in."""

    def __init__(
        self, content: OrchestrationContent, nodes: Sequence[CreditNode], samples: Sequence[Sample],
        model: DecisionModel | None, words: Sequence[str],
    ) -> None:  # fmt: skip
        self.calls = {call.id: call for call in content.calls}
        self.credit = {
            node.subject: node.credit for node in nodes if node.unit == "message" and node.label == "decision"
        }
        self.samples = {row.call_id: row for row in samples}
        self.model = model
        self.words = words

    def of(self, item: Told, *, goes_on: bool = False) -> DecisionObject:
        event, decision = item.event, item.decision
        call = self.calls.get(event.call_id)
        if was_asked(call) and not decision.options:
            call = None  # it took another decision, which is told
        row = self.samples.get(event.call_id) if call is not None else None
        answer = self._answer(item, row, goes_on=goes_on)
        margin = self._margin(item)
        by = decision.by_policy
        if by is None and call is not None and policy_number(call.policy_version) >= 0:
            by = True
        return DecisionObject(
            code=CODES.get(decision.kind, ""),
            kind=decision.kind,
            agent=event.agent,
            agent_id=event.agent_id,
            role=item.role,
            decided_by="" if by is None else "policy" if by else "other",
            exploration=None if decision.by_policy is None else not decision.by_policy,
            t_ns=event.t_ns,
            event_id=event.id,
            evidence=event.evidence,
            call_id=event.call_id,
            action=row.response_token_ids if row is not None else (),
            rule=event.rule,
            confidence=event.confidence,
            state=_state(item),
            menu=answer.menu,
            options=answer.options,
            chosen=answer.chosen or decision.chosen,
            propensity=answer.propensity,
            effect=answer.effect,
            low=answer.low,
            high=answer.high,
            level=LEVEL,
            status=answer.status,
            reason=answer.reason,
            margin=margin,
            advantage=None
            if margin is None or decision.kind != "stop"
            else margin
            if stops_at(event, decision) and not goes_on
            else -margin,
            credit=self.credit.get(event.call_id) if call is not None else None,
        )

    def _margin(self, item: Told) -> float | None:
        if item.decision.kind != "stop" or self.model is None or self.model.stopping is None:
            return None
        return self.model.stopping.verdict(dict(features_of(item))).margin

    def _answer(self, item: Told, row: Sample | None, *, goes_on: bool) -> _Answer:
        if item.decision.options:
            return self._told(item)
        if row is not None and row.menu_ids and not goes_on:
            return _from_tokens(row, self.words)
        if item.decision.kind == "stop":
            options = tuple(Option(name) for name in STOP_MENU)
            why = "the program does not tell its stop decisions, so nothing says how likely they were"
            chosen = "continue" if goes_on else "stop"
            return _Answer("implied", options, status="unidentified", reason=why, chosen=chosen)
        why = "which options were open was neither told nor recorded"
        return _Answer("", (), status="unidentified", reason=why)

    def _told(self, item: Told) -> _Answer:
        decision = item.decision
        shares: Mapping[str, float] = dict(zip(decision.options, decision.propensities, strict=False))
        effects = self._effects(item)
        by_option = {effect.option: effect for effect in effects}
        values = self._stop_values(item)
        options = tuple(
            _option(name, shares.get(name), by_option.get(name), values.get(name))
            for name in decision.options
        )
        propensity = shares.get(decision.chosen)
        mine = by_option.get(decision.chosen)
        least = min(shares.values(), default=None)
        if mine is None:
            why = (
                "no version of the decision models knows this menu yet"
                if decision.chosen in decision.options
                else "the choice is not on its menu"
            )
            return _Answer("told", options, propensity, status="unidentified", reason=why)
        if least is not None and least < LEAST_PROPENSITY:
            why = f"an option had propensity {least:.3g} here, at least {LEAST_PROPENSITY:g} is needed"
            return _Answer("told", options, propensity, status="unidentified", reason=why)
        reason = mine.reason
        if not shares and mine.status != "unidentified":
            reason = "propensities were not told, they are estimated: nothing hidden may have moved both decision and outcome"
        return _Answer(
            "told", options, propensity, mine.effect, mine.low, mine.high, status=mine.status, reason=reason
        )

    def _effects(self, item: Told) -> tuple[OptionEffect, ...]:
        """Of the context; of the whole group where the context alone cannot tell."""
        if self.model is None:
            return ()
        group = group_of(item)
        whole = self.model.effects.get((group, ""), ())
        here = self.model.effects.get((group, context_of(item)), ())
        mine = next((effect for effect in here if effect.option == item.decision.chosen), None)
        return here if mine is not None and mine.status != "unidentified" else whole or here

    def _stop_values(self, item: Told) -> dict[str, float]:
        """Value of stopping and of going on, to go from here (quality less what is still to be spent)."""
        decision = item.decision
        if decision.kind != "stop" or self.model is None or self.model.stopping is None:
            return {}
        if stop_propensity(item.event, decision) is None and "stop" not in decision.options:
            return {}
        verdict = self.model.stopping.verdict(dict(features_of(item)))
        stop = verdict.value if verdict.stop else verdict.value + verdict.margin
        return {name: stop if name == "stop" else stop - verdict.margin for name in decision.options}


class _Answer(msgspec.Struct, frozen=True):
    """Menu, values and effect of one decision."""

    menu: str
    options: tuple[Option, ...]
    propensity: float | None = None
    effect: float | None = None
    low: float | None = None
    high: float | None = None
    status: str = "unidentified"
    reason: str = ""
    chosen: str = ""


def _option(name: str, share: float | None, effect: OptionEffect | None, stop: float | None) -> Option:
    taken = None if effect is None else effect.taken
    if effect is not None and effect.value is not None:
        return Option(name, share, effect.value, effect.value_error, taken, "decision_model")
    if stop is not None:
        return Option(name, share, stop, None, taken, "stopping_model")
    return Option(name, share, taken=taken)


def _state(item: Told) -> dict[str, float | None]:
    told = dict(features_of(item))
    found: dict[str, float | None] = {name: told.pop(name, None) for name in STATE}
    found["spent_cost"] = dict(item.decision.state).get("cost")
    return found | dict(sorted(told.items()))


def _from_tokens(row: Sample, words: Sequence[str]) -> _Answer:
    """A response as one decision: its options are all the ways in which it could first have gone another way, and itself. Their
    propensities sum to 1; each one's value is the value model's after it (METHODS 3.2 h)."""
    options: list[Option] = []
    reached = 1.0
    said = ""
    for i, token in enumerate(row.response_token_ids):
        menu, logs = row.menu_ids[i], row.menu_logprobs[i]
        values = row.menu_values[i] if i < len(row.menu_values) else ()
        last = i + 1 == len(row.response_token_ids)
        own = 1.0
        for at, option in enumerate(menu):
            share = math.exp(min(0.0, logs[at]))
            if option == token:
                own = share
            if option != token or last:
                value = values[at] / 1e6 if at < len(values) else None
                name = f"{said} {_word(option, words)}".strip()
                options.append(
                    Option(name, reached * share, value, source="value_model" if value is not None else "")
                )
        reached *= own
        said = f"{said} {_word(token, words)}".strip()
    chosen = next((option for option in options if option.name == said), None)
    if chosen is None or len(options) < 2:
        return _Answer(
            "tokens",
            tuple(options),
            reached,
            reason="it was the only option: nothing was decided",
            chosen=said,
        )
    least = min(option.propensity or 0.0 for option in options)
    if least < LEAST_PROPENSITY:
        why = f"an option had propensity {least:.3g} here, at least {LEAST_PROPENSITY:g} is needed"
        return _Answer("tokens", tuple(options), reached, reason=why, chosen=said)
    if any(option.value is None for option in options):
        return _Answer(
            "tokens", tuple(options), reached, reason="no value model had been published", chosen=said
        )
    total = math.fsum(option.propensity or 0.0 for option in options)
    expected = math.fsum((option.propensity or 0.0) * (option.value or 0.0) for option in options) / total
    return _Answer(
        "tokens", tuple(options), reached, (chosen.value or 0.0) - expected, status="model_based",
        reason="against the behaviour's own mix, by the value model; no interval", chosen=said,
    )  # fmt: skip


def _word(token: int, words: Sequence[str]) -> str:
    return words[token] if 0 <= token < len(words) else f"#{token}"
