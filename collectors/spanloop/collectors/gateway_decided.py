"""What the gateway's span tells of a decision, in the attribute names of our SDK. Pure.

Numbers of the state stay whether content is kept or not, as the SDK sends them; texts and features never are among them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spanloop.schemas import sdk_attributes as names

__all__ = ["decision_attributes"]


def decision_attributes(
    request: Mapping[str, Any], response: Mapping[str, Any], fallback: str
) -> dict[str, Any]:
    """The attributes.

    Args:
        request: A decision as ``gateway_decide`` read it.
        response: Its answer.
        fallback: Why nobody but the caller's default answered; empty: the policy did.
    """
    found: dict[str, Any] = {"spanloop.decide.fallback": fallback} if fallback else {}
    found[names.ACT] = "decision"
    found[names.CALL] = request["id"]
    numbers = {name: float(v) for name, v in request["state"].items() if _is_number(v)}
    kept = sorted(numbers)[: names.STATE_MAX]
    if len(kept) < len(numbers):
        found[names.TRUNCATED] = True
    return found | {
        names.DECISION: request["kind"],
        names.OPTIONS: list(response["options"]),
        names.PROPENSITIES: list(response["propensities"]),
        names.CHOSEN: response["chosen"],
        names.BY_POLICY: not fallback,
        names.STATE_NAMES: kept,
        names.STATE_VALUES: [numbers[name] for name in kept],
    }


def _is_number(value: Any) -> bool:
    try:
        return isinstance(value, bool | int | float) and math.isfinite(value)
    except OverflowError:
        return False
