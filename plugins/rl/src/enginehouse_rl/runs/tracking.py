"""Sends a run's metrics to its trackers, which may be slow, raise errors or hang while the run continues."""

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
from enginehouse_rl.runs.observer import Observer

if TYPE_CHECKING:
    from enginehouse.engines.tracker import MetricsKind, Outcome, RunFacts, Tracker
    from enginehouse_rl.plan.trackers import TrackerPlan

log = logging.getLogger(__name__)

MOST_WAITING = 1000
"""Maximum number of rows that wait for a tracker; further rows are dropped."""
ENDING_SECONDS = 30.0
"""Maximum number of seconds that the end of a run waits for all its trackers together."""
HURRY_SECONDS = 3.0
"""Maximum number of seconds that the end of an interrupted run waits for all its trackers together."""


class TrackerFeed(Observer):
    """Passes a run's metrics to a tracker in a daemon thread, so that no call here waits for the tracker."""

    def __init__(self, plan: TrackerPlan):
        self.plan = plan
        self.problems: list[str] = []
        self._thread: threading.Thread | None = None
        self._waiting: SimpleQueue[tuple[int, dict[str, float], MetricsKind] | Outcome] = SimpleQueue()
        self._dropped = 0
        self._doing = "start"

    def opened(self, run: RunFacts) -> None:
        self._thread = threading.Thread(target=self._work, args=[run], name=f"tracker-{self.plan.name}", daemon=True)
        self._thread.start()

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        self._put(step, metrics, "train")

    def validated(self, step: int, metrics: Mapping[str, float], how: str) -> None:
        self._put(step, metrics, "validation")

    def _put(self, step: int, metrics: Mapping[str, float], kind: MetricsKind) -> None:
        """Queue a row, unless too many rows wait. No other thread adds rows, so the limit is exact."""
        if self._thread is None or not self._thread.is_alive():
            return
        if self._waiting.qsize() < MOST_WAITING:
            self._waiting.put((step, _convert_numbers(metrics), kind))
        else:
            self._dropped += 1

    def end(self, outcome: Outcome) -> None:
        """Tell the tracker to end once it has taken the waiting rows."""
        self._waiting.put(outcome)

    def wait(self, until: float) -> None:
        """Wait for the tracker's end until `time.monotonic()` is `until`, and report problems."""
        if self._thread is None:
            return
        self._thread.join(max(0.0, until - time.monotonic()))
        if self._dropped:
            self.problems.append(f"{self._dropped} rows of metrics were dropped")
            log.warning("the tracker %r was too slow: %d rows of metrics were dropped", self.plan.name, self._dropped)
        if self._thread.is_alive():
            abandoned.append(self.plan.name)
            self.problems.append(f"it was still in `{self._doing}` when the run ended")
            unsent = max(0, self._waiting.qsize() - (self._doing != "finish"))  # the last one is the outcome
            log.warning(
                "the tracker %r did not end in time, so the run ends without it: it was in `%s`, and %d rows of "
                "metrics waited for it; metrics.jsonl has all rows",
                self.plan.name,
                self._doing,
                unsent,
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
        except BaseException as error:  # errors of any kind end only this thread
            self.problems.append(f"it raised in `{self._doing}`: {type(error).__name__}: {error}")
            log.warning(
                "the tracker %r raised in `%s` and is not called again. The run continues, and metrics.jsonl has all "
                "metrics. %s: %s",
                self.plan.name,
                self._doing,
                type(error).__name__,
                error,
                exc_info=error,
            )


def end_trackers(feeds: Sequence[TrackerFeed], outcome: Outcome) -> dict[str, str]:
    """End the trackers, and return their problems by the trackers' names: calls that raised or hang, and dropped rows.

    All trackers together have a limited time. Trackers that have not ended by then are abandoned.
    """
    for feed in feeds:
        feed.end(outcome)
    until = time.monotonic() + (HURRY_SECONDS if outcome == "interrupted" else ENDING_SECONDS)
    for feed in feeds:
        feed.wait(until)
    return {feed.plan.name: "; ".join(feed.problems) for feed in feeds if feed.problems}


def _convert_numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as Python floats, without values that are no numbers."""
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = float(value)
        except (TypeError, ValueError):
            continue
    return numbers
