"""Is what serves what routing declares? The served versions' log-probabilities against those of their weights, now and then.

Place: the learner's process steps it. A version was proved when it was loaded (``deployment``); this proves it again while it serves:
a server that was restarted with other weights, a cache that goes on answering for an older version, or one of several servers
that kept another adapter is found here. A mismatch is an alarm like a sentinel's: learning and promotion are frozen, the
champion goes on serving, and somebody has to look. ``WORKSPACE/audit.json`` holds the last measurement of each version.

Invariants: a server that cannot be reached is no mismatch; a mismatch is raised once until it is unfrozen, and again when it is still
there then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from pathlib import Path

import msgspec

from spanloop.learner.deployment import Deployment, Fit
from spanloop.learner.durable import write_durably
from spanloop.schemas.errors import SchemaError, TransientError
from spanloop.schemas.ids import policy_name

__all__ = ["FILE", "SENTINEL", "Audit", "Audited", "Mismatch", "read_audit"]

_LOG = logging.getLogger(__name__)

SENTINEL = "served_version"
"""Name of the alarm."""
FILE = "audit.json"
SUSPECTS_MAX = 8
"""Versions, newest first, that a server's answers are compared with when they are not the declared version's."""


class Audited(msgspec.Struct, frozen=True):
    """The last audit of one served version."""

    version: int
    at_ns: int
    fits: bool
    mean: float
    """Mean difference of log-probabilities, nats ..."""
    largest: float
    """... and the largest."""
    allowed_mean: float
    allowed_largest: float
    answers_as: int = -1
    """Version whose weights the answers fit instead; -1: none that is known."""
    error: str = ""
    """What the server said instead of answering."""

    def told(self, policy: str) -> str:
        """What was found, for people."""
        if self.error:
            return f"mismatch: {self.error}"
        told = f"mean difference {self.mean:.2g} nats, allowed {self.allowed_mean:.2g}"
        if self.fits:
            return f"serves its own weights ({told})"
        other = f", answers as {policy_name(policy, self.answers_as)}" if self.answers_as >= 0 else ""
        return f"mismatch{other}: {told}"


class Mismatch(msgspec.Struct, frozen=True):
    """A version that answers with other numbers than its own."""

    found: Audited
    reason: str


def read_audit(workspace: Path) -> dict[int, Audited]:
    """The last measurements of a workspace by version; empty where there are none."""
    try:
        found = msgspec.json.decode((workspace / FILE).read_bytes(), type=list[Audited])
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        return {}
    return {audited.version: audited for audited in found}


class Audit:
    """Probes what routing names.

    Args:
        deployment: Where versions are loaded.
        policy: Name of the policy.
        every_s: Seconds between two audits; 0: never.
        place: File for the last measurements; None: nowhere.
    """

    def __init__(self, deployment: Deployment, policy: str, *, every_s: float, place: Path | None) -> None:
        self._deployment = deployment
        self._policy = policy
        self._every_s = every_s
        self._place = place
        self._due_s = 0.0
        self.last: dict[int, Audited] = {}

    def step(
        self,
        named: Collection[int],
        known: Collection[int],
        now_ns: int,
        raise_alarm: Callable[[Mismatch], None],
    ) -> bool:
        """Audit the versions that routing names, where it is time; returns whether it was.

        Args:
            named: Versions in routing.
            known: All registered versions.
            now_ns: Processing time.
            raise_alarm: Called for each that does not fit.
        """
        now_s = now_ns / 1e9
        if self._every_s <= 0.0 or now_s < self._due_s:
            return False
        self._due_s = now_s + self._every_s
        self.last = {v: a for v, a in self.last.items() if v in named}
        for version in sorted(named):
            try:
                found = self._audit(version, known, now_ns)
            except TransientError as exc:
                _LOG.info("%s is not audited: %s", policy_name(self._policy, version), exc.message)
                continue
            if found is None:
                continue
            self.last[version] = found
            if not found.fits:
                raise_alarm(Mismatch(found, self._reason(found)))
        self._save()
        return True

    def _audit(self, version: int, known: Collection[int], now_ns: int) -> Audited | None:
        try:
            fit = self._deployment.fit(version, version)
        except SchemaError as exc:  # the server refuses a version that it had loaded, or its replicas differ
            return Audited(version, now_ns, False, 0.0, 0.0, 0.0, 0.0, error=exc.message)
        if fit is None:
            return None
        suspect = -1 if fit.good else self._fitting(version, known)
        return Audited(
            version, now_ns, fit.good, fit.mean, fit.largest, fit.allowed.mean, fit.allowed.largest, suspect
        )

    def _fitting(self, version: int, known: Collection[int]) -> int:
        """Another version whose weights the answers for ``version`` fit, the best of the newest; -1: none."""
        fits: list[tuple[float, int]] = []
        for other in sorted(set(known) - {version}, reverse=True)[:SUSPECTS_MAX]:
            try:
                fit: Fit | None = self._deployment.fit(version, other)
            except SchemaError:
                continue
            if fit is not None and fit.good:
                fits.append((fit.mean, other))
        return min(fits, default=(0.0, -1))[1]

    def _reason(self, found: Audited) -> str:
        name = policy_name(self._policy, found.version)
        if found.error:
            return f"{SENTINEL}: {name} cannot be shown to serve: {found.error}"
        told = (
            f"answers as {policy_name(self._policy, found.answers_as)} does"
            if found.answers_as >= 0
            else "answers as no known version does"
        )
        return (
            f"{SENTINEL}: what serves as {name} {told}: its log-probabilities differ by {found.mean:.2g} nats from its weights' "
            f"(allowed {found.allowed_mean:.2g}); restart that server, then unfreeze"
        )

    def _save(self) -> None:
        if self._place is None:
            return
        temporary = self._place.with_suffix(".tmp")
        write_durably(temporary, msgspec.json.encode(sorted(self.last.values(), key=lambda a: a.version)))
        temporary.rename(self._place)
