"""A Hugging Face causal LM, frozen, with places for the LoRA tensors of one version at a time.

Place: under ``hf_policy``. Loaded once a process for each ``HfConfig``; every version of a deployment shares it.
Invariants: nothing comes from the hub and no code from the model's folder runs; weights are safetensors; eval mode always.

Legend of suffixes: B rows, T positions, W width, N decisions, V vocabulary.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spanloop.learner.hf_artifact import HfConfig
from spanloop.learner.packing import Packed, pack
from spanloop.schemas.errors import ConfigError, SchemaError
from spanloop.schemas.settings import Learner

__all__ = ["Base", "base_of_settings", "config_of", "open_base", "open_model", "packed_tensors"]

_PREFIX = "base_model.model."
"""Before peft's names of layers in an adapter file."""
_HASHED = ("config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_BASES: dict[HfConfig, Base] = {}
_PACKED_ATOL = {"float32": 1e-4, "bfloat16": 5e-2}


class Base:
    """A frozen model with places for LoRA tensors.

    Args:
        model: From ``open_model``; its layers are changed.
        config: Of the versions that it will carry.
        device: Where it computes.
    """

    def __init__(self, model: Any, config: HfConfig, device: str) -> None:
        from peft import LoraConfig, inject_adapter_in_model

        lora = LoraConfig(
            r=config.rank,
            lora_alpha=config.alpha,
            target_modules=list(config.targets),
            fan_in_fan_out=config.transposed,
            task_type="CAUSAL_LM",
        )
        self.config = config
        self.device = torch.device(device)
        self._model = inject_adapter_in_model(lora, model).eval().requires_grad_(False).to(self.device)
        found = {
            _PREFIX + name.replace(".default.", "."): self._model.get_submodule(name.removesuffix(".weight"))
            for name, _ in self._model.named_parameters()
            if ".lora_A." in name or ".lora_B." in name
        }
        self._slots: dict[str, Any] = {name: found[name] for name in sorted(found)}
        self.shapes: dict[str, tuple[int, ...]] = {n: tuple(s.weight.shape) for n, s in self._slots.items()}
        self._decoder: Any = self._model.get_decoder()  # type: ignore[operator]
        self._head: Any = self._model.get_output_embeddings()  # type: ignore[operator]
        self.direct = self._is_direct()
        """Whether the head alone turns final states into logits. Some models scale or cap them after it; then the whole
        model is asked, which costs logits at every position."""
        self.packs = self._packs()
        """Whether rows that share a prefix can go through as a tree (``packing``)."""

    def shard(self) -> int:
        """Shard the decoder's layers over the ranks of the default process group (FSDP2); places for LoRA tensors, embeddings and
        head stay whole. Returns how many numbers of the sharded layers this rank holds.

        From now on every rank has to make the same forward and backward passes."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        whole = {slot.weight for slot in self._slots.values()}
        mesh = init_device_mesh(self.device.type, (torch.distributed.get_world_size(),))
        held = 0
        for layer in self._decoder.layers:
            fully_shard(layer, mesh=mesh, ignored_params=whole)
            own = [p for p in layer.parameters() if p not in whole]
            held += sum(p.to_local().numel() for p in own)
        return held

    def bind(self, tensors: Mapping[str, nn.Parameter]) -> None:
        """Compute with these tensors from now on. A backward pass has to come before the next bind."""
        for name, slot in self._slots.items():
            slot._parameters["weight"] = tensors[name]

    def states(self, ids_BT: Tensor, lengths_B: Tensor) -> Tensor:
        """Final states (B, T, W), or logits (B, T, V) where not ``direct``."""
        inside_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None, :] < lengths_B[:, None]
        arguments = {"input_ids": ids_BT, "attention_mask": inside_BT.long(), "use_cache": False}
        return (
            self._decoder(**arguments).last_hidden_state if self.direct else self._model(**arguments).logits
        )

    def packed_states(self, ids_RL: Tensor, positions_RL: Tensor, seen_RLL: Tensor) -> Tensor:
        """``states`` of packed trees: each token sees those that ``seen_RLL`` says, at the position that it has in its row."""
        dtype = next(self._model.parameters()).dtype
        mask_R1LL = torch.zeros(seen_RLL.shape, dtype=dtype, device=seen_RLL.device)[:, None]
        mask_R1LL.masked_fill_(~seen_RLL[:, None], torch.finfo(dtype).min)
        arguments = {
            "input_ids": ids_RL, "position_ids": positions_RL, "attention_mask": mask_R1LL, "use_cache": False,
        }  # fmt: skip
        return (
            self._decoder(**arguments).last_hidden_state if self.direct else self._model(**arguments).logits
        )

    @torch.no_grad()
    def _packs(self) -> bool:
        """Whether a packed tree gives what its rows give: tried once, as some models have other positions or masks of their own."""
        settings: Any = self._model.config
        window = getattr(settings.get_text_config(), "sliding_window", None)
        if window and window < self.config.context:
            return False
        ids = [
            np.array([1, 2, 3, 4, 5, 6, 7, 8, *more]) % self.config.vocabulary_size
            for more in ([9, 1], [2, 2, 5])
        ]
        packed = pack([*ids, ids[0][::-1]])
        try:
            tree = self.packed_states(*packed_tensors(packed, self.device))
            flat = tree.reshape(-1, tree.shape[-1])
            for row, places in zip([*ids, ids[0][::-1]], packed.places, strict=True):
                ids_1T = torch.from_numpy(row.copy())[None].to(self.device)
                alone = self.states(ids_1T, torch.tensor([len(row)], device=self.device))[0]
                here = flat[torch.from_numpy(places).to(self.device)]
                if not torch.allclose(
                    alone.float(), here.float(), rtol=1e-2, atol=_PACKED_ATOL[self.config.dtype]
                ):
                    return False
        except (RuntimeError, TypeError, ValueError, IndexError):
            return False
        return True

    def logits(self, states_NW: Tensor) -> Tensor:
        """Logits (N, V), float32."""
        return (self._head(states_NW) if self.direct else states_NW).float()

    def initial(self, seed: int) -> dict[str, Tensor]:
        """Tensors of the first version: A as peft draws it (Kaiming uniform), from the seed; B zero."""
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, Tensor] = {}
        for name, shape in self.shapes.items():
            tensors[name] = torch.zeros(shape)
            if ".lora_A." in name:
                tensors[name].uniform_(-1.0, 1.0, generator=generator).mul_(shape[1] ** -0.5)
        return tensors

    @torch.no_grad()
    def _is_direct(self) -> bool:
        ids_1T = torch.arange(1, 9, device=self.device)[None] % self.config.vocabulary_size
        try:
            wanted = self._model(input_ids=ids_1T, use_cache=False).logits.float()
            states = self._decoder(input_ids=ids_1T, use_cache=False).last_hidden_state
            return bool(torch.allclose(self._head(states).float(), wanted, rtol=1e-5, atol=1e-5))
        except (AttributeError, RuntimeError, TypeError):
            return False


def packed_tensors(packed: Packed, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids (R, L), positions (R, L) and what each token sees (R, L, L)."""
    arrays = (packed.ids_RL, packed.positions_RL, packed.seen_RLL())
    ids_RL, positions_RL, seen_RLL = (torch.from_numpy(array).to(device) for array in arrays)
    return ids_RL, positions_RL, seen_RLL


def open_model(folder: str, dtype: str) -> Any:
    """A causal LM from a local folder, frozen weights in ``dtype``. Raises ConfigError."""
    if not (Path(folder) / "config.json").is_file():
        raise ConfigError(
            f"learner.model = {folder!r} is no Hugging Face model folder (no config.json in it); nothing is downloaded: put "
            "the model there first"
        )
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging as transformers_logging
    except ModuleNotFoundError as exc:
        raise ConfigError(
            f"learner.model needs {exc.name}: pip install 'spanloop[finetune]', or empty learner.model for the embedded policy"
        ) from exc
    transformers_logging.disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            dtype=getattr(torch, dtype),
        )
    except (OSError, ValueError, KeyError) as exc:
        first = next(iter(str(exc).strip().splitlines()), type(exc).__name__)
        raise ConfigError(f"learner.model = {folder!r} cannot be loaded: {first[:300]}") from exc


def config_of(settings: Learner, model: Any) -> HfConfig:
    """Shape of the versions that settings ask for. Raises ConfigError."""
    linear = _linear_layers(model)
    targets = tuple(sorted(set(settings.lora_targets))) or tuple(sorted(linear))
    unknown = sorted(set(targets) - linear.keys())
    if unknown or not targets:
        raise ConfigError(
            f"learner.lora_targets names {', '.join(unknown) or 'nothing'}; linear layers of {settings.model} are "
            f"{', '.join(sorted(linear))} (the output head stays as it is)"
        )
    text = model.config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or settings.max_length
    return HfConfig(
        base=settings.model,
        base_hash=_base_hash(settings.model),
        vocabulary_size=int(model.get_input_embeddings().weight.shape[0]),
        context=min(int(longest), settings.max_length),
        rank=settings.lora_rank,
        alpha=settings.lora_alpha,
        targets=targets,
        dtype=settings.dtype,
        transposed=any(linear[name] for name in targets),
    )


def _linear_layers(model: Any) -> dict[str, bool]:
    """Last name of each kind of linear layer but the head -> whether it is (in, out)."""
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return {
        name.rpartition(".")[2]: isinstance(layer, Conv1D)
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer is not head
    }


@lru_cache(maxsize=8)
def _base_hash(folder: str) -> str:
    """sha256 over names and contents of weights, configuration and tokenizer."""
    root = Path(folder)
    names = {*_HASHED, *(p.name for p in root.glob("*.safetensors*"))}
    whole = hashlib.sha256()
    for path in sorted(root / name for name in names if (root / name).is_file()):
        with path.open("rb") as file:
            whole.update(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path.name}\n".encode())
    return whole.hexdigest()


def open_base(config: HfConfig) -> Base:
    """The process's base for these versions. Raises SchemaError when its folder holds another model now."""
    if config not in _BASES:
        try:
            model = open_model(config.base, config.dtype)
        except ConfigError as exc:
            raise SchemaError(exc.message) from exc
        found = _base_hash(config.base)
        if found != config.base_hash:
            raise SchemaError(
                f"{config.base} holds another model (sha256 {found[:12]}) than the one that the version was trained on "
                f"({config.base_hash[:12]}); restore it"
            )
        _BASES[config] = Base(model, config, "cpu")
    return _BASES[config]


def base_of_settings(settings: Learner) -> Base:
    """The process's base as settings describe it. Raises ConfigError."""
    model = open_model(settings.model, settings.dtype)
    config = config_of(settings, model)
    if config not in _BASES:
        if settings.device != "cpu" and not torch.cuda.is_available():
            raise ConfigError(f"learner.device = {settings.device!r}, but torch sees no GPU here; use cpu")
        _BASES[config] = Base(model, config, settings.device if settings.ranks == 1 else "cpu")
    return _BASES[config]
