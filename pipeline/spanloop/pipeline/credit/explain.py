"""How a reward became credit: the last ledger of an orchestration as a tree that says what made each split.

Reads ``credits``, ``rewards`` and ``samples`` from a log, and where Shapley values were exact the revision and the value model
that they came from; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from spanloop.pipeline.credit.asking import Asking
from spanloop.pipeline.credit.cast import cast_of
from spanloop.pipeline.credit.estimators.groups import group_stats, grpo, rloo
from spanloop.pipeline.credit.ledger import check_ledger
from spanloop.pipeline.credit.structural import coalitions_of
from spanloop.pipeline.credit.value_model import ValueModel
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.ports import Log
from spanloop.schemas import topics
from spanloop.schemas.canonical import unmicro
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import (
    CreditAssigned,
    CreditNode,
    Event,
    OrchestrationRevised,
    RewardsComputed,
    SamplesBuilt,
    ValueModelPublished,
    decode,
)
from spanloop.schemas.orchestration import OrchestrationContent

__all__ = [
    "WORDS",
    "Coalition",
    "Explanation",
    "Group",
    "Line",
    "explain_credit",
    "find_orchestration",
    "lines_of",
]

PAGE = 2_000


class Line(msgspec.Struct, frozen=True):
    """One account as printed."""

    id: str
    unit: str
    depth: int
    label: str
    credit: float
    """Units of reward."""
    raw: float | None
    """The estimator's own value; None: unknown."""
    residual: float | None
    """Credit - raw: what reconciliation added."""
    variance: float
    estimator: str
    subject: str
    parent: str = ""
    share: float | None = None
    """Share of what its parent had left after the estimates of its children that fell to it; None: nothing was left."""
    error: float | None = None
    """Standard error of ``raw``; None: unknown."""
    why: str = ""
    """What the estimator says, in words."""


class Group(msgspec.Struct, frozen=True):
    """The tries of one task under one harness, as far as the log has them."""

    tries: int
    status: str
    """ok, singleton or no_variance."""
    mean: float
    """Units of reward."""
    deviation: float
    """Sample standard deviation, units of reward."""
    grpo: float
    """This try's advantage, standard deviations."""
    rloo: float
    """The same less the mean of the others, units of reward."""
    said: str


class Coalition(msgspec.Struct, frozen=True):
    """A set of agents that worked side by side and what the state with their work alone is worth."""

    agents: tuple[str, ...]
    value: float


class Explanation(msgspec.Struct, frozen=True):
    """The ledger of one orchestration."""

    tenant: str
    orchestration_id: str
    revision: int
    reward: float
    status: str
    baseline: float
    value_model: str
    channels: tuple[tuple[str, float | None, float, str], ...]
    """Name, value, weight as paid, status of the team's reward channels."""
    lines: tuple[Line, ...]
    problems: tuple[str, ...]
    """What is not conserved; empty: all sums are exact."""
    group: Group | None = None
    """None: no final reward yet."""
    definitions: str = ""
    """Digest of the reward definitions that the value was computed under; empty: not recorded."""
    coalitions: tuple[tuple[Coalition, ...], ...] = ()
    """For each exact game of agents that worked side by side the values of all its coalitions."""


def find_orchestration(log: Log, prefix: str) -> tuple[str, str]:
    """(tenant, id) of the one orchestration whose id, or tenant/id, begins with ``prefix``.

    Raises:
        SchemaError: none begins with it, or several do.
    """
    found = {record.key for record in _records(log, topics.REWARDS) if _matches(record.key, prefix)}
    if not found:
        known = any(_matches(record.key, prefix) for record in _records(log, topics.ORCHESTRATIONS))
        why = (
            "it has no rewards yet: has the pipeline folded it?"
            if known
            else '`spanloop traces` lists what is there; the id of a trace is another: `spanloop query "SELECT orchestration_id '
            "FROM orchestrations WHERE list_contains(trace_ids, 'ID')\"`"
        )
        raise SchemaError(f"no orchestration with rewards begins with {prefix!r}; {why}")
    exact = {key for key in found if key.endswith(f"/{prefix}")}
    if len(exact or found) > 1:
        some = ", ".join(sorted(found)[:5])
        raise SchemaError(
            f"{prefix!r} is ambiguous: {len(found)} orchestrations begin with it ({some}); give more digits"
        )
    tenant, _, name = next(iter(exact or found)).partition("/")
    return tenant, name


def _matches(key: str, prefix: str) -> bool:
    return bool(prefix) and (
        key.startswith(prefix) if "/" in prefix else key.partition("/")[2].startswith(prefix)
    )


def _records(log: Log, topic: str) -> Iterator[Any]:
    return scan(log, [topic], batch=PAGE)


def _last(log: Log, topic: str, key: str) -> Event | None:
    newest: Event | None = None
    for record in _records(log, topic):
        if record.key == key:
            event = decode(record.value)
            if newest is None or event.revision >= newest.revision:  # type: ignore[attr-defined]
                newest = event
    return newest


def explain_credit(log: Log, prefix: str) -> Explanation:
    """The last ledger of the orchestration whose id begins with ``prefix``, checked."""
    tenant, name = find_orchestration(log, prefix)
    rewards = _last(log, topics.REWARDS, f"{tenant}/{name}")
    credit = _last(log, topics.CREDITS, f"{tenant}/{name}")
    if not isinstance(rewards, RewardsComputed):
        raise SchemaError(f"orchestration {name}: its rewards record is of another type")
    if not isinstance(credit, CreditAssigned) or not credit.nodes:
        why = "void, merged into another" if isinstance(credit, CreditAssigned) else rewards.status
        raise SchemaError(f"orchestration {name} has no credit: its reward is {why}")
    return Explanation(
        tenant=tenant,
        orchestration_id=name,
        revision=credit.revision,
        reward=unmicro(credit.reward),
        status=rewards.status,
        baseline=unmicro(credit.baseline),
        value_model=credit.value_model,
        definitions=rewards.definitions,
        channels=tuple(
            (r.name, None if r.value is None else unmicro(r.value), unmicro(r.weight), r.status)
            for r in rewards.rewards
            if r.unit == "team"
        ),
        lines=lines_of(credit.nodes),
        problems=tuple(_problems(credit, rewards)),
        group=_group(log, f"{tenant}/{name}"),
        coalitions=_coalitions(log, f"{tenant}/{name}", credit),
    )


WORDS = {
    "reward - baseline": "the reward less what was to be expected at the start",
    "sum/1": "the sum of what is below it",
    "value_difference/1": "what it added to the expected reward",
    "leave_one_out/1": "the value with its work less the value without it",
    "shapley/1": "Shapley value in all coalitions of those beside it",
    "shapley_sampled/1": "Shapley value from sampled orders of those beside it",
    "owen/1": "Owen value: its role's Shapley value, shared inside the role",
    "owen_sampled/1": "Owen value from sampled orders of those beside it",
    "precedence_shapley/1": "Shapley value over the orders in which spawners come first",
    "precedence_sampled/1": "Shapley value from sampled orders in which spawners come first",
    "gae/1": "turn-level GAE",
    "uniform/1": "unknown: nothing was estimated here, it has its even share of what is above it",
    "unidentified/1": "unidentified: nothing on the log tells its effect from others'",
    "residual/1": "chance, and what no account explains",
}
"""What estimators say (docs/credit.md)."""


def _group(log: Log, key: str) -> Group | None:
    last: dict[str, SamplesBuilt] = {}
    for record in _records(log, topics.SAMPLES):
        event = decode(record.value)
        if isinstance(event, SamplesBuilt):
            last[event.key] = event
    own = last.get(key)
    if own is None or "void" in own.excluded:
        return None
    rewards = [
        event.reward
        for event in last.values()
        if event.tenant == own.tenant and event.group == own.group and "void" not in event.excluded
    ]
    stats = group_stats(rewards)
    said = {
        "singleton": "the only try of its task: no group advantage, the baseline is the value model's",
        "no_variance": f"group of {stats.count}, no variance: advantage 0",
        "ok": f"group of {stats.count}: advantage {grpo(own.reward, stats).value:+.6f} standard deviations",
    }[stats.status]
    return Group(
        tries=stats.count,
        status=stats.status,
        mean=stats.mean,
        deviation=stats.deviation(),
        grpo=grpo(own.reward, stats).value,
        rloo=rloo(own.reward, stats).value,
        said=said,
    )


def _coalitions(log: Log, key: str, credit: CreditAssigned) -> tuple[tuple[Coalition, ...], ...]:
    """Values of all coalitions of those that were shared exactly; empty where the log no longer has the revision or the model."""
    if not any(node.estimator in _EXACT for node in credit.nodes):
        return ()
    content: OrchestrationContent | None = None
    for record in _records(log, topics.ORCHESTRATIONS):
        if record.key == key:
            event = decode(record.value)
            if isinstance(event, OrchestrationRevised) and event.revision == credit.orchestration_revision:
                content = event.content
    model: ValueModelPublished | None = None
    for record in _records(log, topics.MODELS):
        event = decode(record.value)
        if isinstance(event, ValueModelPublished) and event.version == credit.value_model:
            model = event if event.tenant == credit.tenant else model
    if content is None or model is None:
        return ()
    asking, cast = Asking(ValueModel.from_dict(model.parameters)), cast_of(content)
    coalitions_of(cast, asking)
    asking.answer()
    names = {node.subject: node.label for node in credit.nodes}
    shared = {node.subject for node in credit.nodes if node.estimator in _EXACT}
    return tuple(
        tuple(
            Coalition(tuple(f"{names.get(unit, '')} {unit}".strip() for unit in units), unmicro(value))
            for units, value in game.values
        )
        for game in coalitions_of(cast, asking)
        if shared.intersection(game.units)
    )


_EXACT = frozenset({"shapley/1", "owen/1", "precedence_shapley/1"})


def _problems(credit: CreditAssigned, rewards: RewardsComputed) -> list[str]:
    problems = check_ledger(credit.nodes, credit.reward, credit.baseline)
    if credit.revision == rewards.revision and rewards.team != credit.reward:
        problems.append(f"the ledger splits {credit.reward}, the rewards say {rewards.team}")
    return problems


def lines_of(nodes: Sequence[CreditNode]) -> tuple[Line, ...]:
    """Accounts depth first, children in their given order."""
    children: dict[str, list[CreditNode]] = {}
    for node in nodes:
        children.setdefault(node.parent, []).append(node)
    left = {key: [node.credit - (node.raw or 0) for node in below] for key, below in children.items() if key}
    lines: list[Line] = []
    waiting = [(node, 0) for node in reversed(children.get("", []))]
    while waiting:
        node, depth = waiting.pop()
        raw = None if node.raw is None else unmicro(node.raw)
        lines.append(
            Line(
                id=node.id,
                unit=node.unit,
                depth=depth,
                label=node.label,
                credit=unmicro(node.credit),
                raw=raw,
                residual=None if node.raw is None else unmicro(node.credit - node.raw),
                variance=node.variance,
                estimator=node.estimator,
                subject=node.subject,
                parent=node.parent,
                share=_share(node.credit - (node.raw or 0), left.get(node.parent, [])),
                error=None if node.raw is None else node.variance**0.5,
                why=WORDS.get(node.estimator, ""),
            )
        )
        waiting += [(child, depth + 1) for child in reversed(children.get(node.id, []))]
    return tuple(lines)


def _share(own: int, left: Sequence[int]) -> float | None:
    """Part of what was left that fell to one of its children."""
    whole = sum(map(abs, left))
    return abs(own) / whole if whole else None
