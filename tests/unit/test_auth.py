"""Credentials: schemes, rotation, expiry, roles, and settings that refuse an open door."""

from __future__ import annotations

import base64
import contextlib
from typing import Any

import pytest

from spanloop.collectors import auth
from spanloop.collectors.auth import MAY, Authenticator, AuthError
from spanloop.pipeline.clock import ManualClock
from spanloop.schemas.settings import Settings

NOW = 1_790_000_000_000_000_000
ROLES = ("agent", "scorer", "reader", "admin")


def _basic(text: str) -> str:
    return "Basic " + base64.b64encode(text.encode()).decode()


def _auth(*credentials: dict[str, Any], now: int = NOW) -> Authenticator:
    return Authenticator(Settings(credentials=credentials), ManualClock(now))


@pytest.mark.parametrize(
    "header",
    ["Bearer s3cret", "bearer  s3cret ", _basic("pk-lf-1:s3cret"), _basic(":s3cret")],
    ids=["bearer", "spaces", "basic", "basic without user"],
)
def test_a_key_in_each_scheme(header: str) -> None:
    found = _auth({"key": "s3cret", "role": "agent", "tenant": "A"}).check(header, "spans")
    assert (found.tenant, found.role) == ("A", "agent")
    assert "s3cret" not in found.name


def test_a_pair_may_be_the_key_and_x_api_key_stands_in() -> None:
    checked = _auth({"key": "pk-1:sk-1", "role": "agent"})
    assert checked.check(_basic("pk-1:sk-1"), "spans").role == "agent"
    with pytest.raises(AuthError):
        checked.check(_basic("pk-2:sk-1"), "spans")
    assert _auth({"key": "k", "role": "agent"}).check(None, "spans", api_key="k").role == "agent"
    with pytest.raises(AuthError):  # what Authorization says is not overruled
        _auth({"key": "k", "role": "agent"}).check("Bearer nope", "spans", api_key="k")


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", "Bearer ", "Basic", "Basic !!", _basic("nocolon"), _basic("user:"),
               "Digest k", "k", "Bearer \ud800", "Bearer kk", "Bearer " + "k" * 10_000]
)  # fmt: skip
def test_everything_else_is_401(header: str | None) -> None:
    with pytest.raises(AuthError) as refused:
        _auth({"key": "k", "role": "agent"}).check(header, "spans")
    assert refused.value.status == 401
    assert "kk" not in refused.value.message, "what was sent is not repeated"


@pytest.mark.parametrize("action", sorted(MAY))
@pytest.mark.parametrize("role", ROLES)
def test_roles(action: str, role: str) -> None:
    checked = _auth({"key": "k", "role": role})
    if role in MAY[action]:
        assert checked.check("Bearer k", action).role == role
        return
    with pytest.raises(AuthError) as refused:
        checked.check("Bearer k", action)
    assert refused.value.status == 403


def test_what_each_role_may() -> None:
    may = {role: {action for action in MAY if role in MAY[action]} for role in ROLES}
    assert may == {
        "agent": {"spans", "metrics"},
        "scorer": {"spans", "feedback", "metrics"},
        "reader": {"metrics"},
        "admin": {"spans", "feedback", "metrics"},
    }


def test_rotation_with_two_valid_keys() -> None:
    old = {"key": "old", "role": "agent", "tenant": "A", "expires": "2026-09-21T14:13:20Z"}  # NOW
    new = {"key": "new", "role": "agent", "tenant": "A"}
    for now, valid in ((NOW - 1, {"old", "new"}), (NOW, {"new"})):
        checked = _auth(old, new, now=now)
        for key in ("old", "new"):
            if key in valid:
                assert checked.check(f"Bearer {key}", "spans").tenant == "A"
                continue
            with pytest.raises(AuthError, match="expired") as refused:
                checked.check(f"Bearer {key}", "spans")
            assert refused.value.status == 401


@pytest.mark.parametrize("text", ["tomorrow", "2027-01-31", "2027-01-31T00:00:00", "1"])
def test_expiry_needs_a_time_with_a_zone(text: str) -> None:
    with pytest.raises(ValueError, match="with a zone"):
        Settings(credentials=({"key": "k", "role": "agent", "expires": text},))


def test_every_key_is_compared_each_time_and_at_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    real = auth.hmac.compare_digest

    def noting(known: bytes, given: bytes) -> bool:
        seen.append((len(known), len(given)))
        return real(known, given)

    monkeypatch.setattr(auth.hmac, "compare_digest", noting)
    checked = _auth(*({"key": "k" * n, "role": "agent"} for n in (1, 7, 900)))
    for key in ("k", "k" * 7, "x" * 5_000):
        seen.clear()
        with contextlib.suppress(AuthError):
            checked.check(f"Bearer {key}", "spans")
        assert seen == [(32, 32)] * 3


def test_without_credentials_only_this_machine() -> None:
    assert Authenticator(Settings(tenant="t")).check(None, "feedback").role == "admin"
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        Settings(collector={"host": host})
    for host in ("0.0.0.0", "::", "10.0.0.1", "example.invalid", "127.example.invalid"):  # noqa: S104
        with pytest.raises(ValueError, match="reachable from outside"):
            Settings(collector={"host": host})
        Settings(collector={"host": host}, credentials=({"key": "k", "role": "agent"},))
