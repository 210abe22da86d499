"""States of finished steps as chains: what is known by what was added, so that one more step costs one step.

A state of thousands of finished steps has thousands of features. It is told apart by the sum of its features' numbers (96 random
bits each, a function of the feature alone), which one more step changes by an addition; a model sums embeddings in the same
way, in numbers whose sums are exact in any order. A plain function of states gets them written out.
Invariants: pure; the key of a set of features does not depend on the order in which they came.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from spanloop.pipeline.credit.anchors import Value
from spanloop.pipeline.credit.states import COUNT_MAX, State, step_feature

__all__ = ["Bag", "Plain", "StepValues", "features_of", "key_of", "variance_of", "written_out"]

Floats = NDArray[np.float64]


class Bag:
    """A set of features: those of ``parent`` and ``added``."""

    __slots__ = ("added", "key", "model", "parent", "state", "vector")

    def __init__(self, parent: Bag | None, key: int, added: Sequence[int]) -> None:
        self.parent = parent
        self.key = key
        self.added = added
        self.model: object = None
        self.vector: Floats | None = None
        """Sum of embeddings under ``model``."""
        self.state: State | None = None

    def chain(self) -> list[Bag]:
        """This one and those that it adds to, up to the first whose state is written out."""
        chain: list[Bag] = []
        at: Bag | None = self
        while at is not None and at.state is None:
            chain.append(at)
            at = at.parent
        return chain


@lru_cache(maxsize=65_536)
def features_of(kind: str) -> tuple[tuple[int, int], ...]:
    """(feature, its number) of the first, second ... finished step of a kind; further ones add nothing."""
    return tuple((f, key_of(f)) for f in (step_feature(kind, n) for n in range(1, COUNT_MAX + 1)))


@lru_cache(maxsize=262_144)
def key_of(feature: int) -> int:
    """The number of a feature: 96 bits."""
    return int.from_bytes(hashlib.blake2b(feature.to_bytes(8, "little"), digest_size=12).digest(), "little")


class StepValues(Protocol):
    """V of states that are told as chains."""

    misses: int
    """How often a value was asked for that is not known yet, and 0 was said."""

    def at(self, bag: Bag, key: int, added: Sequence[int]) -> int:
        """Micro-units of the state of ``bag`` with the features ``added``; ``key`` is that state's."""
        ...

    def known(self, key: int) -> int | None:
        """The same of a state that was asked for and answered; None: not yet."""
        ...

    def members(self, key: int) -> Floats | None:
        """What each member of an ensemble says of a state that was asked for, units; None: there is only one voice."""
        ...

    def recall(self, shape: tuple[object, ...]) -> Any:
        """What was remembered under ``shape``; None: nothing."""
        ...

    def remember(self, shape: tuple[object, ...], found: object) -> None:
        """Keep what is a function of ``shape`` under this version of a value model, within a bound."""
        ...


def variance_of(told: Floats) -> float:
    """Unbiased variance of what the members of an ensemble say, shape (members,): ``numpy.var`` to the last bit, without what that
    does for other shapes.

    >>> variance_of(np.array([1.0, 2.0, 4.0])) == np.var(np.array([1.0, 2.0, 4.0]), ddof=1)
    True
    """
    from_mean = told - np.add.reduce(told) / len(told)
    return float(np.add.reduce(from_mean * from_mean) / (len(told) - 1))


class Plain:
    """``StepValues`` of a plain function of states."""

    def __init__(self, value: Value) -> None:
        self._value = value
        self._known: dict[int, int] = {}
        self.misses = 0

    def at(self, bag: Bag, key: int, added: Sequence[int]) -> int:
        """The value of the state, written out; asked for once."""
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = self._value(written_out(bag, added))
        return known

    def known(self, key: int) -> int | None:
        """The value of a state that was asked for."""
        return self._known.get(key)

    def members(self, key: int) -> Floats | None:
        """One voice."""
        return None

    def recall(self, shape: tuple[object, ...]) -> None:
        """Nothing is remembered."""
        return

    def remember(self, shape: tuple[object, ...], found: object) -> None:
        """Nothing is."""


def written_out(bag: Bag, added: Iterable[int]) -> State:
    """A state as a sorted tuple of distinct features.

    >>> written_out(Bag(None, 0, (3, 5)), (4, 3))
    (3, 4, 5)
    """
    for link in reversed(bag.chain()):
        before = link.parent.state if link.parent is not None else None
        link.state = _merged(before or (), link.added)
    return _merged(bag.state or (), added)


def _merged(state: State, added: Iterable[int]) -> State:
    new = set(added).difference(state)
    return tuple(sorted((*state, *new))) if new else state
