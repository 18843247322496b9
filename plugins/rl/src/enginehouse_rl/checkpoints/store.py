"""Writes checkpoints to a run directory atomically, and keeps only the newest checkpoints."""

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
        kept: the number of newest checkpoints to keep. If the newest is damaged, a run resumes from an older one.

    Attributes:
        newest_step: step of the newest checkpoint that was published or resumed from; None before the first.
    """

    def __init__(self, run_directory: Path, newest_step: int | None = None, kept: int = 2):
        self._run, self._kept = run_directory, kept
        self._directory = run_directory / CHECKPOINTS
        self.newest_step = newest_step

    def clear_partial(self) -> None:
        """Delete the remains of interrupted writes. No process may write checkpoints meanwhile.

        A complete checkpoint whose deletion was interrupted is deleted too, and never restored. The reason is that a
        resumed run may have truncated its metrics at an earlier step. If the checkpoint were restored, the metrics
        between that step and the step of the checkpoint would be missing.
        """
        for partial in self._directory.glob(".*"):
            shutil.rmtree(partial, ignore_errors=True)

    def set_aside(self, damaged: Iterable[Path]) -> None:
        """Rename damaged checkpoints, so that no later search for checkpoints finds them."""
        for path in damaged:
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            log.warning("the damaged checkpoint %s is now %s, and can be deleted", path, aside.name)

    def stage(self, step: int) -> Path:
        """Create a hidden directory for a checkpoint. The engine of each trained role then writes a folder in it, which
        has the name of the role."""
        staged = self._directory / f".{name_checkpoint(step)}.partial-{uuid.uuid4().hex[:8]}"
        staged.mkdir(parents=True)
        return staged

    def publish(self, staged: Path, checkpoint: Checkpoint, files: Files | None = None) -> Path:
        """Turn a staged directory, which contains the roles' state, into the checkpoint of its step, and delete the
        oldest checkpoints.

        Args:
            staged: directory that `stage` created.
            checkpoint: checkpoint to write beside the roles' state; its path and files are ignored.
            files: the result of `digest_files(staged)`, which reads every byte; None: it is computed here. Empty: there
                was no time to compute it, so the files are not fsynced either.

        Raises:
            EnginehouseError: a role's state is missing, because workers and controller share no file system.
        """
        for role in checkpoint.roles:
            if not (staged / role).is_dir():
                raise EnginehouseError(
                    f"the {role} did not write its state of step {checkpoint.step} to {staged / role}: the node of "
                    f"the {role} and this node must share the file system of run.directory"
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
