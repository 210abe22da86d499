"""Message credit: what a message was worth against what else its author could have written at the same point.

With replays, alternatives are drawn at the frozen prefix and continued by the fixed team; in a log the same happens by itself
wherever prefixes repeat (retries, n-best, regenerated turns). Both are samples (message, outcome) at one prefix. Two answers:
``leave_one_out_advantages`` compares each drawn alternative with the mean of the other ones; ``message_credits`` first
merges equal messages and compares each message's value with the policy's mean at the prefix, which is the advantage that
trains. Where a message stands alone its credit is 0 and its status says so.
Source: C3 2603.06859; METHODS 3.2 l.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from spanloop.pipeline.credit.estimators.intervals import student_quantile

__all__ = ["Drawn", "MessageCredit", "leave_one_out_advantages", "log_credits", "message_credits"]


class Drawn(msgspec.Struct, frozen=True):
    """An alternative that was drawn at a prefix, and the outcomes of its continuations."""

    message: Hashable
    """What makes two messages the same, such as a digest of the canonical text."""
    outcomes: tuple[float, ...]
    """Of its continuations, units of reward."""
    chosen: bool = False
    """Put there by us and not drawn by the policy: it tells about its own value, not about how often it is written."""


class MessageCredit(msgspec.Struct, frozen=True):
    """A message against the policy's mean at its prefix."""

    value: float
    """Q(message) - mean over the policy, units of reward."""
    error: float
    """Standard error of ``value``; infinite where it cannot be told."""
    samples: int
    """Outcomes at the prefix."""
    status: Literal["ok", "no_alternative"]

    def half_width(self, level: float = 0.9) -> float:
        """Half-width of a two-sided interval of ``level``, units of reward."""
        if math.isinf(self.error) or self.samples < 3:
            return math.inf
        return student_quantile(level, self.samples - 2) * self.error


def leave_one_out_advantages(drawn: Sequence[tuple[float, int]]) -> list[float]:
    """A_j = mean outcome of alternative j less that of the continuations of the others, units of reward.

    Args:
        drawn: (mean outcome, number of continuations) of each alternative.

    A single alternative gives 0. Source: C3, leave-one-out baseline weighted by continuations.

    >>> [round(a, 6) for a in leave_one_out_advantages([(0.75, 4), (0.25, 4), (0.5, 2)])]
    [0.416667, -0.416667, 0.0]
    """
    weight = sum(n for _, n in drawn)
    total = math.fsum(n * mean for mean, n in drawn)
    return [mean - (total - n * mean) / (weight - n) if weight > n else 0.0 for mean, n in drawn]


def message_credits(
    drawn: Iterable[Drawn], propensities: Mapping[Hashable, float] | None = None
) -> dict[Hashable, MessageCredit]:
    """Credit of each distinct message at one prefix.

    Args:
        drawn: Samples at the prefix. Frequencies of those that the policy drew stand for its propensities.
        propensities: Logged propensities of the messages, where known: they take the place of the frequencies. Those of
            messages that were not drawn are left out and the rest scaled up to 1.

    The outcomes of equal messages are pooled: V = sum of share x Q, and the credit of m is Q(m) - V. Its error counts the
    spread of outcomes within messages and, without propensities, that of the shares.
    """
    outcomes: dict[Hashable, list[float]] = {}
    times: dict[Hashable, int] = {}
    for item in drawn:
        outcomes.setdefault(item.message, []).extend(item.outcomes)
        times[item.message] = times.get(item.message, 0) + (not item.chosen)
    outcomes = {message: found for message, found in outcomes.items() if found}
    if not outcomes:
        return {}
    samples = sum(map(len, outcomes.values()))
    q = {message: math.fsum(found) / len(found) for message, found in outcomes.items()}
    weights = {m: float(times[m]) if propensities is None else propensities.get(m, 0.0) for m in q}
    whole = math.fsum(weights.values())
    if len(q) < 2 or whole <= 0.0:
        return {message: MessageCredit(0.0, math.inf, samples, "no_alternative") for message in q}
    share = {message: weight / whole for message, weight in weights.items()}
    mean = math.fsum(share[m] * q[m] for m in q)
    within = _variances_of_means(outcomes, q)
    draws = sum(times[m] for m in q)
    spread = math.fsum(share[m] * (q[m] - mean) ** 2 for m in q)
    mixing = spread / max(draws - 1, 1) if propensities is None else 0.0
    found: dict[Hashable, MessageCredit] = {}
    for message, value in q.items():
        variance = mixing + math.fsum(((m == message) - share[m]) ** 2 * within[m] for m in q)
        error = math.sqrt(variance)
        found[message] = MessageCredit(value - mean, error, samples, "ok")
    return found


def log_credits(
    log: Iterable[tuple[Hashable, Hashable, float]],
) -> dict[tuple[Hashable, Hashable], MessageCredit]:
    """The log-only analogue: credit of each (prefix, message) where prefixes repeat.

    Args:
        log: One (prefix, message, outcome of its orchestration) a message that was written. A prefix names all that the
            author had seen, its role and its harness.
    """
    at: dict[Hashable, list[Drawn]] = {}
    for prefix, message, outcome in log:
        at.setdefault(prefix, []).append(Drawn(message, (outcome,)))
    return {
        (prefix, message): credit
        for prefix, drawn in at.items()
        for message, credit in message_credits(drawn).items()
    }


def _variances_of_means(
    outcomes: Mapping[Hashable, Sequence[float]], q: Mapping[Hashable, float]
) -> dict[Hashable, float]:
    """Squared standard error of each message's mean outcome.

    Few outcomes that happen to agree are no proof of certainty: each message borrows one degree of freedom from all of them.
    """
    spreads = {m: math.fsum((z - q[m]) ** 2 for z in found) for m, found in outcomes.items()}
    freedom = sum(len(found) - 1 for found in outcomes.values())
    if freedom:
        pooled = math.fsum(spreads.values()) / freedom
    else:
        mean = math.fsum(q.values()) / len(q)
        pooled = math.fsum((value - mean) ** 2 for value in q.values()) / max(len(q) - 1, 1)
    return {m: (spreads[m] + pooled) / len(found) ** 2 for m, found in outcomes.items()}
