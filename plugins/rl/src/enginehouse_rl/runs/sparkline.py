"""A figure over a whole run in a line of text: which way it went, no matter how many steps there were."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

BLOCKS, ASCII = "▁▂▃▄▅▆▇", "_.-=+*#"  # no full block: lines below each other would touch
MOST_POINTS = 128
"""A figure is remembered in at most so many points."""


class Series:
    """A figure's values over a run, each the mean of as many steps as it takes for all to fit.

    Attributes:
        points: the means, oldest first.
    """

    def __init__(self) -> None:
        self.points: list[float] = []
        self._each, self._sum, self._count = 1, 0.0, 0

    def add(self, value: float) -> None:
        """Take in a step's value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._each:
            return
        self.points.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.points) == MOST_POINTS:
            self.points, self._each = _means(self.points, MOST_POINTS // 2), 2 * self._each


def sparkline(points: Sequence[float], width: int, ramp: str = BLOCKS) -> str:
    """Draw values as a line of text, from their least to their largest.

    Args:
        points: the values, all finite.
        width: most columns; more values than that are put together.
        ramp: characters of one column each, lowest first.
    """
    if not points or width < 1:
        return ""
    shown = _means(points, width) if len(points) > width else points
    least, span = min(shown), max(shown) - min(shown)
    if span == 0:
        return ramp[0] * len(shown)
    return "".join(ramp[min(int((value - least) / span * len(ramp)), len(ramp) - 1)] for value in shown)


def _means(points: Sequence[float], count: int) -> list[float]:
    """The points in so many parts, and the mean of each."""
    bounds = [part * len(points) // count for part in range(count + 1)]
    parts = (points[begin:end] for begin, end in itertools.pairwise(bounds))
    return [sum(part) / len(part) for part in parts if part]
