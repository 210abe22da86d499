"""Worlds S1-S3 in which the best time to stop is known exactly (METHODS 5.3). Nothing here imports an estimator, and no estimator may
import this.

Each world plays orchestrations: rounds that cost something and make a new draft. Before every round somebody decides to stop or to go
on, with a logged propensity. What is written is what a deployment would write: the decisions with their menus and what the decider saw,
and one grade for each draft. What the world knows beyond that (the chance of success, the hidden truth) is in no log.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True)
class Round:
    """What there is at a decision point."""

    state: dict[str, float]
    """What the decider sees."""
    quality: float
    """Of the draft, as a grader finds it later."""
    cost: float
    """Spent so far."""


class World(Protocol):
    """A world with a known optimum."""

    horizon: int

    def play(self, rng: np.random.Generator) -> list[Round]:
        """Decision points 0..horizon of one orchestration that never stops."""
        ...

    def optimum(self) -> float:
        """V*, by closed form or dynamic programming on the world's own constants."""
        ...


@dataclass(frozen=True)
class Geometric:
    """S1. Each round succeeds with chance p and costs c; a success is seen and stays."""

    p: float
    c: float
    horizon: int = 30

    def play(self, rng: np.random.Generator) -> list[Round]:
        done, rounds = False, []
        for k in range(self.horizon + 1):
            if k:
                done = done or bool(rng.random() < self.p)
            rounds.append(Round({"verifier_score": float(done), "round": k}, float(done), self.c * k))
        return rounds

    def optimum(self) -> float:
        """Backward over the horizon: value of going on from a failure with n rounds left."""
        value = 0.0
        for _ in range(self.horizon):
            value = max(0.0, -self.c + self.p + (1 - self.p) * value)
        return value

    def endless(self) -> float:
        return max(0.0, 1 - self.c / self.p)


@dataclass(frozen=True)
class Draws:
    """S2. Each round draws a draft of quality U(0, 1); with recall the best so far counts, without it the last."""

    c: float
    horizon: int = 20
    recall: bool = True

    def play(self, rng: np.random.Generator) -> list[Round]:
        now, rounds = 0.0, []
        for k in range(self.horizon + 1):
            if k:
                drawn = float(rng.random())
                now = max(now, drawn) if self.recall else drawn
            rounds.append(Round({"quality": now, "round": k}, now, self.c * k))
        return rounds

    def optimum(self) -> float:
        return finite_recall(self.c, self.horizon) if self.recall else finite_no_recall(self.c, self.horizon)


@dataclass(frozen=True)
class Voting:
    """S3. A hidden truth; each round asks one more voter, right with chance q, at cost c; the answer is the sign of the vote."""

    q: float
    c: float
    horizon: int = 30

    def play(self, rng: np.random.Generator) -> list[Round]:
        truth, margin, rounds = (1 if rng.random() < 0.5 else -1), 0, []
        for k in range(self.horizon + 1):
            if k:
                margin += truth if rng.random() < self.q else -truth
            sign = math.copysign(1, margin) if margin else (1 if rng.random() < 0.5 else -1)
            rounds.append(Round({"vote_margin": abs(margin), "round": k}, float(sign == truth), self.c * k))
        return rounds

    def optimum(self) -> float:
        """Dynamic programming over the margin."""
        size = self.horizon + 1
        d = np.arange(-size, size + 1)
        post = 1 / (1 + ((1 - self.q) / self.q) ** d.astype(float))
        stop = np.maximum(post, 1 - post)
        up = post * self.q + (1 - post) * (1 - self.q)
        value = stop.copy()
        for _ in range(self.horizon):
            nxt = value.copy()
            nxt[1:-1] = np.maximum(stop[1:-1], -self.c + up[1:-1] * value[2:] + (1 - up[1:-1]) * value[:-2])
            value = nxt
        return float(value[size])


def finite_recall(c: float, horizon: int, grid: int = 4001) -> float:
    """S2 with recall and ``horizon`` draws at most, from nothing."""
    x = np.linspace(0, 1, grid)
    value = x.copy()
    for _ in range(horizon):
        pieces = np.concatenate([[0.0], np.cumsum((value[1:] + value[:-1]) / 2 * (x[1] - x[0]))])
        value = np.maximum(x, x * value + (pieces[-1] - pieces) - c)
    return float(value[0])


def finite_no_recall(c: float, horizon: int) -> float:
    """S2 without recall: the last draw must be taken; net of all costs."""
    value = 0.5
    for _ in range(horizon - 1):
        value = (1 + (value - c) ** 2) / 2 if value > c else 0.5
    return max(0.0, value - c)


def reservation(c: float) -> float:
    """S2's threshold, and its value, without a horizon."""
    return 1 - math.sqrt(2 * c)


def vote_rule(q: float, k: int, c: float) -> tuple[float, float, float]:
    """(accuracy, mean number of votes, value) of stopping at margin k."""
    rho = (1 - q) / q
    accuracy = 1 / (1 + rho**k)
    votes = (k / (2 * q - 1)) * (1 - rho**k) / (1 + rho**k)
    return accuracy, votes, accuracy - c * votes


def play_log(world: World, rng: np.random.Generator, count: int, mu: float) -> list[tuple[list[Round], bool]]:
    """``count`` orchestrations under a behaviour that stops with chance ``mu`` at every point: (points seen, stopped by choice)."""
    logged = []
    for _ in range(count):
        rounds = world.play(rng)
        end, chose = len(rounds) - 1, False
        for k in range(len(rounds) - 1):
            if rng.random() < mu:
                end, chose = k, True
                break
        logged.append((rounds[: end + 1], chose))
    return logged


# ---------------------------------------------------------------- as a deployment writes it

T0_NS = 1_800_000_000_000_000_000
SECOND_NS = 1_000_000_000


def spans_of(number: int, rounds: list[Round], chose: bool, mu: float | None) -> list[dict]:
    """The spans of one orchestration as our SDK names them: a run of an agent, and in it every decision to go on or to stop."""
    trace = f"{number + 1:032x}"
    last = len(rounds) - 1
    root = {
        "trace_id": trace, "span_id": f"{1:016x}", "parent_span_id": None, "name": "invoke_agent asker", "start_ns": T0_NS,
        "end_ns": T0_NS + (last + 2) * SECOND_NS,
        "attributes": {
            "gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "asker", "spanloop.sdk.act": "agent",
        },
    }  # fmt: skip
    spans = [root]
    for k, each in enumerate(rounds):
        stops = chose and k == last
        if not stops and k == last:
            break  # the horizon: nobody decided
        names = sorted(each.state)
        attributes = {
            "spanloop.sdk.act": "stop" if stops else "decision",
            "spanloop.sdk.decision": "stop",
            "spanloop.sdk.options": ["stop", "continue"],
            "spanloop.sdk.chosen": "stop" if stops else "continue",
            "spanloop.sdk.state.names": [*names, "cost"],
            "spanloop.sdk.state.values": [*(float(each.state[name]) for name in names), float(each.cost)],
        }
        if mu is not None:
            attributes["spanloop.sdk.propensities"] = [mu, 1.0 - mu]
        start = T0_NS + (k + 1) * SECOND_NS
        spans.append({
            "trace_id": trace, "span_id": f"{k + 2:016x}", "parent_span_id": root["span_id"], "name": "decide stop",
            "start_ns": start, "end_ns": start, "attributes": attributes,
        })  # fmt: skip
    if not chose:
        # The horizon ends it: told as a stop that had no alternative.
        each = rounds[last]
        names = sorted(each.state)
        start = T0_NS + (last + 1) * SECOND_NS
        spans.append({
            "trace_id": trace, "span_id": f"{last + 2:016x}", "parent_span_id": root["span_id"], "name": "stop",
            "start_ns": start, "end_ns": start,
            "attributes": {
                "spanloop.sdk.act": "stop", "spanloop.sdk.decision": "stop", "spanloop.sdk.chosen": "stop",
                "spanloop.sdk.options": ["stop"], "spanloop.sdk.propensities": [1.0],
                "spanloop.sdk.state.names": [*names, "cost"],
                "spanloop.sdk.state.values": [*(float(each.state[name]) for name in names), float(each.cost)],
            },
        })  # fmt: skip
    return spans


def grades_of(number: int, rounds: list[Round]) -> list[tuple[str, str, float]]:
    """(trace id, span id of the decision, grade) of every draft; the last is the outcome too."""
    return [(f"{number + 1:032x}", f"{k + 2:016x}", each.quality) for k, each in enumerate(rounds)]
