"""Ready configs: an algorithm or an environment each, on a task that two CPU cores learn in a few minutes.

A recipe is a YAML file of this folder. Its header says whose setting it is, in what it differs and which command runs
it; its paths say what it begins from, below `runs/recipes/`: `task/` is what `sorting` makes, `chat/` what `chat` does
and `sums/` what `sums` does, `NAME/` is the run of the recipe of that name. Read light: neither torch nor pydantic is
imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from enginehouse.errors import UserError, nearest

DIRECTORY = Path("runs", "recipes")
"""Where recipes run and find what they begin from, relative to the current directory."""

TASKS = {
    "task": ("enginehouse_recipes.sorting:make_task", "the task, to sort six digits, and its model"),
    "chat": ("enginehouse_recipes.chat:make_chat", "games of several turns, and their model"),
    "sums": ("enginehouse_recipes.sums:make_sums", "sums of two numbers"),
}
"""The folders there with a task, and most with its model: what makes one, and what it is."""

_COMMAND = re.compile(r"^#   enginehouse (\w+) \S+\.yaml$", re.MULTILINE)


class Recipe(NamedTuple):
    """A config that comes with enginehouse.

    Attributes:
        name: what it is called, and its file.
        path: the file.
        text: what it holds.
    """

    name: str
    path: Path
    text: str

    @property
    def summary(self) -> str:
        """The first line of its header."""
        return self.text.partition("\n")[0].removeprefix("# ")

    @property
    def command(self) -> str:
        """The command that runs it: `"train"`, `"sft"`, `"dpo"` or `"rm"`."""
        (command,) = _COMMAND.findall(self.text)
        return command


def recipes() -> dict[str, Recipe]:
    """All of them, by name."""
    files = sorted(Path(__file__).parent.glob("*.yaml"))
    return {file.stem: Recipe(file.stem, file, file.read_text(encoding="utf-8")) for file in files}


def recipe(name: str) -> Recipe:
    """The recipe of that name.

    Raises:
        UserError: there is none; with the nearest.
    """
    known = recipes()
    if name not in known:
        raise UserError(f"there is no recipe {name!r}; {nearest(name, known)}")
    return known[name]


def needs(config: Mapping[str, Any]) -> list[str]:
    """What a config begins from, in the order of its keys: of `TASKS`, or names of recipes."""
    paths = (Path(text) for section, held in config.items() if section != "run" for text in _texts(held))
    inside = [path.relative_to(DIRECTORY).parts[0] for path in paths if path.is_relative_to(DIRECTORY)]
    return list(dict.fromkeys(inside))


def _texts(held: Any) -> Iterator[str]:
    if isinstance(held, str):
        yield held
    elif isinstance(held, Mapping):
        for value in held.values():
            yield from _texts(value)
    elif isinstance(held, list):
        for value in held:
            yield from _texts(value)
