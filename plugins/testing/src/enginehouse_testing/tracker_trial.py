"""A tracker under test: made and called as a run makes and calls it, in one thread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from enginehouse.engines.tracker import MetricsKind, Outcome, RunFacts, Tracker
from enginehouse.plugin import Tracker as TrackerRecord
from enginehouse.plugin import resolve
from enginehouse_testing.given import Given

Logged = tuple[int, Mapping[str, float], MetricsKind]
"""Arguments of `log`."""

VERSIONS = {"enginehouse": "0.1.0"}


@dataclass(frozen=True, slots=True)
class TrackerTrial:
    """What an act is given.

    Attributes:
        record: the tracker.
        given: its arguments, and how what it wrote is read back.
        directory: of the run.
    """

    record: TrackerRecord
    given: Given
    directory: Path

    def run(self, logged: Iterable[Logged], outcome: Outcome = "finished", resumed_after: int = 0) -> None:
        """A whole run: a new tracker is started, told of metrics, and finished."""
        tracker: Tracker = resolve(self.record.tracker)(**self.given.arguments)
        config = {
            "run": {"directory": str(self.directory)},
            "train": {"steps": 5},
            "algorithm": {"loss": {"name": "x"}},
        }
        tracker.start(
            RunFacts(
                name=self.directory.name,
                directory=self.directory,
                config=config,
                resumed_after=resumed_after,
                versions=VERSIONS,
            )
        )
        for step, metrics, kind in logged:
            tracker.log(step, metrics, kind)
        tracker.finish(outcome)

    def read(self) -> Mapping[str, Sequence[tuple[int, float]]]:
        """What was written, by name."""
        return {} if self.given.read is None else self.given.read(self.directory)


def steps(first: int, last: int) -> list[Logged]:
    """What a run logs: of each step, and of a validation after each second one, metrics named as a run names them."""
    logged: list[Logged] = [(0, {"validation/reward": 0.125}, "validation")] if first == 1 else []
    for step in range(first, last + 1):
        logged.append((step, {"actor/loss": -0.5 * step, "reward/mean": step / 8, "time/step": 1.5}, "train"))
        if step % 2 == 0:
            logged.append((step, {"validation/reward": step / 16, "validation/pass@4": 0.25}, "validation"))
    return logged
