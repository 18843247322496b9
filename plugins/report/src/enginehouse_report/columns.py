"""Turns rows of figures into columns for a page, with few digits and a bounded number of points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

DIGITS = 5
"""Significant digits of a figure; a screen shows three or four."""
MOST_POINTS = 4000
"""Most points of a chart, more than a screen is wide. Longer runs are reduced to lowest and highest values."""


def round_significant(value: float, digits: int = DIGITS) -> float:
    """Round a number to significant digits."""
    return value if value == 0 or isinstance(value, int) else float(f"{value:.{digits}g}")


def number(value: Any) -> float | None:
    """Return a value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def make_columns(rows: Sequence[Mapping[str, Any]], most: int = MOST_POINTS) -> dict[str, Any]:
    """Return the columns of the rows that have a `step`.

    Args:
        rows: rows of `metrics.jsonl`.
        most: most points of a column. A longer one is cut into equal parts, each of which keeps its lowest and its
            highest value, in their order, at its first and last step.

    Returns:
        `rows`: number of points. `columns`: values by name, None where a row has none. `not_finite`: by name, the
        points whose value is no finite number. `binned`: number of steps that two points stand for; 0: each step is a
        point.
    """
    rows = [row for row in rows if isinstance(row.get("step"), int)]
    names = [name for name in dict.fromkeys(name for row in rows for name in row) if name != "step"]
    if len(rows) <= most:
        parts = [[row] for row in rows]
        each = 0
    else:
        each = math.ceil(len(rows) / (most // 2))
        parts = [list(rows[begin : begin + each]) for begin in range(0, len(rows), each)]
    columns: dict[str, list[Any]] = {"step": [row["step"] for part in parts for row in _ends(part)]}
    not_finite: dict[str, list[int]] = {}
    for name in names:
        values: list[Any] = []
        columns[name] = values
        for part in parts:
            if any(name in row and number(row[name]) is None for row in part):
                not_finite.setdefault(name, []).append(len(values))
            values += _extremes([number(row.get(name)) for row in part], len(_ends(part)))
    return {"rows": len(columns["step"]), "columns": columns, "not_finite": not_finite, "binned": each}


def _ends(part: list[Any]) -> list[Any]:
    return part if len(part) == 1 else [part[0], part[-1]]


def _extremes(values: list[float | None], points: int) -> list[float | None]:
    """Return the lowest and the highest value, in the order in which they come."""
    numbers = [(value, place) for place, value in enumerate(values) if value is not None]
    if not numbers:
        return [None] * points
    ends = sorted({min(numbers), max(numbers)}, key=lambda number: number[1])
    extremes: list[float | None] = [round_significant(value) for value, _ in ends]
    return (extremes * points)[:points] if len(extremes) == 1 else extremes[:points]
