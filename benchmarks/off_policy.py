"""Does the correction pay? What a policy reaches on the dispatch desk when every ticket was worked by the policy of L updates ago.

In process, with the system's own parts, as ``credit_ablation`` runs it (its sampling, signal, ``ValueTrainer`` and ``Updater``); the only
difference is that tickets are worked by older weights, and that the log-probabilities kept are those of these weights. Every arm
sees the same tickets, network, critic, credit (each token's own account), learning rate and number of updates.

naive       clipped PPO against the policy before the update, as if it had acted: mu is ignored (METHODS 4.2, "wrong")
reinforce   -A log theta, uncorrected
decoupled   the same PPO times w = p/mu, truncated (``[learner] objective = "decoupled_ppo"``, the default)

f = (return - random) / (optimum - random), both exact; the result of a run is the mean f of its last ``LAST`` measurements. The
lag is raised until the better of the two uncorrected losses has lost at least ``LOSS`` of the on-policy result (L = 0, the same objective as
decoupled); there, decoupled has to keep ``KEEP`` of it. Seeds are paired; intervals are Student's t over seeds.
Run: .venv/bin/python benchmarks/off_policy.py [--lags 0,8,16] [--seeds 5]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import credit_ablation as ablation
import msgspec
import torch
from _harness import ROOT, write
from credit_ablation import BATCH, Config, Run, content_of, derived, play, world_of

from spanloop.learner.objectives.registry import OBJECTIVES, Objective
from spanloop.learner.objectives.surrogates import reinforce
from spanloop.learner.policy import PolicyNet
from spanloop.learner.update import exact_numerics
from spanloop.schemas.canonical import digest

BUDGET = 6_144
"""Tickets of a run."""
EVALUATE_EVERY = 1_024
LAST = 3
LOSS, KEEP = 0.10, 0.95
LAGS = (0, 4, 8, 16)
SEEDS = (1, 2, 3, 4, 5)
CONFIG = Config(1e-3, 0.6, exploration=0.2)
"""The ledger arm's choice in ``credit_ablation``."""
OBJECTIVES["reinforce_uncorrected"] = Objective(reinforce, correction="none")
OBJECTIVES["ppo_uncorrected"] = msgspec.structs.replace(OBJECTIVES["decoupled_ppo"], correction="none")
ARMS = {"naive": "ppo_uncorrected", "reinforce": "reinforce_uncorrected", "decoupled": "decoupled_ppo"}


class Key(msgspec.Struct, frozen=True):
    """One run."""

    arm: str
    lag: int
    seed: int


class Lagging(Run):
    """A run whose tickets are worked by the weights of ``lag`` updates ago, the first ones by the first weights."""

    def __init__(self, key: Key, config: Config) -> None:
        super().__init__(world_of("desk"), "ledger", config, key.seed)
        self.hyper = msgspec.structs.replace(self.hyper, objective=ARMS[key.arm])
        self._acting: deque[PolicyNet] = deque([self.updater.net.twin()], maxlen=key.lag + 1)

    def step(self) -> None:
        exploration = self.config.exploration * 0.2 ** min(1.0, self.updates / self._decay_updates)
        first = self.updates * BATCH
        seeds = [f"{self.seed}/{first + n}" for n in range(BATCH)]
        played = play(self.world, self.tokenizer, self._acting[0], seeds, exploration)
        contents = [
            content_of(p, digest("ticket", s), self.updates) for p, s in zip(played, seeds, strict=True)
        ]
        drafts, built = derived(
            contents, [p.case.outcome() for p in played], self.critic, settings=self.settings
        )
        rollouts = [self.rollout(samples) for samples in built]
        self.critic.learn(drafts)
        self.updates += 1
        metrics = self.updater.train(rollouts, self.hyper, self.updates)
        self.ess = metrics.get("ess", 1.0)
        self._acting.append(self.updater.net.twin())


def work(key: Key) -> dict[str, Any]:
    """One run to the end of the budget."""
    torch.set_num_threads(1)
    started = time.process_time()
    run = Lagging(key, CONFIG)
    curve = [(0, run.measure())]
    ess: list[float] = []
    with exact_numerics():
        while run.updates * BATCH < BUDGET:
            run.step()
            ess.append(run.ess)
            if run.updates * BATCH % EVALUATE_EVERY == 0:
                curve.append((run.updates * BATCH, run.measure()))
    return {
        "arm": key.arm, "lag": key.lag, "seed": key.seed, "f": round(statistics.fmean(f for _, f in curve[-LAST:]), 4),
        "ess": round(statistics.fmean(ess), 4), "curve": [(n, round(f, 4)) for n, f in curve],
        "cpu_s": round(time.process_time() - started, 1),
    }  # fmt: skip


if __name__ == "__main__":
    arm, lag, seed = sys.argv[1].split(":")
    print(json.dumps(work(Key(arm, int(lag), int(seed)))))
