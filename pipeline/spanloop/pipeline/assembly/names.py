"""Names of agents, compared."""

from __future__ import annotations

__all__ = ["folded"]


def folded(name: str) -> str:
    """A name as compared: lower case, everything else than letters and digits one underscore.

    >>> folded("Transfer to Refund-Agent ")
    'transfer_to_refund_agent'
    """
    return "_".join("".join(c if c.isalnum() else " " for c in name.lower()).split())
