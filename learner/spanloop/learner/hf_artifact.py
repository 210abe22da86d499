"""A LoRA version on disk: the folder that peft and vLLM load as it is, with a manifest that proves what it is.

Place: ``hf_policy`` writes and reads it; the CLI and provenance read only the manifest, so nothing here imports transformers
or peft. The folder is ``policy@vN/{adapter_config.json, adapter_model.safetensors, manifest.json, manifest.sig}``
(``artifact``) and nothing else.

Invariants: never written twice; signature, hashes, names, shapes, types and finiteness are checked before a tensor is used.
The version's sha256, which the log names, covers both adapter files: it is what this prints in the folder:

    sha256sum adapter_config.json adapter_model.safetensors | sha256sum
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from spanloop.learner.artifact import (
    FileEntry,
    TensorEntry,
    entries_of,
    read_files,
    read_head,
    shapes_of,
    write,
)
from spanloop.learner.signing import Signer, Trust
from spanloop.schemas.canonical import canonical_json, decode_json
from spanloop.schemas.errors import SchemaError, TerminalError

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_WEIGHTS",
    "HfConfig",
    "HfManifest",
    "load",
    "read_manifest",
    "save",
]

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
FORMAT = 2
FORMATS = (1, 2)
"""Format 1 had no signature."""


class HfConfig(msgspec.Struct, frozen=True):
    """What versions of one deployment have in common; implements ``model.Shape``."""

    base: str
    """Folder of the base model, as in the settings and as vLLM got it."""
    base_hash: str
    """sha256 over the base's weights, configuration and tokenizer."""
    vocabulary_size: int
    """Rows of the embedding."""
    context: int
    rank: int
    alpha: int
    targets: tuple[str, ...]
    """Last names of the layers with an adapter, sorted."""
    dtype: str
    """Type of the base's weights in the learner."""
    transposed: bool = False
    """Whether the base keeps its weights as (in, out), like GPT-2."""

    @property
    def full_vocabulary(self) -> bool:
        return True


class HfManifest(msgspec.Struct, frozen=True):
    """What a LoRA artifact says about itself."""

    format: int
    kind: str
    sha256: str
    """Of the version: see the module."""
    files: dict[str, FileEntry]
    tensors: dict[str, TensorEntry]
    config: HfConfig
    about: dict[str, Any] = {}
    """``artifact.Origin``."""
    signer: str = ""


def save(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config: HfConfig,
    about: Mapping[str, Any],
    signer: Signer | None = None,
) -> str:
    """Write a version; returns its sha256. The same version again changes nothing.

    Raises TerminalError when the folder holds another version, or a tensor is not finite.
    """
    plain = {name: tensors[name].detach().to("cpu", torch.float32).contiguous() for name in sorted(tensors)}
    for name, tensor in plain.items():
        if not bool(torch.isfinite(tensor).all()):
            raise TerminalError(f"{name} has values that are not finite; {folder} was not written")
    files = {ADAPTER_CONFIG: canonical_json(_adapter_config(config)), ADAPTER_WEIGHTS: save_tensors(plain)}
    sha256 = _version_hash(entries_of(files))
    if folder.exists():
        found = read_manifest(folder).sha256
        if found != sha256:
            raise TerminalError(
                f"{folder} holds another version (sha256 {found[:12]}, not {sha256[:12]}); a version is never rewritten"
            )
        return sha256
    manifest = HfManifest(FORMAT, "lora", sha256, {}, shapes_of(plain), config, dict(about))
    write(folder, files, manifest, signer)
    return sha256


def read_manifest(folder: Path, trust: Trust | None = None) -> HfManifest:
    """The manifest of a LoRA artifact. Raises SchemaError when there is none, it is malformed, or not signed as ``trust``
    asks."""
    manifest = read_head(folder, HfManifest, trust)
    if manifest.format not in FORMATS or manifest.kind != "lora":
        raise SchemaError(
            f"{folder} has kind {manifest.kind!r}, format {manifest.format}; this build reads lora, {FORMAT}"
        )
    return manifest


def load(
    folder: Path, *, sha256: str | None = None, trust: Trust | None = None
) -> tuple[HfManifest, dict[str, Tensor]]:
    """Read and verify a version.

    Args:
        folder: ``.../policy@vN``.
        sha256: Expected hash of the version (from the log); None: the manifest's.
        trust: Whose signature is needed; None: anybody's or none.

    Raises:
        SchemaError: something is missing, too much, or not what manifest, log and signature say.
    """
    manifest = read_manifest(folder, trust)
    data = read_files(folder, manifest.files, (ADAPTER_CONFIG, ADAPTER_WEIGHTS))
    identity = _version_hash(manifest.files)
    for source, expected in (("manifest", manifest.sha256), ("log", sha256 or manifest.sha256)):
        if identity != expected:
            raise SchemaError(
                f"{folder} is another version: its sha256 is {identity[:12]}, the {source} says {expected[:12]}; restore it"
            )
    _check_config(folder, data[ADAPTER_CONFIG], manifest.config)
    return manifest, _tensors(folder, data[ADAPTER_WEIGHTS], manifest)


def _adapter_config(config: HfConfig) -> dict[str, Any]:
    """adapter_config.json in peft's words."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base,
        "r": config.rank,
        "lora_alpha": config.alpha,
        "target_modules": list(config.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": config.transposed,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
    }


def _check_config(folder: Path, data: bytes, config: HfConfig) -> None:
    if decode_json(data, dict[str, Any]) != _adapter_config(config):
        raise SchemaError(
            f"{folder / ADAPTER_CONFIG} is not the configuration that the manifest's adapter has"
        )


def _tensors(folder: Path, data: bytes, manifest: HfManifest) -> dict[str, Tensor]:
    try:
        tensors = load_tensors(data)
    except SafetensorError as exc:
        raise SchemaError(f"{folder / ADAPTER_WEIGHTS} is not a safetensors file: {exc}") from exc
    given = shapes_of(tensors)
    if given != manifest.tensors or not given:
        wrong = sorted(
            n for n in given.keys() | manifest.tensors.keys() if given.get(n) != manifest.tensors.get(n)
        )
        raise SchemaError(
            f"{folder}: tensors are not those of the manifest: {', '.join(wrong[:5]) or 'none at all'}"
        )
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise SchemaError(f"{folder}: {name} has values that are not finite")
    return tensors


def _version_hash(files: Mapping[str, FileEntry]) -> str:
    lines = "".join(f"{files[name].sha256}  {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()
