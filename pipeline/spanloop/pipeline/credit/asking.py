"""Values for many orchestrations at once: collect the states that their estimates ask for, predict once, look them up.

``estimate`` has no control flow that depends on values, so one run with an ``Asking`` finds every state; after ``answer`` a
second run reads the values. States repeat a lot, so answers are remembered for each version of a value model, within a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from spanloop.pipeline.credit.progress import Bag
from spanloop.pipeline.credit.states import State
from spanloop.pipeline.credit.value_model import Floats, StepReader, ValueModel

__all__ = ["Asking"]

REMEMBERED_MAX = 100_000
FOUND_MAX = 10_000
"""Gaps, of a kilobyte or so, that are remembered; a batch adds what it adds."""


class Asking:
    """V under one version of a value model, in micro-units."""

    def __init__(self, model: ValueModel) -> None:
        self._model = model
        self.encode = model.encoder
        self.indicators = model.indicators
        self._known: dict[State, int] = {}
        self._asked: dict[State, None] = {}
        self._steps: dict[int, int] = {}
        self._members: dict[int, Floats] = {}
        self._asked_steps: dict[int, tuple[Bag, Sequence[int]]] = {}
        self._found: dict[tuple[object, ...], object] = {}
        self._reader: StepReader | None = None
        self.misses = 0
        """How often a value was asked for that is not known yet."""
        self.recalled = 0
        """How often what a gap gives was known."""

    def __call__(self, state: State, /) -> int:
        """The value if known; else 0, and the state is asked for."""
        known = self._known.get(state)
        if known is None:
            self._asked[state] = None
            self.misses += 1
            return 0
        return known

    def at(self, bag: Bag, key: int, added: Sequence[int]) -> int:
        """The value of a state told as a chain, if known; else 0, and it is asked for."""
        known = self._steps.get(key)
        if known is None:
            self._asked_steps[key] = (bag, added)
            self.misses += 1
            return 0
        return known

    def known(self, key: int) -> int | None:
        """The value of a state told as a chain, if it is known."""
        return self._steps.get(key)

    def members(self, key: int) -> Floats | None:
        """What each member of the ensemble says of a state told as a chain, units, shape (members,); None: not known yet."""
        return self._members.get(key)

    def recall(self, shape: tuple[object, ...]) -> Any:
        """What a gap of this shape was found to give, if it was: orchestrations of a deployment do the same again and again."""
        found = self._found.get(shape)
        self.recalled += found is not None
        return found

    def remember(self, shape: tuple[object, ...], found: object) -> None:
        """Keep what a gap of this shape gives under this version."""
        self._found[shape] = found

    def make_room(self) -> None:
        """Forget all answers when there are too many; call between batches only."""
        if len(self._known) > REMEMBERED_MAX:
            self._known.clear()
        if len(self._steps) > REMEMBERED_MAX:
            self._steps.clear()
            self._members.clear()
        if len(self._found) > FOUND_MAX:
            self._found.clear()

    def answer(self) -> None:
        """Predict what was asked for."""
        states = list(self._asked)
        self._asked.clear()
        if states:
            self._known.update(zip(states, self._model.predict_micro(states), strict=True))
        if self._asked_steps:
            if self._reader is None:
                self._reader = StepReader(self._model)
            micro, members = self._reader.predict(list(self._asked_steps.values()))
            self._steps.update(zip(self._asked_steps, micro, strict=True))
            self._members.update(zip(self._asked_steps, members, strict=True))
            self._asked_steps.clear()
