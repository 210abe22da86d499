"""Training of a value model by fitted Q iteration over remembered orchestrations.

The target of a state is the value of the best state that the next decision could have led to, each member's own value of
what the ensemble prefers; at the end, or where the options are not known, it is the outcome. So exploration later in an orchestration
does not taint what came before it. Each orchestration counts in each member as often as a Poisson draw says (online
bootstrap), by a hash of its id.

Deterministic: the minibatches of an update are drawn from a generator seeded by the update's number; everything that an update
depends on is in ``to_dict`` and in the memory.

Legend: K members, S states, B lessons of a minibatch, F features, H hidden units.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from spanloop.pipeline.credit.estimates import Lesson
from spanloop.pipeline.credit.states import Encoder, State
from spanloop.pipeline.credit.value_model import Singles, ValueModel, pack_array, unpack_array
from spanloop.schemas.canonical import MICRO, digest

__all__ = ["Example", "ValueTrainer"]

Ints = NDArray[np.int64]

BATCH = 256
STEPS = 120
LEARNING_RATE = 1e-3
WEIGHT_DECAY = 1.0
"""Decoupled, of the matrices."""
GRADIENT_MAX = 10.0
CHUNK = 4096
ROWS_KEPT_MAX = 100_000
"""States whose embedding rows are kept from update to update."""


class Example(msgspec.Struct, frozen=True, array_like=True):
    """A remembered orchestration."""

    orchestration_id: str
    lessons: tuple[Lesson, ...]
    reward: int
    """Micro-units."""


class _Batch(msgspec.Struct):
    """All lessons of a memory as arrays."""

    states: list[Ints]
    """Embedding rows of each distinct state."""
    of_lesson: Ints
    options: Ints
    """States of all lessons' options, in a row ..."""
    starts: Ints
    """... and where each lesson with options begins."""
    with_options: Ints
    outcomes: Singles
    bags: Singles
    """Weight of each lesson in each member (K, lessons)."""


class _Places(msgspec.Struct):
    """Lessons of an orchestration as places in the index of states; as in ``_Batch``, counted from its own first."""

    of_lesson: list[int]
    options: list[int]
    starts: list[int]
    with_options: list[int]


def _places(lessons: Sequence[Lesson], index: dict[State, int]) -> _Places:
    found = _Places([], [], [], [])
    for lesson in lessons:
        if lesson.options:
            found.with_options.append(len(found.of_lesson))
            found.starts.append(len(found.options))
            found.options += [index.setdefault(option, len(index)) for option in lesson.options]
        found.of_lesson.append(index.setdefault(lesson.state, len(index)))
    return found


class ValueTrainer:
    """A model with its optimiser (Adam, decoupled weight decay)."""

    def __init__(
        self, model: ValueModel, updates: int, moments: list[tuple[Singles, Singles]], steps: int
    ) -> None:
        self.model = model
        self.updates = updates
        self.steps = steps
        self.moments = moments
        self._rows: dict[State, Ints] = {}

    @staticmethod
    def fresh(rows_max: int, encoder: Encoder | None = None) -> ValueTrainer:
        """A trainer of an untrained model."""
        model = ValueModel.fresh(rows_max, encoder)
        return ValueTrainer(model, 0, [(np.zeros_like(w), np.zeros_like(w)) for w in model.weights], 0)

    def update(self, examples: Sequence[Example], steps: int = STEPS) -> float:
        """Some steps on minibatches of ``examples``; returns their mean squared error, in squared units.

        An update that would leave a weight that is not finite is undone.
        """
        batch = self._batch(examples)
        self.updates += 1
        if batch is None:
            return 0.0
        saved = [weight.copy() for weight in self.model.weights]
        rng = np.random.default_rng(self.updates)
        descent = _Descent(self.model, self.moments)
        with np.errstate(over="ignore", invalid="ignore"):
            targets = self._targets(batch)
            dense = self._dense(batch.states) if len(batch.states) <= CHUNK else None
            error = 0.0
            for _ in range(steps):
                chosen = rng.integers(0, len(batch.of_lesson), BATCH)
                states, place = np.unique(batch.of_lesson[chosen], return_inverse=True)
                inputs = self._dense([batch.states[i] for i in states]) if dense is None else dense[states]
                self.steps += 1
                error += (
                    descent.step(inputs, place, targets[:, chosen], batch.bags[:, chosen], self.steps) / steps
                )
        if not all(np.isfinite(weight).all() for weight in self.model.weights):
            self.model.weights = saved
            self.moments = [(np.zeros_like(w), np.zeros_like(w)) for w in saved]
            return float("inf")
        return error

    def _batch(self, examples: Sequence[Example]) -> _Batch | None:
        index: dict[State, int] = {}
        known: dict[int, _Places] = {}
        of_lesson: list[int] = []
        options: list[int] = []
        starts: list[int] = []
        with_options: list[int] = []
        for example in examples:
            # orchestrations that did the same have the same lessons, the very same objects
            places = known.get(id(example.lessons))
            if places is None:
                places = known[id(example.lessons)] = _places(example.lessons, index)
            if places.options:
                with_options += [at + len(of_lesson) for at in places.with_options]
                starts += [at + len(options) for at in places.starts]
                options += places.options
            of_lesson += places.of_lesson
        if not of_lesson:
            return None
        sizes = [len(example.lessons) for example in examples]
        members = len(self.model.weights[0])
        bags = np.stack([_bag(example.orchestration_id, members) for example in examples], axis=1)
        outcomes = np.array([example.reward / MICRO for example in examples], dtype=np.float32)
        self._grow(self.model.add_features(index))
        return _Batch(
            states=[self._rows_of(state) for state in index],
            of_lesson=np.array(of_lesson),
            options=np.array(options, dtype=np.int64),
            starts=np.array(starts, dtype=np.int64),
            with_options=np.array(with_options, dtype=np.int64),
            outcomes=np.repeat(outcomes, sizes),
            bags=np.repeat(bags.astype(np.float32), sizes, axis=1),
        )

    def _rows_of(self, state: State) -> Ints:
        """Embedding rows of a state whose features are known: they never change."""
        rows = self._rows.get(state)
        if rows is None:
            if len(self._rows) >= ROWS_KEPT_MAX:
                self._rows.clear()
            rows = self._rows[state] = np.array(self.model.rows_of(state), dtype=np.int64)
        return rows

    def _targets(self, batch: _Batch) -> Singles:
        """Outcome, or each member's value of the option that the ensemble prefers; shape (K, lessons)."""
        targets = np.tile(batch.outcomes, (len(self.model.weights[0]), 1))
        if len(batch.starts):
            values_KS = np.concatenate(
                [
                    self._forward(self._dense(batch.states[at : at + CHUNK]))[-1][..., 0]
                    for at in range(0, len(batch.states), CHUNK)
                ],
                axis=1,
            )
            means = values_KS.mean(axis=0)[batch.options]
            sizes = np.diff([*batch.starts, len(batch.options)])
            best = np.flatnonzero(means >= np.repeat(np.maximum.reduceat(means, batch.starts), sizes))
            first = best[np.searchsorted(best, batch.starts)]
            targets[:, batch.with_options] = values_KS[:, batch.options[first]]
        return targets

    def _dense(self, states: Iterable[Ints]) -> Singles:
        listed = list(states)
        inputs = np.zeros((len(listed), len(self.model.rows)), np.float32)
        rows = np.repeat(np.arange(len(listed)), [len(state) for state in listed])
        inputs[rows, np.concatenate(listed) if listed else rows] = 1.0
        return inputs

    def _forward(self, inputs_BF: Singles) -> list[Singles]:
        return _forward(self.model.weights, inputs_BF)

    def _grow(self, new: int) -> None:
        if new:
            first, second = self.moments[0]
            more = np.zeros((first.shape[0], new, first.shape[2]), np.float32)
            self.moments[0] = (np.concatenate([first, more], axis=1), np.concatenate([second, more], axis=1))

    def to_dict(self) -> dict[str, Any]:
        """JSON of model and optimiser."""
        return {
            "model": self.model.to_dict(),
            "updates": self.updates,
            "steps": self.steps,
            "moments": [[pack_array(mean), pack_array(square)] for mean, square in self.moments],
        }

    @staticmethod
    def from_dict(data: dict[str, Any]) -> ValueTrainer:
        """A trainer that goes on exactly where ``to_dict`` was taken."""
        moments = [(unpack_array(mean), unpack_array(square)) for mean, square in data["moments"]]
        return ValueTrainer(ValueModel.from_dict(data["model"]), data["updates"], moments, data["steps"])


@lru_cache(maxsize=16_384)
def _bag(orchestration_id: str, members: int) -> Ints:
    """How often an orchestration counts in each member."""
    seed = int(digest("bag", orchestration_id)[:15], 16)
    return np.random.default_rng(seed).poisson(1.0, members)


def _forward(weights: Sequence[Singles], inputs_BF: Singles) -> list[Singles]:
    """Both hidden layers and the output, each (K, B, width)."""
    table, b1, w2, b2, w3, b3 = weights
    first = np.matmul(inputs_BF, table)
    first += b1
    np.maximum(first, 0, out=first)
    second = np.matmul(first, w2)
    second += b2
    np.maximum(second, 0, out=second)
    return [first, second, np.matmul(second, w3) + b3]


class _Descent:
    """Adam on the weights of a model, which become views of one vector, so that a step is few operations.

    The model's list of weights and the trainer's list of moments are replaced by these views.
    """

    def __init__(self, model: ValueModel, moments: list[tuple[Singles, Singles]]) -> None:
        shapes = [weight.shape for weight in model.weights]
        self._all = np.concatenate([weight.ravel() for weight in model.weights])
        self._mean = np.concatenate([mean.ravel() for mean, _ in moments])
        self._square = np.concatenate([square.ravel() for _, square in moments])
        self._gradient = np.zeros_like(self._all)
        self._spare = np.zeros_like(self._all)
        model.weights = self._weights = _views(self._all, shapes)
        moments[:] = zip(_views(self._mean, shapes), _views(self._square, shapes), strict=True)
        self._gradients = _views(self._gradient, shapes)

    def step(
        self, inputs_SF: Singles, place_B: Ints, targets_KB: Singles, bags_KB: Singles, number: int
    ) -> float:
        """One step, ``number`` (1, 2, ...) of the optimiser's life; returns the mean squared error before it.

        The minibatch's distinct states are evaluated once, with the summed weights and targets of their lessons
        (``place_B`` is each lesson's state): the same gradient as lesson by lesson.
        """
        first, second, out = _forward(self._weights, inputs_SF)
        _, _, w2, _, w3, _ = self._weights
        values_KS = out[..., 0]
        of_BS = np.zeros((len(place_B), len(inputs_SF)), np.float32)
        of_BS[np.arange(len(place_B)), place_B] = 1.0
        pull_KS = values_KS * (bags_KB @ of_BS) - (bags_KB * targets_KB) @ of_BS
        d3 = (np.float32(2.0 / len(place_B)) * pull_KS)[..., None]
        d2 = d3 * w3.transpose(0, 2, 1)
        d2 *= second > 0
        d1 = np.matmul(d2, w2.transpose(0, 2, 1))
        d1 *= first > 0
        g1, gb1, g2, gb2, g3, gb3 = self._gradients
        np.matmul(inputs_SF.T, d1, out=g1)
        np.sum(d1, axis=1, keepdims=True, out=gb1)
        np.matmul(first.transpose(0, 2, 1), d2, out=g2)
        np.sum(d2, axis=1, keepdims=True, out=gb2)
        np.matmul(second.transpose(0, 2, 1), d3, out=g3)
        np.sum(d3, axis=1, keepdims=True, out=gb3)
        self._adam(number)
        return float(np.square(values_KS[:, place_B] - targets_KB).mean())

    def _adam(self, number: int) -> None:
        gradient, spare = self._gradient, self._spare
        norm = float(np.sqrt(np.dot(gradient, gradient)))
        if norm > GRADIENT_MAX:
            gradient *= np.float32(GRADIENT_MAX / norm)
        c1, c2 = 1 - 0.9**number, 1 - 0.999**number
        self._mean *= np.float32(0.9)
        self._mean += np.multiply(gradient, np.float32(0.1), out=spare)
        np.multiply(gradient, gradient, out=spare)
        spare *= np.float32(0.001)
        self._square *= np.float32(0.999)
        self._square += spare
        np.multiply(self._square, np.float32(1 / c2), out=spare)
        np.sqrt(spare, out=spare)
        spare += np.float32(1e-8)
        np.divide(self._mean, spare, out=spare)
        spare *= np.float32(LEARNING_RATE / c1)
        for matrix in self._weights[::2]:
            np.multiply(matrix, np.float32(1 - LEARNING_RATE * WEIGHT_DECAY), out=matrix)
        self._all -= spare


def _views(flat: Singles, shapes: Sequence[tuple[int, ...]]) -> list[Singles]:
    """Arrays of these shapes that lie one behind the other in ``flat``."""
    views, at = [], 0
    for shape in shapes:
        size = int(np.prod(shape))
        views.append(flat[at : at + size].reshape(shape))
        at += size
    return views
