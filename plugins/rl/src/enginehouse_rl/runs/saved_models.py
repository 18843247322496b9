"""The models of a run directory: the newest models of steps, and the best model by a validation metric."""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from enginehouse.atomic import clear_partial, move_into_place, point_to, staging_path
from enginehouse.errors import EnginehouseError
from enginehouse_rl.runs.record import RunRecord

log = logging.getLogger(__name__)

BEST = "models/best"
"""The path of the best model in a run directory."""


class SavedModels:
    """The saved models of a run directory.

    Args:
        kept: Number of the newest models of steps that are kept; None: all.

    Attributes:
        record: The run's `run.json`, once the run is open. It records the metric of the best model.
        saved_step: The step of the newest saved model; None before the first.
    """

    record: RunRecord

    def __init__(self, run_path: Path, kept: int | None):
        self._run_path, self._kept = run_path, kept
        self.saved_step: int | None = None

    @property
    def newest(self) -> Path | None:
        return None if self.saved_step is None else self._make_path(self.saved_step)

    def staging_path(self, step: int) -> Path:
        """Return a new path for writing a step's model, which `keep` then moves to its final place."""
        return staging_path(self._make_path(step))

    def best_staging_path(self) -> Path:
        """Return a new path for writing a model, which `keep_best` then moves to its final place."""
        return staging_path(self._run_path / BEST)

    def keep(self, step: int, path: str | Path) -> Path:
        """Move a completely written model to its final place, point the link `model` to it, and return the place.

        Older models of steps beyond the configured number are deleted.

        Raises:
            EnginehouseError: Nothing is at `path`, because workers and controller do not share a file system.
        """
        place = self._move(step, path, self._make_path(step))
        link = self._run_path / "model"
        try:
            point_to(link, place)
        except OSError as error:
            log.info("cannot create the link %s to %s: %s", link, place, error)
        self.saved_step = step
        if self._kept is not None:
            steps = sorted((number for number in self._list_steps() if number <= step), reverse=True)
            for old in map(self._make_path, steps[self._kept :]):
                # Renamed first, so that a half-deleted model never looks like a model.
                dying = old.with_name(f".{old.name}.deleted")
                old.rename(dying)
                shutil.rmtree(dying, ignore_errors=True)
        return place

    def is_best(self, metric: str, value: float) -> bool:
        """True if `value` is larger than the value of the best model so far, or if no saved model was chosen by
        `metric`."""
        best = self.record.content.get("best")
        if not (self._run_path / BEST).is_dir() or not isinstance(best, Mapping) or best.get("metric") != metric:
            return not math.isnan(value)
        return not isinstance(best.get("value"), int | float) or value > best["value"]

    def keep_best(self, step: int, path: str | Path, metric: str, value: float) -> Path:
        """Move a completely written model to `models/best`, record it in `run.json`, and return the place.

        Raises:
            EnginehouseError: Nothing is at `path`; see `keep`.
        """
        place = self._move(step, path, self._run_path / BEST)
        self.record.update(best={"metric": metric, "step": step, "value": value})
        return place

    def resume_after(self, step: int) -> None:
        """Set `saved_step` to the step of the newest model up to `step`."""
        self.saved_step = max((number for number in self._list_steps() if number <= step), default=None)

    def clear_partial(self) -> None:
        """Delete partly written models, and restore a model whose replacement was interrupted."""
        clear_partial(self._run_path / "models")

    def _move(self, step: int, path: str | Path, place: Path) -> Path:
        if not Path(path).is_dir():
            raise EnginehouseError(
                f"the actor did not write the model of step {step} to {path}: the node of the actor and this node must "
                "share the file system of run.directory"
            )
        move_into_place(Path(path), place)
        return place

    def _make_path(self, step: int) -> Path:
        return self._run_path / "models" / f"step-{step:06d}"

    def _list_steps(self) -> list[int]:
        return [number for path in (self._run_path / "models").glob("step-*") if (number := parse_step(path.name)) >= 0]


def parse_step(name: str) -> int:
    """Return the number in `step-000010` or `validation-000010`, or -1 for any other name."""
    match = re.fullmatch(r"(?:step|validation)-(\d+)", name)
    return int(match[1]) if match else -1
