"""An artifact's folder: its files, the manifest that names them all, and the signature of who made it.

Place: every kind of policy (``policy``, ``hf_artifact``) writes and reads its versions with this. The folder holds the kind's
own files, ``manifest.json`` and ``manifest.sig`` (64 bytes over the manifest's), and nothing else:

    openssl pkeyutl -verify -pubin -inkey workspace.pub.pem -rawin -in manifest.json -sigfile manifest.sig

Invariants: written beside its final place, synced and renamed; regular files only, never a link's target; no file but those that
the manifest names, so no pickle either; every file has the size and sha256 that the manifest says before its content is used.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import stat
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from spanloop.learner.durable import write_folder
from spanloop.learner.signing import Signer, Trust, verify
from spanloop.schemas.canonical import canonical_json, decode_json
from spanloop.schemas.errors import ConfigError, SchemaError, TerminalError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "MANIFEST",
    "FileEntry",
    "Origin",
    "TensorEntry",
    "code_version",
    "entries_of",
    "origin_of",
    "read_files",
    "read_head",
    "read_weights",
    "shapes_of",
    "signed_by",
    "signer_of",
    "write",
    "write_once",
]

MANIFEST, SIGNATURE = "manifest.json", "manifest.sig"
MANIFEST_BYTES_MAX = 16 * 2**20
SIGNATURE_BYTES = 64


class FileEntry(msgspec.Struct, frozen=True):
    """One file of the folder."""

    sha256: str
    size: int


class TensorEntry(msgspec.Struct, frozen=True):
    """One tensor of the weights."""

    shape: tuple[int, ...]
    dtype: str


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """Where a version comes from; a manifest's ``about``."""

    version: int = -1
    parent: int = -1
    """Version whose batch came before; -1: none."""
    parent_sha256: str = ""
    """The parent's hash, so that signed manifests are a chain."""
    batch: int = -1
    from_offset: int = -1
    """Its batch took samples after this offset of the topic ..."""
    to_offset: int = -1
    """... up to this one."""
    samples: int = 0
    """Orchestrations that the batch was trained on ..."""
    samples_sha256: str = ""
    """... and which: see ``training.samples_hash``."""
    code: str = ""
    """``code_version`` of the learner."""
    injected: str = ""
    """Why somebody put it there by hand."""
    injected_signer: str = ""
    """Who had signed what was put there; empty: nobody."""


class _Manifest(Protocol):
    @property
    def files(self) -> Mapping[str, FileEntry]: ...
    @property
    def signer(self) -> str: ...


_M = TypeVar("_M", bound=_Manifest)


class _Signed(msgspec.Struct, frozen=True):
    sha256: str = ""
    size: int = 0
    files: dict[str, FileEntry] = {}
    config: dict[str, Any] = {}
    signer: str = ""
    about: dict[str, Any] = {}


@functools.cache
def code_version() -> str:
    """The installed version and a hash of the learner's source, as ``0.1.0+sha256.0123456789ab``."""
    here = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        digest.update(f"{path.relative_to(here)}\0".encode() + path.read_bytes())
    return f"{importlib.metadata.version('spanloop')}+sha256.{digest.hexdigest()[:12]}"


def origin_of(about: Mapping[str, Any]) -> Origin:
    """``about`` of a manifest, typed; what it does not say has its default. Raises SchemaError."""
    try:
        return msgspec.convert(about, Origin)
    except msgspec.ValidationError as exc:
        raise SchemaError(f"the manifest's origin is malformed: {exc}") from exc


def entries_of(files: Mapping[str, bytes]) -> dict[str, FileEntry]:
    """Size and sha256 of files."""
    return {name: FileEntry(hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()}


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Shape and type of tensors by name."""
    return {
        name: TensorEntry(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in tensors.items()
    }


# ---------------------------------------------------------------- writing and reading


def write_once(
    folder: Path,
    file: str,
    tensors: Mapping[str, Tensor],
    *,
    written: Callable[[Path], str],
    manifest: Callable[[str, int, dict[str, TensorEntry]], msgspec.Struct],
    signer: Signer | None,
) -> str:
    """Write a whole network as the only file of a folder; returns the sha256 of its weights. The same weights again change nothing.

    Args:
        folder: ``.../policy@vN``.
        file: Name of the safetensors file.
        tensors: All parameters.
        written: sha256 of the weights of a folder that is there.
        manifest: From sha256, size in bytes and shapes.
        signer: Signs it; None leaves it unsigned.

    Raises:
        TerminalError: the folder holds other weights.
    """
    from safetensors.torch import save

    plain = {name: t.detach().contiguous().cpu() for name, t in tensors.items()}
    weights = save(plain)
    sha256 = hashlib.sha256(weights).hexdigest()
    if not folder.exists():
        write(folder, {file: weights}, manifest(sha256, len(weights), shapes_of(plain)), signer)
    elif (found := written(folder)) != sha256:
        raise TerminalError(
            f"{folder} holds other weights (sha256 {found[:12]}, not {sha256[:12]}); a version is never rewritten"
        )
    return sha256


def write(folder: Path, files: Mapping[str, bytes], manifest: msgspec.Struct, signer: Signer | None) -> None:
    """Write a folder that must not be there yet. ``manifest`` has the fields ``files`` and ``signer``, which are filled in."""
    whole = msgspec.structs.replace(
        manifest, files=entries_of(files), signer="" if signer is None else signer.name
    )
    data = canonical_json(whole)
    signature = {} if signer is None else {SIGNATURE: signer.sign(data)}
    write_folder(folder, {**files, MANIFEST: data, **signature})


def read_head(folder: Path, kind: type[_M], trust: Trust | None = None) -> _M:
    """The manifest of a folder, of a type with the fields ``files`` and ``signer``.

    Args:
        folder: ``.../policy@vN``.
        kind: Type of the manifest.
        trust: Whose signature is needed; None: none is, but one that is there must be right.

    Raises:
        SchemaError: there is none, it is malformed, or not signed as it has to be.
    """
    data = _read(folder, MANIFEST, MANIFEST_BYTES_MAX)
    try:
        manifest = decode_json(data, kind)
    except ConfigError as exc:  # sizes that no network has
        raise SchemaError(f"{folder / MANIFEST}: {exc.message}") from exc
    signature = _read(folder, SIGNATURE, SIGNATURE_BYTES) if os.path.lexists(folder / SIGNATURE) else None
    if trust is None:
        verify(folder, data, manifest.signer, signature)
    else:
        trust.check(folder, data, manifest.signer, signature)
    return manifest


def signer_of(folder: Path, trust: Trust) -> str:
    """The name of the trusted key that signed a folder; "": nobody that is trusted did.

    Raises SchemaError when it is signed and the signature is wrong."""
    return trust.keys.get(read_head(folder, _Signed).signer, "")


def signed_by(folder: Path, trust: Trust) -> str:
    """A sentence on who signed a version, for people; never raises for a folder that is wrong."""
    try:
        manifest = read_head(folder, _Signed, trust)
        origin = origin_of(manifest.about)
    except SchemaError as exc:
        return f"refused: {exc.message}"
    if not manifest.signer:
        return "nobody (made before versions were signed)"
    by = f"{trust.keys[manifest.signer]} ({manifest.signer})"
    if origin.injected:
        by += f", as injected; what was put there was signed by {origin.injected_signer or 'nobody'}"
    return by


def read_files(folder: Path, files: Mapping[str, FileEntry], names: Collection[str]) -> dict[str, bytes]:
    """The files of a folder, each with the size and hash that ``files`` says.

    Raises SchemaError when ``files`` has other names than ``names``, when the folder has, or when one differs.
    """
    if set(files) != set(names):
        raise SchemaError(
            f"{folder}: the manifest names {sorted(files)}, this kind has {sorted(names)}; restore it"
        )
    extra = sorted(set(os.listdir(folder)) - {*names, MANIFEST, SIGNATURE})
    if extra:
        raise SchemaError(
            f"{folder} has files that do not belong to it: {', '.join(extra[:5])}; nothing but safetensors and JSON is ever "
            "loaded: remove them"
        )
    found: dict[str, bytes] = {}
    for name, entry in files.items():
        found[name] = _read(folder, name, entry.size)
        digest = hashlib.sha256(found[name]).hexdigest()
        if digest != entry.sha256:
            raise SchemaError(
                f"{folder / name} is corrupt: its sha256 is {digest[:12]}, the manifest says {entry.sha256[:12]}; restore it"
            )
    return found


def read_weights(
    folder: Path, trust: Trust | None = None
) -> tuple[dict[str, Tensor], dict[str, Any], Origin]:
    """Tensors, configuration and origin of a version of any kind, verified as it is for loading. Raises SchemaError."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    manifest = read_head(folder, _Signed, trust)
    files = manifest.files or {"model.safetensors": FileEntry(manifest.sha256, manifest.size)}
    found: dict[str, Tensor] = {}
    for name, data in read_files(folder, files, files).items():
        if name.endswith(".safetensors"):
            try:
                found.update(load(data))
            except SafetensorError as exc:
                raise SchemaError(f"{folder / name} is not a safetensors file: {exc}") from exc
    return found, manifest.config, origin_of(manifest.about)


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
