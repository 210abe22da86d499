"""A LoRA version on disk: the folder that peft and vLLM load as it is, with a manifest that proves what it is.

Place: ``hf_policy`` writes and reads it; the CLI and provenance read only the manifest, so nothing here imports transformers
or peft. The folder is ``policy@vN/{adapter_config.json, adapter_model.safetensors, manifest.json}`` and nothing else.

Invariants: written beside its final place, synced and renamed, never written twice; safetensors and JSON only; what is read
are regular files of that folder, not links; hashes, names, shapes, types and finiteness are checked before a tensor is used.
The version's sha256, which the log names, covers both adapter files: it is what this prints in the folder:

    sha256sum adapter_config.json adapter_model.safetensors | sha256sum
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from spanloop.learner.durable import write_folder
from spanloop.schemas.canonical import canonical_json, decode_json
from spanloop.schemas.errors import SchemaError, TerminalError

__all__ = [
    "ADAPTER_CONFIG",
    "ADAPTER_WEIGHTS",
    "MANIFEST",
    "HfConfig",
    "HfManifest",
    "load",
    "read_manifest",
    "save",
]

ADAPTER_CONFIG, ADAPTER_WEIGHTS, MANIFEST = (
    "adapter_config.json",
    "adapter_model.safetensors",
    "manifest.json",
)
FORMAT = 1
MANIFEST_BYTES_MAX = 16 * 2**20


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


class _File(msgspec.Struct, frozen=True):
    sha256: str
    size: int


class _Tensor(msgspec.Struct, frozen=True):
    shape: tuple[int, ...]
    dtype: str


class HfManifest(msgspec.Struct, frozen=True):
    """What a LoRA artifact says about itself."""

    format: int
    kind: str
    sha256: str
    """Of the version: see the module."""
    files: dict[str, _File]
    tensors: dict[str, _Tensor]
    config: HfConfig
    about: dict[str, Any] = {}
    """Free facts: version, parent, batch."""


def save(folder: Path, tensors: Mapping[str, Tensor], config: HfConfig, about: Mapping[str, Any]) -> str:
    """Write a version; returns its sha256. The same version again changes nothing.

    Raises TerminalError when the folder holds another version, or a tensor is not finite.
    """
    plain = {name: tensors[name].detach().to("cpu", torch.float32).contiguous() for name in sorted(tensors)}
    for name, tensor in plain.items():
        if not bool(torch.isfinite(tensor).all()):
            raise TerminalError(f"{name} has values that are not finite; {folder} was not written")
    files = {ADAPTER_CONFIG: canonical_json(_adapter_config(config)), ADAPTER_WEIGHTS: save_tensors(plain)}
    entries = {name: _File(hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()}
    sha256 = _version_hash(entries)
    if folder.exists():
        found = read_manifest(folder).sha256
        if found != sha256:
            raise TerminalError(
                f"{folder} holds another version (sha256 {found[:12]}, not {sha256[:12]}); a version is never rewritten"
            )
        return sha256
    shapes = {name: _Tensor(tuple(t.shape), _dtype(t)) for name, t in plain.items()}
    manifest = HfManifest(FORMAT, "lora", sha256, entries, shapes, config, dict(about))
    write_folder(folder, {**files, MANIFEST: canonical_json(manifest)})
    return sha256


def read_manifest(folder: Path) -> HfManifest:
    """The manifest of a LoRA artifact. Raises SchemaError when there is none or it is malformed."""
    manifest = decode_json(_read(folder, MANIFEST, MANIFEST_BYTES_MAX), HfManifest)
    if manifest.format != FORMAT or manifest.kind != "lora":
        raise SchemaError(
            f"{folder} has kind {manifest.kind!r}, format {manifest.format}; this build reads lora, {FORMAT}"
        )
    if set(manifest.files) != {ADAPTER_CONFIG, ADAPTER_WEIGHTS}:
        raise SchemaError(
            f"{folder}: the manifest names other files than an adapter's: {sorted(manifest.files)}"
        )
    return manifest


def load(folder: Path, *, sha256: str | None = None) -> tuple[HfManifest, dict[str, Tensor]]:
    """Read and verify a version.

    Args:
        folder: ``.../policy@vN``.
        sha256: Expected hash of the version (from the log); None: the manifest's.

    Raises:
        SchemaError: something is missing, too much, or not what manifest and log say.
    """
    manifest = read_manifest(folder)
    extra = sorted(set(os.listdir(folder)) - {ADAPTER_CONFIG, ADAPTER_WEIGHTS, MANIFEST})
    if extra:
        raise SchemaError(
            f"{folder} has files that do not belong to an adapter: {', '.join(extra[:5])}; remove them"
        )
    data = {name: _read(folder, name, entry.size) for name, entry in manifest.files.items()}
    for name, entry in manifest.files.items():
        found = hashlib.sha256(data[name]).hexdigest()
        if found != entry.sha256:
            raise SchemaError(
                f"{folder / name} is corrupt: its sha256 is {found[:12]}, the manifest says {entry.sha256[:12]}; restore it"
            )
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
    given = {name: _Tensor(tuple(t.shape), _dtype(t)) for name, t in tensors.items()}
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


def _version_hash(files: Mapping[str, _File]) -> str:
    lines = "".join(f"{files[name].sha256}  {name}\n" for name in sorted(files))
    return hashlib.sha256(lines.encode()).hexdigest()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _read(folder: Path, name: str, size_max: int) -> bytes:
    """A regular file of the folder, never a link's target. Raises SchemaError."""
    path = folder / name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as exc:
        raise SchemaError(f"{folder} is no policy artifact: {name}: {exc.strerror or exc}") from exc
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode) or found.st_size > size_max:
            raise SchemaError(
                f"{path} is no regular file of at most {size_max} bytes (it has {found.st_size})"
            )
        return file.read()
