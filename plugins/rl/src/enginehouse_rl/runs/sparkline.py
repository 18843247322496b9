"""Sparklines: a line of text that shows how a metric changed over a run of any length."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BLOCKS, ASCII = "▁▂▃▄▅▆▇", "_.-=+*#"  # no full block: lines below each other would touch
MOST_POINTS = 128
"""Maximum number of points of a series."""


class Series:
    """A metric's values over a run. In long runs, each of the `points` is the mean of several steps."""

    def __init__(self) -> None:
        self.points: list[float] = []
        self._each, self._sum, self._count = 1, 0.0, 0

    def add(self, value: float) -> None:
        """Add a step's value. Values that are not finite are ignored."""
        if not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._each:
            return
        self.points.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.points) == MOST_POINTS:
            self.points, self._each = _average_parts(self.points, MOST_POINTS // 2), 2 * self._each


def draw_sparkline(points: Sequence[float], width: int, ramp: str = BLOCKS) -> str:
    """Draw values as a line of text, scaled from the smallest value to the largest.

    Args:
        points: The values, all finite.
        width: Maximum number of columns; neighbouring values are averaged to fit.
        ramp: Characters of one column each, lowest first.
    """
    if not points or width < 1:
        return ""
    shown = _average_parts(points, width) if len(points) > width else points
    least, span = min(shown), max(shown) - min(shown)
    if span == 0:
        return ramp[0] * len(shown)
    return "".join(ramp[min(int((value - least) / span * len(ramp)), len(ramp) - 1)] for value in shown)


def _average_parts(points: Sequence[float], count: int) -> list[float]:
    """Divide points into `count` parts, and return the mean of each."""
    bounds = [part * len(points) // count for part in range(count + 1)]
    parts = (points[begin:end] for begin, end in itertools.pairwise(bounds))
    return [sum(part) / len(part) for part in parts if part]
