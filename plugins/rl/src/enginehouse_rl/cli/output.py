"""What a run's command shows: `--quiet` and `--json`, the same of all that run a config."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import click

if TYPE_CHECKING:
    from enginehouse_rl.runs.events import Emit

    Show: TypeAlias = Literal["quiet"] | Emit | None


def add_output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command both options; it is called with `show`: `"quiet"`, what events go to, or None.

    Events have standard output to themselves from here on: what is imported for a plan may write there already.
    """

    @click.option("-q", "--quiet", is_flag=True, help="Say only how it ended.")
    @click.option("--json", "as_json", is_flag=True, help="Write events as JSON, one a line, and nothing else.")
    @functools.wraps(command)
    def called(*arguments: Any, quiet: bool, as_json: bool, **given: Any) -> Any:
        if quiet and as_json:
            raise click.UsageError("--quiet says only how a run ended, --json all that happens: leave out one of them")
        if as_json:
            from enginehouse_rl.runs.events import events_on_stdout

            with events_on_stdout() as emit:
                return command(*arguments, show=emit, **given)
        return command(*arguments, show="quiet" if quiet else None, **given)

    return called
