"""Options that all commands which run a config have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import click

if TYPE_CHECKING:
    from enginehouse_rl.runs.events import Emit

    Show: TypeAlias = Literal["quiet"] | Emit | None


def add_output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--quiet` and `--json` to a command. The command gets `show`: `"quiet"`, the receiver of events, or None.

    With `--json`, only events are written to standard output. Other output is redirected before the command begins,
    because the imports for a plan may already print.
    """

    @click.option("-q", "--quiet", is_flag=True, help="Print only the final result.")
    @click.option("--json", "as_json", is_flag=True, help="Print only events, one JSON object per line.")
    @functools.wraps(command)
    def call(*arguments: Any, quiet: bool, as_json: bool, **options: Any) -> Any:
        if quiet and as_json:
            raise click.UsageError("--quiet and --json exclude each other: leave out one of them")
        if as_json:
            from enginehouse_rl.runs.events import events_on_stdout

            with events_on_stdout() as emit:
                return command(*arguments, show=emit, **options)
        return command(*arguments, show="quiet" if quiet else None, **options)

    return call


def training_command(run: Callable[..., None]) -> click.Command:
    """Make a command from a function that runs a config: `run(config, overrides, resume, show)`."""
    resume = click.option(
        "--resume", is_flag=True, help="Continue the run in run.directory from its newest checkpoint."
    )
    config, overrides = click.argument("config", type=click.Path()), click.argument("overrides", nargs=-1)
    return click.command()(config(overrides(resume(add_output_options(run)))))
