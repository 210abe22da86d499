"""Reading JSON of which nothing is known: an upstream may answer anything, and the gateway must neither fail nor guess."""

from __future__ import annotations

from typing import Any

__all__ = ["maps", "number", "text", "the_map"]


def the_map(value: Any) -> dict[str, Any]:
    """The value if it is a map, else an empty one."""
    return value if isinstance(value, dict) else {}


def maps(value: Any) -> list[dict[str, Any]]:
    """The maps in a list; empty for anything else."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def text(value: Any) -> str:
    """The value if it is a text, else an empty one."""
    return value if isinstance(value, str) else ""


def number(value: Any) -> int | float | None:
    """The value if it is a number, else None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
