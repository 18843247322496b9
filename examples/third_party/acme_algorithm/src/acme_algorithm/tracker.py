"""The tracker `acme_algorithm`, which writes a CSV file in the run directory, one line for each value of a metric."""

from __future__ import annotations

import csv
from collections.abc import Mapping

from enginehouse.engines.tracker import MetricsKind, Outcome, RunFacts


class AcmeAlgorithmTracker:
    """Implements `enginehouse.engines.tracker.Tracker`.

    Args:
        file: path of the CSV file in the run directory.
    """

    def __init__(self, file: str = "acme.csv") -> None:
        self._name = file

    def start(self, run: RunFacts) -> None:
        """Open the file. A resumed run appends to it."""
        path = run.directory / self._name
        fresh = not path.exists()
        self._file = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._file)
        if fresh:
            self._writer.writerow(["kind", "step", "metric", "value"])

    def log(self, step: int, metrics: Mapping[str, float], kind: MetricsKind) -> None:
        """Write one line for each metric."""
        self._writer.writerows([kind, step, name, value] for name, value in metrics.items())
        self._file.flush()

    def finish(self, outcome: Outcome) -> None:
        """Close the file."""
        self._file.close()
