"""The run directory contains everything that a run writes, so that it can be moved, read and compared.

`docs/run-directory.md` lists its files.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from enginehouse.atomic import write_whole
from enginehouse.engines.tracker import Outcome, RunFacts
from enginehouse.errors import ConfigError, EnginehouseError, describe_os_error
from enginehouse_rl.checkpoints import Checkpoint
from enginehouse_rl.checkpoints.store import CheckpointStore
from enginehouse_rl.config import run_lock
from enginehouse_rl.config.document import parse
from enginehouse_rl.config.earlier_run import RUN_MARKER, read_record
from enginehouse_rl.config.paths import check_run_directory
from enginehouse_rl.plan.trackers import TrackerPlan
from enginehouse_rl.runs.clock import StepClock
from enginehouse_rl.runs.jsonlines import JsonLines, read_whole_lines, write_json_lines
from enginehouse_rl.runs.observer import Observer
from enginehouse_rl.runs.record import RunRecord
from enginehouse_rl.runs.saved_models import SavedModels, parse_step
from enginehouse_rl.runs.timeline import Timeline
from enginehouse_rl.runs.tracking import TrackerFeed, end_trackers

log = logging.getLogger(__name__)


class RunRemoved(EnginehouseError):
    """The run directory was removed or replaced while the run wrote to it."""

    def __init__(self, message: str, keeps_state: bool = True):
        super().__init__(message)
        self.keeps_state = keeps_state


class RunDirectory:
    """The directory of a run. Nothing is created or deleted before `open`; `finish` records the end and closes files.

    Args:
        path: The directory. Missing parents are created.
        config: The config as YAML, for `config.yaml`.
        overwrite: Delete an earlier run.
        spare_unfinished: Do not delete an unfinished run that left checkpoints.
        command: The command that started the run, for `run.json`.
        packages: Further distributions whose versions are recorded.
        resumed: The checkpoint from which a run of this directory resumes. `open` then deletes only what that run wrote
            after the checkpoint, and ignores `overwrite`.
        checkpoints_kept: Number of the newest checkpoints that are kept.
        models_kept: Number of the newest models of steps that are kept; None: all.
        trackers: Trackers that also receive the metrics, from `open` to `finish`.

    Attributes:
        path: The absolute path.
        opened: True if the directory belongs to this run.
        clock: Measures steps and phases, and draws them on the timeline.
        timeline: The run's timeline, once the run is open.
        last_step: The last step whose metrics were written; 0 before the first.
        validated_step: The last step whose validation was written; -1 before the first.
        observers: The observers of the run, in the order in which they get its events; trackers come first.
    """

    record: RunRecord
    timeline: Timeline

    def __init__(
        self,
        path: str | Path,
        config: str,
        *,
        overwrite: bool = False,
        spare_unfinished: bool = False,
        command: Sequence[str] = (),
        packages: Sequence[str] = (),
        resumed: Checkpoint | None = None,
        checkpoints_kept: int = 2,
        models_kept: int | None = None,
        trackers: Sequence[TrackerPlan] = (),
    ):
        self.path = Path(path).absolute()
        self.clock = StepClock()
        self.opened = False
        self.last_step = 0
        self.validated_step = -1
        self.alarms: list[dict[str, Any]] = []
        self.checkpoints = CheckpointStore(self.path, resumed.step if resumed else None, checkpoints_kept)
        self.models = SavedModels(self.path, models_kept)
        self._resumed = resumed
        self._overwrite, self._spare_unfinished = overwrite, spare_unfinished
        self._config, self._command, self._packages = config, command, packages
        self._trackers = [TrackerFeed(plan) for plan in trackers]
        self.observers: list[Observer] = [*self._trackers]

    def open(self) -> None:
        """Create the directory, or resume the run there, and lock it for this process until `finish`.

        With `overwrite`, an earlier run is deleted first.

        Raises:
            ConfigError: The directory cannot be created, has other content, contains a running run, or contains an
                earlier run and `overwrite` is not set.
        """
        self._check()  # before anything is made
        try:  # only writing shows what may be written, because a file system may squash root
            self.path.mkdir(parents=True, exist_ok=True)
            run_lock.take(self.path)
        except OSError as error:
            raise ConfigError(
                f"run.directory: cannot create {self.path} or write to it: {describe_os_error(error)}"
            ) from error
        try:
            self._check()  # another process may have written before the lock
            if self._resumed is None:
                self._empty()
            self._open()
        except BaseException:
            run_lock.release(self.path)
            raise
        self.opened = True

    def _check(self) -> None:
        resumed = self._resumed
        check_run_directory(
            self.path, overwrite=self._overwrite, spare_unfinished=self._spare_unfinished, resuming=resumed is not None
        )
        if resumed is not None and read_record(self.path) != resumed.record:
            raise ConfigError(
                f"--resume: another process has resumed the run in {self.path} since this process chose a checkpoint. "
                "Check how the other process ended, and run this command again"
            )

    def _empty(self) -> None:
        """Delete an earlier run. The file that marks the directory as a run directory is deleted last, so that an
        interrupted deletion can be repeated."""
        entries = [entry for entry in self.path.iterdir() if entry.name != run_lock.LOCK_FILE]
        for entry in sorted(entries, key=lambda entry: entry.name == RUN_MARKER):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _open(self) -> None:
        resumed = self._resumed
        self.record = self.models.record = RunRecord(
            self.path / RUN_MARKER, self._command, self._packages, resumed.step if resumed else None
        )
        try:
            before = 0.0 if resumed is None else resumed.elapsed_seconds
            self._started = time.monotonic() - before
            if resumed is not None:
                self._cut_after(resumed)
            self.clock.timeline = self.timeline = Timeline(self.path / "timeline.json", before)
            self._metrics = JsonLines(self.path / "metrics.jsonl")
            write_whole(self.path / "config.yaml", self._config)
            self.tell("opened", run=self._make_facts())
        except BaseException as error:
            with contextlib.suppress(OSError):
                self.record.finish("failed", self.last_step, str(error) or type(error).__name__)
            raise

    def _make_facts(self) -> RunFacts:
        return RunFacts(
            name=self.path.name,
            directory=self.path,
            config=parse(self._config, "the config")[0] or {},
            resumed_after=self._resumed.step if self._resumed else 0,
            versions=dict(self.record.content["versions"]),
        )

    def _cut_after(self, resumed: Checkpoint) -> None:
        """Delete what an earlier run wrote after a checkpoint, except its models, which this run overwrites later."""
        step = resumed.step
        names = ("metrics.jsonl", "validation.jsonl", "alarms.jsonl")
        files = [[row for row in read_whole_lines(self.path / name) if _step_in(row) <= step] for name in names]
        for name, rows in zip(names, files, strict=True):
            if rows or (self.path / name).exists():
                write_json_lines(self.path / name, rows)
        _, validations, self.alarms = files
        for samples in (self.path / "samples").glob("*.jsonl"):
            if parse_step(samples.stem) > step:
                samples.unlink()
        for name in ("error.txt", "report.html"):
            (self.path / name).unlink(missing_ok=True)
        self.clear_partial()
        for partial in (*self.path.glob(".*.partial-*"), *self.path.glob("samples/.*.partial-*")):
            partial.unlink(missing_ok=True)
        self.checkpoints.set_aside(resumed.passed_over)
        self.last_step = step
        self.validated_step = max((row["step"] for row in validations), default=-1)
        self.models.resume_after(step)

    @classmethod
    def create(cls, path: str | Path, config: str, **details: Any) -> RunDirectory:
        """Return an open run directory. It takes the arguments of the class, and raises the errors of `open`."""
        run = cls(path, config, **details)
        run.open()
        return run

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the run was opened; in a resumed run, plus the seconds up to the checkpoint."""
        return time.monotonic() - self._started

    def tell(self, event: str, **content: Any) -> None:
        """Send an event to all observers."""
        for observer in self.observers:
            observer.tell(event, **content)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics and notify the observers. The metrics may not be stored on disk yet when this returns.

        Raises:
            RunRemoved: The directory was removed or replaced. Before this error, the run's metrics were written to it
                again, unless the directory now belongs to another run or cannot be written to.
        """
        if removed := self._put_back():
            raise removed
        self._metrics.append({"step": step, "elapsed_seconds": round(self.elapsed_seconds, 4), **metrics})
        self.last_step = step
        self.tell("step_finished", step=step, metrics=metrics)

    def _put_back(self) -> RunRemoved | None:
        """Restore the directory if somebody removed it, and return the error that reports the removal."""
        if self._metrics.in_place:
            return None
        # Whatever was saved must be assumed lost.
        self.checkpoints.newest_step = self.models.saved_step = None
        removed = (
            f"the run directory {self.path}, or metrics.jsonl in it, was removed or replaced while the run wrote it"
        )
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            run_lock.take(self.path)
            record = read_record(self.path)
            if record and record.get("pid") != os.getpid():
                raise ConfigError(f"{self.path} is the directory of another run now")
            self._metrics.put_back()
            write_whole(self.path / "config.yaml", self._config)
            self.record.update()
        except (ConfigError, OSError) as error:
            self.opened = False
            return RunRemoved(f"{removed}. Nothing more is written: {describe_os_error(error)}", keeps_state=False)
        return RunRemoved(
            f"{removed}. Metrics, config and record have been written again, and a checkpoint and a model are saved as "
            "the run ends. Earlier checkpoints, models, samples, validations and the timeline may be lost. Continue "
            "with --resume"
        )

    def _end_trackers(self, status: Outcome) -> None:
        feeds, self._trackers = self._trackers, []
        if problems := end_trackers(feeds, status):
            self.record.update(trackers=problems)

    def flush(self) -> None:
        """Store on disk the metrics and the timeline, which a resumed run needs."""
        self.timeline.flush()
        self._metrics.to_disk()

    def log_validation(self, step: int, metrics: Mapping[str, float], how: str = "") -> None:
        """Write a validation's metrics, and notify the observers. Step 0 is the untrained model.

        `how` describes in a word or two how responses were sampled: `"greedy"`.
        """
        self._append("validation.jsonl", {"step": step, **metrics})
        self.validated_step = step
        self.tell("validated", step=step, metrics=metrics, how=how)

    def log_alarm(self, step: int, alarm: str, problem: str, advice: str) -> None:
        """Write an alarm to `alarms.jsonl`, and notify the observers."""
        self.alarms.append({"step": step, "alarm": alarm, "said": problem, "advice": advice})
        self._append("alarms.jsonl", self.alarms[-1])
        self.tell("alarmed", alarm=self.alarms[-1])

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        """Append a row to a file that is rarely written; the row is on disk when this returns."""
        lines = JsonLines(self.path / name)
        lines.append(row)
        lines.to_disk()
        lines.close()

    def write_samples(
        self, step: int, rows: Iterable[Mapping[str, Any]], kind: Literal["step", "validation"] = "step"
    ) -> Path:
        """Write one row for each sample of a step or a validation: `prompt`, `response`, `reward`, ..."""
        path = self.path / "samples" / f"{kind}-{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_json_lines(path, rows)
        return path

    def clear_partial(self) -> None:
        """Delete partly written checkpoints and models, and restore a model whose replacement was interrupted.

        Nothing else may write to the directory at the same time.
        """
        self.checkpoints.clear_partial()
        self.models.clear_partial()

    def finish(self, status: Outcome, error: str | None = None, traceback: str | None = None) -> None:
        """Record the end of the run and close its files. Failed writes are logged and do not raise.

        Args:
            status: `"finished"`, `"interrupted"` or `"failed"`.
            error: The message for `run.json`.
            traceback: The text for `error.txt`.
        """
        # The record comes first, because a stuck thread may hold the timeline.
        if removed := self._put_back():
            log.warning("%s", removed)
        if not self.opened:
            return
        ends: list[Callable[[], object]] = [lambda: self.record.finish(status, self.last_step, error)]
        if traceback:
            ends.append(lambda: write_whole(self.path / "error.txt", traceback))
        ends += [self.timeline.close, self._metrics.close]
        ends.append(lambda: self._end_trackers(status))
        # The lock goes last, because another process may write here afterwards.
        ends.append(lambda: run_lock.release(self.path))
        problems = set()
        for end in ends:
            try:
                end()
            except Exception as problem:
                problems.add(str(problem) or repr(problem))
        if problems:
            log.warning("the end of the run could not be written completely to %s: %s", self.path, "; ".join(problems))


def _step_in(row: Mapping[str, Any]) -> float:
    step = row.get("step")
    return step if isinstance(step, int) else math.inf
