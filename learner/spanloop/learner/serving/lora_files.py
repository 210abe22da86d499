"""What a LoRA folder must hold before any server is asked to load it.

Place: in front of ``vllm.VllmServing.load``. A server that is given a broken adapter may answer 200 (not-a-number weights),
fail inside its engine, or serve the base model under the new name; so none is given one. Invariant: what passes here is in
peft's layout, safetensors, complete, finite and not empty.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors

from spanloop.schemas.errors import SchemaError

__all__ = ["CONFIG", "WEIGHTS", "LoraFacts", "check_lora"]

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_HALVES = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")


class LoraFacts(msgspec.Struct, frozen=True):
    """What an adapter says about itself."""

    rank: int
    base: str
    """``base_model_name_or_path``."""
    modules: int
    """Matrices that it changes."""


def check_lora(folder: Path) -> LoraFacts:
    """Read and check an adapter. Raises SchemaError that names the file and what is wrong with it."""
    if not folder.is_dir():
        raise SchemaError(f"there is no adapter folder {folder}", path=str(folder))
    config = _config(folder)
    rank = config.get("r")
    if config.get("peft_type") != "LORA" or not isinstance(rank, int) or rank < 1:
        raise SchemaError(
            f"{folder / CONFIG}: expected peft_type LORA and a rank r of at least 1, found "
            f"{config.get('peft_type')!r} and {rank!r}"
        )
    for key in ("use_dora", "modules_to_save"):
        if config.get(key):
            raise SchemaError(
                f"{folder / CONFIG}: {key} = {config[key]!r} cannot be served as LoRA; train without it"
            )
    modules = _modules(folder)
    return LoraFacts(rank, str(config.get("base_model_name_or_path") or ""), modules)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = msgspec.json.decode((folder / CONFIG).read_bytes())
    except OSError as exc:
        raise SchemaError(f"{folder} is no LoRA adapter: {CONFIG}: {exc.strerror or exc}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise SchemaError(f"{folder / CONFIG} is not JSON: {exc}") from exc
    if not isinstance(config, dict):
        raise SchemaError(f"{folder / CONFIG} is not a JSON object")
    return config


def _modules(folder: Path) -> int:
    path = folder / WEIGHTS
    try:
        tensors = load_tensors(path.read_bytes())
    except OSError as exc:
        raise SchemaError(f"{folder} is no LoRA adapter: {WEIGHTS}: {exc.strerror or exc}") from exc
    except SafetensorError as exc:
        raise SchemaError(f"{path} is corrupt, or not a safetensors file: {exc}") from exc
    if not tensors:
        raise SchemaError(f"{path} is empty: an adapter without weights would serve the base model")
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        half = next((h for h in _HALVES if name.endswith(h)), None)
        if half is None:
            raise SchemaError(f"{path}: {name} is not a LoRA matrix (expected ...lora_A or ...lora_B)")
        if not bool(torch.isfinite(tensor).all()):
            raise SchemaError(f"{path}: {name} has values that are not finite")
        halves.setdefault(name.removesuffix(half), {})["A" if "A" in half else "B"] = tensor
    for module, pair in halves.items():
        if len(pair) != 2:
            raise SchemaError(f"{path}: {module} has only its lora_{next(iter(pair))}")
        if not set(pair["A"].shape) & set(pair["B"].shape):
            raise SchemaError(
                f"{path}: the matrices of {module} do not fit each other: {tuple(pair['A'].shape)} and "
                f"{tuple(pair['B'].shape)}"
            )
    return len(halves)
