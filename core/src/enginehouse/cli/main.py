"""The command line. Each command has its own file, which is imported when used so that `--help` answers at once."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import os
import sys
import traceback
from typing import Any, NamedTuple

import click

from enginehouse import __version__
from enginehouse.cli.console import show_what_is_checked
from enginehouse.errors import EnginehouseError, UserError, nearest

DEBUG_VARIABLE = "ENGINEHOUSE_DEBUG"
WHOLE_SENTENCE = 1000
"""Maximum length of a command's summary in characters. It is so large that `--help` wraps a long summary and never
cuts it off."""


class Lazy(NamedTuple):
    """A command that is not imported yet, as `"module:attribute"` and its line in `--help`."""

    reference: str
    help: str

    def load(self) -> click.Command:
        """Import the command."""
        module, _, attribute = self.reference.partition(":")
        return getattr(importlib.import_module(module), attribute)


COMMANDS: dict[str, Lazy] = {
    "runtime": Lazy("enginehouse.cli.runtime:runtime", "Create and check Python environments for engines."),
    "plugins": Lazy("enginehouse.cli.plugins:plugins", "List the installed engines and other plugins."),
}
"""Core's own commands."""

SECTIONS = {
    "Start": ("init", "recipes"),
    "Train": ("train", "sft", "dpo", "rm", "eval"),
    "Inspect": ("plan", "keys", "report", "watch", "bottleneck"),
    "Engines": ("runtime", "plugins"),
    "Develop plugins": ("new-plugin", "certify", "parity", "matrix"),
}
"""Sections of `--help` with their commands in order. Commands of other packages come last, under "Other commands"."""


class LazyGroup(click.Group):
    """A group that imports a command when it is used, and asks plugins for commands only if needed.

    Commands of enginehouse packages come first, and other packages cannot take their names. The group prints the
    message of an `EnginehouseError` on stderr, and exits with code 2 for a user's mistake and 1 otherwise. `--debug`
    adds the traceback.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy: dict[str, Lazy] = {}
        self._added = f"commands of {id(self)}"  # key in `Context.meta`, with value "enginehouse's" or "all"

    def list_commands(self, ctx: click.Context) -> list[str]:
        self._add_plugins_commands(ctx)
        return [*(name for name in self.lazy if " " not in name), *COMMANDS, *sorted(self.commands)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            self._add_commands_of_enginehouse(ctx)
        if known := COMMANDS.get(cmd_name) or self.lazy.get(cmd_name):
            return known.load()
        self._add_plugins_commands(ctx)
        command = self.commands.get(cmd_name)
        if command is None and not ctx.resilient_parsing:  # the shell completes incomplete names
            refuse_tool_command(cmd_name)
            raise UserError(f"unknown command {cmd_name!r}. {nearest(cmd_name, self.list_commands(ctx))}")
        return command

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        self._check_free(name or cmd.name or "")
        super().add_command(cmd, name)

    def add_lazy_command(self, name: str, reference: str, help: str) -> None:
        """Add the command `"module:attribute"` with its line in `--help`, and import it when it is used.

        A name of two words, such as `"plugins doctor"`, is a command of a group.

        Raises:
            ValueError: the name is taken.
        """
        self._check_free(name)
        self.lazy[name] = Lazy(reference, help)

    def _check_free(self, name: str) -> None:
        if name in COMMANDS or name in self.lazy or name in self.commands:
            raise ValueError(f"there is a command {name!r} already")

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names, lazy = self.list_commands(ctx), {**COMMANDS, **self.lazy}
        summaries = {
            name: lazy[name].help if name in lazy else self.commands[name].get_short_help_str(limit=WHOLE_SENTENCE)
            for name in names
        }
        placed = {name for section in SECTIONS.values() for name in section}
        others = tuple(name for name in names if name not in placed)
        width = max(map(len, names))
        for title, section in {**SECTIONS, "Other commands": others}.items():
            rows = [(name.ljust(width), summaries[name]) for name in section if name in summaries]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def main(self, *args: Any, **kwargs: Any) -> Any:
        code: object = 1
        if isinstance(sys.stdout, io.TextIOWrapper):  # text that the terminal cannot encode must not end a run
            sys.stdout.reconfigure(errors="replace")
        try:
            return super().main(*args, **kwargs)
        except SystemExit as end:
            code = end.code
            raise
        finally:
            _leave_what_hangs(code if isinstance(code, int) else int(code is not None))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EnginehouseError as error:
            if ctx.params["debug"]:
                click.echo("".join(traceback.format_exception(error)), err=True)
            click.echo(f"Error: {error}", err=True)
            ctx.exit(2 if isinstance(error, UserError) else 1)

    def _add_commands_of_enginehouse(self, ctx: click.Context) -> None:
        if self._added not in ctx.meta:
            from enginehouse.plugin import load_plugins

            self.lazy.clear()
            self.commands.clear()
            ctx.meta[self._added] = "enginehouse's"
            load_plugins(enabled=()).add_commands(self)

    def _add_plugins_commands(self, ctx: click.Context) -> None:
        added = ctx.meta.get(self._added)
        if added != "all":
            from enginehouse.plugin import plugins

            if added is None:
                self.lazy.clear()
                self.commands.clear()
            ctx.meta[self._added] = "all"
            plugins().add_commands(self, of_enginehouse=added is None)


def refuse_tool_command(command: str) -> None:
    """Raise a `UserError` that names the package of an unknown command, if a package of enginehouse provides it."""
    from enginehouse.plugin import plugins
    from enginehouse.plugin.first_party import TOOLS, pip_line

    for package in (package for package, commands in TOOLS.items() if command in commands):
        for plugin in plugins().plugins:
            if plugin.name in (package, f"enginehouse_{package}"):
                why = f"{plugin.status}: {plugin.problem}" if plugin.status != "ok" else "does not add this command"
                raise UserError(f"`{command}` comes with enginehouse-{package}, which is installed, but {why}")
        raise UserError(f"`{command}` comes with enginehouse-{package}. Try: {pip_line(package)}")


def _leave_what_hangs(code: int) -> None:
    """Exit with `code` without the shutdown of Ray or a tracker, if that shutdown hung before and would hang again."""

    def leave() -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)

    ray = sys.modules.get("enginehouse.controller.ray_access")  # a command without Ray does not import it
    interruption = sys.modules.get("enginehouse.controller.interruption")
    hung = interruption is not None and interruption.abandoned
    if hung or (ray is not None and (ray.ray_access.stuck or ray.ray_access.abandoned)):
        atexit.register(leave)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="enginehouse")
@click.option("--debug", is_flag=True, envvar=DEBUG_VARIABLE, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Train language models by reinforcement learning, with any training and any rollout engine.

    `enginehouse COMMAND --help` shows the arguments and examples of a command.
    """
    show_what_is_checked()


if __name__ == "__main__":
    main(prog_name="enginehouse")
