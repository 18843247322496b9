"""Writes checkpoints to a run directory atomically, and keeps only the newest ones."""

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
    digest_files,
    list_checkpoints,
    name_checkpoint,
)

log = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints in a run directory. The first `stage` creates the directory.

    Args:
        newest_step: step of the checkpoint from which the run resumes.
        kept: the number of newest checkpoints to keep. Older ones serve if the newest is damaged.

    Attributes:
        newest_step: step of the newest checkpoint that was published or resumed from; None before the first.
    """

    def __init__(self, run_directory: Path, newest_step: int | None = None, kept: int = 2):
        self._run, self._kept = run_directory, kept
        self._directory = run_directory / CHECKPOINTS
        self.newest_step = newest_step

    def clear_partial(self) -> None:
        """Delete the remains of interrupted writes. No process may be writing.

        Nothing is restored, because a run writes no step's checkpoint twice. If a checkpoint came back after the run
        had been cut to an earlier step, the metrics up to it would be missing.
        """
        for partial in self._directory.glob(".*"):
            shutil.rmtree(partial, ignore_errors=True)

    def set_aside(self, damaged: Iterable[Path]) -> None:
        """Rename damaged checkpoints, so that they are not mistaken for checkpoints of later steps."""
        for path in damaged:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            log.warning("the damaged checkpoint %s is now %s, and can be deleted", path, aside.name)

    def stage(self, step: int) -> Path:
        """Create a new directory, in which each trained role's engine then writes a folder of the role's name."""
        staged = self._directory / f".{name_checkpoint(step)}.partial-{uuid.uuid4().hex[:8]}"
        staged.mkdir(parents=True)
        return staged

    def publish(self, staged: Path, checkpoint: Checkpoint, files: Files | None = None) -> Path:
        """Turn a staged directory, which contains the roles' state, into the checkpoint of its step, and delete the
        oldest ones.

        Args:
            staged: directory that `stage` created.
            checkpoint: checkpoint to write beside the roles' state; its path and files are ignored.
            files: the result of `digest_files(staged)`, which reads every byte; None: it is computed here. Empty: there
                was no time for it, so it is not ensured that the files are on disk either.

        Raises:
            EnginehouseError: a role's state is missing, because workers and controller share no file system.
        """
        for role in checkpoint.roles:
            if not (staged / role).is_dir():
                raise EnginehouseError(
                    f"the {role}'s state of step {checkpoint.step} is not at {staged / role}, where it was told to "
                    f"write it. Do the {role}'s node and this one share the file system of run.directory? They have to."
                )
        place = self._directory / name_checkpoint(checkpoint.step)
        files = digest_files(staged) if files is None else files
        write_whole(staged / LOOP_FILE, replace(checkpoint, path=place, files=files).encoded())
        move_into_place(staged, place, to_disk=bool(files))
        self.newest_step = checkpoint.step
        older = [path for step, path in list_checkpoints(self._run) if step <= checkpoint.step][self._kept :]
        for path in older:
            # Renamed first: one that is deleted halfway must not look like a checkpoint.
            dying = path.with_name(f".{path.name}.deleted")
            path.rename(dying)
            shutil.rmtree(dying, ignore_errors=True)
        return place
