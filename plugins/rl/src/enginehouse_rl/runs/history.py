"""The few figures of a run that its display, its alarms and its last words need."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Mapping

from enginehouse_rl.runs.sparkline import Series
from enginehouse_rl.runs.validations import Validations

WINDOW = 10
"""Steps a shown figure is averaged over."""
KEPT = 4 * WINDOW
"""Steps whose metrics are remembered whole, the last."""
TRACED = frozenset(
    ("reward/mean", "loss", "accuracy", "entropy", "kl", "response/tokens_mean", "grad_norm", "tokens_per_second")
)
"""Figures of which the whole run is remembered."""


class History:
    """Remembers the first and the last steps of a run, not what lies between.

    Attributes:
        steps: steps the run is to take; 0 where unknown.
        step: the last step that ended.
        first: metrics of the first `WINDOW` steps.
        last: metrics of the last `KEPT` steps.
        validations: its validations.
        series: by metric, its values over the whole run, of those in `TRACED`.
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
        """Begin counting time, before the first step after the `done` that an earlier process took."""
        self.steps = steps
        self.step = self._done = done
        self._started = self._ended = time.perf_counter()

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take in a step."""
        self.step = step
        self._ended = time.perf_counter()
        if len(self.first) < WINDOW:
            self.first.append(metrics)
        self.last.append(metrics)
        for name in TRACED & metrics.keys():
            self.series[name].add(metrics[name])

    @property
    def seconds(self) -> float:
        """From the start to the end of the last step, of this process."""
        return self._ended - self._started

    @property
    def steps_per_second(self) -> float:
        """Over the steps this process has taken; 0 before the first."""
        return self.taken / self.seconds if self.taken and self.seconds > 0 else 0.0

    @property
    def taken(self) -> int:
        """Steps this process has taken."""
        return self.step - self._done

    @property
    def seconds_left(self) -> float | None:
        """Estimate of the time to the last step; None before the first."""
        rate = self.steps_per_second
        return max(self.steps - self.step, 0) / rate if rate else None

    def recent(self, count: int = WINDOW) -> list[Mapping[str, float]]:
        """Metrics of the last `count` steps, at most `KEPT`; of fewer, where there are fewer."""
        return list(self.last)[-count:]

    def names(self) -> list[str]:
        """Metrics of the last step."""
        return list(self.last[-1]) if self.last else []

    def now(self, name: str) -> float | None:
        """A metric's mean over the last `WINDOW` steps; None if none of them has it."""
        return _mean(self.recent(), name)

    def change(self, name: str) -> tuple[float, float, int] | None:
        """A metric's means over the first and the last steps, and over how many: as many as leave the two apart.

        None before the second step, or if the metric is not there.
        """
        count = min(WINDOW, self.step // 2, len(self.last))
        if not count:
            return None
        first, last = _mean(self.first[:count], name), _mean(self.recent(count), name)
        return None if first is None or last is None else (first, last, count)

    def phases(self) -> list[tuple[str, float]]:
        """Seconds a step of each phase, in the order they were met."""
        names = [name for name in self.names() if name.startswith("time/") and name != "time/step"]
        return [(name.removeprefix("time/"), self.now(name) or 0.0) for name in names]

    def named(self, *candidates: str) -> str | None:
        """The first of `candidates` that the run reports, alone or after a prefix: `loss` finds `actor/loss`."""
        names = self.names()
        for candidate in candidates:
            for name in names:
                if name == candidate or name.endswith("/" + candidate):
                    return name
        return None


def _mean(rows: list[Mapping[str, float]], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return sum(values) / len(values) if values else None
