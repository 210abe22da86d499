"""Residuals of the ledger: noise is no alarm, bias is one."""

from __future__ import annotations

import random

from spanloop.pipeline.credit.residuals import alarm, levels_of
from spanloop.schemas.events import CreditAssigned, CreditNode


def ledger(rng: random.Random, n: int, *, bias: float = 0.0, chance: float = 0.0, model: str = "value@v1"):
    first, second = (rng.gauss(0.3 + bias, 0.1) for _ in range(2))
    luck = rng.gauss(chance, 0.2)
    total = round((0.6 + luck) * 1e6)
    return CreditAssigned(
        tenant="t", orchestration_id=f"o{n}", revision=1, orchestration_revision=1, reward=total, baseline=0,
        value_model=model,
        nodes=(
            CreditNode("team", "team", "", "team", total),
            CreditNode("role:r", "role", "team", "r", 600_000),
            CreditNode("environment", "role", "team", "environment", round(luck * 1e6)),
            CreditNode("agent:a", "agent", "role:r", "a", 300_000, round(first * 1e6), 0.01),
            CreditNode("agent:b", "agent", "role:r", "b", 300_000, round(second * 1e6), 0.01),
        ),
    )  # fmt: skip


def said(*, bias: float = 0.0, chance: float = 0.0) -> list[str]:
    rng = random.Random(0)
    return [
        text
        for level in levels_of(ledger(rng, n, bias=bias, chance=chance) for n in range(300))
        if (text := alarm(level))
    ]


def test_noise_is_no_alarm_and_z_has_the_spread_that_was_promised():
    assert said() == []
    rng = random.Random(1)
    (level,) = [found for found in levels_of(ledger(rng, n) for n in range(400)) if found.name == "role"]
    assert abs(level.mean) < 0.2
    assert 0.85 < level.deviation < 1.15


def test_bias_is_said_by_level():
    (text,) = said(bias=0.1)
    assert "role accounts are biased" in text
    (text,) = said(chance=-0.1)
    assert "promises too much" in text
    (text,) = said(chance=0.1)
    assert "promises too little" in text


def test_too_few_and_ledgers_without_a_model_say_nothing():
    rng = random.Random(0)
    few = levels_of(ledger(rng, n, chance=1.0) for n in range(10))
    assert [alarm(level) for level in few] == [""] * len(few)
    assert levels_of([ledger(rng, 0, model="none")]) == []
