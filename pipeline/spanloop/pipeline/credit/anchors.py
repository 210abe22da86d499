"""Estimates as the ledger takes them: what an account was worth before reconciliation, and how far that can be trusted.

Two ways not to know: *unknown* (no value model yet, or nothing said which of several did it: the account takes its share of what
is left by its variance) and *unidentified* with a share of nothing (what it did is seen in no later state).
Invariants: pure data; ``raw`` is None exactly where nothing was estimated.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from spanloop.pipeline.credit.leave_one_out import UNKNOWN_VARIANCE
from spanloop.pipeline.credit.states import State

__all__ = [
    "DEFAULT",
    "ENVIRONMENT",
    "NULL",
    "UNIDENTIFIED",
    "UNKNOWN",
    "VALUE_DIFFERENCE",
    "Anchored",
    "CallValues",
    "Choice",
    "Estimates",
    "Lesson",
    "Value",
    "exact",
    "settle_environment",
]

ENVIRONMENT = "environment"
VALUE_DIFFERENCE = "value_difference/1"


class Choice(msgspec.Struct, frozen=True):
    """Which estimators an orchestration's ledger uses (METHODS 3.5); a function of the settings and of its id."""

    agents: str = "auto"
    """auto: Shapley, Owen or precedence of those that work side by side; leave_one_out."""
    turns: str = "value_difference"
    """value_difference, or gae."""
    smoothing: float = 0.95
    """lambda of gae."""
    seed: str = ""
    """Orchestration id: seeds what is sampled."""


DEFAULT = Choice()


class Value(Protocol):
    """V of a state in micro-units under one version of a value model."""

    def __call__(self, state: State, /) -> int:
        """The value."""
        ...


class Lesson(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A state that an orchestration was in."""

    state: State
    options: tuple[State, ...]
    """States that the next decision could have led to; empty: only the outcome says what it was worth."""


class Anchored(msgspec.Struct, frozen=True, gc=False):
    """An estimate and where the reconciliation starts from: the estimate with its share of its gap's residual."""

    anchor: int | None
    weight: float
    """Share in what the tree above still has to reconcile; 0: exact."""
    raw: int | None
    variance: float
    estimator: str


NULL = Anchored(0, 0.0, 0, 0.0, VALUE_DIFFERENCE)
UNKNOWN = Anchored(None, UNKNOWN_VARIANCE, None, UNKNOWN_VARIANCE, "uniform/1")
UNIDENTIFIED = Anchored(0, 0.0, None, 0.0, "unidentified/1")


class CallValues(msgspec.Struct, frozen=True):
    """Values of a turn, micro-units."""

    start: int
    """Before its first decision."""
    end: int
    """After its last one."""
    drift: int
    """What lies between its decisions: end - start = sum of the tokens' estimates + drift."""
    tokens: tuple[int, ...]
    """Estimate of each response token; empty for a response that is valued as a whole."""
    menus: tuple[tuple[int, ...], ...]
    """For each response token V after each open option, in the menu's order; empty without menus."""
    starts: tuple[int, ...] = ()
    """V before each response token, 0 where it was the only option; empty for a response that is valued as a whole."""

    @property
    def decided(self) -> int:
        """What the turn's own decisions were worth."""
        return self.end - self.start - self.drift


class Estimates(msgspec.Struct):
    """Everything the ledger needs to know; absent keys are unknown."""

    level: str
    baseline: int = 0
    calls: dict[str, CallValues] = {}
    messages: dict[str, Anchored] = {}
    """By call id: what the turn's own text decided."""
    reports: dict[str, Anchored] = {}
    """By agent id: what a sub-agent's return brought beyond its valued decisions."""
    tools: dict[str, Anchored] = {}
    agents: dict[str, Anchored] = {}
    environment: Anchored | None = None


def exact(amount: int) -> Anchored:
    """A value difference that keeps what it is."""
    return Anchored(amount, 0.0, amount, 0.0, VALUE_DIFFERENCE) if amount else NULL


def settle_environment(found: Estimates, amount: int) -> None:
    """Give chance what no account explains."""
    found.environment = Anchored(amount, UNKNOWN_VARIANCE, None, UNKNOWN_VARIANCE, "residual/1")
