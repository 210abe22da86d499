"""Who made a version: Ed25519 signatures over manifests, and the keys that a workspace trusts.

Place: ``artifact`` signs what it writes and checks what it reads. A manifest names its signer, and names the sha256 of every
other file of the folder, so that a signature over the manifest's bytes covers all of them. The private key belongs to the
workspace's learner: it is made at first use and nobody else needs it; whoever verifies has public keys only.

    WORKSPACE/signing/private.pem            the learner's, 0600
    WORKSPACE/signing/trusted/NAME.pub.pem   whose versions may be loaded; workspace.pub.pem is our own
    WORKSPACE/signing/before.json            manifests that were there before the key: they may stay unsigned

Invariants: a private key that others may read is not used; a key that is there is never replaced; without ``cryptography``
nothing is signed and nothing that is signed is loaded.

Source: RFC 8032 (Ed25519).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from spanloop.learner.durable import sync_folder, write_durably
from spanloop.schemas.errors import ConfigError, SchemaError

__all__ = ["NOBODY", "Signer", "Trust", "open_signer", "shown", "trust_of"]

_LOG = logging.getLogger(__name__)

SCHEME = "ed25519:"
"""What a signer's name begins with; the rest is the public key in hex."""
FOLDER, PRIVATE, TRUSTED, BEFORE, OWN = "signing", "private.pem", "trusted", "before.json", "workspace"


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError as exc:
        raise ConfigError(
            "signatures of policy versions need the package cryptography: pip install cryptography"
        ) from exc
    return ed25519


def _serialization() -> Any:
    _ed25519()
    from cryptography.hazmat.primitives import serialization

    return serialization


def _name_of(public: Any) -> str:
    form = _serialization()
    return SCHEME + public.public_bytes(form.Encoding.Raw, form.PublicFormat.Raw).hex()


def shown(signer: str) -> str:
    """A signer for people.

    >>> shown("ed25519:0123456789abcdef" + "0" * 48), shown("")
    ('ed25519:0123456789ab', 'nobody')
    """
    return signer[: len(SCHEME) + 12] or "nobody"


class Signer:
    """The workspace's private key."""

    def __init__(self, private: Any) -> None:
        self._private = private
        self.name = _name_of(private.public_key())
        """``ed25519:`` and the public key in hex."""

    def sign(self, data: bytes) -> bytes:
        """64 bytes; the same data gives the same signature."""
        return self._private.sign(data)


class Trust(msgspec.Struct, frozen=True):
    """Whose versions may be loaded."""

    keys: Mapping[str, str] = {}
    """Signer -> the name its public key was filed under."""
    before: frozenset[str] | None = None
    """sha256 of manifests that may be unsigned; None: any (a workspace whose learner has made no key yet)."""

    def check(self, where: Path, manifest: bytes, signer: str, signature: bytes | None) -> str:
        """Who stands for a manifest: the name of a trusted key, or "" where it may be unsigned (logged).

        Raises:
            SchemaError: the signature is missing or wrong, or not of a trusted key.
        """
        if verify(where, manifest, signer, signature):
            known = self.keys.get(signer)
            if known is None:
                raise SchemaError(
                    f"{where} is signed by {shown(signer)}, whom this workspace does not trust; put that public key into "
                    f"{FOLDER}/{TRUSTED}/NAME.pub.pem if it is to"
                )
            return known
        if self.before is not None and hashlib.sha256(manifest).hexdigest() not in self.before:
            raise SchemaError(
                f"{where} is not signed; versions of this workspace are. Was the signature removed, or the folder put there by "
                "hand (`spanloop policies inject --unsigned FOLDER`)?"
            )
        _LOG.warning("%s is not signed: it was made before versions were", where)
        return ""


NOBODY = Trust({}, frozenset())
"""Trusts no one."""


def verify(where: Path, manifest: bytes, signer: str, signature: bytes | None) -> bool:
    """Whether a manifest is signed at all. Raises SchemaError when it is and the signature is missing or wrong."""
    if not signer:
        if signature is not None:
            raise SchemaError(f"{where} has a signature, but its manifest names no signer")
        return False
    if signature is None:
        raise SchemaError(f"{where}: the signature of {shown(signer)} is missing; restore manifest.sig")
    key = _ed25519()
    from cryptography.exceptions import InvalidSignature

    try:
        public = key.Ed25519PublicKey.from_public_bytes(bytes.fromhex(signer.removeprefix(SCHEME)))
        public.verify(signature, manifest)
    except (ValueError, InvalidSignature) as exc:
        raise SchemaError(
            f"{where}: the signature is not {shown(signer)}'s over this manifest; something was changed after it was signed: "
            "restore the folder"
        ) from exc
    return True


def trust_of(workspace: Path) -> Trust:
    """Whom a workspace trusts now. Raises SchemaError when a public key or the list cannot be read."""
    folder = workspace / FOLDER
    try:
        listed = (folder / BEFORE).read_bytes()
    except FileNotFoundError:
        return Trust({}, None)
    keys: dict[str, str] = {}
    for path in sorted((folder / TRUSTED).glob("*.pub.pem")):
        form, ed25519 = _serialization(), _ed25519()
        try:
            public = form.load_pem_public_key(path.read_bytes())
        except (OSError, ValueError) as exc:
            raise SchemaError(f"{path} is no public key: {exc}") from exc
        if not isinstance(public, ed25519.Ed25519PublicKey):
            raise SchemaError(f"{path} is no Ed25519 key; versions are signed with those only")
        keys.setdefault(_name_of(public), path.name.removesuffix(".pub.pem"))
    try:
        return Trust(keys, frozenset(msgspec.json.decode(listed, type=list[str])))
    except msgspec.DecodeError as exc:
        raise SchemaError(f"{folder / BEFORE} is no list of hashes: {exc}") from exc


def open_signer(workspace: Path, manifests: Path | None = None) -> Signer:
    """The workspace's key, made where there is none; ``manifests`` below which folder may then stay unsigned.

    One learner works on a workspace (its lock), so that nobody else makes one meanwhile. The list of what was there before is
    written first: a kill in between leaves no key, and the next start begins again.

    Raises:
        ConfigError: the private key is readable for others, or no such key, or the folder cannot be written.
    """
    folder = workspace / FOLDER
    private = folder / PRIVATE
    try:
        if not private.exists():
            _make(folder, private, workspace / "policies" if manifests is None else manifests)
        if stat.S_IMODE(private.stat().st_mode) & 0o077:
            raise ConfigError(f"others may read {private}, which signs policy versions: chmod 600 {private}")
        key = _serialization().load_pem_private_key(private.read_bytes(), password=None)
        if not isinstance(key, _ed25519().Ed25519PrivateKey):
            raise ConfigError(f"{private} is no Ed25519 key")
        _export(folder, key.public_key())
    except OSError as exc:
        raise ConfigError(f"cannot use {private}: {exc.strerror or exc}") from exc
    except ValueError as exc:
        raise ConfigError(f"{private} is no private key: {exc}") from exc
    return Signer(key)


def _make(folder: Path, private: Path, manifests: Path) -> None:
    form = _serialization()
    (folder / TRUSTED).mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    if not (folder / BEFORE).exists():
        known = sorted(
            hashlib.sha256(path.read_bytes()).hexdigest() for path in manifests.glob("*/manifest.json")
        )
        _replace(folder / BEFORE, msgspec.json.encode(known), 0o600)
    data = (
        _ed25519()
        .Ed25519PrivateKey.generate()
        .private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
    )
    _replace(private, data, 0o600)
    _LOG.info("made the key that signs this workspace's policy versions: %s", private)


def _export(folder: Path, public: Any) -> None:
    form = _serialization()
    path = folder / TRUSTED / f"{OWN}.pub.pem"
    data = public.public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        _replace(path, data, 0o644)
    elif path.read_bytes() != data:
        raise ConfigError(
            f"{path} is not the public key of {folder / PRIVATE}: give the old one another name, so that its versions stay "
            "trusted, or restore the private key"
        )


def _replace(path: Path, data: bytes, mode: int) -> None:
    """A file with this mode, there whole or not at all."""
    building = path.with_name(f".building-{path.name}-{secrets.token_hex(4)}")
    descriptor = os.open(building, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    os.close(descriptor)
    try:
        write_durably(building, data)
        building.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            building.unlink()
        raise
    sync_folder(path.parent)
