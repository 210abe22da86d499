"""The ranking of steps by their features: one weight a feature, a softmax over the steps of a log.

The weights that come with spanloop (``weights.json``) were fitted by ``benchmarks/attribution.py`` on labelled failures; the file
says on which, how well they did on logs that they had not seen, and holds no text. There are two sets: one for logs with words,
one for logs without, where only who acted when is known.
Invariants: pure Python, no model call; equal features give equal probabilities; probabilities sum to 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import Any

import msgspec

from spanloop.pipeline.attribution.features import FEATURES, Table

__all__ = ["Model", "by_agent", "probabilities", "shipped", "terms", "usual_row"]


class Model(msgspec.Struct, frozen=True):
    """Weights with where they come from."""

    version: str
    words: dict[str, float]
    """Weight of each feature, for logs whose text is kept."""
    structure: dict[str, float]
    """Weight of each feature that needs no text."""
    provenance: dict[str, Any]
    """Data, labels, hyper-parameters and the accuracy measured on unseen logs."""


@lru_cache(maxsize=1)
def shipped() -> Model:
    """The weights of this version of spanloop."""
    found = resources.files("spanloop.pipeline.attribution").joinpath("weights.json").read_bytes()
    return msgspec.json.decode(found, type=Model)


def probabilities(table: Table, weights: Mapping[str, float]) -> tuple[float, ...]:
    """P(step is the one to blame) of each row, summing to 1; no rows: empty.

    A weight whose name is no feature is ignored, a feature without a weight counts 0.
    """
    ordered = [weights.get(name, 0.0) for name in FEATURES]
    return _softmax([math.fsum(w * x for w, x in zip(ordered, row, strict=True)) for row in table.rows])


def usual_row(table: Table) -> tuple[float, ...]:
    """The mean of each feature over the log's steps."""
    return tuple(math.fsum(column) / len(table.rows) for column in zip(*table.rows, strict=True))


def terms(
    row: Sequence[float], usual: Sequence[float], weights: Mapping[str, float]
) -> tuple[tuple[str, float], ...]:
    """What each feature of ``row`` adds to its score compared with the log's ``usual_row``, the largest first."""
    found = [
        (name, weights.get(name, 0.0) * (value - mean))
        for name, value, mean in zip(FEATURES, row, usual, strict=True)
    ]
    return tuple(sorted(found, key=lambda term: (-term[1], term[0])))


def by_agent(agents: Sequence[str], chances: Sequence[float]) -> dict[str, float]:
    """Sums of ``chances`` by agent, the likeliest first; ties by first appearance."""
    parts: dict[str, list[float]] = {}
    for agent, chance in zip(agents, chances, strict=True):
        parts.setdefault(agent, []).append(chance)
    sums = {agent: math.fsum(found) for agent, found in parts.items()}
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _softmax(scores: Sequence[float]) -> tuple[float, ...]:
    if not scores:
        return ()
    top = max(scores)
    raised = [math.exp(score - top) for score in scores]
    total = math.fsum(raised)
    return tuple(value / total for value in raised)
