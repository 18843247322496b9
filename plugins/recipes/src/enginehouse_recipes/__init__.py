"""Ready-made configs, each for an algorithm or an environment, on a task that two CPU cores learn in a few minutes.

A recipe is a YAML file in this folder. Its header names the source of its settings, the differences from this source,
and the command that runs it. Its paths below `runs/recipes/` name the models and data that it starts from. `sorting`
creates `task/`, `chat` creates `chat/`, and `sums` creates `sums/`. `smollm2-135m-instruct` is the model that
`real_model` stores in the user's cache, and the recipes of the folder `real` train it. `NAME/` is the run of another
recipe. This module imports neither torch nor pydantic.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from enginehouse.errors import UserError, nearest

DIRECTORY = Path("runs", "recipes")
"""Directory of the recipes' runs and of the models and data that they start from, relative to the current directory."""

TASKS = {
    "task": ("enginehouse_recipes.sorting:make_task", "the task, to sort six digits, and its model"),
    "chat": ("enginehouse_recipes.chat:make_chat", "games of several turns, and their model"),
    "sums": ("enginehouse_recipes.sums:make_sums", "sums of two numbers, and products"),
    "smollm2-135m-instruct": (
        "enginehouse_recipes.real_model:link_real_model",
        "a link to the real model, SmolLM2-135M-Instruct",
    ),
}
"""Folders below `DIRECTORY` with a task, a model or both: the function that creates each folder, and a description."""

FORMER_NAMES = {"sums": "real/grpo"}
"""Former names of recipes, which are still accepted."""

_COMMAND = re.compile(r"^#   enginehouse (\w+) \S+\.yaml$", re.MULTILINE)


class Recipe(NamedTuple):
    name: str
    path: Path
    text: str

    @property
    def summary(self) -> str:
        """First line of its header."""
        return self.text.partition("\n")[0].removeprefix("# ")

    @property
    def command(self) -> str:
        """Command that runs it: `"train"`, `"sft"`, `"dpo"` or `"rm"`."""
        (command,) = _COMMAND.findall(self.text)
        return command


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name. The name of a recipe in a folder is `folder/name`."""
    folder = Path(__file__).parent
    files = {
        file.relative_to(folder).with_suffix("").as_posix(): file
        for pattern in ("*.yaml", "real/*.yaml")
        for file in sorted(folder.glob(pattern))
    }
    return {name: Recipe(name, file, file.read_text(encoding="utf-8")) for name, file in files.items()}


def recipe(name: str) -> Recipe:
    """Return a recipe by its name or a former name.

    Raises:
        UserError: there is no such recipe; the message suggests the nearest.
    """
    by_name = recipes()
    name = FORMER_NAMES.get(name, name)
    if name not in by_name:
        raise UserError(f"unknown recipe {name!r}. {nearest(name, by_name)}. `enginehouse recipes list` lists all")
    return by_name[name]


def needs(config: Mapping[str, Any]) -> list[str]:
    """Return the tasks (`TASKS`) and recipes that a config starts from, by name, in the order of the config's keys."""
    paths = (Path(text) for section, values in config.items() if section != "run" for text in _iterate_texts(values))
    inside = [path.relative_to(DIRECTORY).parts for path in paths if path.is_relative_to(DIRECTORY)]
    return list(dict.fromkeys("/".join(parts[: 2 if parts[0] == "real" else 1]) for parts in inside))


def _iterate_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _iterate_texts(item)
