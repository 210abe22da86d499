"""Does the correction pay? What a policy reaches on the dispatch desk when every ticket was worked by the policy of L updates ago.

In process, with the system's own parts, as ``credit_ablation`` runs it (its sampling, signal, ``ValueTrainer`` and ``Updater``); the only
difference is that tickets are worked by older weights, and that the log-probabilities kept are those of these weights. Every arm
sees the same tickets, network, critic, credit (each token's own account), learning rate and number of updates.

naive       clipped PPO against the policy before the update, as if it had acted: mu is ignored (METHODS 4.2, "wrong")
reinforce   -A log theta, uncorrected
decoupled   the same PPO times w = p/mu, truncated (``[learner] objective = "decoupled_ppo"``, the default)

f = (return - random) / (optimum - random), both exact; the result of a run is the mean f of its last ``LAST`` measurements. The lag is
raised (``LAGS``) until the naive loss has lost at least ``LOSS`` of the on-policy result (decoupled at lag 0); there, decoupled has
to keep ``KEEP`` of it. Seeds are paired; intervals are Student's t over seeds. Staleness is not bounded here: by default the
learner drops what is more than four updates old. Finished runs go to a JSON lines file; ``--resume`` takes up there.
Run: .venv/bin/python benchmarks/off_policy.py [--workers 2] [--resume]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import msgspec
import torch
from _harness import ROOT, write
from credit_ablation import STUDENT, Config, Run, content_of, derived, play, world_of

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
LAGS = (1, 2, 4, 8)
SEEDS = (1, 2, 3, 4, 5)
CONFIG = Config(1e-3, 0.6, exploration=0.2)
"""The ledger arm's choice in ``credit_ablation``."""
UNCORRECTED = {
    "reinforce_uncorrected": Objective(reinforce, correction="none"),
    "ppo_uncorrected": msgspec.structs.replace(OBJECTIVES["decoupled_ppo"], correction="none"),
}
"""Objectives that nobody should train with, so that settings do not know them."""
ARMS = {"naive": "ppo_uncorrected", "reinforce": "reinforce_uncorrected", "decoupled": "decoupled_ppo"}


class Key(msgspec.Struct, frozen=True):
    """One run."""

    arm: str
    lag: int
    seed: int


class Lagging(Run):
    """A run whose tickets are worked by the weights of ``lag`` updates ago, the first ones by the first weights."""

    def __init__(self, key: Key, config: Config) -> None:
        OBJECTIVES.update(UNCORRECTED)
        super().__init__(world_of("desk"), "ledger", config, key.seed)
        self.hyper = msgspec.structs.replace(self.hyper, objective=ARMS[key.arm])
        self._acting: deque[PolicyNet] = deque([self.updater.net.twin()], maxlen=key.lag + 1)

    def step(self) -> None:
        exploration = self.config.exploration * 0.2 ** min(1.0, self.updates / self._decay_updates)
        first = self.played
        seeds = [f"{self.seed}/{first + n}" for n in range(self.config.batch)]
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
        while run.played < BUDGET:
            run.step()
            ess.append(run.ess)
            if run.played % EVALUATE_EVERY == 0:
                curve.append((run.played, run.measure()))
    return {
        "arm": key.arm, "lag": key.lag, "seed": key.seed, "f": round(statistics.fmean(f for _, f in curve[-LAST:]), 4),
        "ess": round(statistics.fmean(ess), 4), "curve": [(n, round(f, 4)) for n, f in curve],
        "cpu_s": round(time.process_time() - started, 1),
    }  # fmt: skip


class Runs:
    """Finished runs, in a JSON lines file."""

    def __init__(self, path: Path, *, resume: bool, workers: int) -> None:
        self._path, self._workers = path, workers
        self._known: dict[Key, dict[str, Any]] = {}
        if resume and path.exists():
            for line in path.read_text().splitlines():
                run = json.loads(line)
                self._known[Key(run["arm"], run["lag"], run["seed"])] = run
        else:
            path.unlink(missing_ok=True)

    def of(self, arm: str, lag: int, seeds: Sequence[int]) -> list[dict[str, Any]]:
        """One run a seed; those that are missing are made now."""
        keys = [Key(arm, lag, seed) for seed in seeds]
        missing = [key for key in keys if key not in self._known]
        with ProcessPoolExecutor(self._workers, mp_context=get_context("spawn")) as pool:
            for key, run in zip(missing, pool.map(work, missing), strict=True):
                self._known[key] = run
                with self._path.open("a") as file:
                    file.write(json.dumps(run) + "\n")
                print(
                    f"{arm} lag {lag} seed {key.seed}: f {run['f']}, ess {run['ess']}, {run['cpu_s']} s",
                    flush=True,
                )
        return [self._known[key] for key in keys]


def kept(runs: Sequence[dict[str, Any]], onpolicy: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Share of the on-policy result that is left: ratio of means, and the mean paired difference with its 95 % interval."""
    mine, best = [run["f"] for run in runs], [run["f"] for run in onpolicy]
    differences = [a - b for a, b in zip(mine, best, strict=True)]
    half = (
        STUDENT[len(differences)] * statistics.stdev(differences) / len(differences) ** 0.5
        if len(differences) in STUDENT
        else float("inf")
    )
    mean = statistics.fmean(differences)
    return {
        "f": mine, "kept": round(statistics.fmean(mine) / statistics.fmean(best), 4), "difference": round(mean, 4),
        "interval": [round(mean - half, 4), round(mean + half, 4)], "ess": round(statistics.fmean(r["ess"] for r in runs), 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument(
        "--all-lags", action="store_true", help="do not stop at the lag where the naive loss fails"
    )
    parser.add_argument("--arms", default="naive,decoupled", help=f"of {', '.join(ARMS)}")
    parser.add_argument(
        "--runs", type=Path, default=ROOT / "benchmarks" / "results" / "off_policy.runs.jsonl"
    )
    parser.add_argument("--one", help="ARM:LAG:SEED: a single run with its curve, no file")
    options = parser.parse_args()
    if options.one:
        arm, lag, seed = options.one.split(":")
        print(json.dumps(work(Key(arm, int(lag), int(seed)))))
        return
    seeds = SEEDS[: options.seeds]
    runs = Runs(options.runs, resume=options.resume, workers=options.workers)
    onpolicy = runs.of("decoupled", 0, seeds)
    lags: dict[str, Any] = {}
    found: int | None = None
    for lag in LAGS:
        lags[str(lag)] = {arm: kept(runs.of(arm, lag, seeds), onpolicy) for arm in options.arms.split(",")}
        if found is None and lags[str(lag)]["naive"]["kept"] <= 1.0 - LOSS:
            found = lag
        if found is not None and not options.all_lags:
            break
    at = lags.get(str(found), {})
    figures = {
        "tickets": BUDGET, "batch": CONFIG.batch, "config": CONFIG.label, "seeds": list(seeds),
        "on_policy": [run["f"] for run in onpolicy], "lags": lags,
        "lag": found, "naive_lost": None if found is None else round(1.0 - at["naive"]["kept"], 4),
        "decoupled_kept": None if found is None else at["decoupled"]["kept"], "wanted": KEEP,
    }  # fmt: skip
    write("off_policy", f".venv/bin/python {' '.join(['benchmarks/off_policy.py', *sys.argv[1:]])}", figures)


if __name__ == "__main__":
    main()
