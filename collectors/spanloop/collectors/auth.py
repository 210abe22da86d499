"""Who is asking: tenant and role from the credential, never from the content.

Without configured credentials everyone on this machine is admin of the one tenant; the settings refuse such a
deployment on a public address.
"""

from __future__ import annotations

import hmac

import msgspec

from spanloop.schemas.canonical import digest
from spanloop.schemas.errors import SpanloopError
from spanloop.schemas.settings import Settings

__all__ = ["AuthError", "Authenticator", "Identity"]

_MAY: dict[str, frozenset[str]] = {
    "spans": frozenset({"agent", "scorer", "admin"}),
    "feedback": frozenset({"scorer", "admin"}),
    "metrics": frozenset({"agent", "scorer", "reader", "admin"}),
}


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


class Authenticator:
    """Checks ``Authorization: Bearer KEY`` in constant time; several keys of one role allow rotation."""

    def __init__(self, settings: Settings) -> None:
        self._anyone = None if settings.credentials else Identity(settings.tenant, "admin", "local")
        self._known = [
            (
                c.key.get_secret_value().encode(),
                Identity(c.tenant, c.role, f"{c.role}-{digest('credential', c.key.get_secret_value())[:8]}"),
            )
            for c in settings.credentials
        ]

    def check(self, header: str | None, action: str) -> Identity:
        """The identity behind an Authorization header, if it may do ``action`` (spans, feedback or metrics).

        Raises:
            AuthError: 401 without a known key, 403 when its role is not enough.
        """
        if self._anyone is not None:
            return self._anyone
        scheme, _, key = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise AuthError("send a key of [[credentials]] as 'Authorization: Bearer KEY'", 401)
        given = key.strip().encode("utf-8", "replace")
        found: Identity | None = None
        for known, identity in self._known:  # all of them, so that time tells nothing
            if hmac.compare_digest(known, given):
                found = identity
        if found is None:
            raise AuthError("the key is not known; it must be one of [[credentials]]", 401)
        if found.role not in _MAY[action]:
            roles = ", ".join(sorted(_MAY[action]))
            raise AuthError(f"a key with role {found.role} may not send {action}; it needs role {roles}", 403)
        return found
