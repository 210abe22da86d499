"""The learner's little world over a tiny Hugging Face model: one cue, one word as the answer, over the whole vocabulary.

An orchestration is two calls; each shows one of three cues, the policy says one token of its vocabulary, the reward is the
share that matches the cue. No menus, as vLLM answers without a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from learner_world import WORDS

from spanloop.learner.hf_base import base_of_settings
from spanloop.learner.hf_policy import HfPolicy
from spanloop.learner.model import Policy, TensorBatch
from spanloop.learner.registry import MemoryRegistry
from spanloop.learner.serving.memory import MemoryServing
from spanloop.learner.tiny_model import build_tiny_model
from spanloop.learner.trainer import Learner
from spanloop.pipeline.clock import ManualClock
from spanloop.pipeline.ports import Log
from spanloop.schemas.canonical import micro
from spanloop.schemas.events import Sample, SamplesBuilt
from spanloop.schemas.settings import Settings, load_settings

CUES, ANSWERS = (5, 6, 7), (8, 9, 10)
BOS, USER, ACT = 1, 12, 3
VOCABULARY = 15


def tiny(folder: Path) -> Path:
    """A base model for tests: 15 tokens, two layers."""
    return build_tiny_model(folder, WORDS, hidden=64, heads=2, layers=2, context=64)


def settings(workspace: Path, model: Path, **learner: Any) -> Settings:
    section = {
        "model": str(model), "batch_orchestrations": 16, "minibatch_orchestrations": 16, "epochs": 2, "learning_rate": 1e-2,
        "gate_every": 1, "canary_min": 20, "entropy_start": 0.05, "advantage": "ledger", "canary_share": 0.3, "max_length": 32,
        "max_staleness": 50, **learner,
    }  # fmt: skip
    return load_settings(flags={"workspace": str(workspace), "learner": section})


def first_policy(model: Path, **learner: Any) -> HfPolicy:
    base = base_of_settings(settings(Path("unused"), model, **learner).learner)
    return HfPolicy(base, base.initial(0))


def next_log_probs(net: Policy, prompts: Sequence[Sequence[int]]) -> np.ndarray:
    """(B, V) log-probabilities of the token after each prompt (equal lengths), as a server would compute them."""
    count, length = len(prompts), len(prompts[0])
    everything = torch.arange(VOCABULARY).repeat(count, 1)
    batch = batch_of(prompts, [length] * count, list(range(count)), [length - 1] * count, everything)
    with torch.no_grad():
        return net.decide(batch)[0].double().numpy()


def batch_of(
    ids: Any, lengths: Sequence[int], rows: Sequence[int], positions: Sequence[int], menus: torch.Tensor, *, full: bool = False
) -> TensorBatch:  # fmt: skip
    """Decisions with unit weights and no advantages."""
    count = len(rows)
    zeros = torch.zeros(count)
    return TensorBatch(
        ids_BT=torch.as_tensor(ids), lengths_B=torch.tensor(lengths), row_N=torch.tensor(rows),
        position_N=torch.tensor(positions), menu_NK=menus, open_NK=torch.ones_like(menus, dtype=torch.bool),
        chosen_N=torch.zeros(count, dtype=torch.int64), behaviour_N=zeros, advantage_N=zeros,
        values_NK=torch.zeros(menus.shape), valued_N=torch.zeros(count, dtype=torch.bool), weight_N=torch.ones(count) / count,
        full_N=torch.full((count,), full),
    )  # fmt: skip


class HfWorld:
    """Plays orchestrations; everything is drawn from ``seed`` and the orchestration's number."""

    def __init__(self, seed: int = 0, *, menus: bool = False) -> None:
        self.seed = seed
        self.menus = menus
        self.played = 0

    def play(self, net: Policy, version: int, *, holdout: bool = False) -> SamplesBuilt:
        return self.play_many(net, version, [holdout])[0]

    def play_many(self, net: Policy, version: int, holdouts: Sequence[bool]) -> list[SamplesBuilt]:
        """Orchestrations acted by ``net``."""
        rngs = [np.random.default_rng([self.seed, self.played + i]) for i in range(len(holdouts))]
        cues = [[int(rng.integers(3)) for _ in range(2)] for rng in rngs]
        prompts = [(BOS, USER, CUES[cue], ACT) for pair in cues for cue in pair]
        logp_BV = next_log_probs(net, prompts)
        built: list[SamplesBuilt] = []
        for i, rng in enumerate(rngs):
            rows, right = [], 0
            for call, cue in enumerate(cues[i]):
                logp_V = logp_BV[2 * i + call]
                token = int(rng.choice(VOCABULARY, p=np.exp(logp_V) / np.exp(logp_V).sum()))
                hit = token == ANSWERS[cue]
                right += hit
                expected = float(np.exp(logp_V)[ANSWERS[cue]])
                rows.append(
                    Sample(
                        call_id=f"{self.played}/{call}", agent_id="boss", role="orchestrator",
                        policy_version=f"policy@v{version}", prompt_token_ids=prompts[2 * i + call],
                        response_token_ids=(token,), logprobs=(float(np.float32(logp_V[token])),),
                        advantages=(micro(0.5 * (hit - expected)),), accounts=(f"token/{self.played}/{call}",),
                        menu_ids=(tuple(range(VOCABULARY)),) if self.menus else (),
                        menu_logprobs=(tuple(map(float, logp_V)),) if self.menus else (), weight=0.5,
                    )
                )  # fmt: skip
            built.append(
                SamplesBuilt(
                    orchestration_id=f"{self.seed}-{self.played:06d}", revision=1, group="g", harness="h",
                    reward=micro(right / 2), baseline=micro(0.5), value_model="exact", holdout=holdouts[i], rows=tuple(rows),
                )
            )  # fmt: skip
            self.played += 1
        return built


def share_right(net: Policy) -> float:
    """Probability of the right answer, mean over cues: the expected reward."""
    logp_BV = next_log_probs(net, [(BOS, USER, cue, ACT) for cue in CUES])
    return float(np.exp(logp_BV)[np.arange(3), list(ANSWERS)].mean())


def learner(log: Log, workspace: Path, model: Path, **section: Any) -> Learner:
    """A started learner on ``log``, with fakes for MLflow and serving."""
    made = Learner(
        settings(workspace, model, **section), log=log, registry=MemoryRegistry(), serving=MemoryServing(),
        clock=ManualClock(10**18),
    )  # fmt: skip
    made.start()
    return made
