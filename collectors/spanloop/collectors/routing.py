"""Which version serves a call: sticky keys, shares, and the memory of live keys. No I/O.

Place: the gateway asks ``Router.route`` for each call to the policy alias; a follower thread applies the events of the
``policies`` topic to it. Invariants: without a change of routing a key always gets the same version, on every gateway
(a hash, no random); shares are those of ``RoutingChanged``, canary first, then learning, the champion the rest; a live
key keeps its version when routing changes, unless that version was rolled back.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from spanloop.schemas.canonical import digest
from spanloop.schemas.events import Event, PolicyPromoted, PolicyRolledBack, RoutingChanged
from spanloop.schemas.ids import is_hex_id

__all__ = ["Choice", "Router", "StickyKey", "choose", "parse_traceparent", "share_position", "sticky_key"]

PINS_MAX = 100_000
"""Live keys remembered; the longest unused go first."""
PIN_S = 600.0
"""A key is live for this long after its last call."""


class StickyKey(msgspec.Struct, frozen=True):
    """What keeps the calls of one orchestration on one version."""

    value: str
    """Digest; the id itself is not kept."""
    source: str
    """session, trace, user or prompt: where it came from. Only the first two name one orchestration."""


class Choice(msgspec.Struct, frozen=True):
    """The version that serves a call and by which route: champion, learning or canary."""

    version: int
    route: str
    exploration: float = 0.0
    """Floor to ask the server for."""


def parse_traceparent(header: str | None) -> tuple[str, str] | None:
    """(trace id, span id) of a W3C ``traceparent``; None when absent or malformed.

    >>> parse_traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")
    ('0af7651916cd43dd8448eb211c80319c', 'b7ad6b7169203331')
    """
    parts = (header or "").strip().split("-")
    if len(parts) < 4 or len(parts[0]) != 2 or parts[0] == "ff" or (parts[0] == "00" and len(parts) != 4):
        return None
    if not is_hex_id(parts[1], 32) or not is_hex_id(parts[2], 16):
        return None
    return parts[1], parts[2]


def sticky_key(*, session: str | None, trace_id: str | None, user: Any, messages: Any) -> StickyKey:
    """The key of a call: session id, else trace id, else the body's ``user``, else system prompts + first user message."""
    if session:
        return StickyKey(digest("conversation", "session", session), "session")
    if trace_id:
        return StickyKey(digest("conversation", "trace", trace_id), "trace")
    if isinstance(user, str) and user:
        return StickyKey(digest("conversation", "user", user), "user")
    texts: list[bytes] = []
    for message in messages if isinstance(messages, Sequence) and not isinstance(messages, str) else ():
        role = message.get("role") if isinstance(message, Mapping) else None
        if role in ("system", "developer", "user"):
            texts.append(msgspec.json.encode([role, message.get("content")]))
        if role == "user":
            break
    return StickyKey(digest("conversation", "prompt", *texts), "prompt")


def share_position(key: str) -> float:
    """Where a key stands in [0, 1): a hash, uniform over keys, the same on every gateway."""
    return int(digest("route", key)[:13], 16) / 16**13


def choose(routing: RoutingChanged, u: float) -> Choice:
    """The version at position ``u``: [0, canary) canary, then the learning share, the champion the rest."""
    canary = routing.canary_share if routing.canary >= 0 else 0.0
    learning = routing.learning_share if routing.learner >= 0 else 0.0
    limit = 1.0 - routing.champion_share_min
    canary = min(canary, limit)
    if u < canary:
        return Choice(routing.canary, "canary")
    if u < min(canary + learning, limit):
        return Choice(routing.learner, "learning", routing.exploration)
    return Choice(routing.champion, "champion")


class Router:
    """Routing by tenant, as last told by the log, and the pins of live keys. Safe to use from several threads.

    Args:
        policy: Name of the policy (the alias).
        now_s: Monotonic seconds.
    """

    def __init__(
        self, policy: str, now_s: Callable[[], float], *, pins_max: int = PINS_MAX, pin_s: float = PIN_S
    ) -> None:
        self._policy = policy
        self._now_s = now_s
        self._pins_max = pins_max
        self._pin_s = pin_s
        self._lock = threading.Lock()
        self._routing: dict[str, RoutingChanged] = {}
        self._withdrawn: set[tuple[str, int]] = set()
        self._pins: OrderedDict[tuple[str, str], tuple[Choice, float]] = OrderedDict()

    def apply(self, events: Iterable[Event], *, afresh: bool = False) -> None:
        """Take in events of the ``policies`` topic, in log order. An older sequence never replaces a newer one.

        ``afresh``: they are all there are; what was known before is forgotten.
        """
        with self._lock:
            if afresh:
                self._routing, self._withdrawn = {}, set()
            for event in events:
                if getattr(event, "policy", self._policy) != self._policy:
                    continue
                if isinstance(event, RoutingChanged):
                    known = self._routing.get(event.tenant)
                    if known is None or event.sequence >= known.sequence:
                        self._routing[event.tenant] = event
                elif isinstance(event, PolicyRolledBack):
                    self._withdrawn.add((event.tenant, event.version))
                    self._withdrawn.discard((event.tenant, event.to))
                elif isinstance(event, PolicyPromoted):
                    self._withdrawn.discard((event.tenant, event.version))

    def events(self) -> list[Event]:
        """Events that tell a new router what this one knows of routing."""
        with self._lock:
            withdrawn = [
                PolicyRolledBack(
                    tenant=tenant, policy=self._policy, epoch=0, version=version, to=-1, reason="kept"
                )
                for tenant, version in sorted(self._withdrawn)
            ]
            return [*withdrawn, *(self._routing[tenant] for tenant in sorted(self._routing))]

    def routing(self, tenant: str) -> RoutingChanged | None:
        """The routing in force; None before the learner's first."""
        return self._routing.get(tenant)

    def route(self, tenant: str, key: StickyKey) -> Choice | None:
        """The version that serves this key now; None before the first routing."""
        now = self._now_s()
        with self._lock:
            routing = self._routing.get(tenant)
            if routing is None:
                return None
            pin = (tenant, key.value)
            found = self._pins.get(pin)
            choice = found[0] if found is not None and now - found[1] < self._pin_s else None
            if choice is None or (tenant, choice.version) in self._withdrawn:
                choice = choose(routing, share_position(key.value))
            self._pins[pin] = (choice, now)
            self._pins.move_to_end(pin)
            while len(self._pins) > self._pins_max:
                self._pins.popitem(last=False)
            return choice

    @property
    def num_pins(self) -> int:
        """Keys remembered."""
        return len(self._pins)
