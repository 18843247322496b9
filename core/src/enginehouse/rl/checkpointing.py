"""When and how a loop's checkpoints are written: the actor's state by its engine, the loop's own beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from enginehouse.config.resume import ACTOR, Checkpoint, files_of, kind_of

if TYPE_CHECKING:
    from enginehouse.config.schema import Config, SFTConfig
    from enginehouse.controller import WorkerGroup
    from enginehouse.runs import RunDirectory

LOOK_SECONDS = 0.1
"""Longest time that looking at a checkpoint under way holds up the loop."""


class Standing(NamedTuple):
    """Where a loop stands after the update of a step: all that the next step depends on, besides the actor's state.

    Attributes:
        step: the step.
        loop: what the loop keeps of its own, as plain data.
    """

    step: int
    loop: Mapping[str, Any]


class Checkpointing:
    """Writes a loop's checkpoints. With an engine that saves in the background, training goes on meanwhile, and while
    what it wrote is read for its digests.

    Args:
        actor: the workers whose state is saved.
        run: the run directory.
        config: the run's config.
        background: whether the actor's backend declares `background_save`.
        published: called with step and path of each checkpoint once it is whole.
        data: digests of the training data's files, which go into each checkpoint.
    """

    def __init__(
        self,
        actor: WorkerGroup,
        run: RunDirectory,
        config: Config | SFTConfig,
        background: bool,
        published: Callable[[int, Path], None],
        data: Mapping[str, str] | None = None,
    ):
        self._actor, self._run, self._config = actor, run, config
        self._background, self._published, self._data = background, published, data or {}
        self._under_way: tuple[Path, Checkpoint] | None = None
        self._digests: Future[dict[str, tuple[int, str]]] | None = None
        self._reader = ThreadPoolExecutor(1, "checkpoint-digests")

    def begin(self, standing: Standing) -> None:
        """Write a checkpoint, or begin to; one still under way is waited for first."""
        self.finish()
        if not self._background:
            self.write(standing)
            return
        staged, checkpoint = self._staged(standing)
        self._actor.call("save_in_background", str(staged / ACTOR))
        self._under_way = staged, checkpoint

    def look(self) -> None:
        """Publish the checkpoint under way if it is there, to the last digest; wait for hardly anything."""
        if self._under_way is not None and (self._under_way[0] / ACTOR).is_dir():
            self._saved(None)
            if self._digests is not None and wait([self._digests], LOOK_SECONDS).done:
                self.finish()

    def finish(self, timeout: float | None = None) -> None:
        """Wait for the checkpoint under way, if there is one, and publish it.

        Raises:
            WorkerError: it could not be written.
            OSError: it could not be read back.
            TimeoutError: reading it back takes longer than `timeout`.
        """
        if self._under_way is None:
            return
        self._saved(timeout)
        digests = None if self._digests is None else self._digests.result(timeout)
        staged, checkpoint = self._under_way
        self._under_way = self._digests = None
        self._publish(staged, checkpoint, digests)

    def _saved(self, timeout: float | None) -> None:
        """Wait until the engine has moved its part into place, and begin to read it."""
        if self._under_way is None or self._digests is not None:
            return
        try:
            self._actor.call("finish_save", timeout=timeout)
        except Exception:  # an interrupt leaves it under way: the end of the run waits for it once more
            self._under_way = None
            raise
        staged, _ = self._under_way
        if (staged / ACTOR).is_dir():  # else `publish` says what is wrong
            self._digests = self._reader.submit(files_of, staged)

    def write_last(self, standing: Standing, seconds: float) -> None:
        """Have a checkpoint of `standing`, in at most `seconds`: the run is about to end.

        Raises:
            WorkerError: it could not be written, or not in that time.
        """
        until = time.monotonic() + seconds
        self.finish(timeout=seconds)
        if self._run.checkpoints.newest_step != standing.step:
            self.write(standing, timeout=max(until - time.monotonic(), 0.1))

    def write(self, standing: Standing, timeout: float | None = None) -> None:
        """Write a checkpoint and wait for it."""
        staged, checkpoint = self._staged(standing)
        self._actor.call("save", str(staged / ACTOR), timeout=timeout)
        self._publish(staged, checkpoint)

    def _staged(self, standing: Standing) -> tuple[Path, Checkpoint]:
        self._run.flush()  # a run that is resumed here has it up to here
        staged = self._run.checkpoints.stage(standing.step)
        config = self._config.model_dump(mode="json")
        return staged, Checkpoint(
            staged, standing.step, self._run.elapsed_seconds, standing.loop, config, kind_of(self._config), self._data
        )

    def _publish(
        self, staged: Path, checkpoint: Checkpoint, files: Mapping[str, tuple[int, str]] | None = None
    ) -> None:
        self._published(checkpoint.step, self._run.checkpoints.publish(staged, checkpoint, files))
