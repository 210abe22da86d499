"""The tickets of the help desk, and what becomes of them: who can work on one, and what resolves it.

Two decisions make an outcome. A ticket names a symptom and a product; four teams own two symptoms each, and each symptom has one
remedy among four, the same four for every team. The right team earns 0.3, the right remedy by the right team 0.7 more: by chance
0.12, at best 1. Nothing here is told to the agents; they find out from outcomes.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = [
    "BEST",
    "CHANCE",
    "PRODUCTS",
    "REMEDIES",
    "SYMPTOMS",
    "TEAMS",
    "WORDS",
    "Ticket",
    "new_ticket",
    "outcome",
]

TEAMS = ("billing", "network", "identity", "hardware")
REMEDIES = ("refund", "reset", "replace", "restart")
SYMPTOMS = {
    "overcharged": ("billing", "refund"),
    "unpaid": ("billing", "reset"),
    "offline": ("network", "restart"),
    "slow": ("network", "replace"),
    "locked-out": ("identity", "reset"),
    "forgotten": ("identity", "restart"),
    "broken": ("hardware", "replace"),
    "noisy": ("hardware", "refund"),
}
"""Symptom -> the team that owns it, the remedy that resolves it."""
PRODUCTS = ("laptop", "phone", "printer", "router")
"""Named in a ticket, and of no importance."""
WORDS = (*TEAMS, *REMEDIES, *SYMPTOMS, *PRODUCTS)
"""All that agents read and say: the vocabulary of the tiny model."""
CHANCE = 0.3 / len(TEAMS) + 0.7 / len(TEAMS) / len(REMEDIES)
BEST = 1.0


@dataclass(frozen=True)
class Ticket:
    """What a customer wrote."""

    symptom: str
    product: str

    @property
    def text(self) -> str:
        """As the agents read it."""
        return f"{self.symptom} {self.product}"


def new_ticket(seed: int, number: int) -> Ticket:
    """Ticket ``number`` of a seed; the same for ever.

    >>> new_ticket(0, 1) == new_ticket(0, 1)
    True
    """
    rng = random.Random(f"{seed}/{number}")
    return Ticket(rng.choice(tuple(SYMPTOMS)), rng.choice(PRODUCTS))


def outcome(ticket: Ticket, team: str, remedy: str) -> float:
    """What the customer says afterwards, from 0 to 1.

    >>> outcome(Ticket("slow", "phone"), "network", "replace"), outcome(Ticket("slow", "phone"), "billing", "replace")
    (1.0, 0.0)
    """
    owner, cure = SYMPTOMS[ticket.symptom]
    if team != owner:
        return 0.0
    return 1.0 if remedy == cure else 0.3
