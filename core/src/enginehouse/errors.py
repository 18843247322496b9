"""The root of every error this project raises on purpose.

Each error says what went wrong, where, and what to do about it. An error that a user can cause with bad
input derives from `UserError`: the command line prints its message alone and exits with code 2. Everything
else that ends a run exits with code 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["ConfigError", "DataError", "EnginehouseError", "ModelError", "SaveError", "UserError", "listed", "nearest"]


class EnginehouseError(Exception):
    """Base of all errors raised by enginehouse and its plugins.

    Attributes:
        keeps_state: whether the actor's state is worth saving when this ends a run; False where the state is at fault.
    """

    keeps_state: bool = True


class UserError(EnginehouseError):
    """A mistake in the user's input: config, command line, data set, model path, reward function."""


class ConfigError(UserError):
    """A config that cannot be loaded or cannot work."""


class DataError(UserError):
    """A data file that is missing, unreadable, or lacks what the config names."""


class SaveError(EnginehouseError):
    """State or a model that could not be written: of a disk, whatever mistake of a user's is said to be behind it."""


class SaveTooLate(SaveError):
    """State or a model of which only a part was written when the time for it was up."""


class ModelError(UserError):
    """A model path that is missing or is not a model the chosen engine can load."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the end of an error message: the nearest choice if one is near, and all of them.

    >>> nearest("trainr", ["trainer", "data"])
    "did you mean 'trainer'? Choices: data, trainer"
    """
    ordered = sorted(choices)
    if not ordered:
        return "there is nothing to choose from"
    choices_named = "Choices: " + ", ".join(ordered)
    close = difflib.get_close_matches(word, ordered, n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}? {choices_named}" if close else choices_named


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names of a list, and how many more there are.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or of what it is called where it has none."""
    return (str(error) or repr(error)).splitlines()[0]


def join_problems(problems: Sequence[str], where: str) -> str:
    """Write all problems as one text: the only one as it is, several as a list."""
    if len(problems) == 1:
        return f"{where}: {problems[0]}"
    return f"{len(problems)} problems in {where}:\n" + "\n".join(
        "  - " + problem.replace("\n", "\n    ") for problem in problems
    )
