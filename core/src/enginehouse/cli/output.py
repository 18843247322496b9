"""What a run's command shows: `--quiet` and `--json`, the same of all that run a config."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from enginehouse.runs.progress import Mode


def shows(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command both options; it is called with `show`: the mode they name, or None."""

    @click.option("-q", "--quiet", is_flag=True, help="Say only how it ended.")
    @click.option("--json", "as_json", is_flag=True, help="Write events as JSON, one a line, and nothing else.")
    @functools.wraps(command)
    def called(*arguments: Any, quiet: bool, as_json: bool, **given: Any) -> Any:
        if quiet and as_json:
            raise click.UsageError("--quiet says only how a run ended, --json all that happens: leave out one of them")
        show: Mode | None = "quiet" if quiet else "json" if as_json else None
        return command(*arguments, show=show, **given)

    return called
