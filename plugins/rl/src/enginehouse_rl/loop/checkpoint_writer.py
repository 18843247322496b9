"""Writes a loop's checkpoints: the state that the engine of each trained role saves, and the state of the loop."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from enginehouse.controller.deadlines import seconds_left
from enginehouse.controller.errors import WorkerTimeout
from enginehouse.errors import SaveError, SaveTooLate, describe_os_error, first_line
from enginehouse_rl.checkpoints import Checkpoint, Files, digest_files
from enginehouse_rl.plan.resume import find_command, record_config

if TYPE_CHECKING:
    from enginehouse.controller import WorkerGroup
    from enginehouse_rl.config.schema import AnyConfig
    from enginehouse_rl.runs import RunDirectory

log = logging.getLogger(__name__)

HOLD_SECONDS = 0.1
"""Maximum number of seconds that the loop waits for the digests of a checkpoint right after their reading has begun. A
small checkpoint is read in this time."""


@contextmanager
def guard_writing(what: str, staged: Path, *, hurried: bool = False, expected: int | None = None) -> Iterator[None]:
    """Clean up if writing a directory fails: delete it, and raise an error that names its place and the free space
    there.

    Args:
        what: Name of the directory, for messages.
        hurried: True if the caller set a time limit shorter than the usual limits.
        expected: Expected size of the directory in bytes, if known.

    Raises:
        SaveTooLate: The time limit passed.
        SaveError: Writing failed.
    """
    try:
        yield
    except Exception as error:
        place = staged.parent
        if hurried and isinstance(error, WorkerTimeout):
            total = f" of {_describe_bytes(expected)}" if expected else ""
            written = _describe_bytes(count_bytes(staged))
            shutil.rmtree(staged, ignore_errors=True)
            raise SaveTooLate(
                f"only {written}{total} of {what} were written to {place} before the time limit passed"
            ) from error
        free = _describe_free_space(place)
        shutil.rmtree(staged, ignore_errors=True)
        raise SaveError(f"{what} could not be written to {place}, which has {free}: {first_line(error)}") from error


def count_bytes(directory: Path) -> int:
    """Return the total size of the readable files in a directory, in bytes."""
    size = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            size += path.stat().st_size if path.is_file() else 0
    return size


def _describe_bytes(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _describe_free_space(place: Path) -> str:
    try:
        free = shutil.disk_usage(place).free
    except OSError as error:
        return f"free space unknown ({describe_os_error(error)})"
    return f"{_describe_bytes(free)} free"


class LoopState(NamedTuple):
    """The state of a loop after a step's update: everything on which the next step depends besides the roles' state.

    `loop` is the loop's own state as plain data.
    """

    step: int
    loop: Mapping[str, Any]


class CheckpointWriter:
    """Writes a loop's checkpoints.

    With engines that save in the background, training continues while the files are written, and while they are read
    for their digests.

    Args:
        trained: Workers whose state is saved, by role.
        background: True if every backend of the workers declares `background_save`.
        data: Digests of the training data's files, which go into each checkpoint.
        models: Digests of the models from which roles started, which go into each checkpoint.
        size: Size in bytes of the checkpoint from which the run resumes. None: a new run.
    """

    def __init__(
        self,
        trained: Mapping[str, WorkerGroup],
        run: RunDirectory,
        config: AnyConfig,
        dtype: str,
        background: bool,
        data: Mapping[str, str] | None = None,
        models: Mapping[str, str] | None = None,
        size: int | None = None,
    ):
        self._trained, self._run, self._config, self._dtype = trained, run, config, dtype
        self._background, self._data, self._models = background, data or {}, models or {}
        self._size = size
        self._pending: tuple[Path, Checkpoint] | None = None
        self._digests: Future[Files] | None = None

    def begin(self, state: LoopState) -> None:
        """Write a checkpoint, in the background if the engines can. Waits for an earlier checkpoint first."""
        self.finish()
        if not self._background:
            self.write(state)
            return
        staged, checkpoint = self._stage(state)
        with guard_writing(f"the checkpoint of step {state.step}", staged):
            for role, group in self._trained.items():
                group.call("save_in_background", str(staged / role))
        self._pending = staged, checkpoint

    def publish_if_written(self) -> None:
        """Publish the pending checkpoint if it is complete with all digests, almost without waiting."""
        if self._pending is not None and all((self._pending[0] / role).is_dir() for role in self._trained):
            begun = self._digests is not None
            with self._guard():
                digests = self._await_engines(None)
            if wait([digests], 0.0 if begun else HOLD_SECONDS).done:
                self.finish()

    def finish(self, timeout: float | None = None) -> None:
        """Wait for the pending checkpoint, if there is one, and publish it.

        Args:
            timeout: Seconds for everything. If the checkpoint is written in that time but not read back, it is
                published without digests.

        Raises:
            SaveError: The checkpoint could not be written or read back, or was not written in time.
        """
        if self._pending is None:
            return
        staged, checkpoint = self._pending
        until = None if timeout is None else time.monotonic() + timeout
        with self._guard(hurried=timeout is not None):
            digests = self._await_engines(until)
            files = _await_digests(digests, until, checkpoint)
            self._pending = self._digests = None
            self._publish(staged, checkpoint, files)

    @contextmanager
    def _guard(self, hurried: bool = False) -> Iterator[None]:
        """Guard a part of the writing of the pending checkpoint. After a failure, no checkpoint is pending any more."""
        assert self._pending is not None
        staged, checkpoint = self._pending
        try:
            with guard_writing(
                f"the checkpoint of step {checkpoint.step}", staged, hurried=hurried, expected=self._size
            ):
                yield
        except Exception:  # after an interrupt, the end of the run waits for it again
            self._pending = self._digests = None
            raise

    def _await_engines(self, until: float | None) -> Future[Files]:
        """Wait until each engine has moved its part into place, and start reading the parts."""
        assert self._pending is not None
        if self._digests is None:
            for group in self._trained.values():
                group.call("finish_save", timeout=seconds_left(until))
            self._digests = _start_reading(self._pending[0])
        return self._digests

    def write_last(self, state: LoopState, seconds: float | None = None) -> None:
        """Write a checkpoint of `state`, unless it exists, before the run ends.

        Args:
            seconds: Time limit. None: each call has its usual limit.

        Raises:
            SaveError: The checkpoint could not be written in that time.
        """
        until = None if seconds is None else time.monotonic() + seconds
        try:
            self.finish(timeout=seconds)
        except SaveError as error:
            log.warning("%s", first_line(error))
        if self._run.checkpoints.newest_step != state.step:
            self.write(state, timeout=seconds_left(until))

    def write(self, state: LoopState, timeout: float | None = None) -> None:
        """Write a checkpoint and wait for it. Takes the timeout of `finish`, and raises the same errors."""
        until = None if timeout is None else time.monotonic() + timeout
        staged, checkpoint = self._stage(state)
        what, hurried = f"the checkpoint of step {state.step}", timeout is not None
        with guard_writing(what, staged, hurried=hurried, expected=self._size):
            for role, group in self._trained.items():
                group.call("save", str(staged / role), timeout=seconds_left(until))
            self._publish(staged, checkpoint, _await_digests(_start_reading(staged), until, checkpoint))

    def _stage(self, state: LoopState) -> tuple[Path, Checkpoint]:
        self._run.flush()  # a run resumed from this checkpoint keeps what was written up to here
        staged = self._run.checkpoints.stage(state.step)
        config = record_config(self._config, self._dtype)
        return staged, Checkpoint(
            staged, state.step, self._run.elapsed_seconds, state.loop, config, find_command(self._config), self._data,
            self._models, roles=tuple(self._trained),
        )  # fmt: skip

    def _publish(self, staged: Path, checkpoint: Checkpoint, files: Files) -> None:
        self._size = count_bytes(staged)
        place = self._run.checkpoints.publish(staged, checkpoint, files)
        self._run.tell("checkpoint_saved", step=checkpoint.step, path=str(place), what="state")


def _start_reading(staged: Path) -> Future[Files]:
    """Run `digest_files` in a daemon thread, because an executor's thread would delay the end of the program."""
    digests: Future[Files] = Future()

    def read() -> None:
        try:
            digests.set_result(digest_files(staged))
        except BaseException as error:
            digests.set_exception(error)

    threading.Thread(target=read, name="checkpoint-digests", daemon=True).start()
    return digests


def _await_digests(digests: Future[Files], until: float | None, checkpoint: Checkpoint) -> Files:
    """Return the digests; empty if reading takes more than half of the remaining time. The other half is reserved for
    what is saved next."""
    if wait([digests], None if until is None else max(until - time.monotonic(), 0.0) / 2).done:
        return digests.result()
    log.warning(
        "the checkpoint of step %d is kept without digests, because no time is left to read its files", checkpoint.step
    )
    return {}
