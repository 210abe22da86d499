"""Training of a value model: minibatches of remembered states against the outcomes that followed (Monte Carlo targets).

Deterministic: the minibatches of an update are drawn from a generator seeded by the update's number, and weights and moments are
rounded to float32 after each update, so that what is stored and published is exactly what training goes on from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanloop.pipeline.credit.value_model import Floats, ValueModel, pack_array, unpack_array
from spanloop.schemas.canonical import MICRO

__all__ = ["Example", "ValueTrainer"]

Example = tuple[tuple[tuple[int, ...], ...], int]
"""States that one orchestration went through, and its reward in micro-units."""

BATCH = 256
STEPS = 48
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 1e-4
GRADIENT_MAX = 10.0


def _single(array: Floats) -> Floats:
    return array.astype(np.float32).astype(np.float64)


class ValueTrainer:
    """A model with its optimiser (Adam, decoupled weight decay)."""

    def __init__(self, model: ValueModel, updates: int, moments: list[tuple[Floats, Floats]], steps: int) -> None:
        self.model = model
        self.updates = updates
        self.steps = steps
        self.moments = moments

    @staticmethod
    def fresh(rows_max: int) -> ValueTrainer:
        """A trainer of an untrained model."""
        model = ValueModel.fresh(rows_max)
        return ValueTrainer(model, 0, [(np.zeros_like(w), np.zeros_like(w)) for w in model.weights], 0)

    def update(self, examples: Sequence[Example], steps: int = STEPS) -> float:
        """Some steps on minibatches of ``examples``; returns the last mean squared error, in squared units.

        An update that would leave a weight that is not finite is undone.
        """
        states = [state for seen, _ in examples for state in seen]
        if not states:
            return 0.0
        targets = np.array([reward / MICRO for seen, reward in examples for _ in seen])
        self._grow(self.model.add_features(states))
        index = [np.array(self.model.rows_of(state), dtype=np.int64) for state in states]
        rng = np.random.default_rng(self.updates)
        saved = [weight.copy() for weight in self.model.weights]
        error = 0.0
        for _ in range(steps):
            chosen = rng.integers(0, len(states), BATCH)
            counts = np.zeros((BATCH, len(self.model.rows)))
            for row, i in enumerate(chosen):
                counts[row, index[i][index[i] >= 0]] = 1.0
            error = self._step(counts, targets[chosen])
        self.updates += 1
        if not all(np.isfinite(weight).all() for weight in self.model.weights):
            self.model.weights = saved
            self.moments = [(np.zeros_like(w), np.zeros_like(w)) for w in saved]
            return float("inf")
        self.model.weights = [_single(weight) for weight in self.model.weights]
        self.moments = [(_single(mean), _single(square)) for mean, square in self.moments]
        return error

    def _grow(self, new: int) -> None:
        if new:
            first, second = self.moments[0]
            more = np.zeros((first.shape[0], new, first.shape[2]))
            self.moments[0] = (np.concatenate([first, more], axis=1), np.concatenate([second, more], axis=1))

    def _step(self, counts: Floats, targets: NDArray[np.float64]) -> float:
        table, b1, w2, b2, w3, b3 = self.model.weights
        first = np.maximum(np.matmul(counts, table) + b1, 0.0)
        second = np.maximum(np.matmul(first, w2) + b2, 0.0)
        miss = (np.matmul(second, w3) + b3)[..., 0] - targets
        d3 = (2.0 / len(targets)) * miss[..., None]
        d2 = np.matmul(d3, w3.transpose(0, 2, 1)) * (second > 0)
        d1 = np.matmul(d2, w2.transpose(0, 2, 1)) * (first > 0)
        gradients = [
            np.matmul(counts.T, d1),
            d1.sum(axis=1, keepdims=True),
            np.matmul(first.transpose(0, 2, 1), d2),
            d2.sum(axis=1, keepdims=True),
            np.matmul(second.transpose(0, 2, 1), d3),
            d3.sum(axis=1, keepdims=True),
        ]
        norm = float(np.sqrt(sum(float((g * g).sum()) for g in gradients)))
        scale = min(1.0, GRADIENT_MAX / norm) if norm > 0 else 1.0
        self.steps += 1
        c1, c2 = 1 - 0.9**self.steps, 1 - 0.999**self.steps
        for i, gradient in enumerate(gradients):
            mean, square = self.moments[i]
            mean *= 0.9
            mean += 0.1 * scale * gradient
            square *= 0.999
            square += 0.001 * (scale * gradient) ** 2
            weight = self.model.weights[i]
            weight -= LEARNING_RATE * (mean / c1 / (np.sqrt(square / c2) + 1e-8) + WEIGHT_DECAY * weight)
        return float((miss * miss).mean())

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
