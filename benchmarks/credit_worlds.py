"""Worlds G1-G7 whose credit is known exactly (METHODS 6). Nothing here imports an estimator, and no estimator may import this.

Each world draws what an estimator may see (logs, replays) from a seeded generator and keeps the truth beside it, computed from the
world's own constants by enumeration or in closed form.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Synergy:
    """G1. Agent i succeeds with chance p_i; the outcome is the sum of the planted terms whose members all succeeded."""

    chances: np.ndarray
    terms: dict[tuple[int, ...], float]
    unions: list[list[int]]
    parents: list[int]

    @classmethod
    def draw(cls, rng: np.random.Generator, n: int) -> Synergy:
        terms = {}
        for size, share in ((1, 0.9), (2, 0.4), (3, 0.15)):
            for members in itertools.combinations(range(n), size):
                if rng.random() < share:
                    terms[members] = float(rng.normal(0.0, 0.3))
        unions = [list(part) for part in np.array_split(np.arange(n), max(1, n // 2))]
        parents = [-1, *(int(rng.integers(-1, i)) for i in range(1, n))]
        return cls(rng.uniform(0.3, 1.0, n), terms, unions, parents)

    def _means(self) -> dict[tuple[int, ...], float]:
        return {t: a * float(np.prod(self.chances[list(t)])) for t, a in self.terms.items()}

    def expected(self, masks: np.ndarray) -> np.ndarray:
        """Mean outcome with the agents outside the mask taken out."""
        found = np.zeros(len(masks))
        for members, mean in self._means().items():
            found += mean * masks[:, list(members)].all(axis=1)
        return found

    def replay(self, rng: np.random.Generator, masks: np.ndarray) -> np.ndarray:
        """One replay of each mask."""
        done = masks & (rng.random(masks.shape) < self.chances)
        found = np.zeros(len(masks))
        for members, value in self.terms.items():
            found += value * done[:, list(members)].all(axis=1)
        return found

    def shapley(self) -> np.ndarray:
        truth = np.zeros(len(self.chances))
        for members, mean in self._means().items():
            truth[list(members)] += mean / len(members)
        return truth

    def owen(self) -> np.ndarray:
        """A term is shared evenly by the unions that it touches, then by its members in each."""
        truth = np.zeros(len(self.chances))
        for members, mean in self._means().items():
            parts = [[i for i in union if i in members] for union in self.unions]
            parts = [part for part in parts if part]
            for part in parts:
                truth[part] += mean / len(parts) / len(part)
        return truth

    def precedence(self) -> np.ndarray:
        """A term goes to its last member, over all orders in which everyone comes after its parent."""
        n = len(self.chances)
        truth, count = np.zeros(n), 0
        for order in itertools.permutations(range(n)):
            place = {i: k for k, i in enumerate(order)}
            if any(p >= 0 and place[p] > place[i] for i, p in enumerate(self.parents)):
                continue
            count += 1
            for members, mean in self._means().items():
                truth[max(members, key=place.__getitem__)] += mean
        return truth / count


@dataclass(frozen=True)
class Relay:
    """G2. A chain of messages, each spoilt with some chance given a clean prefix; success iff none is. A side message
    between two links says one of two things and changes nothing."""

    chances: tuple[float, ...] = (0.1, 0.2, 0.3)

    def truth(self) -> dict[tuple[int, str], float]:
        """(link, "good" or "bad") -> advantage against the author's policy."""
        found = {}
        for k, chance in enumerate(self.chances):
            after = math.prod(1 - e for e in self.chances[k + 1 :])
            found[k, "good"] = after - (1 - chance) * after
            found[k, "bad"] = -(1 - chance) * after
        return found

    def write(self, rng: np.random.Generator, k: int) -> str:
        """A message at a clean prefix."""
        return "bad" if rng.random() < self.chances[k] else "good"

    def outcome(self, rng: np.random.Generator, k: int, message: str) -> float:
        """Of one continuation after ``message`` at link k."""
        return float(
            message == "good" and all(self.write(rng, j) == "good" for j in range(k + 1, len(self.chances)))
        )

    def log(self, rng: np.random.Generator, count: int) -> list[tuple[str, str, float]]:
        """(prefix, message, outcome) of every message of ``count`` orchestrations, side messages included."""
        rows = []
        for _ in range(count):
            said = [self.write(rng, k) for k in range(len(self.chances))]
            outcome = float("bad" not in said)
            rows += [
                ("".join(f"{k}{m}" for k, m in enumerate(said[:k])) + f"|{k}", said[k], outcome)
                for k in range(len(said))
            ]
            rows.append(("side", "left" if rng.random() < 0.5 else "right", outcome))
        return rows


@dataclass(frozen=True)
class Spawning:
    """G3. A hidden difficulty moves both the decision to spawn and the outcome."""

    spawn: dict[str, float] = field(default_factory=lambda: {"easy": 0.2, "hard": 0.9})
    outcome: dict[str, tuple[float, float]] = field(
        default_factory=lambda: {"easy": (0.85, 0.9), "hard": (0.2, 0.5)}
    )
    """Chance of success without and with a spawn."""

    def truth(self) -> float:
        return sum(0.5 * (yes - no) for no, yes in self.outcome.values())

    def log(self, rng: np.random.Generator, n: int, *, deterministic: bool = False) -> dict:
        """Difficulty, decision (1: spawn), propensities (n, 2), outcome."""
        hard = rng.random(n) < 0.5
        chance = np.where(hard, self.spawn["hard"], self.spawn["easy"])
        if deterministic:
            chance = np.round(chance)
        chosen = (rng.random(n) < chance).astype(np.int64)
        table = np.array([self.outcome["easy"], self.outcome["hard"]])
        outcome = (rng.random(n) < table[hard.astype(int), chosen]).astype(np.float64)
        return {
            "contexts": ["hard" if h else "easy" for h in hard],
            "chosen": chosen,
            "propensities": np.stack([1 - chance, chance], axis=1),
            "rewards": outcome,
        }


@dataclass(frozen=True)
class Schedule:
    """G4. Sub-agents under one orchestrator in stages; durations and a few failures and idle spawns."""

    stages: list[tuple[int, tuple[int, ...]]]
    """(steps of the main agent, steps of each sub-agent)."""
    weights: dict[str, int]
    after: dict[str, set[str]]

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Schedule:
        stages = [
            (int(rng.integers(1, 4)), tuple(int(x) for x in rng.integers(0, 9, rng.integers(0, 5))))
            for _ in range(int(rng.integers(1, 6)))
        ]
        n = int(rng.integers(3, 12))
        weights = {f"s{i}": int(rng.integers(1, 20)) for i in range(n)}
        after = {f"s{i}": {f"s{j}" for j in range(i) if rng.random() < 0.3} for i in range(n)}
        return cls(stages, weights, after)

    def critical_steps(self) -> int:
        return sum(main + max(subs, default=0) for main, subs in self.stages)

    def work(self) -> int:
        return sum(self.weights.values())

    def critical_path(self) -> int:
        """By walking every path."""

        def longest(step: str) -> int:
            return self.weights[step] + max((longest(s) for s in self.after[step]), default=0)

        return max(longest(step) for step in self.weights)

    def latecomers(self, stage: int) -> np.ndarray:
        """Who a stage's length is due to: the mean over all orders of what each sub-agent adds to the maximum."""
        subs = self.stages[stage][1]
        truth, count = np.zeros(len(subs)), 0
        for order in itertools.permutations(range(len(subs))):
            count, longest = count + 1, 0
            for i in order:
                truth[i] += max(longest, subs[i]) - longest
                longest = max(longest, subs[i])
        return truth / max(count, 1)


@dataclass(frozen=True)
class Stopping:
    """G5. S1 geometric success, S2 draws with recall, S3 votes, each with its best attainable value (METHODS 5.3)."""

    kind: str
    """success, draws or votes."""
    quality: float
    """Chance of success a round, or of a right vote; unused for draws."""
    cost: float
    """A round."""

    def best(self) -> float:
        if self.kind == "success":
            return max(0.0, 1.0 - self.cost / self.quality)
        if self.kind == "draws":
            return 1.0 - math.sqrt(2.0 * self.cost)
        rho = (1.0 - self.quality) / self.quality
        drift = 2.0 * self.quality - 1.0
        return max(
            1.0 / (1.0 + rho**k) - self.cost * (k / drift) * (1.0 - rho**k) / (1.0 + rho**k)
            for k in range(200)
        )

    def rounds(self, rng: np.random.Generator, count: int, horizon: int) -> tuple[np.ndarray, np.ndarray]:
        """What is seen after each round and what stopping there pays, shape (count, horizon + 1) each."""
        cost = self.cost * np.arange(horizon + 1)
        if self.kind == "success":
            hit = rng.random((count, horizon)) < self.quality
            seen = np.concatenate([np.zeros((count, 1)), np.maximum.accumulate(hit, axis=1)], axis=1)
            return seen, seen - cost
        if self.kind == "draws":
            best = np.maximum.accumulate(rng.random((count, horizon)), axis=1)
            seen = np.concatenate([np.zeros((count, 1)), best], axis=1)
            return seen, seen - cost
        truth = rng.random((count, 1)) < 0.5
        votes = np.where((rng.random((count, horizon)) < self.quality) == truth, 1, -1)
        seen = np.concatenate([np.zeros((count, 1)), np.cumsum(votes, axis=1)], axis=1)
        right = np.where(seen == 0, 0.5, (seen > 0) == truth)
        return seen, right - cost


@dataclass(frozen=True)
class Menus:
    """G6. K contexts, M actions, softmax policies of two versions, known mean rewards."""

    means: np.ndarray
    logits: np.ndarray
    """Of the behaviour, shape (K, M)."""
    target_logits: np.ndarray

    @classmethod
    def draw(cls, rng: np.random.Generator, contexts: int = 4, actions: int = 4) -> Menus:
        shape = (contexts, actions)
        behaviour = rng.normal(0, 0.7, shape)
        return cls(rng.uniform(0.1, 0.9, shape), behaviour, behaviour + rng.normal(0, 0.7, shape))

    @staticmethod
    def policy(logits: np.ndarray) -> np.ndarray:
        weights = np.exp(logits)
        return weights / weights.sum(axis=1, keepdims=True)

    def truth(self) -> float:
        return float((self.policy(self.target_logits) * self.means).sum(axis=1).mean())

    def log(self, rng: np.random.Generator, n: int) -> dict:
        """Context, action, propensities (n, M), the target's chances (n, M), reward."""
        context = rng.integers(len(self.means), size=n)
        behaviour = self.policy(self.logits)[context]
        chosen = (behaviour.cumsum(axis=1) < rng.random((n, 1))).sum(axis=1).clip(max=self.means.shape[1] - 1)
        return {
            "contexts": context.tolist(),
            "chosen": chosen,
            "propensities": behaviour,
            "target": self.policy(self.target_logits)[context],
            "rewards": (rng.random(n) < self.means[context, chosen]).astype(np.float64),
        }


@dataclass(frozen=True)
class Voters:
    """G7. Independent voters on a yes-or-no question, right with chance p_i; the answer weighs them by log odds."""

    chances: np.ndarray

    def accuracy(self, masks: np.ndarray) -> np.ndarray:
        """Chance that the best combination of each mask's votes is right; half for nobody."""
        found = []
        for mask in masks:
            p = self.chances[mask]
            found.append(
                sum(
                    max(
                        0.5 * math.prod(q if up else 1 - q for q, up in zip(p, votes, strict=True)),
                        0.5 * math.prod(1 - q if up else q for q, up in zip(p, votes, strict=True)),
                    )
                    for votes in itertools.product((True, False), repeat=len(p))
                )
            )
        return np.array(found)

    def truth(self) -> np.ndarray:
        """Mean over all orders of what each voter adds to the accuracy."""
        n = len(self.chances)
        table = self.accuracy(((np.arange(1 << n)[:, None] >> np.arange(n)) & 1).astype(bool))
        truth = np.zeros(n)
        for order in itertools.permutations(range(n)):
            before = 0
            for i in order:
                truth[i] += table[before | 1 << i] - table[before]
                before |= 1 << i
        return truth / math.factorial(n)

    def log(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """Whether each vote was right, bool, shape (count, n)."""
        return rng.random((count, len(self.chances))) < self.chances
