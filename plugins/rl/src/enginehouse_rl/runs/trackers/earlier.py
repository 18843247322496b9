"""Reads from a run's files the metrics that its earlier processes logged, because a tracker may lack some of them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from enginehouse_rl.runs.jsonlines import read_whole_lines

if TYPE_CHECKING:
    from enginehouse.engines.tracker import RunFacts


def read_earlier_rows(run: RunFacts) -> Iterator[tuple[int, dict[str, float], float]]:
    """Yield steps and validations up to the step after which a run was resumed; none in a new run.

    Yields:
        The step, its metrics (NaN for values that were not finite), and its time in seconds since 1970, as if the run
        had never stopped.
    """
    if not run.resumed_after:
        return
    now, elapsed = time.time(), {0: 0.0}
    files = [read_whole_lines(run.directory / name) for name in ("metrics.jsonl", "validation.jsonl")]
    rows = [row for rows in files for row in rows if row["step"] <= run.resumed_after]
    elapsed |= {row["step"]: row["elapsed_seconds"] for row in rows if "elapsed_seconds" in row}
    for row in rows:
        step = row.pop("step")
        row.pop("elapsed_seconds", None)
        numbers = {name: math.nan if value is None else value for name, value in row.items()}
        metrics = {name: float(value) for name, value in numbers.items() if isinstance(value, int | float)}
        yield step, metrics, now - max(elapsed.values()) + elapsed.get(step, 0.0)
