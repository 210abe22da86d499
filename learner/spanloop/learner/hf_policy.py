"""LoRA on a Hugging Face causal LM as a policy.

Place: adapter of ``model.Policy`` where ``learner.model`` names a model folder. The base model is loaded once a process and
frozen; a version is only its LoRA tensors, put into the base for each call, so many versions share one base.

Invariants: nothing comes from the hub and no code from the model's folder runs; weights are safetensors; the first version is
the base itself (A random from the seed, B zero); the model is in eval mode always, so equal tensors give equal numbers; only LoRA
tensors have gradients. Rows are padded on the right, so position ids are the model's own and padding is masked.

Legend of suffixes: B rows, T positions, W width, N decisions, K options, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from spanloop.learner import hf_artifact
from spanloop.learner.hf_artifact import HfConfig, HfManifest
from spanloop.learner.hf_base import Base, base_of_settings, open_base, packed_tensors
from spanloop.learner.losses import decision_log_probs, menu_log_probs
from spanloop.learner.model import TensorBatch, Tolerance, other_policy
from spanloop.learner.packing import pack
from spanloop.learner.signing import Signer, Trust, trust_of
from spanloop.learner.tokenizer import Tokenizer
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.settings import Settings

__all__ = ["HfArtifact", "HfPolicy", "initial_lora", "load_artifact"]

LOGITS_MAX = 2**24
"""Logits (decisions times vocabulary) that exist at once; the backward pass computes them again."""
TOLERANCES = {"float32": Tolerance(1e-3, 1e-2), "bfloat16": Tolerance(0.06, 0.6)}
"""By the learner's dtype. bfloat16 on both sides, or on one: mean .03 and largest .17 nats were measured with a model of 135
million parameters; the bounds leave a factor of two and more."""


class HfArtifact(msgspec.Struct, frozen=True):
    """A verified LoRA version in memory. Its tokenizer is the base model's."""

    net: HfPolicy
    manifest: HfManifest
    tokenizer: Tokenizer | None = None


class HfPolicy:
    """One version: LoRA tensors over a shared base. Implements ``model.Policy``."""

    microbatched = True

    def __init__(self, base: Base, tensors: Mapping[str, Tensor], *, trainable: bool = False) -> None:
        wrong = sorted(
            n for n in base.shapes.keys() | tensors.keys()
            if n not in tensors or base.shapes.get(n) != tuple(tensors[n].shape)
        )  # fmt: skip
        if wrong:
            raise SchemaError(f"the adapter's tensors do not fit {base.config.base}: {', '.join(wrong[:5])}")
        self._base = base
        self._lora = {
            name: nn.Parameter(
                tensors[name].detach().to(base.device, torch.float32, copy=True), requires_grad=trainable
            )
            for name in base.shapes
        }

    @property
    def config(self) -> HfConfig:
        return self._base.config

    @property
    def tolerance(self) -> Tolerance:
        return TOLERANCES[self.config.dtype]

    def twin(self) -> HfPolicy:
        """The same version with tensors of its own, trainable."""
        return HfPolicy(self._base, self._lora, trainable=True)

    def trainable(self) -> dict[str, nn.Parameter]:
        """The LoRA tensors."""
        return dict(self._lora)

    def tensors(self) -> dict[str, Tensor]:
        """The LoRA tensors."""
        return {name: tensor.detach() for name, tensor in self._lora.items()}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Become the version with these tensors."""
        for name, parameter in self._lora.items():
            parameter.copy_(tensors[name])

    def decide(self, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        """See ``model.Policy``. Logits exist for a few decisions at a time."""
        states = self._tree_states if batch.packed and self._base.packs else self._states
        hidden_NW = states(batch.ids_BT, batch.lengths_B, batch.row_N, batch.position_N)
        score = _score_any if bool(batch.full_N.any()) else _score_menus
        few = max(1, LOGITS_MAX // self.config.vocabulary_size)
        found: list[tuple[Tensor, Tensor]] = []
        for start in range(0, hidden_NW.shape[0], few):
            part = slice(start, start + few)
            rest = [t[part].to(self._base.device) for t in (batch.menu_NK, batch.open_NK, batch.full_N)]
            arguments = (self._base.logits, hidden_NW[part], *rest)
            if torch.is_grad_enabled():
                got: Any = checkpoint(score, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                got = score(*arguments)
            found.append(got)
        return torch.cat([a for a, _ in found]).cpu(), torch.cat([b for _, b in found]).cpu()

    @torch.no_grad()
    def probe(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each prompt's tokens after the first."""
        found: list[list[float]] = []
        for prompt in prompts:
            ids_1T = torch.tensor([list(prompt)])
            position_N = torch.arange(len(prompt) - 1)
            lengths_B = torch.tensor([len(prompt)])
            hidden_NW = self._states(ids_1T, lengths_B, torch.zeros_like(position_N), position_N)
            logp_NV = self._base.logits(hidden_NW).log_softmax(-1)
            found.append(logp_NV.gather(1, ids_1T[0, 1:, None].to(logp_NV.device))[:, 0].tolist())
        return found

    def save(
        self,
        folder: Path,
        tokenizer: Tokenizer | None,
        about: Mapping[str, Any],
        signer: Signer | None = None,
    ) -> str:
        """Write the version as an adapter folder; returns its sha256."""
        return hf_artifact.save(folder, self._lora, self.config, about, signer)

    def _states(self, ids_BT: Tensor, lengths_B: Tensor, row_N: Tensor, position_N: Tensor) -> Tensor:
        """What the head reads at each decision: final states (N, W), or the logits themselves (``Base.direct``)."""
        device = self._base.device
        self._base.bind(self._lora)
        states_BTW = self._base.states(ids_BT.to(device), lengths_B.to(device))
        return states_BTW[row_N.to(device), position_N.to(device)]

    def _tree_states(self, ids_BT: Tensor, lengths_B: Tensor, row_N: Tensor, position_N: Tensor) -> Tensor:
        """``_states`` with what rows share computed once."""
        rows = [ids[:length] for ids, length in zip(ids_BT.numpy(), lengths_B.tolist(), strict=True)]
        packed = pack(rows)
        self._base.bind(self._lora)
        states_RLW = self._base.packed_states(*packed_tensors(packed, self._base.device))
        place_N = np.array(
            [packed.places[r][p] for r, p in zip(row_N.tolist(), position_N.tolist(), strict=True)], np.int64
        )
        return states_RLW.reshape(-1, states_RLW.shape[-1])[torch.from_numpy(place_N).to(self._base.device)]


def _score_any(
    logits: Any, hidden_NW: Tensor, menu_NK: Tensor, open_NK: Tensor, full_N: Tensor
) -> tuple[Tensor, Tensor]:
    return decision_log_probs(logits(hidden_NW), menu_NK, open_NK, full_N)


def _score_menus(
    logits: Any, hidden_NW: Tensor, menu_NK: Tensor, open_NK: Tensor, full_N: Tensor
) -> tuple[Tensor, Tensor]:
    logp_NK = menu_log_probs(logits(hidden_NW), menu_NK, open_NK)
    return logp_NK, torch.zeros(full_N.shape, device=full_N.device)


def load_artifact(folder: Path, *, sha256: str | None = None, trust: Trust | None = None) -> HfArtifact:
    """Read and verify a LoRA version, and its base where this process has not loaded it. Raises SchemaError."""
    manifest, tensors = hf_artifact.load(folder, sha256=sha256, trust=trust)
    return HfArtifact(HfPolicy(open_base(manifest.config), tensors), manifest)


def initial_lora(settings: Settings, folder: Path) -> tuple[HfConfig, None, HfPolicy]:
    """See ``trainer.initial_policy``; ``folder`` is version 0's."""
    base = base_of_settings(settings.learner)
    if folder.exists():
        trust = trust_of(settings.workspace)
        found = hf_artifact.read_manifest(folder, trust).config
        if found != base.config:
            raise other_policy(settings.workspace, found, base.config)
        return base.config, None, load_artifact(folder, trust=trust).net
    return base.config, None, HfPolicy(base, base.initial(settings.learner.seed))
