"""Fit the weights of failure attribution on logs whose culprit is known.

A softmax over the steps of a log with an L2 penalty. The loss of a log is (1 - a) * -log P(labelled step) + a * -log P(labelled
agent), where an agent's probability is the sum over its steps; every log counts the same. The agent's part is not convex: it is
fitted by expectation-maximisation (the label is spread over the agent's steps as the present model has it), each round one
damped Newton step of the convex part. Deterministic: no random start.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from spanloop.pipeline.attribution.features import FEATURES, Table

__all__ = ["Labelled", "fit"]

Floats = NDArray[np.float64]
_ROUNDS = 40
_CLOSE = 1e-6


class Labelled(msgspec.Struct, frozen=True):
    """A log with its label."""

    table: Table
    step: int
    """Number of the step to blame; one that is not in the log teaches nothing of steps."""
    agent: str
    """Name of the agent to blame."""


def fit(logs: Sequence[Labelled], columns: Sequence[str], *, penalty: float, agent_share: float) -> Floats:
    """Weights of ``columns`` (names of FEATURES, in that order).

    Args:
        logs: At least one with a step.
        columns: Features that may be used.
        penalty: L2 penalty of each log, > 0.
        agent_share: a above, 0 to 1.
    """
    picked = [FEATURES.index(name) for name in columns]
    kept = [log for log in logs if log.table.rows]
    rows: Floats = np.concatenate([np.asarray(log.table.rows, float)[:, picked] for log in kept])
    sizes = [len(log.table.rows) for log in kept]
    starts = np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(int)
    owner = np.repeat(np.arange(len(kept)), sizes)
    of_step, of_agent = _masks(kept)
    weights: Floats = np.zeros(len(picked))
    ridge = penalty * len(kept) * np.eye(len(picked))
    for _ in range(_ROUNDS):
        chance = _softmax(rows @ weights, starts, owner)
        target = (1 - agent_share) * of_step + agent_share * _spread(chance * of_agent, starts, owner)
        mass = np.add.reduceat(target, starts)
        model = chance * mass[owner]
        means = np.add.reduceat(chance[:, None] * rows, starts) * np.sqrt(mass)[:, None]
        gradient = rows.T @ (model - target) + ridge @ weights
        curvature = rows.T @ (model[:, None] * rows) - means.T @ means + ridge
        change = np.linalg.solve(curvature, gradient)
        size = float(np.abs(change).max())
        weights = weights - change * min(1.0, 2.0 / max(size, 1e-12))
        if size < _CLOSE:
            break
    return weights


def _masks(logs: Sequence[Labelled]) -> tuple[Floats, Floats]:
    """1 at the labelled step, and at each step of the labelled agent."""
    steps: list[float] = []
    agents: list[float] = []
    for log in logs:
        steps += [float(step.index == log.step) for step in log.table.steps]
        agents += [float(step.agent == log.agent) for step in log.table.steps]
    return np.asarray(steps), np.asarray(agents)


def _softmax(scores: Floats, starts: NDArray[Any], owner: NDArray[Any]) -> Floats:
    raised = np.exp(scores - np.maximum.reduceat(scores, starts)[owner])
    return raised / np.add.reduceat(raised, starts)[owner]


def _spread(mass: Floats, starts: NDArray[Any], owner: NDArray[Any]) -> Floats:
    """Each log's mass scaled to 1; a log without any stays 0."""
    total = np.add.reduceat(mass, starts)[owner]
    return np.divide(mass, total, out=np.zeros_like(mass), where=total > 0)
