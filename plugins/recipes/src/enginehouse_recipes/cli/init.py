"""`enginehouse init`: creates a first config, reward and test from four answers."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from enginehouse.errors import ConfigError, UserError
from enginehouse_recipes.init.first_config import RUN, choose_recipe, config_text
from enginehouse_recipes.init.machines import LAPTOP, Engines, choose_engines, describe_machine, read_machine
from enginehouse_recipes.init.models import TINY, read_model
from enginehouse_recipes.init.new_files import NewFiles
from enginehouse_recipes.init.prompt_data import SAMPLES, PromptsUnknown, read_rows
from enginehouse_recipes.init.rewards import OWN, REWARD, TEST, fitting_rewards, read_reward, reward_texts

if TYPE_CHECKING:
    from enginehouse_recipes.init.machines import Machine
    from enginehouse_recipes.init.models import ChosenModel
    from enginehouse_recipes.init.prompt_data import PromptData
    from enginehouse_rl.plan.plan import Plan

T = TypeVar("T")

CONFIG = "config.yaml"
_QUESTIONS = {
    "model": f"Model: a directory, a GGUF file, a name on the hub, or {TINY} (made here, learns within minutes)",
    "data": f"Data: a file of prompts (jsonl, parquet, csv), or {', '.join(SAMPLES)} (made here)",
    "reward": "Reward",
    "machine": f"Machine: {LAPTOP}, a number of GPUs, or GPUs of a Ray cluster as 8@auto",
}


@click.command()
@click.argument("directory", type=click.Path(file_okay=False), default=".")
@click.option("--model", help=f"Model: a directory, a GGUF file, a name on the hub, or {TINY} (created here).")
@click.option("--data", help=f"Prompts: a file (jsonl, parquet, csv), or {' or '.join(SAMPLES)} (created here).")
@click.option("--reward", help=f"Reward: exact_match, numeric, math, or {OWN} (a function to write).")
@click.option("--machine", help=f"Machine: {LAPTOP}, a number of GPUs, or 8@ADDRESS for 8 GPUs of a Ray cluster.")
@click.option("--prompt", "prompt", metavar="COLUMN", help="Column that holds the prompts; unset: guessed.")
@click.option("--answer", "answer", metavar="COLUMN", help="Column that holds the reference answers; unset: guessed.")
@click.option("-y", "--yes", is_flag=True, help="Use the default of each option that is not given, without asking.")
def init(
    directory: str,
    model: str | None,
    data: str | None,
    reward: str | None,
    machine: str | None,
    prompt: str | None,
    answer: str | None,
    yes: bool,
) -> None:
    """Create a project with a config, a reward function and its test in DIRECTORY (default: here).

    \b
    enginehouse init first                          asks four questions
    enginehouse init first --yes                    a tiny model that learns to sort within minutes
    enginehouse init first --data calculator --yes  a tiny model that learns to multiply with a tool
    enginehouse init math --model Qwen/Qwen3-0.6B --data gsm8k.jsonl --machine 1 --yes

    No file is overwritten. The command writes only a config that `enginehouse plan` accepts.

    Exit codes: 0 written, 2 an answer is invalid or a file exists already.
    """
    files = NewFiles(Path(directory).absolute())
    files.check(CONFIG, REWARD, TEST)
    try:
        the_model = _ask("model", model, TINY, yes, lambda text: read_model(text, files.directory))
        asks = data is None and not yes
        rows = _ask(
            "data", data, "sorting", yes, lambda text: _read_rows(text, the_model, files, (prompt, answer), asks)
        )
        click.echo(f"  {rows.summary}")
        fitting = fitting_rewards(rows)
        choices = [name for name, why in fitting.items() if not why]
        if reward is None and not yes:
            for name, why in fitting.items():
                if why:
                    click.echo(f"  not {name}: {why}")
        the_reward = _ask("reward", reward, choices[0], yes, lambda text: read_reward(text, rows), choices)
        default = describe_machine() if the_model.path else LAPTOP
        the_machine = _ask("machine", machine, default, yes, read_machine)
        engines = choose_engines(the_machine) if the_model.path else Engines()
        for line in engines.better:
            click.echo(f"  {line}")
        plan = _write(files, the_model, rows, the_reward, the_machine, engines)
    except BaseException:
        files.take_back()
        raise
    _print_summary(files, plan, the_machine)


def _ask(
    name: str, answer: str | None, default: str, yes: bool, read: Callable[[str], T], choices: Sequence[str] = ()
) -> T:
    """Read the given answer or the default, or ask on the terminal until an answer is valid."""
    if answer is not None or yes:
        try:
            return read(default if answer is None else answer)
        except UserError as error:
            error.args = (f"--{name}: {error}", *error.args[1:])
            raise
    while True:
        try:
            text = click.prompt(_QUESTIONS[name] + f" ({', '.join(choices)})" * bool(choices), default=default)
        except click.Abort:
            if sys.stdin.isatty():
                raise
            raise ConfigError(f"no terminal to ask for the {name}: add --{name}, or --yes for {default}") from None
        try:
            return read(text)
        except UserError as error:
            click.echo(f"  {error}")


def _read_rows(
    data: str, model: ChosenModel, files: NewFiles, columns: tuple[str | None, str | None], asks: bool
) -> PromptData:
    """Read rows; if `asks`, ask for unknown columns on the terminal."""
    prompt, answer = columns
    try:
        rows = read_rows(data, model, files, prompt, answer)
    except PromptsUnknown as error:
        if not asks:
            raise
        click.echo(f"  {error}")
        return _read_rows(data, model, files, (click.prompt("Column of prompts"), answer), asks)
    if asks and rows.answer is None and rows.columns:
        none = "none"
        text = click.prompt(f"Column of answers ({', '.join((*rows.columns, none))})", default=none)
        return rows if text == none else read_rows(data, model, files, rows.prompt, text)
    return rows


def _write(
    files: NewFiles, model: ChosenModel, rows: PromptData, reward: str, machine: Machine, engines: Engines
) -> Plan:
    """Write all files, create the tiny model if it was chosen, and check the result by `plan`."""
    from enginehouse_rl.config.load import load_config
    from enginehouse_rl.plan.plan import plan

    if not model.path:
        _make_tiny(files.directory, rows)
    files.write(CONFIG, config_text(model, rows, machine, engines))
    for name, text in reward_texts(rows, reward).items():
        files.write(name, text)
    with contextlib.chdir(files.directory), _assume_gpus(machine):
        try:
            return plan(load_config(CONFIG), config_path=CONFIG)
        except UserError as error:
            error.args = (
                f"`enginehouse plan` rejects the project that these answers create, so nothing is kept: {error}",
            )
            raise


def _assume_gpus(machine: Machine) -> contextlib.AbstractContextManager[None]:
    """Plan with the GPUs of another machine if the answer names one."""
    from enginehouse_rl.plan.device import assume_gpus, visible_gpus

    elsewhere = machine.gpus and (machine.address or not visible_gpus())
    return assume_gpus(machine.gpus, None) if elsewhere else contextlib.nullcontext()


def _make_tiny(directory: Path, rows: PromptData) -> None:
    from enginehouse_recipes import recipe
    from enginehouse_recipes.cli.recipes import make_beginning

    click.echo("Making the tiny model, and warming it up on demonstrations that are mostly wrong: a minute or two.")
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(directory):
        make_beginning(recipe(choose_recipe(rows)), ())


def _print_summary(files: NewFiles, plan: Plan, machine: Machine) -> None:
    facts = dict(plan.facts)
    click.echo(f"Written to {files.directory}: {', '.join(files.made)}")
    click.echo("`enginehouse plan` accepts it:")
    for label in ("data", "a step", "the run", "device"):
        click.echo(f"  {label:<6}  {facts[label]}")
    for note in plan.notes:
        click.echo(f"  note    {note}")
    as_if = f" --gpus {machine.gpus}" if machine.gpus else ""
    lines = [
        *([] if files.directory == Path.cwd() else [f"cd {shlex.quote(str(files.directory))}"]),
        f"pytest {TEST}",
        f"enginehouse plan {CONFIG}{as_if}",
        f"enginehouse train {CONFIG}",
        f"enginehouse report {RUN}",
    ]
    click.echo("Next:" + "".join(f"\n  {line}" for line in lines))
