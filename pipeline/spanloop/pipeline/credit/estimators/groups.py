"""Group-relative advantages: how much better than other tries of the same task (under the same harness) a try went.

A group is described by three integers (count, sum, sum of squares of micro-rewards), so that a late try is added and a
retracted one taken away exactly. A group with one member, or whose members all got the same, says nothing: its advantages are 0
and their status says why, so that a fallback (a learned baseline) can tell "no better than the others" from "unknown".
Source: GRPO 2402.03300, RLOO 2402.14740, Dr. MAS 2602.08847; METHODS 2.5, 2.8, 3.1 b-c.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal, TypeVar

import msgspec

from spanloop.schemas.canonical import MICRO

__all__ = ["Advantage", "GroupStats", "Status", "agent_wise", "group_stats", "grpo", "inflation", "rloo"]

Status = Literal["ok", "singleton", "no_variance"]
Key = TypeVar("Key", bound=Hashable)


class Advantage(msgspec.Struct, frozen=True):
    """A member's advantage."""

    value: float
    """GRPO and Dr. MAS: standard deviations of the group; RLOO: units of reward."""
    status: Status


class GroupStats(msgspec.Struct, frozen=True):
    """What is known of a group; exact under any order of additions and retractions."""

    count: int = 0
    total: int = 0
    """Sum of micro-rewards."""
    squares: int = 0
    """Sum of squared micro-rewards."""

    def add(self, reward: int) -> GroupStats:
        """With one more member."""
        return GroupStats(self.count + 1, self.total + reward, self.squares + reward * reward)

    def retract(self, reward: int) -> GroupStats:
        """Without a member that was added before."""
        return GroupStats(self.count - 1, self.total - reward, self.squares - reward * reward)

    @property
    def mean(self) -> float:
        """Units of reward; 0 of nobody."""
        return self.total / (self.count * MICRO) if self.count else 0.0

    def deviation(self, *, sample: bool = True) -> float:
        """Standard deviation, units of reward; with n - 1 below it (``sample``) or n. 0 below two members."""
        if self.count < 2:
            return 0.0
        spread = self.count * self.squares - self.total * self.total  # n^2 times the variance, an integer
        below = self.count * (self.count - 1 if sample else self.count)
        return math.sqrt(spread / below) / MICRO

    @property
    def status(self) -> Status:
        """Whether the group can tell its members apart."""
        if self.count < 2:
            return "singleton"
        return "ok" if self.count * self.squares != self.total * self.total else "no_variance"


def group_stats(rewards: Sequence[int]) -> GroupStats:
    """Stats of a whole group of micro-rewards."""
    return GroupStats(len(rewards), sum(rewards), sum(reward * reward for reward in rewards))


def grpo(reward: int, group: GroupStats, *, sample: bool = True, epsilon: float = 0.0) -> Advantage:
    """(R - mean) / (deviation + epsilon) of a member of a group.

    Args:
        reward: Micro-units.
        group: With the member in it.
        sample: n - 1 below the variance, as verl and TRL do; False: n.
        epsilon: Added to the deviation, units of reward.

    >>> group = group_stats([1_000_000, 0, 0, 1_000_000])
    >>> round(grpo(1_000_000, group).value, 6), grpo(0, group, sample=False).value
    (0.866025, -1.0)
    """
    if group.status != "ok":
        return Advantage(0.0, group.status)
    centred = (group.count * reward - group.total) / (group.count * MICRO)
    return Advantage(centred / (group.deviation(sample=sample) + epsilon), "ok")


def rloo(reward: int, group: GroupStats) -> Advantage:
    """R less the mean of the group's other members.

    Args:
        reward: Micro-units.
        group: With the member in it.

    >>> round(rloo(1_000_000, group_stats([1_000_000, 0, 0, 1_000_000])).value, 6)
    0.666667
    """
    if group.status != "ok":
        return Advantage(0.0, group.status)
    return Advantage((group.count * reward - group.total) / ((group.count - 1) * MICRO), "ok")


def agent_wise(
    calls: Sequence[tuple[Key, int]], *, sample: bool = True, epsilon: float = 0.0
) -> list[Advantage]:
    """Dr. MAS: each call normalised by the calls of the same agent in the group, not by the group's tries.

    Args:
        calls: One (agent, micro-reward of its try) a call of all tries of one task.
        sample: As in ``grpo``.
        epsilon: As in ``grpo``.

    Source: 2602.08847, A = (R - mean_k) / (deviation_k + epsilon).
    """
    groups: dict[Key, GroupStats] = {}
    for agent, reward in calls:
        groups[agent] = groups.get(agent, GroupStats()).add(reward)
    return [grpo(reward, groups[agent], sample=sample, epsilon=epsilon) for agent, reward in calls]


def inflation(agent: GroupStats, group: GroupStats) -> float:
    """Factor by which group-wide normalisation scales the second moment of an agent's gradient; NaN without variance.

    Source: 2602.08847, (deviation_k^2 + (mean_k - mean)^2) / deviation^2, population deviations.
    """
    whole = group.deviation(sample=False) ** 2
    own = agent.deviation(sample=False) ** 2
    return (own + (agent.mean - group.mean) ** 2) / whole if whole else math.nan
