"""The canary: candidate against champion on live traffic, with a test that may be looked at after every orchestration.

Place: ``promotion`` starts a canary for what passed the gate; the trainer feeds both arms from the samples topic. An arm
holds the orchestrations whose every call was answered by its version, newest revision only.

How: each orchestration counts its reward minus the value of its start (known before the first decision, so its mean does not
differ between arms; only the variance falls). The bounds are one-sided asymptotic confidence sequences with a
normal mixture: valid at all sample sizes at once, so stopping at the first crossing keeps the error rate.

Invariants: pure; the order of arrival within an arm does not matter; adding an older revision changes nothing.
"""

from __future__ import annotations

import math

import msgspec

from spanloop.schemas.canonical import MICRO

__all__ = ["Arm", "CanaryTest", "Verdict", "normal_mixture", "one_sided_mixture", "tuned_rho2"]


def normal_mixture(sigma: float, count: float, alpha: float, rho2: float) -> float:
    """Two-sided anytime-valid half-width sigma sqrt(2 (n rho^2 + 1) / (n^2 rho^2) ln(sqrt(n rho^2 + 1) / alpha)).

    >>> round(normal_mixture(.5, 1000, .05, .01), 6)
    0.048032

    Source: METHODS 4.5 (Robbins 1970; Howard et al. 2021; Waudby-Smith et al. 2021, theorem 2.2).
    """
    grown = count * rho2 + 1.0
    return sigma * math.sqrt(2.0 * grown / (count * count * rho2) * math.log(math.sqrt(grown) / alpha))


def one_sided_mixture(sigma: float, count: float, alpha: float, rho2: float) -> float:
    """The same for one side: ln(1 + sqrt(n rho^2 + 1) / (2 alpha)) in place of the logarithm.

    Source: Waudby-Smith et al., "Time-uniform central limit theory", proposition B.1.
    """
    grown = count * rho2 + 1.0
    return sigma * math.sqrt(
        2.0 * grown / (count * count * rho2) * math.log1p(math.sqrt(grown) / (2.0 * alpha))
    )


def tuned_rho2(count: float, alpha: float) -> float:
    """rho^2 that makes the sequence tightest near ``count`` samples.

    Source: Waudby-Smith et al., appendix B.2: rho^2 = (-2 ln a + ln(-2 ln a + 1)) / n.
    """
    log_term = -2.0 * math.log(alpha)
    return (log_term + math.log(log_term + 1.0)) / count


class Arm:
    """Gains of one arm: orchestration id -> (revision, reward - value of the start, micro-units). Sums are integers: exact."""

    def __init__(self) -> None:
        self._gains: dict[str, tuple[int, int]] = {}
        self._sum = 0
        self._square = 0

    def add(self, orchestration_id: str, revision: int, gain: int) -> None:
        """Take an orchestration; a newer revision replaces what an older one said."""
        known = self._gains.get(orchestration_id)
        if known is not None:
            if known[0] >= revision:
                return
            self.discard(orchestration_id)
        self._gains[orchestration_id] = (revision, gain)
        self._sum += gain
        self._square += gain * gain

    def discard(self, orchestration_id: str) -> None:
        """Forget an orchestration (a newer revision mixes versions, or it was joined into another)."""
        known = self._gains.pop(orchestration_id, None)
        if known is not None:
            self._sum -= known[1]
            self._square -= known[1] * known[1]

    @property
    def count(self) -> int:
        return len(self._gains)

    @property
    def mean(self) -> float:
        """Units of reward."""
        return self._sum / len(self._gains) / MICRO if self._gains else 0.0

    @property
    def variance(self) -> float:
        """Sample variance, squared units of reward."""
        n = len(self._gains)
        return (n * self._square - self._sum**2) / (n * (n - 1)) / MICRO**2 if n > 1 else 0.0


class Verdict(msgspec.Struct, frozen=True):
    """What the test says now; difference and bounds in units of reward."""

    verdict: str
    """promote, reject, inconclusive or "" (go on)."""
    difference: float
    lower: float
    upper: float
    n_version: int
    n_against: int
    reason: str = ""


class CanaryTest:
    """Candidate and champion arm, and the rule that ends the canary."""

    def __init__(self, *, confidence: float, minimum: int, maximum: int, max_s: float) -> None:
        self.candidate = Arm()
        self.champion = Arm()
        self._alpha = 1.0 - confidence
        self._minimum = minimum
        self._maximum = maximum
        self._max_s = max_s
        self._rho2 = tuned_rho2(max(minimum, maximum / 4), self._alpha)

    def add(self, orchestration_id: str, revision: int, gain: int, *, candidate: bool) -> None:
        """Feed one orchestration (gain in micro-units). The champion's arm opens with the candidate's first result, so that neither arm has
        orchestrations from before the other could have any."""
        mine, other = (self.candidate, self.champion) if candidate else (self.champion, self.candidate)
        other.discard(orchestration_id)
        if candidate or self.candidate.count:
            mine.add(orchestration_id, revision, gain)

    def discard(self, orchestration_id: str) -> None:
        """Forget an orchestration in both arms."""
        self.candidate.discard(orchestration_id)
        self.champion.discard(orchestration_id)

    def verdict(self, elapsed_s: float) -> Verdict:
        """Promote when the difference's lower bound is above 0, reject when its upper bound is below, inconclusive when
        the candidate's arm reached its maximum or time is over."""
        new, old = self.candidate, self.champion
        over = elapsed_s >= self._max_s or new.count >= self._maximum
        if min(new.count, old.count) < max(2, self._minimum):
            return self._result("inconclusive" if over else "", 0.0, math.inf, "too few orchestrations")
        difference = new.mean - old.mean
        width = self.half_width()
        if difference - width > 0.0:
            return self._result("promote", difference, width, "lower bound above zero")
        if difference + width < 0.0:
            return self._result("reject", difference, width, "upper bound below zero")
        return self._result(
            "inconclusive" if over else "", difference, width, "budget used up" if over else ""
        )

    def half_width(self) -> float:
        """One-sided half-width now, in units of the difference."""
        new, old = self.candidate, self.champion
        square = new.variance / new.count + old.variance / old.count
        pooled = new.count * old.count / (new.count + old.count)
        sigma = max(1e-6, math.sqrt(square * pooled))
        return one_sided_mixture(sigma, pooled, self._alpha, self._rho2)

    def _result(self, verdict: str, difference: float, width: float, reason: str) -> Verdict:
        return Verdict(
            verdict,
            difference,
            difference - width,
            difference + width,
            self.candidate.count,
            self.champion.count,
            reason,
        )
