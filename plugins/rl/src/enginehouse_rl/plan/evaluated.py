"""Finds the model that `enginehouse eval` evaluates, and a directory to write to."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from enginehouse.errors import ModelError
from enginehouse_rl.checkpoints import checkpoint_paths
from enginehouse_rl.config.earlier_run import RUN_MARKER, read_record
from enginehouse_rl.hub.names import HubName

MODELS, BEST = "models", "best"
_STEP = re.compile(r"step-(\d+)")
_DIRECTORY = ("run.directory", "run")
"""Overrides that set `run.directory`."""


@dataclass(frozen=True)
class EvaluatedModel:
    """A model that is evaluated.

    Attributes:
        path: its directory, or its name on the hub.
        step: of the run that trained it, by its place in that run's directory; 0: it is in none.
        name: of the run and the step, or of its directory; for people.
    """

    path: str
    step: int
    name: str

    @classmethod
    def at(cls, path: str, key: str) -> EvaluatedModel:
        """The model in a directory, or the newest of a run's directory.

        Args:
            path: the directory.
            key: what names it, for messages: `"--model"`.

        Raises:
            ModelError: it is a run's directory, and there is no model in it.
        """
        if hub_name := HubName.parse(path, "model"):
            return cls(path, 0, Path(hub_name.repository).name)
        directory = Path(path)
        if (directory / RUN_MARKER).is_file():
            link, models = directory / "model", _models(directory)
            if not link.is_dir() and not models:
                raise ModelError(
                    f"{key}: the run in {path} has saved no model yet (train.save_every says when one is saved)"
                )
            directory = link if link.is_dir() else models[-1]
        place = directory.resolve()
        if directory.is_symlink() or path != str(directory):  # the link may lead on meanwhile
            path = os.path.relpath(place)
        run = place.parent.parent
        if place.parent.name != MODELS or not (run / RUN_MARKER).is_file():
            return cls(path, 0, place.name)
        if found := _STEP.fullmatch(place.name):
            return cls(path, int(found[1]), f"{run.name}-{place.name}")
        best = read_record(run).get("best") if place.name == BEST else None
        step = best.get("step") if isinstance(best, dict) else None
        return cls(path, step if isinstance(step, int) else 0, f"{run.name}-{place.name}")


def free_directory(given: str, name: str, overrides: Sequence[str]) -> str:
    """Return the directory of an evaluation: the command line's, else one beside the config's own run.

    Args:
        given: the config's `run.directory`.
        name: of what is evaluated.
        overrides: what of the config was given on the command line.
    """
    if any(one.partition("=")[0].strip() in _DIRECTORY for one in overrides):
        return given
    first = Path(given).parent / f"eval-{name}"
    places = itertools.chain([first], (first.with_name(f"{first.name}-{number}") for number in itertools.count(2)))
    return str(next(place for place in places if not place.exists()))


def holds_training(directory: Path) -> bool:
    """Return whether a run that trained left models or checkpoints in a directory."""
    return bool(checkpoint_paths(directory) or _models(directory) or (directory / MODELS / BEST).is_dir())


def _models(directory: Path) -> list[Path]:
    """The models of a run's steps, the newest last."""
    return sorted(path for path in (directory / MODELS).glob("step-*") if _STEP.fullmatch(path.name))
