"""Converts rows of metrics to columns for a page, with few digits and a limited number of points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

DIGITS = 5
"""Number of significant digits of a value; a screen shows three or four."""
MOST_POINTS = 4000
"""Maximum number of points of a chart; a screen is narrower. A longer run is reduced to minima and maxima."""


def round_significant(value: float, digits: int = DIGITS) -> float:
    return value if value == 0 or isinstance(value, int) else float(f"{value:.{digits}g}")


def number(value: Any) -> float | None:
    """Return the value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def make_columns(rows: Sequence[Mapping[str, Any]], most: int = MOST_POINTS) -> dict[str, Any]:
    """Return the columns of the rows that have a `step`.

    Args:
        rows: rows of `metrics.jsonl`.
        most: maximum number of points. If there are more steps, they are divided into equal parts. Each part has two
            points, at its first and at its last step. Their values are the part's minimum and maximum, in the order in
            which these occur.

    Returns:
        `rows`: number of points. `columns`: values by name, None where a row has none. `not_finite`: by name, the
        indices of points with a value that is no finite number. `binned`: number of steps in a part; 0: each point is a
        step.
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
    """Return the minimum and the maximum, in the order in which they occur."""
    numbers = [(value, place) for place, value in enumerate(values) if value is not None]
    if not numbers:
        return [None] * points
    ends = sorted({min(numbers), max(numbers)}, key=lambda number: number[1])
    extremes: list[float | None] = [round_significant(value) for value, _ in ends]
    return (extremes * points)[:points] if len(extremes) == 1 else extremes[:points]
