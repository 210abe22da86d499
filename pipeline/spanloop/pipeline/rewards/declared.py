"""Rewards that a deployment declares in its settings, beside the built-in channels.

[[pipeline.rewards]] names a registered reward, its weight in the team's composite (R8) and, for a scaffold, the schedule by which the
weight goes to 0 with the versions of the value model, or with a measured indicator whose state these carry. The version is recorded on the credit, so a replay pays what was paid.
Invariants: pure, given the registry; a reward that is gated is paid only where the outcome is at least the floor; the weight as
paid stands on the reward; while the orchestration is incomplete none is final.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from spanloop.pipeline.rewards import individual, parallel, process, role, verifier
from spanloop.pipeline.rewards.indicators import key_of
from spanloop.pipeline.rewards.inputs import feedback_inputs, inputs_of
from spanloop.pipeline.rewards.loading import load_functions
from spanloop.pipeline.rewards.registry import Case, Definition, Found, find
from spanloop.pipeline.rewards.shaping import Schedule, weight_at
from spanloop.schemas.canonical import content_hash, micro
from spanloop.schemas.errors import SpanloopError
from spanloop.schemas.events import Reward

if TYPE_CHECKING:
    from spanloop.schemas.settings import Pipeline

__all__ = ["BUILT_IN", "Term", "declared_rewards", "terms_of"]

BUILT_IN = (individual, parallel, role, process, verifier)
"""Imported, so that their rewards are registered."""


class Term(msgspec.Struct, frozen=True):
    """One declared reward."""

    definition: Definition
    weight: float
    schedule: Schedule | None
    gated: bool
    options: dict[str, Any]
    indicator: str = ""
    """Key of what the schedule goes by; empty: versions of the value model."""

    @property
    def definition_parts(self) -> tuple[Any, ...]:
        """All that what it pays depends on, beside what it reads."""
        return (
            self.definition.estimator,
            self.weight,
            self.schedule,
            self.gated,
            self.options,
            self.indicator,
        )


def terms_of(settings: Pipeline) -> tuple[Term, ...]:
    """The rewards that settings declare. Raises ConfigError: unknown names, a file that cannot be run."""
    if settings.reward_functions:
        load_functions(Path(settings.reward_functions))
    found = []
    for given in settings.rewards:
        schedule = None
        if given.schedule != "constant":
            schedule = Schedule(given.weight, given.length, given.schedule)
        found.append(
            Term(find(given.name), given.weight, schedule, given.gated, dict(given.options), key_of(given))
        )
    return tuple(found)


def declared_rewards(
    terms: Sequence[Term], case: Case, *, good: bool, progress: int, indicators: Mapping[str, float]
) -> list[Reward]:
    """Rewards of all terms.

    Args:
        terms: From ``terms_of``.
        case: The orchestration; each term sees its own options.
        good: Whether the outcome is at least the floor.
        progress: Number of the recorded value model's version.
        indicators: How far the schedules that go by one have come, as that version says.

    A function of the deployment's own that fails makes a missing reward whose estimator says so: one bad reward costs itself.
    """
    found: list[Reward] = []
    whole = ""
    for term in terms:
        done = indicators.get(term.indicator, 0.0) if term.indicator else progress
        weight = term.weight if term.schedule is None else weight_at(term.schedule, done)
        paid = micro(weight) if good or not term.gated else 0
        estimator = term.definition.estimator
        try:
            got = term.definition.function(msgspec.structs.replace(case, options=term.options))
            made = _rewards(term.definition, got)
        except SpanloopError:
            raise
        except Exception as exc:
            made = [Reward(term.definition.family, _channel(term), "team", "", None, "missing", "")]
            estimator = f"{estimator}:failed:{type(exc).__name__}"
        scaffold = term.schedule is not None
        for item in made:
            team = item.unit == "team"
            if item.value is not None and not item.inputs_hash:
                whole = whole or _whole(case)
            found.append(
                msgspec.structs.replace(
                    item,
                    inputs_hash=item.inputs_hash or (whole if item.value is not None else ""),
                    status=item.status if case.complete or item.value is None else "provisional",
                    estimator=estimator,
                    weight=paid if team else 0,
                    scaffold=scaffold and team and paid > 0,
                )
            )
    return found


def _whole(case: Case) -> str:
    """Inputs of a function that may have read anything."""
    return inputs_of(content_hash(case.content), feedback_inputs(case.feedback), str(case.outcome))


def _channel(term: Term) -> str:
    return term.definition.name.partition("/")[0]


def _rewards(definition: Definition, got: Found) -> list[Reward]:
    if got is None or isinstance(got, int | float):
        name = definition.name.partition("/")[0]
        value = None if got is None else micro(float(got))
        return [
            Reward(definition.family, name, "team", "", value, "missing" if value is None else "final", "")
        ]
    return list(got)
