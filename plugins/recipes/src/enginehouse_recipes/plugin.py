"""Registers the commands `init` and `recipes`."""

from __future__ import annotations

from enginehouse.plugin import hookimpl

enginehouse_protocol = "1.1"


@hookimpl
def enginehouse_commands(cli):
    for name, summary in {
        "init": "Create a project with a config, a reward function and its test.",
        "recipes": "List, show and run ready-made configs, one per algorithm.",
    }.items():
        cli.add_lazy_command(name, f"enginehouse_recipes.cli.{name}:{name}", summary)
