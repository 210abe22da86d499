"""A world small enough for the learner's tests: two cues, three answers, the right answer pays.

An orchestration is two calls; each shows one of three cues, the policy picks one of three words, the reward is the share
that matches the cue plus noise. ``World.play`` samples a policy as the embedded server does (exploration floor) and
returns the SamplesBuilt that the pipeline would have made.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spanloop.learner.losses import menu_log_probs
from spanloop.learner.policy import PolicyConfig, PolicyNet
from spanloop.learner.registry import MemoryRegistry
from spanloop.learner.serving.memory import MemoryServing
from spanloop.learner.trainer import Learner
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.ports import Log, new_record
from spanloop.schemas.canonical import micro
from spanloop.schemas.events import Sample, SamplesBuilt
from spanloop.schemas.settings import Settings, load_settings

WORDS = ("cue-a", "cue-b", "cue-c", "a", "b", "c")
CUES, ANSWERS = (5, 6, 7), (8, 9, 10)
BOS, ACT = 1, 3
EXPLORATION = 0.05
CONFIG = PolicyConfig(vocabulary_size=11, width=16, layers=1, heads=2, context=16)


def settings(workspace: Path, **learner: Any) -> Settings:
    """Settings of a small learner; ``learner`` overrides its section."""
    section = {
        "vocabulary": WORDS, "width": 16, "heads": 2, "context": 16, "batch_orchestrations": 16,
        "minibatch_orchestrations": 8, "epochs": 2, "learning_rate": 1e-2, "gate_every": 1, "canary_min": 20,
        "entropy_start": 0.0, "advantage": "ledger", "canary_share": 0.3, **learner,
    }  # fmt: skip
    flags = {"workspace": str(workspace), "learner": section, "serving": {"exploration": EXPLORATION}}
    return load_settings(flags=flags)


class World:
    """Plays orchestrations; everything is drawn from ``seed`` and the orchestration's number."""

    def __init__(self, seed: int = 0, *, noise: float = 0.1, values: bool = True) -> None:
        self.seed = seed
        self.noise = noise
        self.values = values
        self.played = 0

    def play(self, net: PolicyNet, version: int, *, holdout: bool = False, revision: int = 1) -> SamplesBuilt:
        """One orchestration acted by ``net``."""
        number, self.played = self.played, self.played + 1
        rng = np.random.default_rng([self.seed, number])
        rows: list[Sample] = []
        right = 0
        for call in range(2):
            cue = int(rng.integers(3))
            prompt = (BOS, CUES[cue], ACT)
            menu = ANSWERS
            with torch.no_grad():
                logits = net(torch.tensor([prompt]))[:, -1]
                logp = menu_log_probs(
                    logits, torch.tensor([menu]), torch.ones(1, 3, dtype=torch.bool), EXPLORATION
                )
            logps = [float(x) for x in logp[0]]
            chosen = int(rng.choice(3, p=np.exp(logps) / np.exp(logps).sum()))
            right += chosen == cue
            values = tuple(micro(0.5 * (a == cue)) for a in range(3))
            expected = sum(math.exp(p) * v for p, v in zip(logps, values, strict=True))
            rows.append(
                Sample(
                    call_id=f"{number}/{call}",
                    agent_id="boss",
                    role="orchestrator",
                    policy_version=f"policy@v{version}",
                    prompt_token_ids=prompt,
                    response_token_ids=(menu[chosen],),
                    logprobs=(logps[chosen],),
                    advantages=(round(values[chosen] - expected),),
                    accounts=(f"token/{number}/{call}",),
                    menu_ids=(menu,),
                    menu_logprobs=(tuple(logps),),
                    menu_values=(values,) if self.values else (),
                    weight=0.5,
                )
            )
        reward = right / 2 + float(rng.normal(0, self.noise))
        return SamplesBuilt(
            orchestration_id=f"{self.seed}-{number:06d}", revision=revision, group=f"g{number}", harness="h",
            reward=micro(reward), baseline=micro(0.5), value_model="exact", holdout=holdout, rows=tuple(rows),
        )  # fmt: skip


def share_right(net: PolicyNet) -> float:
    """Probability of the right answer under a policy's softmax, mean over cues."""
    with torch.no_grad():
        logits = net(torch.tensor([[BOS, cue, ACT] for cue in CUES]))[:, -1]
        return float(logits[:, list(ANSWERS)].softmax(-1).diagonal().mean())


def learner(
    log: Log, workspace: Path, *, registry: Any = None, serving: Any = None, clock: ManualClock | None = None,
    **section: Any,
) -> Learner:  # fmt: skip
    """A started learner on ``log``, with fakes for MLflow and serving."""
    made = Learner(
        settings(workspace, **section),
        log=log,
        registry=registry or MemoryRegistry(),
        serving=serving or MemoryServing(),
        clock=clock or ManualClock(10**18),
    )
    made.start()
    return made


def traffic(made: Learner, world: World, count: int, rng: np.random.Generator) -> list[SamplesBuilt]:
    """``count`` orchestrations, each served as the newest routing says."""
    routing = made.promoter.state.routing
    assert routing is not None
    built: list[SamplesBuilt] = []
    for _ in range(count):
        u = rng.random()
        version = routing.champion
        if u < routing.canary_share:
            version = routing.canary
        elif u < routing.canary_share + routing.learning_share:
            version = routing.learner
        built.append(world.play(made.promoter.net(version), version, holdout=bool(rng.random() < 0.3)))
    return built


def append(log: Log, built: Iterable[SamplesBuilt]) -> None:
    log.append([new_record(b) for b in built])


def drive(made: Learner, log: Log, world: World, rounds: int, *, per_round: int = 20, seed: int = 0) -> None:
    """Traffic and learner by turns."""
    rng = np.random.default_rng(seed)
    made.step()
    for _ in range(rounds):
        append(log, traffic(made, world, per_round, rng))
        made.step()


def counts(events: Iterable[Any]) -> Mapping[str, int]:
    """Type name -> number."""
    found: dict[str, int] = {}
    for event in events:
        found[type(event).__name__] = found.get(type(event).__name__, 0) + 1
    return found
