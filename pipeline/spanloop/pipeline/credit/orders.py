"""Value differences on a partial order: what a step added, whatever order a clock happened to show.

With parallel branches the difference V(D + step) - V(D) depends on which branch a clock shows first. Credit is therefore
averaged over linear extensions of the happens-before order: one forward, one with every antichain reversed.
Invariants: each order's differences telescope, so the averages sum to exactly V(all) - V(none) (a half micro-unit is carried to
the next step); a step without effect in either order gets exactly 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TypeVar

__all__ = ["average_differences", "linear_extensions"]

Step = TypeVar("Step", bound=str)


def linear_extensions(
    steps: Sequence[Step], before: Mapping[Step, AbstractSet[Step]]
) -> tuple[list[Step], list[Step]]:
    """A linear extension that follows the order of ``steps`` inside antichains, and one that reverses them.

    Args:
        steps: All steps in their preferred order (by time and id).
        before: For each step the steps that must precede it; others and absent ones count as none. Steps on a
            cycle are taken in the preferred order once nothing else is left.

    >>> linear_extensions(["a", "b", "c"], {"c": {"a"}})
    (['a', 'b', 'c'], ['b', 'a', 'c'])
    """
    return _extension(list(steps), before), _extension(list(reversed(steps)), before)


def _extension(order: list[Step], before: Mapping[Step, AbstractSet[Step]]) -> list[Step]:
    present = set(order)
    waiting = {step: (before.get(step, frozenset()) & present) - {step} for step in order}
    done: list[Step] = []
    placed: set[Step] = set()
    left = order
    while left:
        ready = [step for step in left if waiting[step] <= placed] or left[:1]
        done += ready
        placed.update(ready)
        left = [step for step in left if step not in placed]
    return done


def average_differences(
    steps: Sequence[Step],
    before: Mapping[Step, AbstractSet[Step]],
    value: Callable[[frozenset[Step]], int],
) -> dict[Step, int]:
    """Micro-units that each step added to ``value``, averaged over the two linear extensions.

    Args:
        steps: All steps in their preferred order.
        before: Happens-before: for each step the steps that must precede it.
        value: Value of a set of completed steps, micro-units.

    Source: METHODS 3.4, concurrency (Faigle-Kern values, two orders).

    >>> v = {"": 200_000, "a": 900_000, "b": 900_000, "ab": 1_000_000}
    >>> average_differences(["a", "b"], {}, lambda done: v["".join(sorted(done))])
    {'a': 400000, 'b': 400000}
    """
    added = dict.fromkeys(steps, 0)
    forward, backward = linear_extensions(steps, before)
    orders = (forward, backward) if backward != forward else (forward,)
    for order in orders:
        done: frozenset[Step] = frozenset()
        previous = value(done)
        for step in order:
            done |= {step}
            current = value(done)
            added[step] += current - previous
            previous = current
    if len(orders) == 1:
        return added  # the average of two equal orders
    average: dict[Step, int] = {}
    carry = 0
    for step in forward:
        average[step], carry = divmod(added[step] + carry, 2)
    return {step: average[step] for step in steps}
