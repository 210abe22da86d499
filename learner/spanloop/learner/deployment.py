"""Versions in serving: loaded under an immutable name, proved by a probe, then free to be routed to.

Place: ``promoter`` asks for a version before an event names it. Invariants: routing never names a version that has not
passed here; a version that serving refuses, or whose probe differs from the weights, is unloaded and not tried again
by this process; old versions are unloaded only after they had time to drain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec
import numpy as np

from spanloop.learner.model import Policy, Tolerance
from spanloop.learner.serving.port import ServingPort
from spanloop.schemas.errors import SchemaError, SpanloopError, StaleError
from spanloop.schemas.ids import policy_name

__all__ = ["DRAIN_S", "Deployment", "Fit", "probe_prompts"]

_LOG = logging.getLogger(__name__)

DRAIN_S = 60.0
"""A version that routing no longer names is unloaded after this long."""


def probe_prompts(vocabulary_size: int, context: int) -> list[list[int]]:
    """Four fixed token sequences that touch the whole vocabulary's embedding by chance, the same for every version."""
    rng = np.random.default_rng(20)
    return [rng.integers(0, vocabulary_size, min(context, 16)).tolist() for _ in range(4)]


class Fit(msgspec.Struct, frozen=True):
    """How far serving's answers are from a version's weights, nats."""

    mean: float
    largest: float
    allowed: Tolerance

    @property
    def good(self) -> bool:
        """Within what is allowed; false for what is not a number."""
        return self.mean <= self.allowed.mean and self.largest <= self.allowed.largest


class Deployment:
    """What is loaded and proved, and what was refused.

    Args:
        serving: Where versions are loaded; None: nowhere, everything counts as proved (experiments).
        policy: Name of the policy.
        net: Version -> its verified network. Raises SchemaError.
        folder: Version -> its artifact folder.
        tolerance: Mean difference in nats that a probe may have, ten times that at any token; 0: the policy's own.
    """

    def __init__(
        self,
        serving: ServingPort | None,
        policy: str,
        *,
        net: Callable[[int], Policy],
        folder: Callable[[int], Path],
        tolerance: float = 0.0,
    ) -> None:
        self._serving = serving
        self._policy = policy
        self._net = net
        self._folder = folder
        self._tolerance = Tolerance(tolerance, 10.0 * tolerance) if tolerance > 0.0 else None
        self._verified: set[int] = set()
        self._left: dict[int, float] = {}
        self.unroutable: set[int] = set()

    def ensure(self, version: int) -> bool:
        """Load a version and compare its probe; False when serving refuses it or answers with other numbers.

        Raises TransientError when serving cannot be reached."""
        if version in self._verified or self._serving is None:
            return True
        if version in self.unroutable:
            return False
        name = policy_name(self._policy, version)
        try:
            self._prove(self._serving, name, version)
        except (SchemaError, StaleError) as exc:
            _LOG.warning("%s is not routed to: %s", name, exc.message)
            self.unroutable.add(version)
            self._forget(name)
            return False
        self._verified.add(version)
        return True

    def _prove(self, serving: ServingPort, name: str, version: int) -> None:
        net = self._net(version)
        prompts = probe_prompts(net.config.vocabulary_size, net.config.context)
        serving.load(name, self._folder(version).resolve())
        fit = self._compare(serving.probe(name, prompts), net, prompts)
        if not fit.good:
            raise SchemaError(
                f"its probe differs by {fit.largest:.2g} nats from the weights (mean {fit.mean:.2g}; allowed {fit.allowed.largest:.2g} "
                f"and {fit.allowed.mean:.2g}); where serving computes in another type, set learner.probe_tolerance"
            )

    def fit(self, version: int, weights: int) -> Fit | None:
        """What serves as ``version`` now against the weights of version ``weights``; None: it is not loaded by us.

        A server that was restarted since is asked to load it first.

        Raises:
            SchemaError: serving refuses it, or its replicas answer differently.
            TransientError: serving cannot be reached.
        """
        if self._serving is None or version not in self._verified:
            return None
        name = policy_name(self._policy, version)
        net = self._net(weights)
        prompts = probe_prompts(net.config.vocabulary_size, net.config.context)
        try:
            served = self._serving.probe(name, prompts)
        except SchemaError:
            try:
                self._serving.load(name, self._folder(version).resolve())
            except StaleError as exc:
                raise SchemaError(exc.message) from exc
            served = self._serving.probe(name, prompts)
        return self._compare(served, net, prompts)

    def _compare(self, served: Sequence[Sequence[float]], net: Policy, prompts: list[list[int]]) -> Fit:
        mean, largest = _difference(served, net.probe(prompts))
        return Fit(mean, largest, self._tolerance or net.tolerance)

    def drain(self, named: Collection[int], now_s: float) -> None:
        """Unload versions that have not been in ``named`` for ``DRAIN_S``."""
        for version in sorted(self._verified):
            if version in named:
                self._left.pop(version, None)
            elif now_s - self._left.setdefault(version, now_s) >= DRAIN_S:
                del self._left[version]
                self._verified.discard(version)
                self._forget(policy_name(self._policy, version))

    def _forget(self, name: str) -> None:
        try:
            if self._serving is not None:
                self._serving.unload(name)
        except SpanloopError as exc:
            _LOG.info("%s could not be unloaded: %s", name, exc.message)


def _difference(served: Sequence[Sequence[float]], local: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Mean and largest absolute difference, nats; not a number where an entry is none."""
    if [len(s) for s in served] != [len(s) for s in local]:
        raise SchemaError("serving answered a probe of another length")
    gaps = [abs(a - b) for s, t in zip(served, local, strict=True) for a, b in zip(s, t, strict=True)]
    if not gaps:
        return 0.0, 0.0
    return float(np.mean(gaps)), float(np.max(gaps))
