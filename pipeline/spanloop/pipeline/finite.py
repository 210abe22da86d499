"""The type of options that take a number: NaN lies outside no range, so click's own lets it through.

Place in the flow: edges of verbs only. Invariant: what a verb gets is finite and in its range.
"""

from __future__ import annotations

import math
from typing import Any

import click

__all__ = ["FiniteRange"]


class FiniteRange(click.FloatRange):
    """A range of numbers without NaN and infinity; without bounds, any finite number."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; a usage error where it is none that can be compared."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is not a finite number.", param, ctx)
        return number
