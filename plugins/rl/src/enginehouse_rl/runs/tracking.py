"""Sends a run's metrics to its trackers: they may be slow, raise or hang, and the run goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from enginehouse.controller.interruption import abandoned
from enginehouse.plugin import resolve
from enginehouse.plugin.secrets import insert_variables

if TYPE_CHECKING:
    from enginehouse_rl.plan.trackers import TrackerPlan
from enginehouse.engines.tracker import MetricsKind, Outcome, RunFacts, Tracker

log = logging.getLogger(__name__)

MOST_WAITING = 1000
"""Rows of metrics that wait for a tracker; more are dropped."""
ENDING_SECONDS = 30.0
"""Longest time that the end of a run waits for all its trackers together."""
HURRY_SECONDS = 3.0
"""The same, of a run that was interrupted."""


class Trackers:
    """A run's trackers, each in a daemon thread of its own.

    Args:
        plans: what they are; empty: every call does nothing.
    """

    def __init__(self, plans: Sequence[TrackerPlan]):
        self._feeds = [_Feed(plan) for plan in plans]
        self._ended = False

    def start(self, run: RunFacts) -> None:
        """Begin; returns at once."""
        for feed in self._feeds:
            feed.start(run)

    def log(self, step: int, metrics: Mapping[str, float], kind: MetricsKind) -> None:
        """Hand metrics on; returns at once. What is no number is left out."""
        if self._feeds:
            row = dict(_numbers(metrics))
            for feed in self._feeds:
                feed.put((step, dict(row), kind))

    def finish(self, outcome: Outcome, seconds: float) -> Mapping[str, str]:
        """End all of them, and say which did not end within `seconds` and are left, and what was dropped.

        A second call does nothing.

        Returns:
            What went wrong with which, in words.
        """
        if self._ended:
            return {}
        self._ended = True
        for feed in self._feeds:
            feed.end(outcome)
        until = time.monotonic() + seconds
        for feed in self._feeds:
            feed.wait(until)
        return {feed.plan.name: "; ".join(feed.problems) for feed in self._feeds if feed.problems}


class _Feed:
    """A tracker, its thread, and the rows that wait for it.

    Attributes:
        plan: which tracker.
        problems: what went wrong with it, in words.
    """

    def __init__(self, plan: TrackerPlan):
        self.plan = plan
        self.problems: list[str] = []
        self._thread: threading.Thread | None = None
        self._waiting: SimpleQueue[tuple[int, dict[str, float], MetricsKind] | Outcome] = SimpleQueue()
        self._dropped = 0
        self._doing = "start"

    def start(self, run: RunFacts) -> None:
        """Start its thread."""
        self._thread = threading.Thread(target=self._work, args=[run], name=f"tracker-{self.plan.name}", daemon=True)
        self._thread.start()

    def put(self, row: tuple[int, dict[str, float], MetricsKind]) -> None:
        """Add a row, unless too many wait; nobody else adds any, so that no more than so many ever do."""
        if self._thread is None or not self._thread.is_alive():
            return
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put(row)
        else:
            self._dropped += 1

    def end(self, outcome: Outcome) -> None:
        """Have it end once the rows that wait are taken."""
        self._waiting.put(outcome)

    def wait(self, until: float) -> None:
        """Wait for its end until `time.monotonic()` is `until`, and say what there is to say."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._dropped:
            self.problems.append(f"{self._dropped} rows of metrics were dropped")
            log.warning("the tracker %r was too slow: %d rows of metrics were dropped", self.plan.name, self._dropped)
        if self._thread.is_alive():
            abandoned.append(self.plan.name)
            self.problems.append(f"it was left in `{self._doing}` when the run ended")
            left = max(0, self._waiting.qsize() - (self._doing != "finish"))  # the last that waits is the end
            log.warning(
                "the tracker %r did not end in time and is left: it was in `%s`, and %d rows of metrics waited for it; "
                "metrics.jsonl has them all",
                self.plan.name,
                self._doing,
                left,
            )

    def _work(self, run: RunFacts) -> None:
        try:
            tracker: Tracker = resolve(self.plan.tracker)(**insert_variables(self.plan.arguments))
            tracker.start(run)
            self._doing = "log"
            while not isinstance(row := self._waiting.get(), str):
                tracker.log(*row)
            self._doing = "finish"
            tracker.finish(row)
        except BaseException as error:  # the thread's own end, whatever it is
            self.problems.append(f"it raised in `{self._doing}`: {type(error).__name__}: {error}")
            log.warning(
                "the tracker %r raised in `%s` and is not called again; the run goes on, and metrics.jsonl has its "
                "metrics. %s: %s",
                self.plan.name,
                self._doing,
                type(error).__name__,
                error,
                exc_info=error,
            )


def _numbers(metrics: Mapping[str, Any]) -> Mapping[str, float]:
    """Metrics as Python's own numbers."""
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            continue
    return numbers
