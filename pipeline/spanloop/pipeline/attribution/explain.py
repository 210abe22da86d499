"""What ``spanloop explain failure`` says: agents and steps with the probability that they are to blame, reasons and evidence.

Reads orchestrations, spans, rewards and credits from a log; changes nothing, calls no model. ``attribute`` is the pure part.
Invariants: the probabilities of steps sum to 1, and so do those of agents; an agent's is the sum over its steps; without
texts there is still an answer, of low confidence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from spanloop.pipeline.attribution.features import table_of
from spanloop.pipeline.attribution.judge import Judge, JudgeCase, ask
from spanloop.pipeline.attribution.model import Model, by_agent, probabilities, shipped, usual_row
from spanloop.pipeline.attribution.pooling import Opinion, ledger_opinion, pool
from spanloop.pipeline.attribution.reasons import reasons
from spanloop.pipeline.attribution.steps import Step, evidence_of, steps_of
from spanloop.pipeline.attribution.texts import Words, words_of
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.ports import Log
from spanloop.schemas import topics
from spanloop.schemas.canonical import unmicro
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    CreditAssigned,
    CreditNode,
    OrchestrationRevised,
    RewardsComputed,
    SpansReceived,
    decode,
)
from spanloop.schemas.orchestration import OrchestrationContent

__all__ = ["AgentBlame", "Failure", "StepBlame", "attribute", "explain_failure", "words_said"]

_SURE = 0.1
"""The least that the top step must be above an even draw, as a share of what it could be: less says little."""


class AgentBlame(msgspec.Struct, frozen=True):
    """An agent by name; its instances are one."""

    agent: str
    probability: float
    steps: int
    agent_ids: tuple[str, ...]


class StepBlame(msgspec.Struct, frozen=True):
    """A step."""

    step: int
    """Its number from 0; of an imported chat log the place in its history."""
    agent: str
    kind: str
    probability: float
    reasons: tuple[str, ...]
    t_ns: int
    event_ids: tuple[str, ...]
    span_ids: tuple[str, ...]


class Failure(msgspec.Struct, frozen=True):
    """Who and what is likely to blame in one orchestration."""

    orchestration_id: str
    tenant: str
    model: str
    confidence: str
    """usual: as accurate as measured. low: see notes."""
    agents: tuple[AgentBlame, ...]
    """The likeliest first."""
    steps: tuple[StepBlame, ...]
    """The likeliest first."""
    opinions: tuple[tuple[str, float], ...]
    """What else was heard (ledger, judge), and its weight."""
    notes: tuple[str, ...]
    accuracy: Mapping[str, Any]
    """Measured on labelled logs that the weights had not seen."""


def attribute(
    content: OrchestrationContent,
    words: Mapping[str, Words],
    *,
    nodes: Sequence[CreditNode] = (),
    judge: Judge | None = None,
    timeout_s: float = 30.0,
    model: Model | None = None,
) -> Failure:
    """Blame in ``content``.

    Args:
        content: What happened.
        words: What each span said, by span id; absent where the deployment keeps no content.
        nodes: The last ledger's accounts; empty: it has no credit.
        judge: Asked once, for at most ``timeout_s`` seconds.
        timeout_s: See ``judge``.
        model: Weights; by default those of this version.

    Raises:
        SchemaError: it holds no step that anybody could be blamed for.
    """
    model = model or shipped()
    table = table_of(steps_of(content, words))
    if not table.rows:
        raise SchemaError(
            f"orchestration {content.orchestration_id} holds no step of an agent: nobody to blame"
        )
    weights = model.words if table.has_words else model.structure
    opinions, notes = _heard(content.orchestration_id, table.steps, nodes, judge, timeout_s)
    chances = pool(probabilities(table, weights), opinions)
    usual = usual_row(table)
    order = sorted(range(len(chances)), key=lambda i: (-chances[i], i))
    agents = by_agent([step.agent for step in table.steps], chances)
    doubts = _doubts(table.has_words, len(table.steps), chances[order[0]], table.steps[order[0]], agents)
    return Failure(
        orchestration_id=content.orchestration_id,
        tenant=content.tenant,
        model=model.version,
        confidence="low" if doubts else "usual",
        agents=tuple(_agent(name, chance, table.steps) for name, chance in agents.items()),
        steps=tuple(
            _step(table.steps[i], chances[i], (*_told(opinions, i), *reasons(table.rows[i], usual, weights)))
            for i in order
        ),
        opinions=tuple((opinion.source, opinion.weight) for opinion in opinions),
        notes=(*doubts, *notes),
        accuracy=model.provenance.get("accuracy" if table.has_words else "accuracy_without_words", {}),
    )


def _heard(
    name: str, steps: tuple[Step, ...], nodes: Sequence[CreditNode], judge: Judge | None, timeout_s: float
) -> tuple[list[Opinion], list[str]]:
    """Other opinions, and why one that was expected is missing."""
    opinions: list[Opinion] = []
    notes: list[str] = []
    if nodes:
        from_ledger = ledger_opinion(steps, nodes)
        if from_ledger is None:
            notes.append("the ledger holds no loss on a step with an estimate of its own; it was not used")
        else:
            opinions.append(from_ledger)
    else:
        notes.append("there is no credit for it; the ledger was not used")
    if judge is not None:
        said = ask(judge, JudgeCase(name, steps), timeout_s)
        if isinstance(said, Opinion):
            opinions.append(said)
        else:
            notes.append(said)
    return opinions, notes


def _told(opinions: Sequence[Opinion], place: int) -> tuple[str, ...]:
    """What others say of one step, where they say more than an even draw would."""
    said = [(opinion.source, opinion.chances[place], len(opinion.chances)) for opinion in opinions]
    return tuple(
        f"{source} puts {share:.0%} of the loss on it" for source, share, count in said if share * count > 1
    )


def _doubts(
    has_words: bool, count: int, best: float, step: Step, agents: Mapping[str, float]
) -> tuple[str, ...]:
    doubts: list[str] = []
    if not has_words:
        doubts.append(
            "the texts of most steps are not kept ([content] training = true keeps them): only who acted when was looked at"
        )
    if count > 1 and best - 1 / count < _SURE * (1 - 1 / count):
        doubts.append(f"no step stands out: the likeliest has {best:.3f}, an even draw {1 / count:.3f}")
    if step.agent != next(iter(agents)):
        doubts.append(
            f"agent and step disagree: the likeliest step is {step.agent}'s, another agent's steps weigh more together"
        )
    return tuple(doubts)


def _agent(name: str, chance: float, steps: Sequence[Step]) -> AgentBlame:
    own = [step for step in steps if step.agent == name]
    return AgentBlame(name, chance, len(own), tuple(sorted({step.agent_id for step in own if step.agent_id})))


def _step(step: Step, chance: float, why: tuple[str, ...]) -> StepBlame:
    return StepBlame(step.index, step.agent, step.kind, chance, why, step.t_ns, step.event_ids, step.span_ids)


# ---------------------------------------------------------------- from a log


def explain_failure(log: Log, prefix: str, *, judge: Judge | None = None) -> Failure:
    """Blame in the orchestration whose id, or tenant/id, begins with ``prefix``.

    Raises:
        SchemaError: none begins with it, several do, or it holds no step.
    """
    content = _content(log, prefix)
    key = f"{content.tenant}/{content.orchestration_id}"
    nodes, outcome = _signal(log, key)
    found = attribute(content, words_said(log, content), nodes=nodes, judge=judge)
    if outcome is None:
        note = (
            "nothing on the log says that it failed (there is no outcome); what follows supposes that it did"
        )
    elif outcome > 0:
        note = (
            f"its outcome is {outcome:+g}, which may be no failure at all; what follows supposes that it is"
        )
    else:
        return found
    return msgspec.structs.replace(found, notes=(note, *found.notes))


def _content(log: Log, prefix: str) -> OrchestrationContent:
    last: dict[str, OrchestrationRevised] = {}
    for record in scan(log, (topics.ORCHESTRATIONS,)):
        name = record.key if "/" in prefix else record.key.partition("/")[2]
        if not prefix or not name.startswith(prefix):
            continue
        event = _decoded(record.value)
        if isinstance(event, OrchestrationRevised):
            known = last.get(record.key)
            if known is None or event.revision >= known.revision:
                last[record.key] = event
    found = {key: event.content for key, event in last.items() if event.content is not None}
    exact = {key: content for key, content in found.items() if prefix in (key, content.orchestration_id)}
    if len(exact or found) != 1:
        what = "no orchestration" if not found else f"{len(found)} orchestrations"
        raise SchemaError(f"{what} with an id that begins with {prefix!r}; `spanloop traces` lists them")
    return next(iter((exact or found).values()))


def words_said(log: Log, content: OrchestrationContent) -> dict[str, Words]:
    """What the spans of its evidence said; of a span sent twice, the version that said most."""
    wanted = evidence_of(content)
    keys = {f"{content.tenant}/{trace}" for trace in content.trace_ids}
    words: dict[str, Words] = {}
    for record in scan(log, (topics.SPANS,)):
        if record.key not in keys:
            continue
        event = _decoded(record.value)
        for span in event.spans if isinstance(event, SpansReceived) else ():
            if span.span_id in wanted:
                said = words_of(span)
                known = words.get(span.span_id)
                if known is None or (said.length, said.text) > (known.length, known.text):
                    words[span.span_id] = said
    return words


def _signal(log: Log, key: str) -> tuple[tuple[CreditNode, ...], float | None]:
    """The last ledger's accounts, and the team's outcome."""
    credit: CreditAssigned | None = None
    rewards: RewardsComputed | None = None
    for record in scan(log, (topics.REWARDS, topics.CREDITS)):
        if record.key != key:
            continue
        event = _decoded(record.value)
        if isinstance(event, CreditAssigned) and (credit is None or event.revision >= credit.revision):
            credit = event
        elif isinstance(event, RewardsComputed) and (rewards is None or event.revision >= rewards.revision):
            rewards = event
    outcome = next(
        (r.value for r in (rewards.rewards if rewards else ()) if r.name == "outcome" and r.unit == "team"),
        None,
    )
    return credit.nodes if credit else (), None if outcome is None else unmicro(outcome)


def _decoded(value: bytes) -> object:
    try:
        return decode(value)
    except SchemaError:
        return None
