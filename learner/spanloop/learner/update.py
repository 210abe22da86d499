"""One batch of learning: weights and optimiser before it, rollouts, hyper-parameters -> weights and optimiser after it.

Place: ``trainer`` calls it between BatchCommitted and the checkpoint, a replay calls it with what the log says.
Invariants: deterministic given its arguments (one thread, deterministic kernels, all chance from the batch's number); a step
whose loss, gradient or resulting parameters are not finite leaves weights and optimiser as they were and is counted.

Legend of suffixes: B rows, T positions, N decisions, K options, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from spanloop.learner.arrays import Arrays, collate, minibatches, roles_of, standardised, summed, take
from spanloop.learner.batches import Rollout, with_advantages
from spanloop.learner.losses import CLOSED, LossTerms, joined, policy_loss
from spanloop.learner.model import Policy, TensorBatch, scored
from spanloop.learner.objectives.registry import OBJECTIVES, Objective
from spanloop.learner.objectives.surrogates import Clip
from spanloop.schemas.settings import Settings

__all__ = ["Hyper", "TensorBatch", "Updater", "exact_numerics", "hyper_of", "initialise_torch"]


class Hyper(msgspec.Struct, frozen=True):
    """Everything an update depends on besides weights and data; written on each BatchCommitted."""

    seed: int
    learning_rate: float
    epochs: int
    minibatch_orchestrations: int
    clip: float
    """Trust region below 1; above it too, unless ``clip_high`` is set."""
    entropy_start: float
    entropy_end: float
    entropy_updates: int
    advantage: str
    exploration: float
    max_staleness: int
    ratio_cap: float = 2.0
    """Truncation of drift-one weights (TIS, METHODS 4.2)."""
    gradient_norm: float = 1.0
    """Gradients are scaled down to this norm."""
    weight_decay: float = 0.0
    weighting: str = "decision"
    """decision, rollout, or one of ``objectives.means.MEANS``."""
    objective: str = "decoupled_ppo"
    """One of ``objectives.registry.OBJECTIVES``."""
    clip_high: float = 0.0
    """0: as ``clip``."""
    dual_clip: float = 0.0
    horizon: int = 0
    """Longest response in tokens, for seq-mean-token-sum-norm."""
    divergence: str = "reverse"
    """Direction of the all-action divergence, forward or reverse."""
    microbatch_tokens: int = 8192
    """Padded tokens that go through a large model at once (``Policy.microbatched``); less needs less memory."""
    packing: bool = False
    """A large model computes prefixes that rows share once (``packing``); changes the last bits."""
    standardise: bool = True
    """Divide account advantages by their root mean square over the batch (values keep their unit)."""
    normalise: str = "batch"
    """Over what that root mean square is taken: batch, or role: each role's own."""
    train_roles: tuple[str, ...] = ()
    """Roles whose calls are trained; empty: all."""
    source_max: int = 0
    """Orchestrations of one source that a batch trains on at most; 0: no bound."""
    corrections: bool = False
    """Late revisions of what was taught are made up for."""

    def named(self) -> Objective:
        """The objective with this update's numbers."""
        clip = Clip(self.clip, self.clip_high or self.clip, self.dual_clip)
        return msgspec.structs.replace(OBJECTIVES[self.objective], clip=clip, cap=self.ratio_cap)

    def temperature(self, batch: int) -> float:
        """Coefficient of the entropy for batch number ``batch`` (1, 2, ...): from start to end in equal steps, in equal
        ratios where both are positive.

        >>> h = hyper_of(Settings())
        >>> h.temperature(1) == h.entropy_start, h.temperature(10**6) == h.entropy_end
        (True, True)
        """
        done = min(1.0, max(0, batch - 1) / self.entropy_updates)
        if done in (0.0, 1.0):
            return self.entropy_end if done else self.entropy_start
        if min(self.entropy_start, self.entropy_end) > 0.0:
            return self.entropy_start * (self.entropy_end / self.entropy_start) ** done
        return self.entropy_start + (self.entropy_end - self.entropy_start) * done


def hyper_of(settings: Settings) -> Hyper:
    """The hyper-parameters that settings ask for; where they say nothing, the objective's own."""
    names = set(Hyper.__struct_fields__)
    values: dict[str, Any] = {k: v for k, v in settings.learner.model_dump().items() if k in names}
    named = OBJECTIVES[settings.learner.objective]
    high = named.clip.high if not values["clip"] else 0.0
    own = {
        "clip": named.clip.low,
        "clip_high": high,
        "dual_clip": named.clip.dual,
        "ratio_cap": named.cap,
        "weighting": named.mean,
        "horizon": settings.learner.max_length if settings.learner.model else settings.learner.context,
    }
    values |= {name: value for name, value in own.items() if not values[name]}
    values["packing"] = values["packing"] and not settings.learner.decisions
    share, batch = settings.learner.source_share_max, settings.learner.batch_orchestrations
    values |= {
        "corrections": settings.learner.late_corrections,
        "source_max": math.ceil(share * batch) if share < 1.0 else 0,
    }
    return Hyper(exploration=settings.serving.exploration, **values)


def initialise_torch(threads: int, *, deterministic: bool = True) -> None:
    """Process-wide torch settings: threads, deterministic kernels, no denormals (they cost 15 times, PARTS B.7)."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.set_flush_denormal(True)


@contextmanager
def exact_numerics() -> Iterator[None]:
    """The learner's torch settings for a while, in this thread: one thread, deterministic kernels, no denormals. A replay
    elsewhere gives the same bits only under them."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    flushing = _smallest() * 1.0 == 0.0
    initialise_torch(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(deterministic)
        torch.set_flush_denormal(flushing)


def _smallest() -> float:
    """The smallest denormal; reads as zero where denormals are flushed."""
    return math.ldexp(1.0, -1074)


class Updater:
    """A policy with its optimiser. ``tensors``/``restore`` carry both through a checkpoint."""

    def __init__(self, net: Policy) -> None:
        self.net: Any = net.twin()
        trainable = self.net.trainable()
        self.names = list(trainable)
        self._parameters = list(trainable.values())
        self._moments = {
            f"adam/{name}/{kind}": torch.zeros_like(parameter)
            for name, parameter in trainable.items()
            for kind in ("first", "second")
        }
        self.steps = 0
        self.skipped = 0

    def tensors(self) -> dict[str, Tensor]:
        """Weights (``policy/``) and moments (``adam/``), copied."""
        weights = {f"policy/{name}": t for name, t in self.net.tensors().items()}
        return {name: t.detach().clone() for name, t in (weights | self._moments).items()}

    def restore(self, tensors: Mapping[str, Tensor], *, steps: int, skipped: int) -> None:
        """Become what ``tensors`` returned."""
        self.net.restore(
            {name.removeprefix("policy/"): t for name, t in tensors.items() if name.startswith("policy/")}
        )
        self._moments = {
            f"adam/{name}/{kind}": tensors[f"adam/{name}/{kind}"].to(parameter.device, copy=True)
            for name, parameter in zip(self.names, self._parameters, strict=True)
            for kind in ("first", "second")
        }
        self.steps, self.skipped = steps, skipped

    def train(self, rollouts: Sequence[Rollout], hyper: Hyper, batch: int) -> dict[str, float]:
        """Learn from one batch in place; returns metrics (means over its steps)."""
        prepared, notes = with_advantages(rollouts, hyper.advantage)
        arrays = collate(prepared, weighting=hyper.weighting)
        if hyper.standardise:
            arrays = standardised(arrays, roles_of(prepared) if hyper.normalise == "role" else None)
        prox_NK = self._proximal(_tensors(arrays, hyper), hyper)
        temperature = hyper.temperature(batch)
        history: list[tuple[LossTerms, float]] = []
        for epoch in range(hyper.epochs):
            split = minibatches(
                len(prepared), hyper.minibatch_orchestrations, seed=(hyper.seed, batch, epoch)
            )
            for part in split:
                few, index_N = take(arrays, part)
                few = summed(few, hyper.weighting, hyper.horizon)
                chosen_NK = prox_NK[torch.from_numpy(index_N)]
                history.extend(self._step(_tensors(few, hyper), chosen_NK, hyper, temperature))
        return _summary(history) | {"temperature": temperature, **{k: float(v) for k, v in notes.items()}}

    def _parts(self, tensors: TensorBatch, hyper: Hyper) -> Iterator[tuple[TensorBatch, Tensor | None]]:
        """What goes through the network at once; the indices of its decisions are None where that is everything."""
        return tensors.parts(hyper.microbatch_tokens) if self.net.microbatched else iter([(tensors, None)])

    @torch.no_grad()
    def _proximal(self, tensors: TensorBatch, hyper: Hyper) -> Tensor:
        """(N, K) log-probabilities before the update."""
        found_NK = torch.full(tensors.menu_NK.shape, CLOSED)
        for part, index_N in self._parts(tensors, hyper):
            logp_NK, _ = self.net.decide(part)
            if index_N is None:
                return logp_NK
            found_NK[index_N] = logp_NK
        return found_NK

    def _step(
        self, tensors: TensorBatch, prox_NK: Tensor, hyper: Hyper, temperature: float
    ) -> list[tuple[LossTerms, float]]:
        for parameter in self._parameters:
            parameter.grad = None
        found: list[LossTerms] = []
        norm = math.nan
        for part, index_N in self._parts(tensors, hyper):
            prox = prox_NK if index_N is None else prox_NK[index_N]
            terms = self._loss(part, prox, hyper, temperature)
            if not bool(torch.isfinite(terms.loss)):
                break
            terms.loss.backward()
            found.append(msgspec.structs.replace(terms, loss=terms.loss.detach()))
        else:
            norm = self._apply(hyper)
        if not math.isfinite(norm):
            self.skipped += 1
            return []
        return [(joined(found), norm)]

    def _loss(self, tensors: TensorBatch, prox_NK: Tensor, hyper: Hyper, temperature: float) -> LossTerms:
        theta_NK, full = scored(self.net, tensors)
        return policy_loss(
            theta_NK,
            open_NK=tensors.open_NK,
            prox_NK=prox_NK,
            behaviour_N=tensors.behaviour_N,
            chosen_N=tensors.chosen_N,
            advantage_N=tensors.advantage_N,
            values_NK=tensors.values_NK,
            valued_N=tensors.valued_N,
            weight_N=tensors.weight_N,
            seq_N=tensors.row_N,
            num=tensors.lengths_B.shape[0],
            exploration=hyper.exploration,
            objective=hyper.named(),
            temperature=temperature,
            forward=hyper.divergence == "forward",
            full=full,
        )

    def _apply(self, hyper: Hyper) -> float:
        """One AdamW step if everything stays finite; returns the gradient norm, NaN when the step was skipped."""
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._parameters]
        norm = float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
        if not math.isfinite(norm):
            return math.nan
        scale = min(1.0, hyper.gradient_norm / (norm + 1e-12))
        updated, moments = self._adam([g * scale for g in gradients], hyper)
        if not all(bool(torch.isfinite(t).all()) for t in (*updated, *moments.values())):
            return math.nan
        with torch.no_grad():
            for parameter, value in zip(self._parameters, updated, strict=True):
                parameter.copy_(value)
        self._moments = moments
        self.steps += 1
        return norm

    @torch.no_grad()
    def _adam(self, gradients: list[Tensor], hyper: Hyper) -> tuple[list[Tensor], dict[str, Tensor]]:
        """AdamW (Loshchilov and Hutter, arXiv 1711.05101) with betas .9, .999, written out of place so that a step
        can be refused as a whole."""
        step = self.steps + 1
        updated: list[Tensor] = []
        moments: dict[str, Tensor] = {}
        for name, parameter, gradient in zip(self.names, self._parameters, gradients, strict=True):
            first = self._moments[f"adam/{name}/first"].lerp(gradient, 0.1)
            second = self._moments[f"adam/{name}/second"].mul(0.999).addcmul(gradient, gradient, value=0.001)
            denominator = (second / (1.0 - 0.999**step)).sqrt().add(1e-8)
            value = parameter * (1.0 - hyper.learning_rate * hyper.weight_decay)
            updated.append(value.addcdiv(first, denominator, value=-hyper.learning_rate / (1.0 - 0.9**step)))
            moments[f"adam/{name}/first"], moments[f"adam/{name}/second"] = first, second
        return updated, moments


def _tensors(arrays: Arrays, hyper: Hyper) -> TensorBatch:
    return msgspec.structs.replace(TensorBatch.of(arrays), packed=hyper.packing)


def _summary(history: Sequence[tuple[LossTerms, float]]) -> dict[str, float]:
    if not history:
        return {}
    names = ("entropy", "clipped", "kl", "ess")
    means = {name: float(np.mean([getattr(terms, name) for terms, _ in history])) for name in names}
    means["loss"] = float(np.mean([float(terms.loss) for terms, _ in history]))
    means["gradient_norm"] = float(np.mean([norm for _, norm in history]))
    return means
