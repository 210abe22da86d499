"""Other opinions on who is to blame, pooled with the features': the ledger's, and a judge's where there is one.

Opinions are distributions over steps; the pool is linear, p = (1 - w) * features + w * other. A ledger's w is what is known of the
loss by variance (S^2 / (S^2 + V), as METHODS 3.4 weighs estimates) times the share of steps with an account of their own, at
most LEDGER_MAX; a judge's is its confidence, at most JUDGE_MAX. These two limits are set, not fitted: no labelled failures with
ledgers or judges were at hand. Published judges name the right step in 14 to 55 % of cases (METHODS 3.3), so none may overrule.
Invariants: pure; a pool of distributions is one; w = 0 changes nothing; rewards of 0 credit blame nobody.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from spanloop.pipeline.attribution.steps import Step
from spanloop.pipeline.credit.ledger import call_key
from spanloop.schemas.canonical import unmicro
from spanloop.schemas.events import CreditNode

__all__ = ["JUDGE_MAX", "LEDGER_MAX", "Opinion", "ledger_opinion", "pool", "verdict_opinion"]

LEDGER_MAX = 0.5
JUDGE_MAX = 0.5


class Opinion(msgspec.Struct, frozen=True):
    """A distribution over steps, and how much it weighs."""

    source: str
    weight: float
    chances: tuple[float, ...]


def pool(chances: Sequence[float], opinions: Sequence[Opinion]) -> tuple[float, ...]:
    """``chances`` with each opinion mixed in, in the order given.

    >>> pool((0.5, 0.5), [Opinion("judge", 0.5, (1.0, 0.0))])
    (0.75, 0.25)
    """
    mixed = list(chances)
    for opinion in opinions:
        mixed = [
            (1 - opinion.weight) * own + opinion.weight * other
            for own, other in zip(mixed, opinion.chances, strict=True)
        ]
    total = math.fsum(mixed)
    return tuple(value / total for value in mixed) if total else ()


def ledger_opinion(steps: Sequence[Step], nodes: Sequence[CreditNode]) -> Opinion | None:
    """Blame in proportion to the loss on each step's own account; None: no account of a step lost anything, or none is known.

    An account without an estimate of its own holds only what reconciliation spread over it, which blames nobody in particular.
    """
    turns = {node.id: node for node in nodes if node.unit == "turn"}
    tools = {node.subject: node for node in nodes if node.unit == "tool_call" and node.subject}
    own = [_account(step, turns, tools) for step in steps]
    known = [node for node in own if node is not None and node.raw is not None]
    losses = [
        max(0.0, -unmicro(node.credit)) if node is not None and node.raw is not None else 0.0 for node in own
    ]
    lost = math.fsum(losses)
    if not lost:
        return None
    doubt = math.fsum(
        node.variance
        for node, loss in zip(own, losses, strict=True)
        if node is not None and loss and math.isfinite(node.variance)
    )
    certain = lost * lost / (lost * lost + doubt)
    weight = LEDGER_MAX * certain * len(known) / len(steps)
    return Opinion("ledger", weight, tuple(loss / lost for loss in losses))


def verdict_opinion(steps: Sequence[Step], index: int, confidence: float, source: str) -> Opinion | None:
    """A judge's word for one step; None: there is no such step."""
    chances = tuple(float(step.index == index) for step in steps)
    return Opinion(source, JUDGE_MAX * min(1.0, max(0.0, confidence)), chances) if any(chances) else None


def _account(step: Step, turns: dict[str, CreditNode], tools: dict[str, CreditNode]) -> CreditNode | None:
    if step.call_id:
        return turns.get(f"turn:{call_key(step.call_id)}")
    return next((tools[event] for event in step.event_ids if event in tools), None)
