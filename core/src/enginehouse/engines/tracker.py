"""The protocol of a tracker, which receives the metrics of a run in addition to the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

__all__ = ["MetricsKind", "Outcome", "RunFacts", "Tracker"]

MetricsKind = Literal["train", "validation"]
"""Source of metrics: a step or a validation."""
Outcome = Literal["finished", "interrupted", "failed"]
"""The ways in which a run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The description of a run that a tracker gets.

    Attributes:
        name: name of the run directory.
        directory: absolute path of the run directory. A tracker may keep files there, in a folder with the tracker's
            name, which a resumed run finds again.
        config: the whole config as plain data, defaults included. `"${NAME}"` is not replaced by its variable. Known
            forms of secrets are rejected earlier, but a secret of an unknown name and form is still in the config.
        resumed_after: the step from which the run resumes; 0 for a new run. If a killed process logged later steps
            already, they are logged again.
        versions: versions of the packages that the run uses, by distribution.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    resumed_after: int
    versions: Mapping[str, str]


class Tracker(Protocol):
    """Sends the metrics of a run elsewhere.

    It is constructed and called in its own thread of the run's process, so the run continues while it waits. An error
    that it raises is logged, and no call is made after it.
    """

    def start(self, run: RunFacts) -> None:
        """Begin. Called once, before anything else."""
        ...

    def log(self, step: int, metrics: Mapping[str, float], kind: MetricsKind) -> None:
        """Receive metrics by name.

        Args:
            step: step of the run, counted from 1; 0 for a validation before the first step. A validation that ran
                beside later steps is logged after them.
            metrics: numbers by name. They may be infinite or NaN.
            kind: source of the metrics. A step and its validation are two calls.
        """
        ...

    def finish(self, outcome: Outcome) -> None:
        """End. Called once, after everything else. The run waits for it up to a time limit."""
        ...
