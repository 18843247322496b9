"""Computes the headline of a run's page: did the run learn, how good is it, and how fast was it?"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from enginehouse_report.columns import number, round_significant
from enginehouse_rl.runs.history import KEPT, WINDOW, History
from enginehouse_rl.runs.validations import Validations

Rows = Sequence[Mapping[str, Any]]

LEARNED = ("reward/mean", "accuracy", "loss")
"""Metrics that show that a run learns. The page shows the first of them that the run reports."""
VALIDATED = ("validation/reward", "validation/accuracy", "validation/loss")


def make_headline(metrics: Rows, validations: Rows, resumed_after: int | None) -> dict[str, Any]:
    """Return the headline of a run as plain data, with None for each part that the run has no values for.

    Args:
        metrics: Rows of `metrics.jsonl`.
        validations: Rows of `validation.jsonl`. If there are none, validations are read from `metrics`, which has them
            in a run on demonstrations or preferences.
        resumed_after: Step after which the last process resumed the run, or None.
    """
    return {
        "learned": _describe_change(metrics),
        "validated": _describe_validations(validations) or _describe_validations(metrics),
        "speed": _measure_speed(metrics, resumed_after),
    }


def _describe_change(rows: Rows) -> dict[str, Any] | None:
    """Return a metric's means over the first and the last steps, as the run prints them at its end."""
    steps = [_keep_numbers(row) for row in rows if isinstance(row.get("step"), int)]
    history = History()
    for row in steps if len(steps) <= WINDOW + KEPT else [*steps[:WINDOW], *steps[-KEPT:]]:
        history.add(int(row["step"]), row)
    for candidate in LEARNED:
        name = history.find_metric(candidate)
        if name and (change := history.change(name)):
            first, last, count = change
            return {"name": name, "first": round_significant(first), "last": round_significant(last), "over": count}
    return None


def _describe_validations(rows: Rows) -> dict[str, Any] | None:
    """Return the first, the best and the last validation. If the last validation is worse, say by how much."""
    for name in VALIDATED:
        values = [
            (row["step"], value)
            for row in rows
            if isinstance(row.get("step"), int) and (value := number(row.get(name))) is not None
        ]
        if values:
            best = (min if name.endswith("loss") else max)(values, key=lambda value: value[1])
            places = {"first": values[0], "best": best, "last": values[-1]}
            rounded = {place: [step, round_significant(value)] for place, (step, value) in places.items()}
            return {"name": name, **rounded, "worse": _describe_decline(rows)}
    return None


def _describe_decline(rows: Rows) -> str:
    validations = Validations()
    for row in rows:
        if isinstance(row.get("step"), int):
            validations.add(row["step"], _keep_numbers(row))
    with contextlib.suppress(KeyError):  # a damaged file may lack a standard error
        return validations.describe_decline()
    return ""


def _measure_speed(rows: Rows, resumed_after: int | None) -> dict[str, Any] | None:
    """Return the number of steps that the run's last process took, and their duration in seconds. The time for starting
    the workers is left out."""
    steps = [
        (row["step"], elapsed, number(row.get("time/step")))
        for row in rows
        if isinstance(row.get("step"), int) and row["step"] > (resumed_after or 0)
        if (elapsed := number(row.get("elapsed_seconds"))) is not None
    ]
    if not steps:
        return None
    (first, began, took), (last, ended, _) = steps[0], steps[-1]
    count, seconds = (last - first, ended - began) if took is None else (last - first + 1, ended - began + took)
    return {"steps": count, "seconds": round(seconds, 3)} if count > 0 and seconds > 0 else None


def _keep_numbers(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if number(value) is not None}
