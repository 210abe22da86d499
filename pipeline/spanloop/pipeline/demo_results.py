"""Pure functions from what the demo saw to what its report says."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from spanloop.pipeline.demo_watch import Served
from spanloop.schemas.events import CandidateRegistered, Event, PolicyPromoted, PolicyRolledBack

__all__ = ["BETTER", "chosen_versions", "gating_cost", "own_candidates", "promotions", "returns_by_version"]

BETTER = 0.01
"""A candidate counts as better than the champion when its evaluated return is higher by this much (units of outcome)."""


def chosen_versions(champions: Sequence[int], own: Sequence[int], *, at_most: int = 14) -> list[int]:
    """Versions to evaluate: every champion, the first and the last of the learner's own, and more of them at even distances
    until there are ``at_most`` (champions are never left out).

    >>> chosen_versions([0, 4], [0, 1, 2, 3, 4, 5, 6], at_most=5)
    [0, 2, 4, 6]
    """
    chosen = set(champions) | ({own[0], own[-1]} if own else set())
    room = at_most - len(chosen)
    for number in range(1, room + 1):
        chosen.add(own[round(number * (len(own) - 1) / (room + 1))])
    return sorted(chosen)


def returns_by_version(evaluated: Mapping[int, float], own: Sequence[int]) -> dict[int, float]:
    """A return for each of the learner's own versions: as evaluated, or on the line between its evaluated neighbours.

    >>> returns_by_version({0: 0.0, 4: 0.4}, [0, 1, 4])
    {0: 0.0, 1: 0.1, 4: 0.4}
    """
    known = sorted(version for version in evaluated if version in set(own))
    found: dict[int, float] = {}
    for version in own:
        if version in evaluated:
            found[version] = evaluated[version]
            continue
        place = bisect.bisect_left(known, version)
        if 0 < place < len(known):
            low, high = known[place - 1], known[place]
            share = (version - low) / (high - low)
            found[version] = evaluated[low] + share * (evaluated[high] - evaluated[low])
    return found


def gating_cost(
    served: Sequence[Served], registered: Sequence[tuple[int, int]], returns: Mapping[int, float]
) -> dict[str, float]:
    """What it cost that a candidate has to be proven before it serves everybody.

    Counted are tickets that the champion served after a candidate was registered whose evaluated return is better by at least
    ``BETTER``; for each, the difference of the two returns is lost. Hindsight: nobody could know at the time.

    Args:
        served: Tickets.
        registered: (time in ns, version) of the learner's candidates, in order of time.
        returns: Evaluated (or interpolated) return by version.

    Returns:
        tickets, share of all tickets, outcome lost in total and for each ticket of the demo.
    """
    times = [at for at, _ in registered]
    best: list[float] = []
    for _, version in registered:
        value = returns.get(version, float("-inf"))
        best.append(max(value, best[-1]) if best else value)
    tickets, lost = 0, 0.0
    for ticket in served:
        place = bisect.bisect_left(times, ticket.known_ns)
        if ticket.version != ticket.champion or ticket.version not in returns or not place:
            continue
        gain = best[place - 1] - returns[ticket.version]
        if gain >= BETTER:
            tickets += 1
            lost += gain
    count = max(1, len(served))
    return {
        "tickets": tickets,
        "share": tickets / count,
        "outcome_lost": lost,
        "outcome_lost_per_ticket": lost / count,
    }


def promotions(events: Sequence[tuple[Event, int]], start_ns: int) -> list[dict[str, Any]]:
    """Promotions and rollbacks in order, with seconds since ``start_ns``."""
    found = []
    for event, at in events:
        base = {"t_s": round((at - start_ns) / 1e9, 1)}
        if isinstance(event, PolicyPromoted):
            found.append(
                base
                | {
                    "kind": "promotion",
                    "epoch": event.epoch,
                    "version": event.version,
                    "before": event.previous,
                }
                | {"reason": event.reason}
            )
        elif isinstance(event, PolicyRolledBack):
            found.append(
                base
                | {"kind": "rollback", "epoch": event.epoch, "version": event.version, "to": event.to}
                | {"reason": event.reason}
            )
    return found


def own_candidates(events: Sequence[tuple[Event, int]]) -> list[tuple[int, int]]:
    """(time in ns, version) of what the learner itself registered."""
    return [(at, e.version) for e, at in events if isinstance(e, CandidateRegistered) and not e.injected]
