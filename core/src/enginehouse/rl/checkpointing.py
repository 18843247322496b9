"""When and how a loop's checkpoints are written: the actor's state by its engine, the loop's own beside it."""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from enginehouse.config.resume import ACTOR, Checkpoint, files_of, kind_of
from enginehouse.errors import SaveError

if TYPE_CHECKING:
    from enginehouse.config.schema import Config, SFTConfig
    from enginehouse.controller import WorkerGroup
    from enginehouse.runs import RunDirectory

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""Longest time that looking at a checkpoint under way holds up the loop."""


@contextmanager
def writing(what: str, staged: Path) -> Iterator[None]:
    """Around the writing of a directory: if it fails, delete what there is of it, and say where it was and what room.

    Raises:
        SaveError: it failed.
    """
    try:
        yield
    except Exception as error:
        place = staged.parent
        free = _free_words(place)
        shutil.rmtree(staged, ignore_errors=True)
        raise SaveError(f"{what} could not be written to {place}, which has {free}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message."""
    return (str(error) or repr(error)).splitlines()[0]


def _free_words(place: Path) -> str:
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return f"no room that could be looked at ({error})"
    return f"{free / 2**20:,.1f} MiB free"


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
        with writing(f"the checkpoint of step {standing.step}", staged):
            self._actor.call("save_in_background", str(staged / ACTOR))
        self._under_way = staged, checkpoint

    def look(self) -> None:
        """Publish the checkpoint under way if it is there, to the last digest; wait for hardly anything."""
        if self._under_way is not None and (self._under_way[0] / ACTOR).is_dir():
            with self._writing():
                self._saved(None)
            if self._digests is not None and wait([self._digests], LOOK_SECONDS).done:
                self.finish()

    def finish(self, timeout: float | None = None) -> None:
        """Wait for the checkpoint under way, if there is one, and publish it.

        Raises:
            SaveError: it could not be written or read back, or not in that time.
        """
        if self._under_way is None:
            return
        staged, checkpoint = self._under_way
        with self._writing():
            self._saved(timeout)
            digests = None if self._digests is None else self._digests.result(timeout)
            self._under_way = self._digests = None
            self._publish(staged, checkpoint, digests)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Around a part of the writing of the checkpoint under way: if it fails, there is none any more."""
        assert self._under_way is not None
        staged, checkpoint = self._under_way
        try:
            with writing(f"the checkpoint of step {checkpoint.step}", staged):
                yield
        except Exception:  # an interrupt leaves it under way: the end of the run waits for it once more
            self._under_way = self._digests = None
            raise

    def _saved(self, timeout: float | None) -> None:
        """Wait until the engine has moved its part into place, and begin to read it."""
        if self._under_way is None or self._digests is not None:
            return
        self._actor.call("finish_save", timeout=timeout)
        staged, _ = self._under_way
        if (staged / ACTOR).is_dir():  # else `publish` says what is wrong
            self._digests = self._reader.submit(files_of, staged)

    def write_last(self, standing: Standing, seconds: float | None = None) -> None:
        """Have a checkpoint of `standing`, in at most `seconds`: the run is about to end.

        Raises:
            SaveError: it could not be written, or not in that time.
        """
        until = None if seconds is None else time.monotonic() + seconds
        try:
            self.finish(timeout=seconds)
        except SaveError as error:
            log.warning("%s", first_line(error))
        if self._run.checkpoints.newest_step != standing.step:
            self.write(standing, timeout=None if until is None else max(until - time.monotonic(), 0.1))

    def write(self, standing: Standing, timeout: float | None = None) -> None:
        """Write a checkpoint and wait for it."""
        staged, checkpoint = self._staged(standing)
        with writing(f"the checkpoint of step {standing.step}", staged):
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
