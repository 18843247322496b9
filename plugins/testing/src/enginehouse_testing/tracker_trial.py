"""Creates and calls a tracker under test in one thread, as a run does."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from enginehouse.engines.tracker import MetricsKind, Outcome, RunFacts, Tracker
from enginehouse.plugin import Tracker as TrackerRecord
from enginehouse.plugin import resolve
from enginehouse_testing.trial import Trial

Logged = tuple[int, Mapping[str, float], MetricsKind]
"""Arguments of `log`."""

VERSIONS = {"enginehouse": "0.1.0"}


@dataclass(frozen=True, slots=True)
class TrackerTrial(Trial):
    """Makes runs with a tracker, in the trial's directory."""

    record: TrackerRecord

    def run(self, logged: Iterable[Logged], outcome: Outcome = "finished", resumed_after: int = 0) -> None:
        """Make a whole run: start a new tracker, log metrics, and finish."""
        tracker: Tracker = resolve(self.record.tracker)(**self.given.arguments)
        config = {
            "run": {"directory": str(self.directory)},
            "train": {"steps": 5},
            "algorithm": {"loss": {"name": "x"}},
        }
        name, directory = self.directory.name, self.directory
        tracker.start(
            RunFacts(name=name, directory=directory, config=config, resumed_after=resumed_after, versions=VERSIONS)
        )
        for step, metrics, kind in logged:
            tracker.log(step, metrics, kind)
        tracker.finish(outcome)


def steps(first: int, last: int) -> list[Logged]:
    """Return made-up metrics of the steps `first` to `last`, under the names that a run uses. After every second step
    there is a validation."""
    logged: list[Logged] = [(0, {"validation/reward": 0.125}, "validation")] if first == 1 else []
    for step in range(first, last + 1):
        logged.append((step, {"actor/loss": -0.5 * step, "reward/mean": step / 8, "time/step": 1.5}, "train"))
        if step % 2 == 0:
            logged.append((step, {"validation/reward": step / 16, "validation/pass@4": 0.25}, "validation"))
    return logged
