"""A value model: V(state) of a bag of feature ids, as a small ensemble of perceptrons in numpy.

Place in the flow: ``ValueStage`` trains it and publishes versions on ``models``; ``SignalStage`` asks it for the values that the
ledger differences. Predictions must not depend on what else is in a batch (stream == batch), so they are computed in float64
on blocks of one fixed size.
Invariants: deterministic (seeded by nothing but its arguments); feature ids get rows in the order in which training first sees
them, up to ``rows_max``, later ones share rows; ids never seen in training add nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spanloop.pipeline.credit.progress import Bag
from spanloop.pipeline.credit.repeats import Table, lookup, read_table
from spanloop.pipeline.credit.states import Encoder
from spanloop.pipeline.rewards.indicators import progress_in
from spanloop.schemas.canonical import MICRO
from spanloop.schemas.errors import SchemaError

__all__ = ["Floats", "StepReader", "ValueModel", "pack_array", "unpack_array"]

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]

BLOCK = 256
"""Rows of one matrix product in ``predict``; a constant, because BLAS may sum differently for other shapes."""
VALUE_LIMIT = 1e6
QUANTA = 2.0**24
DENSE_FROM = 20_000
"""Features in a block from which they are counted and multiplied instead of gathered."""
KIND = "bag_mlp/1"
INPUT_SCALE = 14.0
"""Features of a typical state; sets the scale of new rows."""


def pack_array(array: NDArray[Any]) -> dict[str, Any]:
    """A float32 array as JSON: shape and base64 of its little-endian bytes."""
    data = np.ascontiguousarray(array, dtype="<f4")
    return {"shape": list(data.shape), "data": base64.b64encode(data.tobytes()).decode("ascii")}


def unpack_array(packed: Mapping[str, Any]) -> Singles:
    """The array of ``pack_array``; raises SchemaError when its bytes do not fit its shape or are not finite."""
    try:
        flat = np.frombuffer(base64.b64decode(packed["data"], validate=True), dtype="<f4")
        array = flat.reshape(tuple(packed["shape"])).astype(np.float32)
    except (KeyError, TypeError, ValueError) as exc:
        raise SchemaError(f"not a packed array: {exc}") from exc
    if not np.isfinite(array).all():
        raise SchemaError("a packed array has values that are not finite")
    return array


def _forward(bags: Floats, k: int, h: int, weights: Sequence[Floats]) -> Floats:
    """From summed embeddings, shape (BLOCK, K * H), to what each member says, shape (K, BLOCK)."""
    b1, w2, b2, w3, b3 = weights
    hidden = np.maximum(bags.reshape(BLOCK, k, h).transpose(1, 0, 2) + b1, 0.0)
    hidden = np.maximum(np.matmul(hidden, w2) + b2, 0.0)
    return (np.matmul(hidden, w3) + b3)[..., 0]


class ValueModel:
    """An ensemble of K perceptrons with two hidden layers of width H over a bag of features."""

    kind = KIND

    def __init__(self, rows: dict[int, int], rows_max: int, weights: list[Singles], encoder: Encoder) -> None:
        self.rows = rows
        """Row of the embedding by feature id."""
        self.rows_max = rows_max
        self.weights = weights
        """Embedding (K, rows, H), bias (K, 1, H), (K, H, H), (K, 1, H), (K, H, 1), (K, 1, 1); float32."""
        self.encoder = encoder
        """How token states are read."""
        self.indicators: dict[str, float] = {}
        """How far reward schedules that go by a measured number had come when it was published."""
        self.table: Table = {}
        """Mean outcomes of states that repeated (``repeats``)."""

    @staticmethod
    def fresh(
        rows_max: int, encoder: Encoder | None = None, *, members: int = 8, width: int = 32, seed: int = 0
    ) -> ValueModel:
        """An untrained model without features."""
        rng = np.random.default_rng(seed)
        k, h = members, width
        weights = [
            np.zeros((k, 0, h), np.float32),
            np.zeros((k, 1, h), np.float32),
            (rng.standard_normal((k, h, h)) / h**0.5).astype(np.float32),
            np.zeros((k, 1, h), np.float32),
            (rng.standard_normal((k, h, 1)) / (100.0 * h) ** 0.5).astype(np.float32),
            np.zeros((k, 1, 1), np.float32),
        ]
        return ValueModel({}, rows_max, weights, encoder or Encoder())

    def add_features(self, states: Iterable[Sequence[int]]) -> int:
        """Give rows to the new feature ids of ``states``; returns how many there were."""
        new: list[int] = []
        for state in states:
            for feature in state:
                if feature not in self.rows and len(self.rows) < self.rows_max:
                    self.rows[feature] = len(self.rows)
                    new.append(feature)
        if new:
            k, _, h = self.weights[0].shape
            added = np.empty((k, len(new), h), np.float32)
            for i, feature in enumerate(new):
                drawn = np.random.default_rng(feature).standard_normal((k, h))
                added[:, i] = drawn / INPUT_SCALE**0.5
            self.weights[0] = np.concatenate([self.weights[0], added], axis=1)
        return len(new)

    def rows_of(self, state: Sequence[int]) -> list[int]:
        """Embedding rows of a state; ids beyond ``rows_max`` share the rows that there are, others add nothing."""
        rows = self.rows
        if len(rows) >= self.rows_max:
            return [rows.get(f, f % self.rows_max) for f in state]
        return [rows[f] for f in state if f in rows]

    def predict(self, features: Sequence[Sequence[int]]) -> Floats:
        """V of each state, in units of reward; shape (states,). Independent of the other states of the call."""
        table, b1, w2, b2, w3, b3 = (weight.astype(np.float64) for weight in self.weights)
        k, have, h = table.shape
        flat = np.concatenate([table.transpose(1, 0, 2).reshape(have, k * h), np.zeros((1, k * h))])
        out = np.empty(len(features))
        for start in range(0, len(features), BLOCK):
            block = features[start : start + BLOCK]
            index: list[int] = []
            starts: list[int] = []
            for state in block:
                starts.append(len(index))
                index += self.rows_of(state)
                index.append(-1)
            bags = np.zeros((BLOCK, k * h))
            bags[: len(block)] = np.add.reduceat(flat[index], starts, axis=0)
            values = _forward(bags, k, h, (b1, w2, b2, w3, b3)).mean(axis=0)
            out[start : start + len(block)] = values[: len(block)]
        if self.table:
            out = np.array([lookup(self.table, s, v) for s, v in zip(features, out.tolist(), strict=True)])
        return np.clip(out, -VALUE_LIMIT, VALUE_LIMIT)

    def predict_micro(self, features: Sequence[Sequence[int]]) -> list[int]:
        """V of each state in integer micro-units."""
        return [int(value) for value in np.rint(self.predict(features) * MICRO)]

    def menu_values(
        self, prompt: tuple[int, ...], response: Sequence[int], menus: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """V after each open option at each token of a response, in units: what ``Sample.menu_values`` would be under this version."""
        states = [
            self.encoder(prompt, (*response[:i], option)) for i, menu in enumerate(menus) for option in menu
        ]
        values = iter(self.predict(states).tolist())
        return [[next(values) for _ in menu] for menu in menus]

    def to_dict(self) -> dict[str, Any]:
        """JSON of the model; ``from_dict`` of it predicts the same numbers bit for bit (weights are float32)."""
        return {
            "kind": self.kind,
            "rows_max": self.rows_max,
            "units": list(self.encoder.units),
            "words": list(self.encoder.words),
            "features": sorted(self.rows, key=self.rows.__getitem__),
            "weights": [pack_array(weight) for weight in self.weights],
        }

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> ValueModel:
        """A model from its JSON; raises SchemaError when it is of another kind or malformed."""
        if data.get("kind") != KIND:
            raise SchemaError(f"value model of kind {data.get('kind')!r}; this build knows {KIND!r}")
        try:
            rows = {int(feature): i for i, feature in enumerate(data["features"])}
            weights = [unpack_array(packed) for packed in data["weights"]]
            k, have, h = weights[0].shape
            shapes = [(k, have, h), (k, 1, h), (k, h, h), (k, 1, h), (k, h, 1), (k, 1, 1)]
            rows_max = int(data["rows_max"])
            encoder = Encoder(data["units"], data["words"])
        except (KeyError, TypeError, ValueError, IndexError) as exc:
            raise SchemaError(f"not a value model: {exc}") from exc
        if [weight.shape for weight in weights] != shapes or have != len(rows):
            raise SchemaError(f"a value model's weights have shapes {[w.shape for w in weights]}")
        model = ValueModel(rows, rows_max, weights, encoder)
        model.indicators = progress_in(data)
        model.table = read_table(data)
        return model


class StepReader:
    """V of states told as chains (``progress``): embeddings are rounded to multiples of 2^-24, so that their sums are exact in any
    order, and the sum of a long chain is that of a shorter one and a few more."""

    def __init__(self, model: ValueModel) -> None:
        table, *rest = (weight.astype(np.float64) for weight in model.weights)
        self._model = model
        self._k, have, self._h = table.shape
        flat = np.rint(table.transpose(1, 0, 2).reshape(have, self._k * self._h) * QUANTA) / QUANTA
        self._flat = np.concatenate([flat, np.zeros((1, self._k * self._h))])
        self._weights = rest

    def predict(self, asked: Sequence[tuple[Bag, Sequence[int]]]) -> tuple[list[int], Floats]:
        """Micro-units, and in units what each member says, shape (states, members), of bags with further features."""
        micro: list[int] = []
        told = np.empty((len(asked), self._k))
        for start in range(0, len(asked), BLOCK):
            block = asked[start : start + BLOCK]
            bags = np.zeros((BLOCK, self._k * self._h))
            bags[: len(block)] = self._sums([added for _, added in block])
            for row, (bag, _) in enumerate(block):
                bags[row] += self._vector(bag)
            said = _forward(bags, self._k, self._h, self._weights)[:, : len(block)]
            told[start : start + len(block)] = np.clip(said.T, -VALUE_LIMIT, VALUE_LIMIT)
            means = np.clip(said.mean(axis=0), -VALUE_LIMIT, VALUE_LIMIT)
            micro += [int(value) for value in np.rint(means * MICRO)]
        return micro, told

    def _sums(self, states: Sequence[Sequence[int]]) -> Floats:
        index: list[int] = []
        starts: list[int] = []
        for state in states:
            starts.append(len(index))
            index += self._model.rows_of(state)
            index.append(-1)
        if len(index) < DENSE_FROM:
            return np.add.reduceat(self._flat[index], starts, axis=0)
        # Many states of few features: count the features of each and multiply. Sums are exact, so both ways give the same.
        rows, place = np.unique(index, return_inverse=True)
        state_of = np.repeat(np.arange(len(states)), np.diff([*starts, len(index)]))
        counts = np.bincount(state_of * len(rows) + place.reshape(-1), minlength=len(states) * len(rows))
        return counts.reshape(len(states), len(rows)).astype(np.float64) @ self._flat[rows]

    def _vector(self, bag: Bag) -> Floats:
        chain: list[Bag] = []
        at: Bag | None = bag
        while at is not None and (at.model is not self or at.vector is None):
            chain.append(at)
            at = at.parent
        total = at.vector if at is not None and at.vector is not None else np.zeros(self._k * self._h)
        for link in reversed(chain):
            if link.added:
                total = total + self._sums([link.added])[0]
            link.vector, link.model = total, self
        return total
