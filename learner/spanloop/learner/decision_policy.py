"""The decision policy: a small scorer of (state, option) pairs, and its immutable artifacts.

Place: a third kind beside the embedded token policy and the Hugging Face one, chosen by ``learner.decisions``; implements
``model.Policy``. The score of an option is a table over pairs of hashed features (one of the state, one of the option) plus one
hidden layer over their embeddings. It reads decisions as token ids (``schemas.decision_tokens``), so samples, training, gate, canary and
replay are those of any policy.

Invariants: an option's score depends on the state and on its own features, not on the rest of the menu or any order; serving's numbers
depend on the request alone (one request is one pass, in numpy), so the same version, seed and request give the same choice; no
pickle; loading verifies sha256, names, shapes and finiteness before a weight is used.

Legend of suffixes: B rows, T positions, N decisions, K options, F features of a state, G of an option, W width.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn
from torch.nn import functional

from spanloop.learner.artifact import (
    FileEntry,
    TensorEntry,
    read_files,
    read_head,
    shapes_of,
    write_once,
)
from spanloop.learner.decision_features import CONTEXT
from spanloop.learner.losses import CLOSED
from spanloop.learner.model import TensorBatch, Tolerance
from spanloop.learner.signing import Signer, Trust
from spanloop.schemas.decision_tokens import DETAIL, FEATURE, MARK, OPTION, VOCABULARY_SIZE, DecisionIds
from spanloop.schemas.errors import ConfigError, SchemaError

__all__ = [
    "KIND",
    "DecisionArtifact",
    "DecisionConfig",
    "DecisionManifest",
    "DecisionNet",
    "Scorer",
    "load_artifact",
    "pair_of",
    "read_manifest",
]

KIND = "decision"
WEIGHTS = "model.safetensors"
FORMAT = 1
_MIX = (0x2545F491, 0x9E3779B1)
"""Odd multipliers that hash a pair of ids into the table of pairs."""
_Ids = TypeVar("_Ids", Tensor, NDArray[np.int64], int)


class DecisionConfig(msgspec.Struct, frozen=True):
    """Shape of the network."""

    width: int = 32
    buckets: int = 4096
    """Rows of each embedding; a feature's row is its hash modulo this."""
    pairs: int = 65_536
    """Entries of the table of pairs."""

    def __post_init__(self) -> None:
        if min(self.width, self.buckets, self.pairs) < 1:
            raise ConfigError(f"every size of the decision policy must be positive, got {self}")

    @property
    def vocabulary_size(self) -> int:
        """Ids of decisions."""
        return VOCABULARY_SIZE

    @property
    def context(self) -> int:
        """Longest decision with its answer."""
        return CONTEXT

    @property
    def full_vocabulary(self) -> bool:
        """A decision has a menu."""
        return False


class DecisionNet(nn.Module):
    """Scores of options; implements ``model.Policy``."""

    tolerance = Tolerance(1e-4, 1e-4)
    microbatched = True

    def __init__(self, config: DecisionConfig) -> None:
        super().__init__()
        self.config = config
        self.state = nn.Embedding(config.buckets, config.width)
        self.option = nn.Embedding(config.buckets, config.width)
        self.pairs = nn.Embedding(config.pairs, 1)
        self.hidden = nn.Linear(3 * config.width, config.width)
        self.head = nn.Linear(config.width, 1, bias=False)

    @classmethod
    def initial(cls, config: DecisionConfig, seed: int) -> DecisionNet:
        """The first policy of a seed: near uniform over any menu. The global generator is left as it was."""
        net = _unfilled(config)
        generator = torch.Generator().manual_seed(seed)
        spread = {"state.weight": 1.0, "option.weight": 1.0, "hidden.weight": (3 * config.width) ** -0.5, "head.weight": 0.02}  # fmt: skip
        with torch.no_grad():
            for name, parameter in sorted(net.named_parameters()):
                if name in spread:
                    parameter.normal_(0.0, spread[name], generator=generator)
                else:
                    parameter.zero_()
        return net

    def scores(self, state_NF: Tensor, said_NF: Tensor, option_NKG: Tensor, told_NKG: Tensor) -> Tensor:
        """(N, K) scores.

        Args:
            state_NF: Ids of state features, padded; int64.
            said_NF: True where there is one.
            option_NKG: Ids of each option and its details, padded; int64.
            told_NKG: True where there is one.
        """
        config = self.config
        s_NW = _pooled(self.state(state_NF % config.buckets), said_NF)
        o_NKW = _pooled(self.option(option_NKG % config.buckets), told_NKG)
        s_NKW = s_NW[:, None].expand_as(o_NKW)
        h_NKW = functional.relu(self.hidden(torch.cat([s_NKW, o_NKW, s_NKW * o_NKW], dim=-1)))
        place = pair_of(state_NF[:, None, :, None], option_NKG[:, :, None, :], config)
        both = said_NF[:, None, :, None] & told_NKG[:, :, None, :]
        pairs_NK = (self.pairs(place)[..., 0] * both).sum(dim=(2, 3))
        return self.head(h_NKW)[..., 0] + pairs_NK

    # ------------------------------------------------------------ the policy port

    def twin(self) -> DecisionNet:
        """An independent copy, trainable."""
        net = _unfilled(self.config)
        net.load_state_dict(self.state_dict())
        return net

    def trainable(self) -> dict[str, nn.Parameter]:
        """All parameters."""
        return dict(self.named_parameters())

    def tensors(self) -> dict[str, Tensor]:
        """All parameters."""
        return self.state_dict()

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Become the network with these parameters."""
        self.load_state_dict(dict(tensors))

    def decide(self, batch: TensorBatch) -> tuple[Tensor, Tensor]:
        """See ``model.Policy``. An option that the prompt does not list is scored as one that nothing is known of."""
        state_NF, option_NKG = _parts(batch)
        score_NK = self.scores(state_NF, state_NF > 0, option_NKG, option_NKG > 0)
        closed_NK = ~batch.open_NK
        logp_NK = torch.log_softmax(score_NK.masked_fill(closed_NK, CLOSED), dim=1)
        return logp_NK.masked_fill(closed_NK, CLOSED), torch.zeros(logp_NK.shape[0])

    @torch.no_grad()
    def probe(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probabilities of a prompt's ids after the first, as if these were the options and the first were all that is known."""
        return [Scorer(self).probe(prompt) for prompt in prompts]

    def save(
        self, folder: Path, tokenizer: Any, about: Mapping[str, Any], signer: Signer | None = None
    ) -> str:
        """See ``model.save_artifact``; there is no tokenizer."""
        return write_once(
            folder,
            WEIGHTS,
            self.state_dict(),
            written=lambda folder: read_manifest(folder).sha256,
            manifest=lambda sha256, size, shapes: DecisionManifest(
                format=FORMAT, sha256=sha256, size=size, config=self.config, about=dict(about), tensors=shapes
            ),
            signer=signer,
        )


def pair_of(feature: _Ids, part: _Ids, config: DecisionConfig) -> _Ids:
    """The entry of the table of pairs for a feature of the state and a part of an option (ids, or arrays of them)."""
    return ((feature * _MIX[0] + part * _MIX[1]) >> 7) % config.pairs


def _pooled(embedded: Tensor, there: Tensor) -> Tensor:
    """Sum over the features that are there, divided by the root of their number."""
    count = there.sum(dim=-1, keepdim=True).clamp(min=1).to(embedded.dtype)
    return (embedded * there[..., None]).sum(dim=-2) / count.sqrt()


def _parts(batch: TensorBatch) -> tuple[Tensor, Tensor]:
    """(N, F) state ids and (N, K, G) ids of each option of the menus, 0 where there is none."""
    ids_NT = batch.ids_BT[batch.row_N].numpy()
    ids_NT = np.where(np.arange(ids_NT.shape[1])[None] <= batch.position_N.numpy()[:, None], ids_NT, 0)
    state_NF = _packed(ids_NT, (ids_NT >= FEATURE) & (ids_NT < DETAIL))
    starts_NT = (ids_NT >= OPTION) & (ids_NT < MARK)
    ordinal_NT = np.cumsum(starts_NT, axis=1) - 1
    own_NT = (starts_NT | ((ids_NT >= DETAIL) & (ids_NT < OPTION))) & (ordinal_NT >= 0)
    listed_NL = _packed(ids_NT, starts_NT)
    count, most = listed_NL.shape
    flat = np.flatnonzero(own_NT)
    owner = (flat // ids_NT.shape[1]) * most + ordinal_NT.reshape(-1)[flat]
    place = np.arange(len(flat)) - np.searchsorted(owner, owner)
    parts_LG = np.zeros((count * most + 1, int(place.max(initial=0)) + 1), np.int64)
    parts_LG[owner, place] = ids_NT.reshape(-1)[flat]
    same_NKL = batch.menu_NK.numpy()[:, :, None] == listed_NL[:, None, :]
    at_NK = np.where(
        same_NKL.any(axis=2), np.arange(count)[:, None] * most + same_NKL.argmax(axis=2), count * most
    )
    at_NK = np.where(batch.open_NK.numpy(), at_NK, count * most)
    return torch.from_numpy(state_NF), torch.from_numpy(parts_LG[at_NK])


def _packed(ids_NT: NDArray[np.int64], keep_NT: NDArray[np.bool_]) -> NDArray[np.int64]:
    """The kept ids of each row from the left, 0 behind them; at least one column."""
    widest = max(1, int(keep_NT.sum(axis=1).max(initial=0)))
    order = np.argsort(~keep_NT, axis=1, kind="stable")[:, :widest]
    return np.take_along_axis(np.where(keep_NT, ids_NT, 0), order, axis=1)


class Scorer:
    """A version as it is served: numpy, one request at a time.

    Args:
        net: The version.
    """

    def __init__(self, net: DecisionNet) -> None:
        tensors = {name: t.detach().cpu().numpy() for name, t in net.tensors().items()}
        self.config = net.config
        self._state, self._option = tensors["state.weight"], tensors["option.weight"]
        self._pairs = tensors["pairs.weight"][:, 0]
        self._hidden, self._bias = tensors["hidden.weight"].T.copy(), tensors["hidden.bias"]
        self._head = tensors["head.weight"][0]

    def scores(self, decision: DecisionIds) -> NDArray[np.float32]:
        """(K,) scores of the options, as ``DecisionNet.scores``."""
        state = np.array(decision.state, np.int64)
        of = [np.array((o, *d), np.int64) for o, d in zip(decision.options, decision.details, strict=True)]
        s_W = self._state[state % self.config.buckets].sum(axis=0) / np.float32(math.sqrt(max(1, len(state))))
        o_KW = np.stack(
            [
                self._option[ids % self.config.buckets].sum(axis=0) / np.float32(math.sqrt(len(ids)))
                for ids in of
            ]
        )
        s_KW = np.broadcast_to(s_W, o_KW.shape)
        h_KW = np.maximum(np.concatenate([s_KW, o_KW, s_KW * o_KW], axis=1) @ self._hidden + self._bias, 0.0)
        found = [self._pairs[pair_of(state[:, None], ids[None], self.config)].sum() for ids in of]
        return (h_KW @ self._head + np.array(found, np.float32)).astype(np.float32)

    def probe(self, prompt: Sequence[int]) -> list[float]:
        """See ``DecisionNet.probe``."""
        options = tuple(prompt[1:])
        score_K = self.scores(DecisionIds(tuple(prompt[:1]), options, ((),) * len(options))).astype(
            np.float64
        )
        top = score_K.max(initial=-math.inf)
        return (score_K - top - math.log(np.exp(score_K - top).sum())).tolist() if options else []


# ---------------------------------------------------------------- artifacts


class DecisionManifest(msgspec.Struct, frozen=True, kw_only=True):
    """What an artifact says about itself."""

    kind: str = KIND
    format: int
    sha256: str
    """Of the weights file."""
    size: int
    config: DecisionConfig
    about: dict[str, Any] = {}
    """``artifact.Origin``."""
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    signer: str = ""


class DecisionArtifact(msgspec.Struct, frozen=True):
    """A verified artifact in memory."""

    net: DecisionNet
    manifest: DecisionManifest
    tokenizer: None = None


def read_manifest(folder: Path, trust: Trust | None = None) -> DecisionManifest:
    """The manifest of an artifact. Raises SchemaError when there is none, it is malformed, or not signed as ``trust`` asks."""
    manifest = read_head(folder, DecisionManifest, trust)
    if manifest.kind != KIND or manifest.format != FORMAT:
        raise SchemaError(
            f"{folder} is of kind {manifest.kind!r} and format {manifest.format}, expected {KIND!r} and {FORMAT}"
        )
    return manifest


def load_artifact(folder: Path, *, sha256: str | None = None, trust: Trust | None = None) -> DecisionArtifact:
    """Read and verify an artifact.

    Args:
        folder: ``.../policy@vN``.
        sha256: Expected hash of the weights (from the log); None: the manifest's.
        trust: Whose signature is needed; None: anybody's or none.

    Raises:
        SchemaError: missing, or its hash, names, shapes, numbers or signature are not what they have to be.
    """
    manifest = read_manifest(folder, trust)
    weights = read_files(folder, manifest.files, (WEIGHTS,))[WEIGHTS]
    found = manifest.files[WEIGHTS].sha256
    for name, expected in (("manifest", manifest.sha256), ("log", sha256 or manifest.sha256)):
        if found != expected:
            raise SchemaError(
                f"{folder / WEIGHTS} is another version: its sha256 is {found[:12]}, the {name} says {expected[:12]}; restore it"
            )
    try:
        tensors = load_tensors(weights)
    except SafetensorError as exc:
        raise SchemaError(f"{folder / WEIGHTS} is not a safetensors file: {exc}") from exc
    net = _unfilled(manifest.config)
    given = shapes_of(tensors)
    for what, wanted in (("network", shapes_of(net.state_dict())), ("manifest", manifest.tensors)):
        if wanted != given:
            wrong = sorted(n for n in wanted.keys() | given.keys() if wanted.get(n) != given.get(n))
            raise SchemaError(f"{folder}: tensors do not fit the {what}: {', '.join(wrong[:5])}")
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise SchemaError(f"{folder}: {name} has values that are not finite")
    net.load_state_dict(tensors, assign=True)
    net.eval().requires_grad_(False)
    return DecisionArtifact(net, manifest)


def _unfilled(config: DecisionConfig) -> DecisionNet:
    """A network whose values will be replaced."""
    with torch.random.fork_rng(devices=[]):
        return DecisionNet(config)
