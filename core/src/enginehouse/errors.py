"""The errors that enginehouse raises on purpose.

Each error says what went wrong, where, and what to do about it. An error that a user can cause with bad input derives
from `UserError`: the command line prints only its message and exits with code 2. Any other error exits with code 1.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

__all__ = ["ConfigError", "DataError", "EnginehouseError", "ModelError", "SaveError", "UserError", "listed", "nearest"]


class EnginehouseError(Exception):
    """Base of all errors raised by enginehouse and its plugins.

    Attributes:
        keeps_state: True if the actor's state is worth saving when this error ends a run. False if the state is at
            fault.
    """

    keeps_state: bool = True


class UserError(EnginehouseError):
    """A mistake in the user's input: config, command line, data set, model path or reward function."""


class ConfigError(UserError):
    """A config cannot be loaded or cannot work."""


class DataError(UserError):
    """A data file is missing or unreadable, or lacks what the config names."""


class SaveError(EnginehouseError):
    """State or a model could not be written. The disk is at fault, even if a user's mistake caused it."""


class SaveTooLate(SaveError):
    """State or a model was written only in part before the time limit."""


class ModelError(UserError):
    """A model path is missing, or its model cannot be loaded by the chosen engine."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the end of an error message: the nearest choice, if one is near, and all choices.

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
    """Return the first names of a list and the number of the remaining names.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or of its `repr` if it has none."""
    return (str(error) or repr(error)).splitlines()[0]


def join_problems(problems: Sequence[str], where: str) -> str:
    """Return all problems as one text, several as a list."""
    if len(problems) == 1:
        return f"{where}: {problems[0]}"
    return f"{len(problems)} problems in {where}:\n" + "\n".join(
        "  - " + problem.replace("\n", "\n    ") for problem in problems
    )
