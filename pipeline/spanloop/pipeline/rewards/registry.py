"""Rewards by name: what a deployment can declare, and how it adds its own.

A reward is a pure function of one ``Case``, registered under "name/version"; ``declared`` evaluates those that the settings name.

    from spanloop.pipeline.rewards.registry import Case, reward

    @reward("short/1", family="R8")
    def short(case):
        "1 for answers of at most 200 tokens."
        return float(case.content.tokens.output <= 200)

Invariants: a name is registered once; a changed definition is a new version, so that a recorded reward says what it meant.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from spanloop.schemas.errors import ConfigError
from spanloop.schemas.events import FeedbackReceived, Reward
from spanloop.schemas.orchestration import OrchestrationContent

__all__ = ["FAMILIES", "Case", "Definition", "Found", "find", "reward"]

FAMILIES = ("R1", "R2", "R3", "R4", "R5", "R6", "R7", "R8")
_NAME = re.compile(r"[a-z][a-z0-9_]*/[0-9]+\Z")


class Case(msgspec.Struct, frozen=True):
    """What a reward may look at: one orchestration, the feedback on it, and the options that the settings give."""

    content: OrchestrationContent
    feedback: Sequence[FeedbackReceived]
    outcome: int | None
    """R1, micro-units; None while missing."""
    outcome_status: str = "final"
    complete: bool = True
    """False: closed by time-out; nothing made of its content is final."""
    options: Mapping[str, Any] = {}

    def option(self, name: str, default: Any) -> Any:
        """An option, or its default."""
        return self.options.get(name, default)


Found = float | None | Sequence[Reward]
"""The team's value in units, None for missing, or rewards of single units with the team's among them."""


class Definition(msgspec.Struct, frozen=True):
    """A registered reward."""

    name: str
    family: str
    function: Callable[[Case], Found]
    source: str = ""
    """Short hash of the file that a deployment's own one came from; empty: ours."""

    @property
    def estimator(self) -> str:
        """What a reward made by it names as its estimator."""
        return f"{self.name}@{self.source}" if self.source else self.name


_REGISTERED: dict[str, Definition] = {}
_SOURCE = [""]


def reward(name: str, *, family: str) -> Callable[[Callable[[Case], Found]], Callable[[Case], Found]]:
    """Register a reward function as "name/version".

    Raises:
        ConfigError: the name is malformed or taken, or the family unknown.
    """
    if not _NAME.match(name):
        raise ConfigError(
            f"reward {name!r}: expected a name and a version like 'short_answer/1' (lower case, digits, underscores)"
        )
    if family not in FAMILIES:
        raise ConfigError(f"reward {name}: family {family!r} is none of {', '.join(FAMILIES)}")

    def register(function: Callable[[Case], Found]) -> Callable[[Case], Found]:
        known = _REGISTERED.get(name)
        made = Definition(name, family, function, _SOURCE[0])
        if known is not None and (known.source != made.source or not made.source):
            raise ConfigError(f"reward {name} is registered twice: a changed definition is a new version")
        _REGISTERED[name] = made
        return function

    return register


def find(name: str) -> Definition:
    """The reward of that name. Raises ConfigError with those that there are."""
    known = _REGISTERED.get(name)
    if known is None:
        raise ConfigError(
            f"no reward {name!r}; there are {', '.join(sorted(_REGISTERED))} (pipeline.reward_functions names a Python file "
            "with your own)"
        )
    return known


class from_file:
    """While it is open, what is registered comes from a file with this hash."""

    def __init__(self, source: str) -> None:
        self._source = source

    def __enter__(self) -> None:
        _SOURCE[0] = self._source

    def __exit__(self, *_: object) -> None:
        _SOURCE[0] = ""
