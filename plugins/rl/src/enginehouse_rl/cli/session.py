"""Takes a run from its plan to its final report, for `train`, `sft`, `dpo`, `rm` and `eval`."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, NoReturn, Protocol

import click

from enginehouse.cli.interrupts import Interrupts
from enginehouse.errors import EnginehouseError, describe_os_error

if TYPE_CHECKING:
    from enginehouse.engines.tracker import Outcome
    from enginehouse_rl.cli.output import Show
    from enginehouse_rl.plan.plan import RunPlan
    from enginehouse_rl.runs import Progress, RunDirectory
    from enginehouse_rl.runs.events import Emit
    from enginehouse_rl.runs.record import Status

log = logging.getLogger(__name__)

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.ESTALE, errno.EIO, errno.ENODEV, errno.ENXIO,
                errno.EFBIG)  # fmt: skip


TRAINERS = {
    "train": "enginehouse_rl.loop.trainer:Trainer",
    "sft": "enginehouse_rl.loop.sft:SFTTrainer",
    "dpo": "enginehouse_rl.preferences.loop:trainer",
    "rm": "enginehouse_rl.preferences.loop:trainer",
}
"""The function or class that makes the trainer of each command."""


class Runnable(Protocol):
    """A trainer or an evaluation, which `run_plan` runs."""

    def run(self) -> object:
        """Run to the end."""


def run_plan(plan: RunPlan, build: Callable[[RunDirectory, Progress], Runnable], *, show: Show = None) -> None:
    """Build the trainer, create the run directory, run the plan, and report how it ended.

    Args:
        build: Makes the trainer, which reads its data when it is made. `build` itself imports the trainer, so that a
            rejected plan does not wait for these imports. The run directory is created after `build` returns, so that
            no earlier run is deleted if the data is wrong.
        show: `"quiet"`: nothing is shown while the plan runs; a callable: it gets the events, and nothing is shown;
            None: progress is shown as far as the terminal can show it.

    Raises:
        UserError: The run failed because of a user's mistake, here or on a worker.
        EnginehouseError: The run failed.
        SystemExit: The run was interrupted. The code is 128 plus the number of the signal, 130 for Ctrl-C.
    """
    from enginehouse_rl.runs import Progress

    emit = show if callable(show) else None
    run = _make_run_directory(plan)
    progress = Progress(run.path.name, mode="quiet" if show == "quiet" else "json" if emit else None, emit=emit)
    if show is None:
        progress.print(plan.render() + "\n")
    if emit is not None:
        emit("plan", run=run.path.name, directory=str(run.path), plan=plan.render())

    interrupts = _make_interrupts(run, progress, emit, plan.config.run.grace_seconds)
    ended_by: BaseException | None = None
    with interrupts:
        try:
            with progress, ExitStack() as stack:
                trainer = build(run, progress)
                run.open()
                run.record.update(**{f"{name}_options": role.options for name, role in plan.roles.items()})
                for name, entries in {"hub": plan.hub, "gguf": plan.gguf}.items():
                    if entries:
                        run.record.update(**{name: entries})
                stack.callback(_trace_calls(run))
                trainer.run()
        except BaseException as error:
            ended_by = error
        # Any error after a signal counts as interrupted, because a process in our group may have died of it too.
        interrupted = interrupts.record_end() and ended_by is not None
        outcome: Outcome = "finished" if ended_by is None else "interrupted" if interrupted else "failed"
        if run.opened:  # recorded while signals are handled, so that no signal stops it halfway
            _record_end(run, ended_by, outcome)
            tell_recorded(str(run.path), outcome)
    _emit_end(run, emit, outcome, ended_by)
    if ended_by is None:
        _print_end(run, progress, "finished")
    elif interrupted:
        _exit_interrupted(run, progress, interrupts.exit_code, ended_by)
    elif run.opened:
        _raise_failure(run, ended_by)
    else:
        raise ended_by


def _make_run_directory(plan: RunPlan) -> RunDirectory:
    from enginehouse_rl.config.load import dump_config
    from enginehouse_rl.runs import RunDirectory

    return RunDirectory(
        plan.run_directory,
        dump_config(plan.written),
        overwrite=plan.config.run.overwrite,
        spare_unfinished=plan.spare_unfinished,
        command=sys.argv,
        packages=plan.distributions,
        resumed=plan.resumed,
        checkpoints_kept=plan.config.train.checkpoints_kept,
        models_kept=plan.config.train.models_kept,
        trackers=plan.trackers,
    )


def _make_interrupts(run: RunDirectory, progress: Progress, emit: Emit | None, grace_seconds: float) -> Interrupts:
    """Return the handler of signals. If the run is ended by force, the handler records and reports that."""
    from enginehouse_rl.runs import describe_saved

    def report() -> None:
        if unrecorded := run.opened and run.record.status == "running":
            with contextlib.suppress(OSError):
                run.record.finish("interrupted", run.last_step, None)
        with contextlib.suppress(OSError):  # the terminal may be gone
            progress.close()
            _emit_end(run, emit, run.record.status if run.opened else "interrupted")
            click.echo(describe_saved(run), err=True)
        if unrecorded:
            run.finish("interrupted")  # last, because a stuck thread may hold the timeline

    def name_last_program() -> list[str] | None:
        return ["enginehouse_rl.cli.forced_end", str(run.path)] if run.opened else None

    return Interrupts(report, grace_seconds, name_last_program)


def _record_end(run: RunDirectory, ended_by: BaseException | None, outcome: Outcome) -> None:
    if ended_by is None or (outcome == "interrupted" and not isinstance(ended_by, Exception)):
        run.finish(outcome)
    else:
        run.finish(outcome, _describe(ended_by), "".join(traceback.format_exception(ended_by)))


def tell_recorded(directory: str, outcome: Outcome) -> None:
    """Call the observers' `run_recorded` with the directory of a run that has ended. An observer's error is only
    logged."""
    from enginehouse.plugin import plugins
    from enginehouse.plugin.errors import PluginError

    try:
        plugins().observe("run_recorded", directory=directory, outcome=outcome)
    except PluginError as error:  # raised with `plugins.strict`
        log.warning("%s", error)


def _emit_end(run: RunDirectory, emit: Emit | None, status: Status, error: BaseException | None = None) -> None:
    if emit is None:
        return
    model = run.models.newest
    emit(
        "end",
        status=status,
        steps=run.last_step,
        directory=str(run.path),
        model=None if model is None else str(model),
        alarms=len(run.alarms),
        error=_describe(error) if isinstance(error, Exception) else None,
    )


def _exit_interrupted(run: RunDirectory, progress: Progress, code: int, error: BaseException) -> NoReturn:
    """Report what was saved, and exit. The terminal may be gone."""
    from enginehouse_rl.runs import describe_saved

    with contextlib.suppress(OSError):
        if run.opened:
            if isinstance(error, Exception):
                click.echo(f"An error occurred while the run was ending: {_describe(error)}", err=True)
            _print_end(run, progress, "interrupted")
        click.echo(describe_saved(run), err=True)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # Python would try once more at its end, and change the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    sys.exit(code)


def _raise_failure(run: RunDirectory, error: BaseException) -> NoReturn:
    """Print where the error is stored, and raise the error that the command line reports."""
    from enginehouse.controller.errors import unwrap_user_error
    from enginehouse_rl.runs import describe_saved

    files = "; the traceback is in error.txt there" if (run.path / "error.txt").exists() else ""
    files += "; report.html there shows the run" if (run.path / "report.html").exists() else ""
    click.echo(f"The run failed. {describe_saved(run)}{files}.", err=True)
    blamed = unwrap_user_error(error) or error
    if isinstance(blamed, OSError) and (
        blamed.errno in _DISK_ERRORS or Path(os.fsdecode(blamed.filename or "")).is_relative_to(run.path)
    ):
        blamed = EnginehouseError(f"the run cannot write to the disk of {run.path}: {describe_os_error(blamed)}")
    if not isinstance(blamed, Exception):  # nobody interrupted the run, so it must not look interrupted
        blamed = EnginehouseError(f"the run was ended by {type(error).__name__}: {error}")
    if blamed is not error:
        raise blamed from error
    raise error


def _describe(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _print_end(run: RunDirectory, progress: Progress, status: Status) -> None:
    from enginehouse_rl.runs import summary_lines, summary_panel

    if progress.mode == "json":  # the event `end` has reported it
        return
    if progress.mode == "quiet":
        progress.print(f"{status}: {run.path}")
    elif progress.mode == "live":
        progress.console.print(summary_panel(run, progress.history, status))
    else:
        for line in summary_lines(run, progress.history, status):
            progress.print(line)


def _trace_calls(run: RunDirectory) -> Callable[[], None]:
    """Draw the calls of worker groups on the run's timeline, and return a function that stops the drawing."""
    from enginehouse.controller.tracing import add_listener

    return add_listener(run.timeline.call)


def run_config(command: str, config: str, overrides: Sequence[str], *, resume: bool, show: Show) -> None:
    """Plan and run a config of `enginehouse train`, `sft`, `dpo` or `rm`. It raises the same errors as `run_plan`."""
    from enginehouse_rl.config.load import load_config
    from enginehouse_rl.config.schema import SCHEMAS
    from enginehouse_rl.plan.plan import PLANS

    loaded = load_config(config, overrides, SCHEMAS[command])
    planned = PLANS[command](loaded, config_path=config, resume=resume, overrides=overrides)

    def build(run: RunDirectory, progress: Progress) -> Runnable:
        return resolve_name(TRAINERS[command])(planned, run, progress)

    run_plan(planned, build, show=show)
