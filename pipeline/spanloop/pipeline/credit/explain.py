"""How a reward became credit: the last ledger of an orchestration as a tree that says what made each split.

Reads ``credits`` and ``rewards`` from a log; changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from spanloop.pipeline.credit.ledger import check_ledger
from spanloop.pipeline.log.scan import scan
from spanloop.pipeline.ports import Log
from spanloop.schemas import topics
from spanloop.schemas.canonical import unmicro
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import CreditAssigned, CreditNode, Event, RewardsComputed, decode

__all__ = ["Explanation", "Line", "explain_credit", "find_orchestration", "lines_of"]

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
            else "`spanloop traces` lists what is there"
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
        channels=tuple(
            (r.name, None if r.value is None else unmicro(r.value), unmicro(r.weight), r.status)
            for r in rewards.rewards
            if r.unit == "team"
        ),
        lines=lines_of(credit.nodes),
        problems=tuple(_problems(credit, rewards)),
    )


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
            )
        )
        waiting += [(child, depth + 1) for child in reversed(children.get(node.id, []))]
    return tuple(lines)
