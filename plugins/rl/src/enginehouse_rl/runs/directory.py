"""The run directory: everything a run writes, in one place that can be moved, read and compared.

config.yaml         the config with every default and override; `enginehouse train` reads it back
run.lock            locked by the run's process as long as it lives; says which that is
run.json            status, command, versions, roles; there from the first moment: it marks the directory as ours
metrics.jsonl       one line a step
validation.jsonl    one line a validation
alarms.jsonl        one line an alarm, once there is one: what is wrong with the run, in words
samples/            what the model said: step-000010.jsonl, and validation-000010.jsonl
timeline.json       a Chrome trace
profiles/           those of `train.profile_steps`: step-000010/actor-0.json.gz, Chrome traces of torch.profiler
tensorboard/        what a tracker keeps here; also wandb/, mlflow/
models/             models in Hugging Face format: step-000250/, and best/ of `train.save_best`, whole or not there
model               a link to the newest of them
checkpoints/        what `--resume` goes on from: the newest, step-000250/, whole or not there
error.txt           the traceback of a run that failed
report.html         a page of it all, where enginehouse-report is installed; written once the run has ended
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from enginehouse.atomic import clear_partial, move_into_place, point_to, staging_path, write_whole
from enginehouse.engines.tracker import Outcome, RunFacts
from enginehouse.errors import ConfigError, EnginehouseError
from enginehouse_rl.checkpoints import Checkpoint
from enginehouse_rl.checkpoints.store import CheckpointStore
from enginehouse_rl.config import run_lock
from enginehouse_rl.config.document import parse
from enginehouse_rl.config.earlier_run import RUN_MARKER, read_record
from enginehouse_rl.config.paths import check_run_directory
from enginehouse_rl.plan.trackers import TrackerPlan
from enginehouse_rl.runs.clock import StepClock
from enginehouse_rl.runs.jsonlines import JsonLines, read_whole_lines, write_json_lines
from enginehouse_rl.runs.record import RunRecord
from enginehouse_rl.runs.timeline import Timeline
from enginehouse_rl.runs.tracking import ENDING_SECONDS, HURRY_SECONDS, Trackers

log = logging.getLogger(__name__)

BEST = "models/best"
"""Where in a run directory the best model is."""


class Earlier(NamedTuple):
    """Rows of `metrics.jsonl` and of `validation.jsonl` that a resumed run found."""

    metrics: list[dict[str, Any]]
    validations: list[dict[str, Any]]


class RunRemoved(EnginehouseError):
    """The run directory was removed, or replaced, under the run that writes there."""

    def __init__(self, message: str, keeps_state: bool = True):
        super().__init__(message)
        self.keeps_state = keeps_state


class RunDirectory:
    """A run's directory. Nothing is made or deleted before `open`; end it with `finish`.

    Args:
        path: where; parents are made.
        config: the config as YAML, written to `config.yaml`.
        overwrite: delete an earlier run.
        spare_unfinished: not one that did not finish and left checkpoints.
        command: how the run was started, for `run.json`.
        packages: distributions to record the versions of, besides the usual.
        resumed: the checkpoint an earlier run in the directory goes on from. What that run wrote of later steps is
            then cut away by `open`, and nothing else of it; `overwrite` says nothing.
        checkpoints_kept: how many checkpoints are kept, the newest.
        models_kept: how many models of steps are kept, the newest; None: all.
        trackers: what metrics are sent to as well, from `open` to `finish`.

    Attributes:
        path: absolute path.
        opened: whether the directory is this run's.
        clock: measures steps and phases, onto the timeline.
        timeline: the run's timeline, once it is open.
        checkpoints: its checkpoints.
        last_step: the last step whose metrics were written; 0 before the first.
        validated_step: the last step of which a validation was written; -1 before the first.
        saved_step: the step of the newest saved model; None before the first.
        earlier: metrics of the steps before those of this process, and validations; none but in a resumed run.
        alarms: rows of `alarms.jsonl`, those of a run that is resumed among them.
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
        self.saved_step: int | None = None
        self.earlier = Earlier([], [])
        self.alarms: list[dict[str, Any]] = []
        self.checkpoints = CheckpointStore(self.path, resumed.step if resumed else None, checkpoints_kept)
        self._resumed, self._models_kept = resumed, models_kept
        self._overwrite, self._spare_unfinished = overwrite, spare_unfinished
        self._config, self._command, self._packages = config, command, packages
        self._trackers = Trackers(trackers)

    def open(self) -> None:
        """Make the directory, after deleting what an earlier run left there if `overwrite` says so; or take it up.

        It is this process's alone from then on, until `finish`.

        Raises:
            ConfigError: there is something else, or an earlier run without `overwrite`, or one that is still running,
                or it cannot be made.
        """
        self._check()  # before anything is made
        try:  # what may be written is known for sure by writing: a file system may squash root
            self.path.mkdir(parents=True, exist_ok=True)
            run_lock.take(self.path)
        except OSError as error:
            raise ConfigError(f"run.directory: {self.path} cannot be made or written to: {error}") from error
        try:
            self._check()  # what another process did until then
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
            self.path,
            overwrite=self._overwrite,
            spare_unfinished=self._spare_unfinished,
            resuming=resumed is not None,
        )
        if resumed is not None and read_record(self.path) != resumed.record:
            raise ConfigError(
                f"--resume: another process went on with the run in {self.path} meanwhile. Look how it ended, and "
                "start this one again"
            )

    def _empty(self) -> None:
        """Delete what an earlier run left, what marks it as a run last: a deletion that was cut off can be repeated."""
        left = [entry for entry in self.path.iterdir() if entry.name != run_lock.LOCK_FILE]
        for entry in sorted(left, key=lambda entry: entry.name == RUN_MARKER):
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def _open(self) -> None:
        resumed = self._resumed
        self.record = RunRecord(
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
            self._trackers.start(self._facts())
        except BaseException as error:
            with contextlib.suppress(OSError):
                self.record.finish("failed", self.last_step, str(error) or type(error).__name__)
            raise

    def _facts(self) -> RunFacts:
        return RunFacts(
            name=self.path.name,
            directory=self.path,
            config=parse(self._config, "the config")[0] or {},
            resumed_after=self._resumed.step if self._resumed else 0,
            versions=dict(self.record.content["versions"]),
        )

    def _cut_after(self, resumed: Checkpoint) -> None:
        """Leave of an earlier run what it wrote up to a checkpoint. Its models stay, until they are written anew."""
        step = resumed.step
        names = ("metrics.jsonl", "validation.jsonl", "alarms.jsonl")
        kept = [[row for row in read_whole_lines(self.path / name) if _step_in(row) <= step] for name in names]
        for name, rows in zip(names, kept, strict=True):
            if rows or (self.path / name).exists():
                write_json_lines(self.path / name, rows)
        metrics, validations, self.alarms = kept
        self.earlier = Earlier(metrics, validations)
        for said in (self.path / "samples").glob("*.jsonl"):
            if _step_of(said.stem) > step:
                said.unlink()
        for said_at_the_end in ("error.txt", "report.html"):
            (self.path / said_at_the_end).unlink(missing_ok=True)
        self.clear_partial()
        for left in (*self.path.glob(".*.partial-*"), *self.path.glob("samples/.*.partial-*")):
            left.unlink(missing_ok=True)
        self.checkpoints.set_aside(resumed.passed_over)
        self.last_step = step
        self.validated_step = max((row["step"] for row in validations), default=-1)
        self.saved_step = max((number for number in self._model_steps() if number <= step), default=None)

    @classmethod
    def create(cls, path: str | Path, config: str, **details: Any) -> RunDirectory:
        """An open run directory; arguments and errors as those of the class and of `open`."""
        run = cls(path, config, **details)
        run.open()
        return run

    def describe(self, roles: Any) -> None:
        """Record in `run.json` which processes the run has, and where; plain data."""
        self.record.update(roles=roles)

    @property
    def elapsed_seconds(self) -> float:
        """Since the run was opened; in a resumed run, with the time it had run up to the checkpoint."""
        return time.monotonic() - self._started

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a step's metrics; they are on their way to disk when this returns.

        Raises:
            RunRemoved: the directory is not there any more, or another's; the metrics up to here are put back where it
                is not.
        """
        if removed := self._put_back():
            raise removed
        self._metrics.append({"step": step, "elapsed_seconds": round(self.elapsed_seconds, 4), **metrics})
        self.last_step = step
        self._trackers.log(step, metrics, "train")

    def _put_back(self) -> RunRemoved | None:
        """Where somebody removed the directory, make it again with what is known of it. An error that says so."""
        if self._metrics.in_place:
            return None
        # Nothing of it is taken to be there any more.
        self.checkpoints.newest_step = self.saved_step = None
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
            return RunRemoved(f"{removed}. Nothing more is written: {error}", keeps_state=False)
        return RunRemoved(
            f"{removed}. Metrics, config and record are there again, and state and model as of the end; checkpoints, "
            "models, samples, validations and the timeline that were there may be gone. Go on with --resume"
        )

    def _end_trackers(self, status: Outcome) -> None:
        if problems := self._trackers.finish(status, HURRY_SECONDS if status == "interrupted" else ENDING_SECONDS):
            self.record.update(trackers=problems)

    def flush(self) -> None:
        """Have on disk what a run that is resumed here needs of what was logged."""
        self.timeline.flush()
        self._metrics.to_disk()

    def log_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write a validation's metrics to `validation.jsonl`; step 0 is the model as it came."""
        self._append("validation.jsonl", {"step": step, **metrics})
        self.validated_step = step
        self._trackers.log(step, metrics, "validation")

    def log_alarm(self, step: int, alarm: str, said: str, advice: str) -> None:
        """Write to `alarms.jsonl` that something is wrong with the run.

        Args:
            step: after which step it was seen.
            alarm: its name.
            said: what happened, in words.
            advice: what to try.
        """
        self.alarms.append({"step": step, "alarm": alarm, "said": said, "advice": advice})
        self._append("alarms.jsonl", self.alarms[-1])

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        """Append to a file that seldom gets a line; it is on disk when this returns."""
        lines = JsonLines(self.path / name)
        lines.append(row)
        lines.to_disk()
        lines.close()

    def write_samples(
        self, step: int, rows: Iterable[Mapping[str, Any]], kind: Literal["step", "validation"] = "step"
    ) -> Path:
        """Write what the model said in a step or a validation, a row a sample: `prompt`, `response`, `reward`, ..."""
        path = self.path / "samples" / f"{kind}-{step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        write_json_lines(path, rows)
        return path

    def model_path(self, step: int) -> Path:
        """Where to write the model of `step`: a path that does not exist, beside its final place.

        `model_saved` or `best_saved` then moves it there. Until that, no one takes it for a model.
        """
        return staging_path(self._model(step))

    def best_path(self) -> Path:
        """As `model_path`, of what may become the best model."""
        return staging_path(self.path / BEST)

    def model_saved(self, step: int, path: str | Path) -> Path:
        """Move a wholly written model into its place and return that; `model` points to it from now on.

        Of those of this step and before, all but the newest `models_kept` are deleted.

        Raises:
            EnginehouseError: nothing is at `path`: workers and controller do not share a file system.
        """
        place = self._place_model(step, path, self._model(step))
        try:
            point_to(self.path / "model", place)
        except OSError as error:
            log.info("no link %s to %s: %s", self.path / "model", place, error)
        self.saved_step = step
        if self._models_kept is not None:
            steps = sorted((number for number in self._model_steps() if number <= step), reverse=True)
            for old in map(self._model, steps[self._models_kept :]):
                # Renamed first: one that is deleted halfway must not look like a model.
                dying = old.with_name(f".{old.name}.deleted")
                old.rename(dying)
                shutil.rmtree(dying, ignore_errors=True)
        return place

    def is_best(self, metric: str, value: float) -> bool:
        """Whether a model is better, by a metric of a validation, than the one in `models/best`, if there is one."""
        best = self.record.content.get("best")
        if not (self.path / BEST).is_dir() or not isinstance(best, Mapping) or best.get("metric") != metric:
            return not math.isnan(value)
        return not isinstance(best.get("value"), int | float) or value > best["value"]

    def best_saved(self, step: int, path: str | Path, metric: str, value: float) -> Path:
        """Make a wholly written model the best, in `models/best` and in `run.json`. Return and errors as of
        `model_saved`."""
        place = self._place_model(step, path, self.path / BEST)
        self.record.update(best={"metric": metric, "step": step, "value": value})
        return place

    def _place_model(self, step: int, path: str | Path, place: Path) -> Path:
        if not Path(path).is_dir():
            raise EnginehouseError(
                f"the model of step {step} is not at {path}, where the actor was told to write it. Do the actor's node "
                "and this one share the file system of run.directory? They have to."
            )
        move_into_place(Path(path), place)
        return place

    def _model_steps(self) -> list[int]:
        """Steps of which a model is there."""
        return [number for path in (self.path / "models").glob("step-*") if (number := _step_of(path.name)) >= 0]

    def clear_partial(self) -> None:
        """Delete what writes of checkpoints and models that were cut off have left. No one may be writing.

        A model whose replacement was cut off is put back.
        """
        self.checkpoints.clear_partial()
        clear_partial(self.path / "models")

    @property
    def saved_model(self) -> Path | None:
        """The newest saved model; None if there is none."""
        return None if self.saved_step is None else self._model(self.saved_step)

    def finish(self, status: Outcome, error: str | None = None, traceback: str | None = None) -> None:
        """Write how the run ended and close its files. Never fails: what could not be written is logged.

        Args:
            status: `"finished"`, `"interrupted"` or `"failed"`.
            error: one message, for `run.json`.
            traceback: written to `error.txt`.
        """
        # The record first: a thread that is stuck may hold the timeline.
        if removed := self._put_back():
            log.warning("%s", removed)
        if not self.opened:
            return
        ends: list[Callable[[], object]] = [lambda: self.record.finish(status, self.last_step, error)]
        if traceback:
            ends.append(lambda: write_whole(self.path / "error.txt", traceback))
        ends += [self.timeline.close, self._metrics.close]
        # Whoever interrupted a run waits.
        ends.append(lambda: self._end_trackers(status))
        # The lock last: another process may write here from then on.
        ends.append(lambda: run_lock.release(self.path))
        problems = set()
        for end in ends:
            try:
                end()
            except Exception as problem:
                problems.add(str(problem) or repr(problem))
        if problems:
            log.warning("not all of the end of the run could be written to %s: %s", self.path, "; ".join(problems))

    def _model(self, step: int) -> Path:
        return self.path / "models" / f"step-{step:06d}"


def _step_in(row: Mapping[str, Any]) -> float:
    """The step a row is of; one after all steps, where it does not say."""
    step = row.get("step")
    return step if isinstance(step, int) else math.inf


def _step_of(name: str) -> int:
    """The number in `step-000010` or `validation-000010`; of any other name, one no step has."""
    match = re.fullmatch(r"(?:step|validation)-(\d+)", name)
    return int(match[1]) if match else -1
