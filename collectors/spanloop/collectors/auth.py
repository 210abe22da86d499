"""Who is asking: tenant and role from the credential, never from the content.

Without configured credentials everyone on this machine is admin of the one tenant; the settings refuse such a
deployment on a public address. Keys are compared by keyed digests of one length, all of them each time, so that the
time of an answer tells nothing about a key.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets

import msgspec

from spanloop.pipeline.clock import SystemClock
from spanloop.pipeline.ports import Clock
from spanloop.schemas.canonical import digest
from spanloop.schemas.errors import SpanloopError
from spanloop.schemas.settings import Settings

__all__ = ["MAY", "AuthError", "Authenticator", "Identity"]

MAY: dict[str, frozenset[str]] = {
    "spans": frozenset({"agent", "scorer", "admin"}),
    "feedback": frozenset({"scorer", "admin"}),
    "metrics": frozenset({"agent", "scorer", "reader", "admin"}),
}
"""Roles that may do what."""


class AuthError(SpanloopError):
    """No valid key (status 401), or one whose role may not do this (status 403)."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message, status=status)
        self.status = status


class Identity(msgspec.Struct, frozen=True):
    """What a credential says about its holder."""

    tenant: str
    role: str
    name: str
    """Stands for the holder in events; never the key."""


class _Known(msgspec.Struct, frozen=True):
    digest: bytes
    identity: Identity
    expires_ns: int | None


class Authenticator:
    """Checks the key of a request. Several keys of one role and tenant allow rotation.

    Args:
        settings: the ``[[credentials]]``.
        clock: decides what has expired.
    """

    def __init__(self, settings: Settings, clock: Clock | None = None) -> None:
        self._anyone = None if settings.credentials else Identity(settings.tenant, "admin", "local")
        self._clock = clock or SystemClock()
        self._salt = secrets.token_bytes(32)
        self._known = [
            _Known(
                self._digest(c.key.get_secret_value().encode()),
                Identity(c.tenant, c.role, f"{c.role}-{digest('credential', c.key.get_secret_value())[:8]}"),
                c.expires_ns,
            )
            for c in settings.credentials
        ]

    def check(self, header: str | None, action: str, api_key: str | None = None) -> Identity:
        """The identity behind a request, if it may do ``action``.

        Args:
            header: its Authorization: ``Bearer KEY``, or ``Basic`` with the key as password (or as ``user:password``).
            action: one of MAY.
            api_key: its ``x-api-key``, used where there is no Authorization.

        Raises:
            AuthError: 401 without a known key or with one that has expired, 403 when its role is not enough.
        """
        if self._anyone is not None:
            return self._anyone
        given = _given(header, api_key)
        if not given:
            raise AuthError("send a key of [[credentials]] as 'Authorization: Bearer KEY'", 401)
        found: _Known | None = None
        for candidate in map(self._digest, given):
            for known in self._known:  # all of them, so that time tells nothing
                if hmac.compare_digest(known.digest, candidate):
                    found = known
        if found is None:
            raise AuthError("the key is not known; it must be one of [[credentials]]", 401)
        if found.expires_ns is not None and found.expires_ns <= self._clock.now_ns():
            raise AuthError("the key has expired (credentials.expires); use its successor", 401)
        role = found.identity.role
        if role not in MAY[action]:
            roles = ", ".join(sorted(MAY[action]))
            raise AuthError(f"a key with role {role} may not do this ({action}); it needs role {roles}", 403)
        return found.identity

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._salt, digest_size=32).digest()


def _given(header: str | None, api_key: str | None) -> list[bytes]:
    """The keys that a request may mean, most likely last."""
    if not header:
        return [api_key.strip().encode("utf-8", "replace")] if api_key and api_key.strip() else []
    scheme, _, rest = header.partition(" ")
    rest = rest.strip()
    if scheme.lower() == "bearer":
        return [rest.encode("utf-8", "replace")] if rest else []
    if scheme.lower() != "basic":
        return []
    try:
        pair = base64.b64decode(rest, validate=True)
    except (binascii.Error, ValueError):
        return []
    _, colon, password = pair.partition(b":")
    return [pair, password] if colon and password else []
