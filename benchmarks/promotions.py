"""Promotion decisions in simulation: how often a candidate that is no better gets through, and how often a better one does.

Each decision is a canary (the real `CanaryTest` with the default settings) that is looked at after every orchestration. Rewards
are drawn from four shapes; the candidate's mean differs by 0, by less and by more. 2,000 decisions with no difference a
shape, 500 with one. Run: .venv/bin/python benchmarks/promotions.py [--decisions 2000]
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from _harness import write
from numpy.typing import NDArray

from spanloop.learner.canary import CanaryTest
from spanloop.schemas.settings import Learner

Draw = Callable[[np.random.Generator, int], NDArray[np.float64]]
SHAPES: dict[str, Draw] = {
    "even": lambda rng, n: rng.integers(0, 2, n) * 1.0,
    "rare success": lambda rng, n: (rng.random(n) < 0.05) * 1.0,
    "bounded continuous": lambda rng, n: rng.beta(2, 5, n),
    "heavy cost tail": lambda rng, n: 0.8 - np.minimum(rng.exponential(0.15, n), 3.0),
}
DIFFERENCES = (-0.1, -0.02, 0.05, 0.1, 0.2)


def decide(shape: str, difference: float, number: int, settings: Learner) -> tuple[str, int]:
    """Verdict of one canary, and orchestrations that it took."""
    rng = np.random.default_rng([zlib.crc32(shape.encode()), round(difference * 1000) + 1000, number])
    test = CanaryTest(
        confidence=settings.canary_confidence,
        minimum=settings.canary_min,
        maximum=settings.canary_max,
        max_s=math.inf,
    )
    total = round(settings.canary_max / settings.canary_share) + 1000
    arms = rng.random(total) < settings.canary_share
    gains = np.round((SHAPES[shape](rng, total) + arms * difference) * 1e6).astype(int)
    for at in range(total):
        test.add(str(at), 1, int(gains[at]), candidate=bool(arms[at]))
        verdict = test.verdict(0.0).verdict
        if verdict:
            return verdict, at + 1
    return "inconclusive", total


def wilson(hits: int, count: int) -> list[float]:
    """95 % interval of a share."""
    z, p = 1.96, hits / count
    middle = (p + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
    return [round(max(0.0, middle - half), 4), round(min(1.0, middle + half), 4)]


def trial(shape: str, difference: float, count: int, settings: Learner) -> dict[str, Any]:
    verdicts: Counter[str] = Counter()
    used: list[int] = []
    for number in range(count):
        verdict, orchestrations = decide(shape, difference, number, settings)
        verdicts[verdict] += 1
        used.append(orchestrations)
    return {
        "decisions": count,
        "promoted": round(verdicts["promote"] / count, 4),
        "promoted_95": wilson(verdicts["promote"], count),
        "rejected": round(verdicts["reject"] / count, 4),
        "median_orchestrations": int(np.median(used)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--decisions", type=int, default=2000)
    options = parser.parse_args()
    settings = Learner()
    figures: dict[str, Any] = {
        "confidence": settings.canary_confidence,
        "share": settings.canary_share,
        "orchestrations_max": settings.canary_max,
    }
    for shape in SHAPES:
        figures[shape] = {"no difference": trial(shape, 0.0, options.decisions, settings)}
        for difference in DIFFERENCES:
            few = max(20, options.decisions // 4)
            figures[shape][f"{difference:+}"] = trial(shape, difference, few, settings)
        print(shape, figures[shape]["no difference"]["promoted"], flush=True)
    figures["false_promotions_max"] = max(figures[s]["no difference"]["promoted"] for s in SHAPES)
    write("promotions", ".venv/bin/python benchmarks/promotions.py", figures)


if __name__ == "__main__":
    main()
