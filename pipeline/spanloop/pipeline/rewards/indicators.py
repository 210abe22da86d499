"""What holds a scaffold up until it is not needed any more: measured numbers that schedules go by instead of by time.

A schedule with an indicator (a channel of the team, such as parl_finish) advances by one with each orchestration at which the channel's
mean is at its target and steady (``shaping.advance``). The value stage folds the state, and every version of the value model carries it,
so that a credit that names a version names the state that its scaffolds were paid under: a replay pays what was paid.
Invariants: pure; each orchestration counts once, when its reward first becomes final; held-out ones never.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from spanloop.pipeline.rewards.shaping import Indicator, advance
from spanloop.schemas.canonical import unmicro
from spanloop.schemas.errors import SchemaError
from spanloop.schemas.events import Reward

if TYPE_CHECKING:
    from spanloop.schemas.settings import Pipeline, RewardTerm

__all__ = ["Watched", "advanced", "as_json", "key_of", "progress_in", "watched_of"]


class Watched(msgspec.Struct, frozen=True):
    """A channel that some schedule goes by."""

    channel: str
    target: float
    tolerance: float

    @property
    def key(self) -> str:
        """Name of its state."""
        return f"{self.channel} >= {self.target:g} +- {self.tolerance:g}"


def key_of(term: RewardTerm) -> str:
    """Key of the state that a declared reward's schedule goes by; empty: it goes by the version of the value model."""
    return (
        Watched(term.indicator, term.indicator_target, term.indicator_tolerance).key if term.indicator else ""
    )


def watched_of(settings: Pipeline) -> tuple[Watched, ...]:
    """All that the settings' schedules go by, each once."""
    found = {
        key_of(t): Watched(t.indicator, t.indicator_target, t.indicator_tolerance)
        for t in settings.rewards
        if t.indicator
    }
    return tuple(found[key] for key in sorted(found))


def advanced(
    states: Mapping[str, Indicator], watched: Iterable[Watched], rewards: Iterable[Reward]
) -> dict[str, Indicator]:
    """States after one more orchestration. Where a channel is missing its state stays as it is."""
    values = {r.name: r.value for r in rewards if r.unit == "team" and r.value is not None}
    found = dict(states)
    for item in watched:
        value = values.get(item.channel)
        if value is not None:
            old = found.get(item.key, Indicator())
            found[item.key] = advance(old, unmicro(value), tolerance=item.tolerance, target=item.target)
    return found


def as_json(states: Mapping[str, Indicator]) -> dict[str, Any]:
    """As a version of the value model carries them."""
    return {key: msgspec.to_builtins(state) for key, state in sorted(states.items())}


def progress_in(parameters: Mapping[str, Any]) -> dict[str, float]:
    """Progress by key that a version of the value model carries. Raises SchemaError: it is malformed."""
    try:
        states = msgspec.convert(parameters.get("indicators", {}), dict[str, Indicator])
    except msgspec.ValidationError as exc:
        raise SchemaError(f"a value model's indicators: {exc}") from exc
    return {key: state.progress for key, state in states.items()}
