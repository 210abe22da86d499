"""One batch on several devices: torchrun starts a process each, which share the rows and shard the base model (FSDP2).

Place: ``training`` calls ``train_on_ranks`` instead of ``Updater.train`` where ``learner.ranks`` is more than 1. The batch goes through a
folder: weights, optimiser and rollouts in, weights, optimiser and metrics out. A batch stays a pure function of the log: a
rank that dies fails the batch, which is trained again from the same folder of facts.

How: every rank has all rollouts, the same LoRA tensors and the same random numbers. Of the parts that a minibatch goes through the
model in, rank r takes each r-th; gradients and proximal log-probabilities are summed over ranks, then each rank takes the
same optimiser step. The frozen base is what is large: its layers are sharded and gathered one at a time. Each rank does
as many forward passes as any other, since every pass gathers: one without a part repeats its last and counts it as nothing.
Invariants: weights are one process's up to the order of sums; equal on all ranks.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from spanloop.learner.batches import Rollout
from spanloop.learner.hf_artifact import HfConfig
from spanloop.learner.losses import LossTerms, joined
from spanloop.learner.model import TensorBatch
from spanloop.learner.update import Hyper, Updater, initialise_torch
from spanloop.schemas.errors import TerminalError

__all__ = ["Job", "RankedUpdater", "Result", "train_on_ranks"]

_JOB, _BEFORE, _AFTER, _RESULT = "job.json", "before.safetensors", "after.safetensors", "result.json"


class Job(msgspec.Struct, frozen=True):
    """One batch."""

    config: HfConfig
    device: str
    """cpu, or cuda: rank r then takes cuda:r."""
    hyper: Hyper
    batch: int
    steps: int
    skipped: int
    rollouts: tuple[Rollout, ...]


class Result(msgspec.Struct, frozen=True):
    """What came of it."""

    steps: int
    skipped: int
    metrics: dict[str, float]
    sharded: int = 0
    """Numbers of the base that one rank holds of its sharded layers."""


def train_on_ranks(
    updater: Updater, rollouts: Sequence[Rollout], hyper: Hyper, batch: int, *, device: str, ranks: int
) -> dict[str, float]:
    """``Updater.train`` on ``ranks`` processes.

    Raises:
        TerminalError: they failed; ``updater`` is as it was, and a restart trains the batch again.
    """
    with tempfile.TemporaryDirectory(prefix="spanloop-batch-") as name:
        folder = Path(name)
        job = Job(updater.net.config, device, hyper, batch, updater.steps, updater.skipped, tuple(rollouts))
        (folder / _JOB).write_bytes(msgspec.json.encode(job))
        save_file({k: t.contiguous().cpu() for k, t in updater.tensors().items()}, folder / _BEFORE)
        command = [
            sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}",
            "-m", "spanloop.learner.ranks", str(folder),
        ]  # fmt: skip
        done = subprocess.run(command, check=False, stderr=subprocess.PIPE, text=True)
        if done.returncode != 0:
            last = [line for line in done.stderr.splitlines() if "Error" in line][-1:] or ["no reason given"]
            raise TerminalError(f"{ranks} ranks could not train batch {batch}: {last[0].strip()[:300]}")
        result = msgspec.json.decode((folder / _RESULT).read_bytes(), type=Result)
        updater.restore(load_file(folder / _AFTER), steps=result.steps, skipped=result.skipped)
    return result.metrics


class RankedUpdater(Updater):
    """An updater that is one of several, each with a share of every minibatch."""

    _refuses = False

    def _parts(self, tensors: TensorBatch, hyper: Hyper) -> Iterator[tuple[TensorBatch, Tensor | None]]:
        """This rank's parts, as many as any rank has; a repeated one weighs nothing."""
        parts = list(tensors.parts(hyper.microbatch_tokens))
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for first in range(0, len(parts), ranks):
            mine = first + rank
            part, index_N = parts[min(mine, len(parts) - 1)]
            if mine >= len(parts):
                part = msgspec.structs.replace(part, weight_N=torch.zeros_like(part.weight_N))
            yield part, index_N

    @torch.no_grad()
    def _proximal(self, tensors: TensorBatch, hyper: Hyper) -> Tensor:
        mine_NK = super()._proximal(tensors, hyper)
        dist.all_reduce(mine_NK, op=dist.ReduceOp.MAX)  # whoever had the decision; CLOSED is below all else
        return mine_NK

    def _loss(self, tensors: TensorBatch, prox_NK: Tensor, hyper: Hyper, temperature: float) -> LossTerms:
        """Goes on after a loss that is not finite, as the other ranks do; the step is refused by all at its end."""
        terms = super()._loss(tensors, prox_NK, hyper, temperature)
        if not bool(torch.isfinite(terms.loss)):
            self._refuses = True
            terms = msgspec.structs.replace(terms, loss=torch.nan_to_num(terms.loss) * 0.0)
        if not bool(tensors.weight_N.any()):
            terms = msgspec.structs.replace(terms, decisions=0, weight=0.0, drift=(0.0, 0.0))
        return terms

    def _step(
        self, tensors: TensorBatch, prox_NK: Tensor, hyper: Hyper, temperature: float
    ) -> list[tuple[LossTerms, float]]:
        self._refuses = False
        found = super()._step(tensors, prox_NK, hyper, temperature)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, found)
        return [(joined([terms for terms, _ in step]), step[0][1]) for step in zip(*everyone, strict=True)]

    def _apply(self, hyper: Hyper) -> float:
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if self._refuses:
                parameter.grad.fill_(math.nan)
            dist.all_reduce(parameter.grad)
        return super()._apply(hyper)


def _main(folder: Path) -> None:
    """One rank."""
    from spanloop.learner.hf_base import Base, open_model
    from spanloop.learner.hf_policy import HfPolicy

    job = msgspec.json.decode((folder / _JOB).read_bytes(), type=Job)
    rank = int(os.environ["LOCAL_RANK"])
    device = job.device if job.device == "cpu" else f"cuda:{rank}"
    if device != "cpu":
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    initialise_torch(1, deterministic=device == "cpu")
    try:
        base = Base(open_model(job.config.base, job.config.dtype), job.config, device)
        sharded = base.shard()
        before = load_file(folder / _BEFORE)
        lora = {k.removeprefix("policy/"): t for k, t in before.items() if k.startswith("policy/")}
        updater = RankedUpdater(HfPolicy(base, lora))
        updater.restore(before, steps=job.steps, skipped=job.skipped)
        metrics = updater.train(job.rollouts, job.hyper, job.batch)
        if dist.get_rank() == 0:
            save_file({k: t.contiguous().cpu() for k, t in updater.tensors().items()}, folder / _AFTER)
            result = Result(updater.steps, updater.skipped, metrics, sharded)
            (folder / _RESULT).write_bytes(msgspec.json.encode(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
