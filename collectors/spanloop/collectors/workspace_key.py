"""The key of the hash that stands where a text was dropped."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

from spanloop.schemas.errors import ConfigError, TransientError
from spanloop.schemas.settings import Settings

__all__ = ["workspace_key"]


def workspace_key(settings: Settings) -> bytes:
    """The key of the keyed hash: the setting, else WORKSPACE/hmac.key, made at first use and readable by its owner
    only. All processes of a workspace share it, so that equal texts leave equal hashes.

    Raises:
        ConfigError: the setting is too short, or the file is damaged.
        TransientError: the file cannot be written.
    """
    given = settings.content.hmac_key.get_secret_value()
    if given:
        if len(given) < 16:
            raise ConfigError("content.hmac_key is shorter than 16 characters; use a long random text")
        return given.encode()
    path = settings.workspace / "hmac.key"
    try:
        settings.workspace.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            _create_key(path)
        text = path.read_text()
    except OSError as exc:
        raise TransientError(f"cannot keep the hash key in {path}: {exc.strerror}") from exc
    if len(text) < 32:
        raise ConfigError(
            f"{path} is damaged ({len(text)} characters, expected 64); restore it or set content.hmac_key"
        )
    return text.encode()


def _create_key(path: Path) -> None:
    """Write beside, then link: of two processes that start together one wins and both read the same key."""
    temporary = path.with_name(f".hmac.key.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as handle:
            handle.write(secrets.token_hex(32))
            handle.flush()
            os.fsync(handle.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        temporary.unlink()
