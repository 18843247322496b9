"""Finds the model that `enginehouse eval` evaluates, and the directory that the evaluation writes to."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from enginehouse.errors import ModelError
from enginehouse_rl.checkpoints import list_checkpoints
from enginehouse_rl.config.earlier_run import RUN_MARKER, read_record
from enginehouse_rl.config.load import is_overridden
from enginehouse_rl.hub.names import HubName

MODELS, BEST = "models", "best"
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class EvaluatedModel:
    """The model of an evaluation.

    Attributes:
        path: its directory, its GGUF file, or its name on the hub.
        step: the step after which a run saved the model, read from the model's path; 0 if no run saved it.
        name: a name for people: the names of the run and the step, or the name of the model's directory.
    """

    path: str
    step: int
    name: str

    @classmethod
    def find(cls, path: str, key: str) -> EvaluatedModel:
        """Return the model at `path`: a directory, a GGUF file or a name on the hub. If `path` is a run directory,
        return the newest model in it.

        Args:
            key: the key or option that gave `path`, for messages: `"--model"`.

        Raises:
            ModelError: the run directory contains no model.
        """
        if hub_name := HubName.parse(path, "model"):
            return cls(path, 0, Path(hub_name.repository).name)
        directory = Path(path)
        if (directory / RUN_MARKER).is_file():
            link, models = directory / "model", _list_models(directory)
            if not link.is_dir() and not models:
                raise ModelError(
                    f"{key}: the run in {path} has saved no model yet (train.save_every sets when models are saved)"
                )
            directory = link if link.is_dir() else models[-1]
        place = directory.resolve()
        if directory.is_symlink() or path != str(directory):  # the link may point to another model later
            path = os.path.relpath(place)
        run = place.parent.parent
        if place.parent.name != MODELS or not (run / RUN_MARKER).is_file():
            return cls(path, 0, place.stem if place.is_file() else place.name)
        if match := _STEP.fullmatch(place.name):
            return cls(path, int(match[1]), f"{run.name}-{place.name}")
        best = read_record(run).get("best") if place.name == BEST else None
        step = best.get("step") if isinstance(best, dict) else None
        return cls(path, step if isinstance(step, int) else 0, f"{run.name}-{place.name}")


def pick_directory(configured: str, name: str, overrides: Sequence[str]) -> str:
    """Return the directory of an evaluation: `configured` if the overrides set `run.directory`, else a new directory
    beside `configured`."""
    if is_overridden("run.directory", overrides):
        return configured
    first = Path(configured).parent / f"eval-{name}"
    places = itertools.chain([first], (first.with_name(f"{first.name}-{number}") for number in itertools.count(2)))
    return str(next(place for place in places if not place.exists()))


def holds_training(directory: Path) -> bool:
    """True if a training run left models or checkpoints in a directory."""
    return bool(list_checkpoints(directory) or _list_models(directory) or (directory / MODELS / BEST).is_dir())


def _list_models(directory: Path) -> list[Path]:
    """Return the models that a run saved at its steps, the newest last."""
    return sorted(path for path in (directory / MODELS).glob("step-*") if _STEP.fullmatch(path.name))
