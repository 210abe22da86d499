"""Values for many orchestrations at once: collect the states that their estimates ask for, predict once, look them up.

``estimate`` has no control flow that depends on values, so one run with an ``Asking`` finds every state; after ``answer`` a
second run reads the values. States repeat a lot, so answers are remembered for each version of a value model, within a bound.
"""

from __future__ import annotations

from spanloop.pipeline.credit.states import State
from spanloop.pipeline.credit.value_model import ValueModel

__all__ = ["Asking"]

REMEMBERED_MAX = 100_000


class Asking:
    """V under one version of a value model, in micro-units."""

    def __init__(self, model: ValueModel) -> None:
        self._model = model
        self.encode = model.encoder
        self._known: dict[State, int] = {}
        self._asked: dict[State, None] = {}
        self.misses = 0
        """How often a value was asked for that is not known yet."""

    def __call__(self, state: State, /) -> int:
        """The value if known; else 0, and the state is asked for."""
        known = self._known.get(state)
        if known is None:
            self._asked[state] = None
            self.misses += 1
            return 0
        return known

    def make_room(self) -> None:
        """Forget all answers when there are too many; call between batches only."""
        if len(self._known) > REMEMBERED_MAX:
            self._known.clear()

    def answer(self) -> None:
        """Predict what was asked for."""
        states = list(self._asked)
        self._asked.clear()
        if states:
            self._known.update(zip(states, self._model.predict_micro(states), strict=True))
