"""Learning curves as SVG: one small plot for each metric over the versions. Pure, and without a plotting library.

Place: ``registry`` keeps the drawing beside the metrics of the learner's MLflow run, for whoever has only the files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

__all__ = ["curves"]

WIDTH, HEIGHT, COLUMNS, GAP = 280, 120, 2, 44
POINTS_MAX = 400
"""Points drawn of one curve; of more, evenly spaced ones and the last."""


def curves(history: Mapping[str, Sequence[tuple[int, float]]], title: str) -> str:
    """A drawing of (version, value) points by metric. Values that are not finite are left out, never drawn as a number.

    >>> drawing = curves({"reward": [(0, 0.1), (1, 0.4)]}, "policy")
    >>> drawing.startswith("<svg"), drawing.count("<polyline"), "reward: 0.4" in drawing
    (True, 1, True)
    """
    names = [name for name in sorted(history) if any(math.isfinite(v) for _, v in history[name])]
    rows = math.ceil(len(names) / COLUMNS)
    width, height = COLUMNS * (WIDTH + GAP) + GAP, rows * (HEIGHT + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<text x="{GAP}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for index, name in enumerate(names):
        left = GAP + (index % COLUMNS) * (WIDTH + GAP)
        top = GAP + (index // COLUMNS) * (HEIGHT + GAP)
        parts += _plot(name, [(x, y) for x, y in history[name] if math.isfinite(y)], left, top)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _plot(name: str, points: Sequence[tuple[int, float]], left: int, top: int) -> list[str]:
    step = max(1, math.ceil(len(points) / POINTS_MAX))
    few = [*points[:-1:step], points[-1]]
    first, last = few[0][0], few[-1][0]
    low, high = min(y for _, y in few), max(y for _, y in few)
    wide, tall = max(1, last - first), (high - low) or 1.0
    places = " ".join(
        f"{left + WIDTH * (x - first) / wide:.1f},{top + HEIGHT * (1 - (y - low) / tall):.1f}" for x, y in few
    )
    return [
        f'<rect x="{left}" y="{top}" width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#ccc"/>',
        f'<polyline points="{places}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>',
        f'<text x="{left}" y="{top - 4}">{escape(name)}: {points[-1][1]:.4g}</text>',
        f'<text x="{left}" y="{top + HEIGHT + 12}" fill="#777">v{first} .. v{last}, {low:.4g} .. {high:.4g}</text>',
    ]
