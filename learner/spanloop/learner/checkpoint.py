"""The learner's state on disk: one folder a batch, there whole or not at all.

Place: ``trainer`` saves one after each batch and starts from the newest sound one. Weights and optimiser state are
safetensors, everything else is JSON; no pickle. What is *not* in a checkpoint is on the log: after a crash the batches
committed since are trained again, with exactly their boundaries.

Invariants: a folder is written beside its final place, synced, then renamed; its JSON names the sha256 of its tensors;
non-finite tensors are never written; a checkpoint that does not verify is passed over for the one before it.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from spanloop.learner.durable import sync_folder, write_durably
from spanloop.schemas.canonical import canonical_json, decode_json
from spanloop.schemas.errors import SchemaError, TerminalError, TransientError

__all__ = ["BatchReport", "Checkpoint", "LearnerState", "load_latest", "save", "tensors_hash"]

_LOG = logging.getLogger(__name__)
_NAME = re.compile(r"batch-(\d{8})\Z")
_TENSORS, _STATE = "tensors.safetensors", "state.json"
KEEP = 3
"""Checkpoints kept; older ones are removed after a new one is safe."""


class BatchReport(msgspec.Struct, frozen=True):
    """What the last batch was; enough to register its candidate after a crash."""

    orchestrations: int
    parent_version: int
    dropped: dict[str, int] = {}
    metrics: dict[str, float] = {}
    samples_sha256: str = ""
    """Which they were: ``training.samples_hash``."""


class LearnerState(msgspec.Struct, frozen=True):
    """All of the learner but its tensors."""

    batch: int
    """Batches trained; 0 before the first."""
    to_offset: int
    """Samples up to this offset are contained in the weights."""
    ledger: dict[str, int] = {}
    """Orchestration id -> batch that used it, for as many batches as a revision could still pass the staleness bound."""
    steps: int = 0
    """Optimiser steps kept."""
    skipped: int = 0
    """Steps that were not finite and left the weights as they were."""
    report: BatchReport | None = None
    format: int = 1
    taught: dict[str, int] = {}
    """Orchestration id -> offset of the samples that the ledger's batch trained on."""


class Checkpoint(msgspec.Struct, frozen=True):
    """A state and its tensors (``policy/NAME``, ``adam/NAME/exp_avg``, ...)."""

    state: LearnerState
    tensors: dict[str, Tensor]


class _Sealed(msgspec.Struct, frozen=True):
    sha256: str
    state: LearnerState


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """sha256 over names, types, shapes and bytes: equal for tensors that are equal bit for bit."""
    return hashlib.sha256(_serialise(tensors)).hexdigest()


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint below ``folder`` and remove old ones; returns its folder.

    Raises:
        TerminalError: a tensor is not finite; the caller must not have come this far.
        TransientError: the disk refused; nothing was replaced.
    """
    for name, tensor in checkpoint.tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise TerminalError(
                f"{name} has values that are not finite; no checkpoint was written", tensor=name
            )
    final = folder / f"batch-{checkpoint.state.batch:08d}"
    building = folder / f".building-{final.name}-{secrets.token_hex(4)}"
    data = _serialise(checkpoint.tensors)
    sealed = _Sealed(hashlib.sha256(data).hexdigest(), checkpoint.state)
    try:
        building.mkdir(parents=True)
        write_durably(building / _TENSORS, data)
        write_durably(building / _STATE, canonical_json(sealed))
        sync_folder(building)
        if final.exists():
            shutil.rmtree(final)
        building.rename(final)
        sync_folder(folder)
    except OSError as exc:
        shutil.rmtree(building, ignore_errors=True)
        raise TransientError(
            f"cannot write the checkpoint {final}: {exc.strerror or exc}; training waits until the disk takes it"
        ) from exc
    _tidy(folder)
    return final


def load_latest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that verifies, or None. Passing one over is logged."""
    for path in reversed(_checkpoints(folder)):
        try:
            return _load(path)
        except SchemaError as exc:
            _LOG.warning("passing over %s: %s; the log holds what it held", path, exc.message)
    return None


def _load(path: Path) -> Checkpoint:
    try:
        sealed = decode_json((path / _STATE).read_bytes(), _Sealed)
        data = (path / _TENSORS).read_bytes()
    except OSError as exc:
        raise SchemaError(f"unreadable checkpoint: {exc.strerror or exc}") from exc
    found = hashlib.sha256(data).hexdigest()
    if found != sealed.sha256:
        raise SchemaError(f"its tensors have sha256 {found[:12]}, its state says {sealed.sha256[:12]}")
    try:
        return Checkpoint(sealed.state, load_tensors(data))
    except SafetensorError as exc:
        raise SchemaError(f"not a safetensors file: {exc}") from exc


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("batch-*") if _NAME.fullmatch(p.name)) if folder.is_dir() else []


def _tidy(folder: Path) -> None:
    for path in (*_checkpoints(folder)[:-KEEP], *folder.glob(".building-*")):
        shutil.rmtree(path, ignore_errors=True)


def _serialise(tensors: Mapping[str, Tensor]) -> bytes:
    return save_tensors({name: tensors[name].detach().contiguous().cpu() for name in sorted(tensors)})
