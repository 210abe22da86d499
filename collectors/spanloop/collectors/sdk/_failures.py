"""What goes wrong inside the telemetry: counted by place, logged once for each place, never raised into the host.

The places are constants of this package, so that the table is bounded. There is no lock: a fork while another thread holds one
would leave the child without telemetry for ever.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Iterator

__all__ = ["failed", "failures", "raise_in_tests"]

_log = logging.getLogger("spanloop.sdk")
_counters: dict[str, Iterator[int]] = {}
_counts: dict[str, int] = {}
_raise = False


def failed(place: str, problem: BaseException | str) -> None:
    """Count a failure at ``place``; its first one is logged. Only under ``raise_in_tests`` is an exception raised again."""
    number = next(_counters.setdefault(place, itertools.count(1)))
    _counts[place] = max(number, _counts.get(place, 0))
    if number == 1:
        shown = problem if isinstance(problem, str) else type(problem).__name__
        with contextlib.suppress(
            Exception
        ):  # a host's logging filter may raise; then there is nowhere to say so
            _log.warning("telemetry: %s: %s (further ones are only counted: failures())", place, shown)
    if _raise and isinstance(problem, Exception):
        raise problem


def failures() -> dict[str, int]:
    """How often something went wrong inside the SDK since the process began, by place; empty: never."""
    return dict(_counts)


def raise_in_tests(on: bool) -> None:
    """Let internal failures be raised: for this project's own tests, so that none is overlooked."""
    global _raise  # noqa: PLW0603
    _raise = on
