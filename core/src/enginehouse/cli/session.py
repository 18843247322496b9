"""What `train` and `sft` share: a run from its plan to its last words, however it ends."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Protocol

import click

from enginehouse.cli.interrupts import EXIT_CODE, Interrupts

if TYPE_CHECKING:
    from enginehouse.config.plan import Plan, SFTPlan
    from enginehouse.runs import Progress, RunDirectory
    from enginehouse.runs.record import Status


class Trainer(Protocol):
    """What runs a plan."""

    def run(self) -> object:
        """Run to the end."""
        ...


def run_plan(plan: Plan | SFTPlan, build: Callable[[RunDirectory, Progress], Trainer], *, quiet: bool = False) -> None:
    """Build the trainer, make the run directory, run the plan, and say how it ended.

    Args:
        plan: what to run.
        build: makes the trainer, which reads its data then; imports what it needs itself, so that a refused plan never
            pays for it. The run directory is made afterwards: bad data does not cost an earlier run.
        quiet: show nothing while it runs.

    Raises:
        UserError: the run failed by a mistake of the user's, here or on a worker.
        EnginehouseError: the run failed.
        SystemExit: with code 130, if it was interrupted.
    """
    from enginehouse.config.load import dump_config
    from enginehouse.runs import Progress, RunDirectory, saved_words

    if not quiet:
        click.echo(plan.render() + "\n")
    settings = plan.config.run
    run = RunDirectory(
        plan.run_directory,
        dump_config(plan.config),
        overwrite=settings.overwrite,
        spare_unfinished=plan.spare_unfinished,
        command=sys.argv,
        packages=plan.distributions,
        resumed=plan.resumed,
        checkpoints_kept=plan.config.train.checkpoints_kept,
    )
    progress = Progress(run.path.name, mode="quiet" if quiet else None)

    def before_force() -> None:
        progress.close()
        click.echo(saved_words(run), err=True)
        if run.opened:
            run.finish("interrupted")

    try:
        with Interrupts(before_force), progress, ExitStack() as stack:
            trainer = build(run, progress)
            run.open()
            run.record.update(actor_options=plan.actor_options, rollout_options=getattr(plan, "rollout_options", None))
            if evaluation := getattr(plan, "evaluation", None):
                run.record.update(evaluation_options=evaluation.options)
            stack.callback(_trace_calls(run))
            trainer.run()
    except (KeyboardInterrupt, SystemExit):  # ray's own handler of SIGTERM exits
        if run.opened:
            run.finish("interrupted")
            _say_end(run, progress, "interrupted", quiet)
        click.echo(saved_words(run), err=True)
        sys.exit(EXIT_CODE)
    except Exception as error:
        if not run.opened:
            raise
        _failed(run, error)
    run.finish("finished")
    _say_end(run, progress, "finished", quiet)


def _failed(run: RunDirectory, error: Exception) -> None:
    """Keep the error with the run, say where, and raise what the command line shall report."""
    from enginehouse.controller.errors import unwrap_user_error
    from enginehouse.runs import saved_words

    run.finish("failed", str(error) or type(error).__name__, "".join(traceback.format_exception(error)))
    click.echo(f"The run failed. {saved_words(run)}; the traceback is in error.txt there.", err=True)
    blamed = unwrap_user_error(error)
    if blamed is not None and blamed is not error:
        raise blamed from error
    raise error


def _say_end(run: RunDirectory, progress: Progress, status: Status, quiet: bool) -> None:
    from enginehouse.runs import summary_lines, summary_panel

    if quiet:
        click.echo(f"{status}: {run.path}")
    elif progress.mode == "live":
        progress.console.print(summary_panel(run, progress.history, status))
    else:
        for line in summary_lines(run, progress.history, status):
            click.echo(line)


def _trace_calls(run: RunDirectory) -> Callable[[], None]:
    """Draw worker-group calls on the run's timeline; returns what stops it."""
    from enginehouse.controller.tracing import add_listener

    return add_listener(run.timeline.call)
