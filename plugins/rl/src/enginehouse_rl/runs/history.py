"""Keeps the metrics of a run that its display, its alarms and its summary need."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping

from enginehouse_rl.runs.sparkline import Series
from enginehouse_rl.runs.validations import Validations

WINDOW = 10
"""Number of steps over which a displayed metric is averaged."""
KEPT = 4 * WINDOW
"""Number of last steps of which all metrics are kept."""
TRACED = frozenset(
    ("reward/mean", "loss", "accuracy", "entropy", "kl", "response/tokens_mean", "grad_norm", "tokens_per_second")
)
"""Metrics whose values are kept over the whole run."""


class History:
    """Keeps all metrics of a run's first and last steps, and only a few of the steps between.

    Attributes:
        steps: The number of steps that the run takes; 0 if unknown.
        step: The last step that ended.
        first: The metrics of the first `WINDOW` steps.
        last: The metrics of the last `KEPT` steps.
        series: The values of each metric in `TRACED` over the whole run.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.step = 0
        self.first: list[Mapping[str, float]] = []
        self.last: deque[Mapping[str, float]] = deque(maxlen=KEPT)
        self.validations = Validations()
        self.series: defaultdict[str, Series] = defaultdict(Series)
        self._started = self._ended = time.perf_counter()
        self._done = 0

    def start(self, steps: int, done: int = 0) -> None:
        """Start measuring time, before the first step of this process. Earlier processes took `done` steps."""
        self.steps = steps
        self.step = self._done = done
        self._started = self._ended = time.perf_counter()

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self._ended = time.perf_counter()
        if len(self.first) < WINDOW:
            self.first.append(metrics)
        self.last.append(metrics)
        for name in TRACED & metrics.keys():
            self.series[name].add(metrics[name])

    @property
    def seconds(self) -> float:
        """Seconds from the start to the end of the last step, in this process."""
        return self._ended - self._started

    @property
    def steps_per_second(self) -> float:
        """Steps per second of this process; 0 before its first step."""
        return self.steps_taken / self.seconds if self.steps_taken and self.seconds > 0 else 0.0

    @property
    def steps_taken(self) -> int:
        """The number of steps that this process took."""
        return self.step - self._done

    @property
    def seconds_left(self) -> float | None:
        """An estimate of the seconds until the last step ends; None before the first step."""
        rate = self.steps_per_second
        return max(self.steps - self.step, 0) / rate if rate else None

    def recent(self, count: int = WINDOW) -> list[Mapping[str, float]]:
        """Return the metrics of the last `count` steps, at most `KEPT`."""
        return list(self.last)[-count:]

    def names(self) -> list[str]:
        return list(self.last[-1]) if self.last else []

    def now(self, name: str) -> float | None:
        """Return a metric's mean over the last `WINDOW` steps; None if none of them has the metric."""
        return _average(self.recent(), name)

    def change(self, name: str) -> tuple[float, float, int] | None:
        """Return a metric's mean over the first steps, its mean over the last steps, and the number of steps in each.

        The first and the last steps do not overlap. None before the second step, or if either part lacks the metric.
        """
        count = min(WINDOW, self.step // 2, len(self.last))
        if not count:
            return None
        first, last = _average(self.first[:count], name), _average(self.recent(count), name)
        return None if first is None or last is None else (first, last, count)

    def phases(self) -> list[tuple[str, float]]:
        """Return the seconds of each phase per step, in the order of the last step's metrics."""
        names = [name for name in self.names() if name.startswith("time/") and name != "time/step"]
        return [(name.removeprefix("time/"), self.now(name) or 0.0) for name in names]

    def find_metric(self, *candidates: str) -> str | None:
        """Return the first of `candidates` that the run reports; `loss` also finds `actor/loss`."""
        names = self.names()
        for candidate in candidates:
            for name in names:
                if name == candidate or name.endswith("/" + candidate):
                    return name
        return None


def _average(rows: list[Mapping[str, float]], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else None
