"""Names of agents, compared."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["folded"]


@lru_cache(8192)
def folded(name: str) -> str:
    """A name as compared: lower case, everything else than letters and digits one underscore.

    >>> folded("Transfer to Refund-Agent ")
    'transfer_to_refund_agent'
    """
    return "_".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
