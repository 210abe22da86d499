"""Upcasters: pure functions from one schema version of an event type to the next, chained.

When a struct in ``events.py`` changes in a way that old readers or old bytes would not survive, raise its
``VERSION``, register the step here and add a golden file of the old version to ``tests/golden/events``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spanloop.schemas.errors import SchemaError

__all__ = ["UPCASTERS", "upcast"]

UPCASTERS: dict[tuple[str, int], Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""(event type, version) -> function from that version's fields to the next version's."""


def upcast(event_type: str, version: int, target: int, fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of ``event_type`` raised from ``version`` to ``target`` one step at a time."""
    while version < target:
        step = UPCASTERS.get((event_type, version))
        if step is None:
            raise SchemaError(
                f"no upcaster for {event_type} from version {version} to {version + 1}", event_type=event_type
            )
        fields = step(fields)
        version += 1
    fields.pop("schema_version", None)
    return fields
