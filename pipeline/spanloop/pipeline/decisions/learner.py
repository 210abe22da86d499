"""Decision models of one tenant, learned beside its value model: effects of told decisions and a stopping rule.

What is kept is what each orchestration that told a decision contributes, a bounded memory of the last ones; everything else is a function
of that memory, so a corrected reward or a retracted orchestration leaves what would be there had it never come otherwise.
Invariants: deterministic; ``parameters`` depend on the memory as a set, not on the order in which it was filled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from spanloop.pipeline.decisions.effects import OptionEffect, Row, Statistics, rows_of
from spanloop.pipeline.decisions.paths import Path, Point
from spanloop.pipeline.decisions.stopping import StoppingModel, StoppingValue, fit_stopping
from spanloop.pipeline.decisions.told import Prices, chains, features_of, stop_propensity, stops_at, told_of
from spanloop.schemas.canonical import MICRO
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import Reward
from spanloop.schemas.orchestration import OrchestrationContent

__all__ = [
    "KIND",
    "MEMORY",
    "DecisionLearner",
    "DecisionModel",
    "Lesson",
    "effects_in",
    "grades_of",
    "lesson_of",
    "path_of",
]

KIND = "decisions/1"
MEMORY = 4096
"""Orchestrations that told a decision and are remembered, a tenant; the longest known goes first."""
CONTEXTS_MAX = 512
"""Contexts of which a version tells effects, those with most decisions."""
POINTS_MAX = 512
"""Decision points of one orchestration that stopping learns from, the first ones."""
DRAFT = "draft"


class _Stop(msgspec.Struct, frozen=True, array_like=True):
    """A decision point before anything was graded."""

    features: tuple[tuple[str, float], ...]
    cost: float
    propensity: float | None
    stopped: bool
    """By choice: where stopping was the only option, something else had ended it."""
    evidence: tuple[str, ...]
    """Span ids and the call id under which its draft may be graded."""


class Lesson(msgspec.Struct, frozen=True, array_like=True):
    """What is kept of an orchestration."""

    sequence: int
    rows: tuple[Row, ...]
    stops: tuple[tuple[str, tuple[_Stop, ...]], ...]
    """By the agent that decides; the agent that nobody started is named ""."""
    reward: int | None = None
    """Of the team, micro; None: not final yet."""
    grades: tuple[tuple[str, int], ...] = ()
    """Grades of drafts by span, call or response id, micro, sorted."""


def lesson_of(content: OrchestrationContent, prices: Prices, sequence: int = 0) -> Lesson | None:
    """What an orchestration teaches; None where no program told a decision."""
    told = told_of(content)
    if not told:
        return None
    parents = {agent.id: agent.parent_id for agent in content.agents}
    stops = tuple(
        (
            "" if not parents.get(agent, "") else agent,
            tuple(
                _Stop(
                    features_of(item), prices.of(item), stop_propensity(item.event, item.decision),
                    stops_at(item.event, item.decision) and len(item.decision.options) != 1, (*item.event.evidence, item.event.call_id),
                )
                for item in items[:POINTS_MAX]
            ),
        )
        for agent, items in chains(told).items()
    )  # fmt: skip
    return Lesson(sequence, rows_of(told), stops)


def grades_of(rewards: tuple[Reward, ...]) -> tuple[tuple[str, int], ...]:
    """Grades of drafts among an orchestration's rewards."""
    return tuple(
        sorted((r.unit_id, r.value) for r in rewards if r.name == DRAFT and r.unit_id and r.value is not None)
    )


def path_of(orchestration_id: str, lesson: Lesson) -> list[Path]:
    """Paths that stopping learns from: the last point of the agent that answers is graded by the outcome where no grade of its own is."""
    grades = dict(lesson.grades)
    found: list[Path] = []
    for agent, stops in lesson.stops:
        points: list[Point] = []
        for k, stop in enumerate(stops):
            last = stop.stopped or k + 1 == len(stops)
            grade = next((grades[name] for name in stop.evidence if name in grades), None)
            if grade is None and last and not agent:
                grade = lesson.reward
            quality = None if grade is None else grade / MICRO
            points.append(Point(stop.features, stop.cost, quality, stop.propensity, stop.stopped))
            if last:
                break
        if points and points[-1].quality is not None:
            found.append(Path(f"{orchestration_id}/{agent}", tuple(points)))
    return found


class DecisionModel(msgspec.Struct, frozen=True):
    """A published version, read."""

    version: str
    value_model: str
    trained_on: int
    effects: Mapping[tuple[str, str], tuple[OptionEffect, ...]]
    """By (group, context); context "": all contexts of the group as they came."""
    stopping: StoppingModel | None
    stopping_value: StoppingValue | None

    @staticmethod
    def read(version: str, value_model: str, trained_on: int, parameters: Mapping[str, Any]) -> DecisionModel:
        """From an event's parameters; raises SchemaError when they are of another kind or malformed."""
        if parameters.get("kind") != KIND:
            raise SchemaError(f"decision model of kind {parameters.get('kind')!r}; this build knows {KIND!r}")
        try:
            effects = {
                (group, context): msgspec.convert(found, tuple[OptionEffect, ...])
                for group, context, found in parameters["effects"]
            }
            rule = parameters["stopping"]
            value = parameters["stopping_value"]
            return DecisionModel(
                version, value_model, trained_on, effects,
                None if rule is None else StoppingModel.from_dict(rule),
                None if value is None else msgspec.convert(value, StoppingValue),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, msgspec.ValidationError) as exc:
            raise SchemaError(f"not a decision model: {exc}") from exc


def effects_in(parameters: Mapping[str, Any]) -> list[tuple[str, str, tuple[OptionEffect, ...]]]:
    """(group, context, effects) that a version's parameters tell; none where they are of another kind or malformed."""
    try:
        return [
            (str(group), str(context), msgspec.convert(found, tuple[OptionEffect, ...]))
            for group, context, found in parameters["effects"]
        ]
    except (KeyError, TypeError, ValueError, msgspec.ValidationError):
        return []


class DecisionLearner:
    """The memory of one tenant and what follows from it."""

    def __init__(self) -> None:
        self.lessons: dict[str, Lesson] = {}
        """By orchestration id, in order of sequence."""
        self.statistics = Statistics()
        self._sequence = 0

    def restore(self, orchestration_id: str, lesson: Lesson) -> None:
        """Take back a committed lesson; in order of sequence."""
        self.lessons[orchestration_id] = lesson
        self._sequence = max(self._sequence, lesson.sequence)
        self._count(orchestration_id, lesson, 1)

    def observe(self, orchestration_id: str, lesson: Lesson | None) -> list[str]:
        """Take in an orchestration's content (None: retracted, or it tells no decision); returns the ids whose lessons changed."""
        old = self.lessons.get(orchestration_id)
        if lesson is None:
            if old is None:
                return []
            self._count(orchestration_id, old, -1)
            del self.lessons[orchestration_id]
            return [orchestration_id]
        if old is not None:
            self._replace(
                orchestration_id,
                msgspec.structs.replace(lesson, sequence=old.sequence, reward=old.reward, grades=old.grades),
            )
            return [orchestration_id]
        self._sequence += 1
        self.lessons[orchestration_id] = msgspec.structs.replace(lesson, sequence=self._sequence)
        changed = [orchestration_id]
        if len(self.lessons) > MEMORY:
            oldest = next(iter(self.lessons))
            self._count(oldest, self.lessons.pop(oldest), -1)
            changed.append(oldest)
        return changed

    def reward(self, orchestration_id: str, reward: int | None, grades: tuple[tuple[str, int], ...]) -> bool:
        """Take in an orchestration's reward (None: void); returns whether its lesson changed."""
        old = self.lessons.get(orchestration_id)
        if old is None or (old.reward, old.grades) == (reward, grades):
            return False
        self._replace(orchestration_id, msgspec.structs.replace(old, reward=reward, grades=grades))
        return True

    def _replace(self, orchestration_id: str, lesson: Lesson) -> None:
        self._count(orchestration_id, self.lessons[orchestration_id], -1)
        self.lessons[orchestration_id] = lesson
        self._count(orchestration_id, lesson, 1)

    def _count(self, orchestration_id: str, lesson: Lesson, sign: int) -> None:
        if lesson.reward is not None:
            self.statistics.add(orchestration_id, lesson.rows, lesson.reward, sign)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to tell."""
        return not any(lesson.reward is not None for lesson in self.lessons.values())

    def parameters(self) -> dict[str, Any]:
        """What a version says: effects of every option by group and context, and the stopping rule."""
        fitted = fit_stopping(
            [
                path
                for name, lesson in self.lessons.items()
                if lesson.reward is not None
                for path in path_of(name, lesson)
            ]
        )
        return {
            "kind": KIND,
            "effects": self._effects(),
            "stopping": None if fitted is None else fitted[0].to_dict(),
            "stopping_value": None if fitted is None else msgspec.to_builtins(_finite(fitted[1])),
        }

    def _effects(self) -> list[Any]:
        told: list[tuple[int, str, str, tuple[OptionEffect, ...]]] = []
        groups = self.statistics.groups()
        with_logged = {group for group, logged in groups if logged}
        for key in groups:
            group, logged = key
            if not logged and group in with_logged:
                continue  # told propensities are better than estimated ones
            for context in ("", *self.statistics.contexts(key)):
                found = self.statistics.effects(key, context or None)
                taken = sum(each.taken for each in found)
                told.append((-taken if context else -(10**12), group, context, found))
        told.sort(key=lambda item: item[:3])
        kept = sorted(told[:CONTEXTS_MAX], key=lambda item: item[1:3])
        return [[group, context, [_plain(each) for each in found]] for _, group, context, found in kept]


def _plain(effect: OptionEffect) -> dict[str, Any]:
    """JSON has no infinities: an interval without an end has none."""
    data = msgspec.to_builtins(effect)
    return {k: None if isinstance(v, float) and not abs(v) < float("inf") else v for k, v in data.items()}


def _finite(value: StoppingValue) -> StoppingValue:
    def finite(number: float) -> float:
        return number if abs(number) < float("inf") else 0.0

    means = {
        name: msgspec.structs.replace(mean, value=finite(mean.value), error=finite(mean.error))
        for name in ("ipcw", "normalised", "doubly_robust", "behaviour")
        if (mean := getattr(value, name)) is not None
    }
    return msgspec.structs.replace(
        value, **means, effective=finite(value.effective), stops=finite(value.stops)
    )
