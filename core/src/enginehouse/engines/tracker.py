"""The protocol of a tracker: what a run's metrics are sent to, beside the run directory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

__all__ = ["MetricsKind", "Outcome", "RunFacts", "Tracker"]

MetricsKind = Literal["train", "validation"]
"""What metrics are of: a step, or a validation."""
Outcome = Literal["finished", "interrupted", "failed"]
"""How a run ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a tracker is told of a run.

    Attributes:
        name: of the run directory.
        directory: its absolute path. A tracker may keep files there, in a folder of its own name; they are there
            again when the run is resumed.
        config: the whole config as plain data, defaults included. `"${NAME}"` stands as it was written, and what is
            known for a secret by its name or form is refused before; a secret that neither tells is in it.
        resumed_after: the step that the run goes on from; 0: it is new. Steps after it may have been logged before,
            by a process that was killed, and come again.
        versions: of the packages that the run uses, by distribution.
    """

    name: str
    directory: Path
    config: Mapping[str, Any]
    resumed_after: int
    versions: Mapping[str, str]


class Tracker(Protocol):
    """Sends a run's metrics elsewhere.

    It is constructed and called in one thread of its own, of the run's process: the run goes on while it waits, and
    whatever it raises, which is logged; no call is made after that.
    """

    def start(self, run: RunFacts) -> None:
        """Begin. Called once, before anything else."""
        ...

    def log(self, step: int, metrics: Mapping[str, float], kind: MetricsKind) -> None:
        """Take metrics by name.

        Args:
            step: of the run, counted from 1; a validation before the first step has 0. One that was made beside later
                steps comes after them.
            metrics: may have numbers that are not finite.
            kind: what they are of. A step and its validation are two calls.
        """
        ...

    def finish(self, outcome: Outcome) -> None:
        """End. Called once, after all else; the run waits for it, up to a limit, and then leaves it."""
        ...
