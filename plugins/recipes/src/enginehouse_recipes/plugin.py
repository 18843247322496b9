"""Registers the commands `init` and `recipes`."""

from __future__ import annotations

from enginehouse.plugin import hookimpl

enginehouse_protocol = "1.1"


@hookimpl
def enginehouse_commands(cli):
    for name, summary in {
        "init": "Begin: a config, a reward and its test, from four answers.",
        "recipes": "Show and run ready configs, one an algorithm.",
    }.items():
        cli.add_lazy_command(name, f"enginehouse_recipes.cli.{name}:{name}", summary)
