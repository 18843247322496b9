"""`enginehouse init`: a first config, reward and test, from four answers."""

from __future__ import annotations

import contextlib
import inspect
import keyword
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, TypeVar

import click

from enginehouse.cli.answers import LAPTOP, NESTED, OWN, SAMPLES, TINY, NewFiles

if TYPE_CHECKING:
    from enginehouse.cli.answers import Engines, Machine, Model, Rows
    from enginehouse.config.plan import Plan

T = TypeVar("T")

CONFIG, REWARD, TEST = "config.yaml", "reward.py", "test_reward.py"
TEMPLATES = Path(__file__).parent / "templates"
RUN = "runs/first"

HINTS = {
    "data.overlong_prompts": "drop keeps a first run going; `plan` says how many are left out",
    "data.chat_template": "Text is given as a user's message, since the model has a template; false: as it stands",
    "reward.function": "It lies beside this file, and test_reward.py tests it. Change that first: a run learns what is "
    "rewarded, not what is meant",
    "actor.engine.options.lr": "Learning rate: the first number to change. Lower it by half if the reward falls or the "
    "entropy collapses, double it if nothing moves",
    "rollout.samples_per_prompt": "They are compared with each other: more tell more, and take as much longer",
    "rollout.sampling.max_tokens": "Raise it if many responses are cut (`truncated` in the terminal)",
    "rollout.sampling.temperature": "1.0 draws what the model would; lower gives less to choose from",
    "evaluation.sampling.temperature": "1.0: as in training, so that the two figures can be compared",
    "environment.arguments": "`max_turns` are answers: a call of the tool, and what is said after its result",
    "algorithm.advantage.name": "grpo needs no critic; `enginehouse recipes list` has others",
    "algorithm.kl.coefficient": "It holds the model near where it began; 0 lets it go, and saves a pass",
    "train.steps": "So many are enough to see whether it learns; then more",
    "train.prompts_per_step": "More make a step's direction surer, and take as much longer",
    "train.checkpoint_every": "`enginehouse train config.yaml --resume` goes on from the newest",
    "cluster.device": "As was answered; it is refused where there is none",
    "run.directory": "A directory that holds a run is refused: name another for the next, run.directory=runs/second",
}
"""What is said of a key besides what it is: why it has its value, what to change first."""


@click.command()
@click.argument("directory", type=click.Path(file_okay=False), default=".")
@click.option("--model", help=f"A model's directory, a hub id that is in the local cache, or {TINY}: one is made.")
@click.option("--data", help=f"A file of prompts (jsonl, parquet, csv), or {' or '.join(SAMPLES)}: it is made.")
@click.option("--reward", help=f"exact_match, numeric, math, or {OWN}: a function to write.")
@click.option("--machine", help=f"{LAPTOP}; a number of GPUs; or 8@ADDRESS, GPUs of a Ray cluster.")
@click.option("--prompt", "prompt", metavar="COLUMN", help="The column of prompts, where it is not guessed right.")
@click.option("--answer", "answer", metavar="COLUMN", help="The column of answers, alike.")
@click.option("-y", "--yes", is_flag=True, help="Ask nothing: take the defaults of what is not given.")
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
    """Begin in DIRECTORY, here if none is named: a config, a reward and its test, from four answers.

    \b
    enginehouse init first                                  asks
    enginehouse init first --yes                            a tiny model that learns to sort, within minutes
    enginehouse init first --data calculator --yes          ... or to multiply by a tool
    enginehouse init math --model Qwen/Qwen3-0.6B --data gsm8k.jsonl --machine 1 --yes

    Nothing is overwritten. What is written passes `enginehouse plan`, or nothing is.

    Exit codes: 0 written, 2 an answer cannot be, or a file is in the way.
    """
    from enginehouse.cli import answers

    files = NewFiles(Path(directory).absolute())
    files.check(CONFIG, REWARD, TEST)
    try:
        the_model = _ask("model", model, TINY, yes, lambda given: answers.read_model(given, files.directory))
        rows = _ask(
            "data", data, "sorting", yes, lambda given: answers.read_rows(given, the_model, files, prompt, answer)
        )
        click.echo(f"  {rows.said}")
        fitting = answers.fitting_rewards(rows)
        choices = [name for name, why in fitting.items() if not why]
        if reward is None and not yes:
            for name, why in fitting.items():
                if why:
                    click.echo(f"  not {name}: {why}")
        the_reward = _ask("reward", reward, choices[0], yes, lambda given: answers.read_reward(given, rows), choices)
        the_machine = _ask("machine", machine, _machine_here(), yes, answers.read_machine)
        engines = answers.choose_engines(the_machine) if the_model.path else answers.Engines()
        for line in engines.better:
            click.echo(f"  {line}")
        plan = _write(files, the_model, rows, the_reward, the_machine, engines)
    except BaseException:
        files.take_back()
        raise
    _say(files, plan, the_machine)


_QUESTIONS = {
    "model": f"Model: a directory, a hub id in the local cache, or {TINY} (made here, learns within minutes)",
    "data": f"Data: a file of prompts (jsonl, parquet, csv), or {', '.join(SAMPLES)} (made here)",
    "reward": "Reward",
    "machine": f"Machine: {LAPTOP}, a number of GPUs, or GPUs of a Ray cluster as 8@auto",
}


def _ask(
    name: str, given: str | None, default: str, yes: bool, read: Callable[[str], T], choices: Sequence[str] = ()
) -> T:
    """An answer, read: what was given, or the default, or what the terminal says, asked until it can be."""
    from enginehouse.errors import ConfigError, UserError

    if given is not None or yes:
        try:
            return read(default if given is None else given)
        except UserError as error:
            error.args = (f"--{name}: {error}", *error.args[1:])
            raise
    while True:
        try:
            text = click.prompt(_QUESTIONS[name] + f" ({', '.join(choices)})" * bool(choices), default=default)
        except click.Abort:
            if sys.stdin.isatty():
                raise
            raise ConfigError(f"nobody answers for the {name}: say --{name}, or --yes for {default}") from None
        try:
            return read(text)
        except UserError as error:
            click.echo(f"  {error}")


def _machine_here() -> str:
    """The machine's name as an answer."""
    from enginehouse.config.device import torch_has_cuda, visible_gpus

    return str(visible_gpus()) if visible_gpus() and torch_has_cuda() else LAPTOP


def _write(files: NewFiles, model: Model, rows: Rows, reward: str, machine: Machine, engines: Engines) -> Plan:
    """Write all files, make the tiny model where it is asked for, and have `plan` look at what is there."""
    from enginehouse.config.load import load_config
    from enginehouse.config.plan import plan
    from enginehouse.errors import UserError

    if not model.path:
        _make_tiny(files.directory, rows)
    files.write(CONFIG, config_text(model, rows, machine, engines))
    for name, text in reward_texts(rows, reward).items():
        files.write(name, text)
    with contextlib.chdir(files.directory), _as_if_there(machine):
        try:
            return plan(load_config(CONFIG), config_path=CONFIG)
        except UserError as error:
            error.args = (f"`enginehouse plan` refuses what these answers make, so nothing is kept: {error}",)
            raise


def _as_if_there(machine: Machine) -> contextlib.AbstractContextManager[None]:
    """A plan for GPUs that are elsewhere is made as if they were here."""
    from enginehouse.config.device import assumed_gpus, visible_gpus

    elsewhere = machine.gpus and (machine.address or not visible_gpus())
    return assumed_gpus(machine.gpus, None) if elsewhere else contextlib.nullcontext()


def _make_tiny(directory: Path, rows: Rows) -> None:
    from enginehouse.cli.recipes import make_beginning
    from enginehouse.recipes import recipe

    click.echo("Making the tiny model, and warming it up on demonstrations that are mostly wrong: a minute or two.")
    directory.mkdir(parents=True, exist_ok=True)
    with contextlib.chdir(directory):
        make_beginning(recipe(_recipe_of(rows)), ())


def _recipe_of(rows: Rows) -> str:
    return SAMPLES["calculator" if rows.tools else "sorting"]


def config_text(model: Model, rows: Rows, machine: Machine, engines: Engines) -> str:
    """The config, with what each key is."""
    from enginehouse.cli.commented import commented
    from enginehouse.config.document import parse
    from enginehouse.config.schema import Config
    from enginehouse.plugin import RolloutBackend, TrainBackend, plugins, resolve
    from enginehouse.recipes import recipe

    source = TEMPLATES / CONFIG if model.path else recipe(_recipe_of(rows)).path
    values, _ = parse(source.read_text(encoding="utf-8"), str(source))
    values = _merged(values, _of_machine(machine, engines, bool(model.path)))
    values = _merged(values, {"reward": {"function": "reward:score"}, "run": {"directory": RUN}})
    if model.path:
        values = _merged(values, _of_model_and_rows(values, model, rows))
        if not rows.validation:
            del values["evaluation"], values["train"]["validate_every"]
    options = {
        "actor.engine.options": plugins().get(TrainBackend, engines.train, elsewhere=True),
        "rollout.engine.options": plugins().get(RolloutBackend, engines.rollout, elsewhere=True),
    }
    hints = {**HINTS, "rollout.engine.backend": engines.others, "data.train": f"Here: {rows.said}"}
    head = (
        "# A first run. Any key can be overridden on the command line: enginehouse train config.yaml train.steps=20\n"
        "# Paths are relative to where the command is run. `enginehouse keys` lists all keys, with their defaults.\n\n"
    )
    return head + commented(values, Config, hints, {key: resolve(one.options) for key, one in options.items()})


def _of_machine(machine: Machine, engines: Engines, large: bool) -> dict[str, Any]:
    """What the machine decides; `large`: the model is not the tiny one."""
    processes = max(machine.gpus, 1)
    values: dict[str, Any] = {
        "actor": {"processes": processes, "engine": {"backend": engines.train}},
        "rollout": {
            "placement": "auto" if engines.train == engines.rollout else "shared",
            "replicas": processes,
            "engine": {"backend": engines.rollout},
        },
        "cluster": {"device": "cuda" if machine.gpus else "cpu"},
    }
    if machine.address:
        values["cluster"]["address"] = machine.address
    if large and not machine.gpus:
        small = {"samples_per_prompt": 4, "sampling": {"max_tokens": 128}}
        short = {"steps": 20, "prompts_per_step": 4, "validate_every": 10}
        values = _merged(values, {"rollout": small, "train": short, "evaluation": {"max_prompts": 16}})
    return values


def _of_model_and_rows(values: Mapping[str, Any], model: Model, rows: Rows) -> dict[str, Any]:
    """What a model and data of the user's decide."""
    most, longest = values["rollout"]["sampling"]["max_tokens"], values["data"]["max_prompt_tokens"]
    if model.positions is not None:
        most = min(most, model.positions // 2)
        longest = min(longest, model.positions - most)
    data: dict[str, Any] = {"train": rows.train, "prompt": rows.prompt, "max_prompt_tokens": longest}
    if rows.validation:
        data["validation"] = rows.validation
    if not rows.chats:
        data["chat_template"] = model.chats
    decided: dict[str, Any] = {
        "model": {"path": model.path},
        "data": data,
        "rollout": {"sampling": {"max_tokens": most}},
        "train": {"prompts_per_step": min(values["train"]["prompts_per_step"], rows.count)},
    }
    if rows.tools:
        decided["environment"] = {"name": "tools", "arguments": {"tools": ["calculator"], "max_turns": 3}}
    return decided


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings as one, the other's values where both have some."""
    merged = dict(one)
    for name, value in other.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = _merged(merged[name], value) if both else value
    return merged


def reward_texts(rows: Rows, reward: str) -> dict[str, str]:
    """The reward's file and its test, by name."""
    column = rows.answer
    named = column is not None and column.isidentifier() and not keyword.iskeyword(column)
    parameter = column if named else "**columns"
    held = (column if named else f"columns[{column!r}]") if column else ""
    expression = f"{held}[{NESTED[column]!r}]" if column in NESTED else held
    if any(not isinstance(one, str) for one in rows.answers) and reward in ("exact_match", OWN):
        expression = f"str({expression})"
    if reward == OWN:
        given = {
            "parameters": ", ".join(filter(None, ["response", parameter if column else ""])),
            "columns": ", ".join(map(repr, rows.columns)).replace("\\", "") or "none",
            "value": f"float({expression} in response)" if column else "float(0 < len(response) <= 200)",
        }
        source = "own_reward.txt"
    else:
        given = {**_of_builtin(reward, expression), "parameter": str(parameter)}
        source = "built_in_reward.txt"
    right = str(rows.answers[0]) if column else "A short response."
    first = {NESTED[column]: rows.answers[0]} if column in NESTED else rows.answers[0] if column else None
    tested = {"columns": repr({column: first} if column else {}), "right": repr(right), "wrong": repr("")}
    return {REWARD: _filled(source, given), TEST: _filled("test_reward.txt", tested)}


def _of_builtin(reward: str, answer: str) -> dict[str, str]:
    from enginehouse.cli.answers import builtin, takes_prompt

    function = builtin(reward)
    arguments = ['prompt=""'] * takes_prompt(function) + ["response=response", f"answer={answer}"]
    said = (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")
    return {
        "module": function.__module__,
        "name": function.__name__,
        "summary": said.replace("the data set's `answer` column", "the answer"),
        "arguments": ", ".join(arguments),
    }


def _filled(template: str, values: Mapping[str, str]) -> str:
    return Template((TEMPLATES / template).read_text(encoding="utf-8")).substitute(values)


def _say(files: NewFiles, plan: Plan, machine: Machine) -> None:
    """What was written, what `plan` says of it, and what comes next."""
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
