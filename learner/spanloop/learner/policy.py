"""The embedded policy: a small causal transformer, and its immutable artifacts.

Place: the learner trains it and saves each version, the embedded server loads and serves it. An artifact is a folder
``policy@vN/{model.safetensors, manifest.json, manifest.sig}`` (``artifact``), there whole or not at all, and never written twice.
Loading verifies signature, sha256, names, shapes and finiteness before a weight is used.

Legend of suffixes: B rows, T positions, V vocabulary, W width, H heads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from torch import Tensor, nn
from torch.nn import functional

from spanloop.learner.artifact import FileEntry, TensorEntry, read_files, read_head, shapes_of, write_once
from spanloop.learner.losses import decision_log_probs, menu_log_probs
from spanloop.learner.model import TensorBatch, Tolerance
from spanloop.learner.signing import Signer, Trust
from spanloop.learner.tokenizer import Tokenizer
from spanloop.schemas.errors import ConfigError, SchemaError, TerminalError

__all__ = ["Artifact", "Manifest", "PolicyConfig", "PolicyNet", "load_artifact", "save_artifact"]

WEIGHTS = "model.safetensors"
FORMAT = 2
FORMATS = (1, 2)
"""Format 1 had neither ``files`` nor a signature."""


class PolicyConfig(msgspec.Struct, frozen=True):
    """Shape of the network."""

    vocabulary_size: int
    """Specials included."""
    width: int = 64
    layers: int = 1
    heads: int = 4
    context: int = 64
    """Longest prompt + response in tokens."""

    def __post_init__(self) -> None:
        if min(self.vocabulary_size, self.width, self.layers, self.heads, self.context) < 1:
            raise ConfigError(f"every size of the policy must be positive, got {self}")
        if self.width % self.heads:
            raise ConfigError(
                f"learner.width = {self.width} is not a multiple of learner.heads = {self.heads}"
            )

    @property
    def full_vocabulary(self) -> bool:
        """The embedded server gives a menu with every token; one without is refused."""
        return False


class _Block(nn.Module):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x_BTW: Tensor) -> Tensor:
        rows, steps, width = x_BTW.shape
        qkv = self.qkv(self.norm_attention(x_BTW)).view(rows, steps, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTW = x_BTW + self.project(mixed.transpose(1, 2).reshape(rows, steps, width))
        return x_BTW + self.contract(functional.gelu(self.expand(self.norm_mlp(x_BTW))))


class PolicyNet(nn.Module):
    """Pre-norm causal transformer with learned positions; implements ``model.Policy``. Rows are padded on the right."""

    tolerance = Tolerance(1e-4, 1e-4)
    microbatched = False

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary_size, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(_Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary_size)

    @classmethod
    def initial(cls, config: PolicyConfig, seed: int) -> PolicyNet:
        """The first policy of a seed: near uniform over any menu. The global generator is left as it was."""
        net = _unfilled(config)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in sorted(net.named_parameters()):
                if parameter.dim() < 2:
                    parameter.fill_(1.0 if "norm" in name and name.endswith("weight") else 0.0)
                else:
                    scale = (
                        0.5
                        if name == "tokens.weight"
                        else 0.02
                        if name in _SMALL
                        else parameter.shape[1] ** -0.5
                    )
                    parameter.normal_(0.0, scale, generator=generator)
        return net

    def hidden(self, ids_BT: Tensor) -> Tensor:
        """Normed final states, (B, T, W)."""
        x_BTW = self.tokens(ids_BT) + self.positions.weight[: ids_BT.shape[1]]
        for block in self.blocks:
            x_BTW = block(x_BTW)
        return self.norm(x_BTW)

    def forward(self, ids_BT: Tensor, lengths_B: Tensor | None = None) -> Tensor:
        """Logits (B, T, V), float32: position t predicts token t + 1.

        Attention is causal and padding is on the right, so no position inside a row sees padding; ``lengths_B`` is
        only used to zero the positions behind each row's end, whose logits mean nothing.
        """
        logits_BTV = self.head(self.hidden(ids_BT))
        if lengths_B is None:
            return logits_BTV
        inside_BT = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None, :] < lengths_B[:, None]
        return logits_BTV * inside_BT[:, :, None]

    def last_logits(self, ids_BT: Tensor, lengths_B: Tensor) -> Tensor:
        """Logits (B, V) of the token after each row's last; the head runs on one position a row."""
        x_BTW = self.hidden(ids_BT)
        return self.head(x_BTW[torch.arange(ids_BT.shape[0]), lengths_B - 1])

    # ------------------------------------------------------------ the policy port

    def twin(self) -> PolicyNet:
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
        """See ``model.Policy``; the head runs on decisions only."""
        logits_NV = self.head(self.hidden(batch.ids_BT)[batch.row_N, batch.position_N])
        if bool(batch.full_N.any()):
            return decision_log_probs(logits_NV, batch.menu_NK, batch.open_NK, batch.full_N)
        logp_NK = menu_log_probs(logits_NV, batch.menu_NK, batch.open_NK)
        return logp_NK, torch.zeros(logp_NK.shape[0])

    @torch.no_grad()
    def probe(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability of each prompt's tokens after the first."""
        found: list[list[float]] = []
        for prompt in prompts:
            ids_T = torch.tensor(list(prompt))
            logp_TV = self(ids_T[None])[0, :-1].log_softmax(-1)
            found.append(logp_TV.gather(1, ids_T[1:, None])[:, 0].tolist())
        return found

    def save(
        self,
        folder: Path,
        tokenizer: Tokenizer | None,
        about: Mapping[str, Any],
        signer: Signer | None = None,
    ) -> str:
        """See ``save_artifact``."""
        if tokenizer is None:
            raise TerminalError("the embedded policy is saved with its tokenizer")
        return save_artifact(folder, self, tokenizer, about=about, signer=signer)


_SMALL = ("head.weight", "positions.weight")


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=False):
    """What an artifact says about itself."""

    format: int
    sha256: str
    """Of the weights file."""
    size: int
    config: PolicyConfig
    vocabulary: tuple[str, ...]
    about: dict[str, Any] = {}
    """``artifact.Origin``."""
    files: dict[str, FileEntry] = {}
    tensors: dict[str, TensorEntry] = {}
    signer: str = ""
    kind: str = "embedded"


class Artifact(msgspec.Struct, frozen=True):
    """A verified artifact in memory: network (eval mode, no gradients), tokenizer and manifest."""

    net: PolicyNet
    tokenizer: Tokenizer
    manifest: Manifest


def save_artifact(
    folder: Path,
    net: PolicyNet,
    tokenizer: Tokenizer,
    *,
    about: Mapping[str, Any] | None = None,
    signer: Signer | None = None,
) -> str:
    """Write ``net`` as the immutable artifact ``folder``; returns the sha256 of its weights.

    Writing the same weights again changes nothing. Raises TerminalError when the folder holds other weights.
    """
    return write_once(
        folder,
        WEIGHTS,
        net.state_dict(),
        written=lambda folder: read_manifest(folder).sha256,
        manifest=lambda sha256, size, shapes: Manifest(
            FORMAT, sha256, size, net.config, tokenizer.vocabulary, dict(about or {}), tensors=shapes
        ),
        signer=signer,
    )


def read_manifest(folder: Path, trust: Trust | None = None) -> Manifest:
    """The manifest of an artifact. Raises SchemaError when there is none, it is malformed, or not signed as ``trust`` asks."""
    manifest = read_head(folder, Manifest, trust)
    if manifest.format not in FORMATS:
        raise SchemaError(f"{folder} has format {manifest.format}, this build reads {FORMAT}")
    return manifest


def load_artifact(folder: Path, *, sha256: str | None = None, trust: Trust | None = None) -> Artifact:
    """Read and verify an artifact.

    Args:
        folder: ``.../policy@vN``.
        sha256: Expected hash of the weights (from the log); None: the manifest's.
        trust: Whose signature is needed; None: anybody's or none.

    Raises:
        SchemaError: missing, or its hash, names, shapes, numbers or signature are not what they have to be.
    """
    manifest = read_manifest(folder, trust)
    files = manifest.files or {WEIGHTS: FileEntry(manifest.sha256, manifest.size)}
    weights = read_files(folder, files, (WEIGHTS,))[WEIGHTS]
    found = files[WEIGHTS].sha256
    for name, expected in (("manifest", manifest.sha256), ("log", sha256 or manifest.sha256)):
        if found != expected:
            raise SchemaError(
                f"{folder / WEIGHTS} is another version: its sha256 is {found[:12]}, the {name} says {expected[:12]}; restore it"
            )
    tokenizer = Tokenizer(manifest.vocabulary)
    if tokenizer.size != manifest.config.vocabulary_size:
        raise SchemaError(
            f"{folder}: {tokenizer.size} tokens in the vocabulary, {manifest.config.vocabulary_size} in the network"
        )
    try:
        tensors = load_tensors(weights)
    except SafetensorError as exc:
        raise SchemaError(f"{folder / WEIGHTS} is not a safetensors file: {exc}") from exc
    net = _unfilled(manifest.config)
    given = shapes_of(tensors)
    for what, wanted in (("network", shapes_of(net.state_dict())), ("manifest", manifest.tensors or given)):
        if wanted != given:
            wrong = sorted(n for n in wanted.keys() | given.keys() if wanted.get(n) != given.get(n))
            raise SchemaError(f"{folder}: tensors do not fit the {what}: {', '.join(wrong[:5])}")
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise SchemaError(f"{folder}: {name} has values that are not finite")
    net.load_state_dict(tensors, assign=True)
    net.eval().requires_grad_(False)
    return Artifact(net, tokenizer, manifest)


def _unfilled(config: PolicyConfig) -> PolicyNet:
    """A network whose values will be replaced. (The meta device would import half of torch: 1.5 s.)"""
    with torch.random.fork_rng(devices=[]):
        return PolicyNet(config)
