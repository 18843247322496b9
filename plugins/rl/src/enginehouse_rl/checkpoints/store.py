"""Puts checkpoints into a run directory: each is there whole or not at all, and only the newest are kept."""

from __future__ import annotations

import logging
import shutil
import uuid
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from enginehouse.atomic import move_into_place, write_whole
from enginehouse.errors import EnginehouseError
from enginehouse_rl.checkpoints import (
    CHECKPOINTS,
    LOOP_FILE,
    Checkpoint,
    Files,
    checkpoint_name,
    checkpoint_paths,
    files_of,
)

log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints in a run directory. Nothing is made before the first is staged.

    Args:
        run_directory: whose they are.
        newest_step: of the checkpoint the run is resumed from.
        kept: how many are kept: the newest, and those before it, should the newest be damaged.

    Attributes:
        newest_step: the step of the newest that was published or resumed from; None before there is one.
    """

    def __init__(self, run_directory: Path, newest_step: int | None = None, kept: int = 2):
        self._run, self._kept = run_directory, kept
        self._directory = run_directory / CHECKPOINTS
        self.newest_step = newest_step

    def clear_partial(self) -> None:
        """Delete what writes that were cut off have left. No one may be writing.

        Nothing is put back: a run writes no step's checkpoint twice, and one that came back after the run was cut to
        an earlier one would lack the metrics up to it.
        """
        for partial in self._directory.glob(".*"):
            shutil.rmtree(partial, ignore_errors=True)

    def set_aside(self, damaged: Iterable[Path]) -> None:
        """Rename damaged checkpoints, so that none is ever taken for one of the steps to come."""
        for path in damaged:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            log.warning("the damaged checkpoint %s is now %s, and can be deleted", path, aside.name)

    def stage(self, step: int) -> Path:
        """Make a new directory, in which each trained role's engine is to write a folder of the role's name."""
        staged = self._directory / f".{checkpoint_name(step)}.partial-{uuid.uuid4().hex[:8]}"
        staged.mkdir(parents=True)
        return staged

    def publish(self, staged: Path, checkpoint: Checkpoint, files: Files | None = None) -> Path:
        """Make what was staged, with the roles' state in it, the checkpoint of its step; delete those grown old.

        Args:
            staged: as `stage` made it.
            checkpoint: what to write beside the roles' state; its path and files are not looked at.
            files: what `files_of` gave of `staged`, where that is done already: it reads every byte. Where it is
                empty there was no time for that, and none is spent on having the files on disk.

        Raises:
            EnginehouseError: a role's state is not there: workers and controller do not share a file system.
        """
        for role in checkpoint.roles:
            if not (staged / role).is_dir():
                raise EnginehouseError(
                    f"the {role}'s state of step {checkpoint.step} is not at {staged / role}, where it was told to "
                    f"write it. Do the {role}'s node and this one share the file system of run.directory? They have to."
                )
        place = self._directory / checkpoint_name(checkpoint.step)
        files = files_of(staged) if files is None else files
        write_whole(staged / LOOP_FILE, replace(checkpoint, path=place, files=files).encoded())
        move_into_place(staged, place, to_disk=bool(files))
        self.newest_step = checkpoint.step
        older = [path for step, path in checkpoint_paths(self._run) if step <= checkpoint.step][self._kept :]
        for path in older:
            # Renamed first: one that is deleted halfway must not look like a checkpoint.
            dying = path.with_name(f".{path.name}.deleted")
            path.rename(dying)
            shutil.rmtree(dying, ignore_errors=True)
        return place
