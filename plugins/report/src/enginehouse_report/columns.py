"""Rows of figures as columns that a page reads: few digits, and few points where there are many steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

DIGITS = 5
"""Significant digits of a figure; a screen shows three or four."""
MOST_POINTS = 4000
"""Points of a chart: more than a screen is wide. Of longer runs the lowest and the highest values are kept."""


def significant(value: float, digits: int = DIGITS) -> float:
    """A number rounded to so many digits that count."""
    return value if value == 0 or isinstance(value, int) else float(f"{value:.{digits}g}")


def number(value: Any) -> float | None:
    """A figure of a file: None for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return value


def columns_of(rows: Sequence[Mapping[str, Any]], most: int = MOST_POINTS) -> dict[str, Any]:
    """The figures of rows that have a `step`.

    Args:
        rows: as `metrics.jsonl` has them.
        most: points a column may have. Longer ones are cut into equal parts, and of each the lowest and the highest
            value stay, in their order, at the part's first and last step.

    Returns:
        `rows`, how many points a column has; `columns`, of each name its values, None where a row has none;
        `not_finite`, of each name that has any the points that are there and no finite number; `binned`, how many steps
        two points stand for, 0 where each is a point.
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
    """The lowest and the highest of some values, the one that comes first first."""
    found = [(value, place) for place, value in enumerate(values) if value is not None]
    if not found:
        return [None] * points
    chosen = sorted({min(found), max(found)}, key=lambda one: one[1])
    kept: list[float | None] = [significant(value) for value, _ in chosen]
    return (kept * points)[:points] if len(kept) == 1 else kept[:points]
