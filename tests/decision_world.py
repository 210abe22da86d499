"""A world small enough for the decision policy's tests: the option whose feature fits the state pays.

An orchestration takes two decisions; each is over a menu of names that no other decision has, told apart by a feature alone, so that what
is learned must hold for menus never seen.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from spanloop.learner.decision_features import MenuItem
from spanloop.learner.decision_policy import DecisionNet, Scorer
from spanloop.learner.serving.decisions import Asked, answer
from spanloop.schemas.canonical import micro
from spanloop.schemas.events import Sample, SamplesBuilt
from spanloop.schemas.settings import Settings, load_settings

EXPLORATION = 0.05
COLOURS = ("red", "green", "blue")


def settings(workspace: Path, **learner: Any) -> Settings:
    """Settings of a small learner of decisions; ``learner`` overrides its section."""
    section = {
        "decisions": True, "width": 8, "decision_buckets": 256, "batch_orchestrations": 16, "minibatch_orchestrations": 8,
        "epochs": 2, "learning_rate": 2e-2, "gate_every": 1, "canary_min": 20, "entropy_start": 0.0,
        "advantage": "ledger", "canary_share": 0.3, **learner,
    }  # fmt: skip
    flags = {"workspace": str(workspace), "learner": section, "serving": {"exploration": EXPLORATION}}
    return load_settings(flags=flags)


def asked(rng: np.random.Generator, name: str, version: int) -> tuple[Asked, int]:
    """A decision and the place of its right option."""
    right = int(rng.integers(3))
    order = [int(i) for i in rng.permutation(3)]
    menu = [MenuItem(f"{name}-{i}", {"colour": COLOURS[i]}) for i in order]
    state = {"wanted": COLOURS[right], "noise": float(rng.random())}
    return Asked("spawn", list(menu), state, model=f"policy@v{version}", seed=name), order.index(right)


class World:
    """Plays orchestrations; everything is drawn from ``seed`` and the orchestration's number."""

    def __init__(self, seed: int = 0, *, noise: float = 0.1) -> None:
        self.seed = seed
        self.noise = noise
        self.played = 0

    def play(
        self, net: DecisionNet, version: int, *, holdout: bool = False, revision: int = 1
    ) -> SamplesBuilt:
        """One orchestration acted by ``net``."""
        number, self.played = self.played, self.played + 1
        rng = np.random.default_rng([self.seed, number])
        scorer = Scorer(net)
        rows: list[Sample] = []
        total = 0
        for call in range(2):
            request, right = asked(rng, f"{number}/{call}", version)
            got = answer(request, scorer, EXPLORATION)
            correct = got["options"][right] == got["chosen"]
            total += correct
            token = got["choices"][0]["logprobs"]["content"][0]
            menu = [int(o["token"].split(":")[1]) for o in token["top_logprobs"]]
            logps = [o["logprob"] for o in token["top_logprobs"]]
            expected = 0.5 * got["propensities"][right]
            rows.append(
                Sample(
                    call_id=f"{number}/{call}", agent_id="boss", role="orchestrator", policy_version=f"policy@v{version}",
                    prompt_token_ids=tuple(got["prompt_token_ids"]), response_token_ids=tuple(got["choices"][0]["token_ids"]),
                    logprobs=(token["logprob"],), advantages=(micro(0.5 * correct - expected),),
                    accounts=(f"token/{number}/{call}",), menu_ids=(tuple(menu),), menu_logprobs=(tuple(logps),), weight=0.5,
                )
            )  # fmt: skip
        reward = total / 2 + float(rng.normal(0, self.noise))
        return SamplesBuilt(
            orchestration_id=f"{self.seed}-{number:06d}", revision=revision, group=f"g{number}", harness="h",
            reward=micro(reward), baseline=micro(0.5), value_model="exact", holdout=holdout, rows=tuple(rows),
        )  # fmt: skip


def share_right(net: DecisionNet) -> float:
    """Mean probability of the right option over fresh menus."""
    rng, scorer = np.random.default_rng(99), Scorer(net)
    found = []
    for n in range(60):
        request, right = asked(rng, f"fresh-{n}", 0)
        found.append(answer(request, scorer, 0.0)["propensities"][right])
    return math.fsum(found) / len(found)
