"""The policy port: what the learner needs of a network that it trains, whatever it is.

Place: ``update``, ``training``, ``evaluation``, ``deployment`` and ``promoter`` know policies by this port only. Adapters:
``policy.PolicyNet`` (the embedded transformer), ``hf_policy.HfPolicy`` (LoRA on a Hugging Face causal LM, where
``learner.model`` is set; its libraries are imported only then) and ``decision_policy.DecisionNet`` (decisions asked outright,
``learner.decisions``). Invariants: a policy's numbers depend on its tensors and
the batch only (no dropout, no clock); an artifact is a folder with a manifest.json that names its kind.

Legend of suffixes: B rows, T positions, N decisions, K options of a menu.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
import numpy as np
import torch
from torch import Tensor, nn

from spanloop.learner.arrays import Arrays
from spanloop.learner.losses import FullVocabulary, taken, with_exploration
from spanloop.learner.packing import cuts
from spanloop.schemas.canonical import decode_json
from spanloop.schemas.errors import ConfigError, SchemaError

if TYPE_CHECKING:
    from spanloop.learner.decision_policy import DecisionManifest
    from spanloop.learner.hf_artifact import HfManifest
    from spanloop.learner.policy import Manifest
    from spanloop.learner.signing import Signer, Trust
    from spanloop.learner.tokenizer import Tokenizer

__all__ = [
    "Artifact",
    "Policy",
    "Shape",
    "TensorBatch",
    "Tolerance",
    "chosen_log_probs",
    "load_artifact",
    "other_policy",
    "read_manifest",
    "save_artifact",
    "scored",
]


class Shape(Protocol):
    """What data has to fit. Two policies with equal shapes can take each other's tensors."""

    @property
    def vocabulary_size(self) -> int: ...

    @property
    def context(self) -> int:
        """Longest prompt + response in tokens."""
        ...

    @property
    def full_vocabulary(self) -> bool:
        """Whether a response token without a menu is a decision over the whole vocabulary; else it has to have one."""
        ...


class Tolerance(msgspec.Struct, frozen=True):
    """How far serving's log-probabilities of a probe may be from the learner's, nats."""

    mean: float
    largest: float


class Policy(Protocol):
    """A network with the tensors of one version."""

    @property
    def config(self) -> Any:
        """A ``Shape``; equal for policies that are interchangeable."""
        ...

    @property
    def tolerance(self) -> Tolerance: ...

    @property
    def microbatched(self) -> bool:
        """Whether minibatches go through in parts (``Hyper.microbatch_tokens``), which changes the last bits."""
        ...

    def twin(self) -> Policy:
        """An independent policy with the same tensors, trainable."""
        ...

    def trainable(self) -> dict[str, nn.Parameter]:
        """What the optimiser moves, by name, in a fixed order."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """All that makes this version differ from the untrained one, by name; not copied."""
        ...

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Become the version with these tensors."""
        ...

    def decide(self, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        """(N, K) log-probabilities of every decision's options without exploration floor, and (N,) entropies of those over
        the whole vocabulary (else 0), on the CPU, as ``losses.decision_log_probs``; carries the gradient."""
        ...

    def probe(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """What ``ServingPort.probe`` must answer for these weights."""
        ...

    def save(
        self,
        folder: Path,
        tokenizer: Tokenizer | None,
        about: Mapping[str, Any],
        signer: Signer | None = None,
    ) -> str:
        """Write the immutable artifact ``folder``; returns its sha256. See ``save_artifact``."""
        ...


class Artifact(Protocol):
    """A verified artifact in memory."""

    @property
    def net(self) -> Any:
        """A ``Policy`` without gradients."""
        ...

    @property
    def tokenizer(self) -> Tokenizer | None:
        """None where it comes with the base model."""
        ...


# ---------------------------------------------------------------- artifacts


class _Head(msgspec.Struct):
    kind: str = "embedded"


def _kind(folder: Path) -> str:
    try:
        return decode_json((folder / "manifest.json").read_bytes(), _Head).kind
    except OSError as exc:
        raise SchemaError(f"{folder} is no policy artifact: {exc.strerror or exc}") from exc


def read_manifest(folder: Path, trust: Trust | None = None) -> Manifest | HfManifest | DecisionManifest:
    """The manifest of an artifact of any kind; its ``config`` is the policy's. Raises SchemaError, see ``load_artifact``."""
    kind = _kind(folder)
    if kind == "lora":
        from spanloop.learner import hf_artifact

        return hf_artifact.read_manifest(folder, trust)
    if kind == "decision":
        from spanloop.learner import decision_policy

        return decision_policy.read_manifest(folder, trust)
    from spanloop.learner import policy

    return policy.read_manifest(folder, trust)


def load_artifact(folder: Path, *, sha256: str | None = None, trust: Trust | None = None) -> Artifact:
    """Read and verify an artifact of any kind.

    Args:
        folder: ``.../policy@vN``.
        sha256: Expected hash (from the log); None: the manifest's.
        trust: Whose signature is needed; None: anybody's or none (tools outside a workspace).

    Raises:
        SchemaError: missing, or its signature, hash, names, shapes or numbers are not what they have to be.
    """
    kind = _kind(folder)
    if kind == "lora":
        from spanloop.learner import hf_policy

        return hf_policy.load_artifact(folder, sha256=sha256, trust=trust)
    if kind == "decision":
        from spanloop.learner import decision_policy

        return decision_policy.load_artifact(folder, sha256=sha256, trust=trust)
    from spanloop.learner import policy

    return policy.load_artifact(folder, sha256=sha256, trust=trust)


def save_artifact(
    folder: Path,
    net: Policy,
    tokenizer: Tokenizer | None,
    *,
    about: Mapping[str, Any] | None = None,
    signer: Signer | None = None,
) -> str:
    """Write ``net`` as the immutable artifact ``folder``; returns the sha256 that the log will name.

    Writing the same version again changes nothing. Raises TerminalError when the folder holds another.
    """
    return net.save(folder, tokenizer, dict(about or {}), signer)


def other_policy(workspace: Path, found: object, wanted: object) -> ConfigError:
    """The error of settings that do not fit a workspace's policy."""
    return ConfigError(
        f"the workspace {workspace} has a policy of {found}, settings ask for {wanted}: use its [learner] settings or "
        "another workspace"
    )


# ---------------------------------------------------------------- batches as tensors


class TensorBatch(msgspec.Struct, frozen=True):
    """``Arrays`` as tensors that share their memory."""

    ids_BT: Tensor
    lengths_B: Tensor
    row_N: Tensor
    position_N: Tensor
    menu_NK: Tensor
    open_NK: Tensor
    chosen_N: Tensor
    behaviour_N: Tensor
    advantage_N: Tensor
    values_NK: Tensor
    valued_N: Tensor
    weight_N: Tensor
    full_N: Tensor
    packed: bool = False
    """Rows that share a prefix may go through as one tree; changes the last bits."""

    @classmethod
    def of(cls, arrays: Arrays) -> TensorBatch:
        names = (name for name in cls.__struct_fields__ if name != "packed")
        tensors: dict[str, Any] = {name: torch.from_numpy(getattr(arrays, name)) for name in names}
        return cls(**tensors)

    def parts(self, tokens: int) -> Iterator[tuple[TensorBatch, Tensor]]:
        """Rows in parts of at most ``tokens`` tokens that go through at once (at least one row each), and the indices of each
        part's decisions. Of similar length, padding counted; where ``packed``, with shared prefixes counted once. Decision
        weights stay as they are, so losses of the parts add up."""
        lengths = self.lengths_B.numpy()
        row_N = self.row_N.numpy()
        for few in self._packed_rows(tokens) if self.packed else self._padded_rows(tokens):
            longest = int(lengths[few].max())
            place = np.full(len(lengths), -1)
            place[few] = np.arange(len(few))
            index_N = np.flatnonzero(place[row_N] >= 0)
            if len(index_N):
                yield self._take(torch.from_numpy(few), torch.from_numpy(index_N), place, longest)

    def _padded_rows(self, tokens: int) -> Iterator[np.ndarray]:
        lengths = self.lengths_B.numpy()
        order = np.argsort(-lengths, kind="stable")
        start = 0
        while start < len(order):
            few = order[start : start + max(1, tokens // int(lengths[order[start]]))]
            start += len(few)
            yield few

    def _packed_rows(self, tokens: int) -> Iterator[np.ndarray]:
        rows = [ids[:n] for ids, n in zip(self.ids_BT.numpy(), self.lengths_B.tolist(), strict=True)]
        for few in cuts(rows, tokens):
            yield np.array(few)

    def _take(
        self, rows: Tensor, index_N: Tensor, place: np.ndarray, longest: int
    ) -> tuple[TensorBatch, Tensor]:
        taken_: dict[str, Tensor] = {
            name: getattr(self, name)[index_N]
            for name in self.__struct_fields__
            if name.endswith(("_N", "_NK"))
        }
        taken_["row_N"] = torch.from_numpy(place)[taken_["row_N"]]
        ids_BT = self.ids_BT[rows][:, :longest]
        lengths_B = self.lengths_B[rows]
        return TensorBatch(ids_BT=ids_BT, lengths_B=lengths_B, packed=self.packed, **taken_), index_N


def scored(net: Policy, batch: TensorBatch) -> tuple[Tensor, FullVocabulary | None]:
    """(N, K) log-probabilities without exploration floor, and what belongs to whole-vocabulary decisions."""
    logp_NK, entropy_N = net.decide(batch)
    if not bool(batch.full_N.any()):
        return logp_NK, None
    return logp_NK, FullVocabulary(batch.full_N, entropy_N, net.config.vocabulary_size)


def chosen_log_probs(net: Policy, batch: TensorBatch, exploration: float, tokens: int) -> Tensor:
    """(N,) log-probability of what was taken, as ``net`` is served with this exploration floor; no gradient.

    ``tokens`` bounds what goes through a ``microbatched`` policy at once."""
    found_N = torch.empty(batch.chosen_N.shape[0])
    parts = batch.parts(tokens) if net.microbatched else ((batch, torch.arange(len(found_N))),)
    with torch.no_grad():
        for part, index_N in parts:
            logp_NK, full = scored(net, part)
            found_N[index_N] = taken(
                with_exploration(logp_NK, part.open_NK, exploration, full), part.chosen_N
            )
    return found_N
