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
        keeps_state: True if the actor's state is worth saving when this error ends a run. False if the state caused
            the error.
    """

    keeps_state: bool = True


class UserError(EnginehouseError):
    """A mistake in the user's input: config, command line, data set, model path or reward function."""


class ConfigError(UserError):
    """A config cannot be loaded or cannot work."""


class DataError(UserError):
    """A data file is missing or unreadable, or lacks a column that the config names."""


class SaveError(EnginehouseError):
    """State or a model could not be written. The error counts as a failure of the disk, not as a `UserError`, even if a
    user's mistake caused it."""


class SaveTooLate(SaveError):
    """The time limit passed before the state or the model was written completely."""


class ModelError(UserError):
    """A model path is missing, or its model cannot be loaded by the chosen engine."""


MOST_CHOICES = 20
"""Maximum number of choices that an error lists. If there are more, it names only the nearest three."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return the end of a message about an unknown name: a similar choice, if there is one, and the available choices.

    >>> nearest("trainr", ["trainer", "data"])
    "Did you mean 'trainer'? Available: data, trainer"
    """
    ordered = sorted(choices)
    if not ordered:
        return "None is available"
    if len(ordered) <= MOST_CHOICES:
        available = ", ".join(ordered)
    else:
        available = listed(difflib.get_close_matches(word, ordered, n=3, cutoff=0.0) + ordered[3:], most=3)
    return f"{did_you_mean(word, ordered)} Available: {available}".lstrip()


def did_you_mean(word: str, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a question that names the choice nearest to a word, or an empty text if no choice is similar enough.

    Args:
        cutoff: least similarity of a choice to the word, from 0 to 1.

    >>> did_you_mean("trainr", ["trainer", "data"])
    "Did you mean 'trainer'?"
    """
    close = difflib.get_close_matches(word, list(choices), n=1, cutoff=cutoff)
    return f"Did you mean {close[0]!r}?" if close else ""


def listed(names: Sequence[str], most: int = 5) -> str:
    """Return the first names of a list and the number of the remaining names.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or of its `repr` if it has none."""
    return (str(error) or repr(error)).splitlines()[0]


def describe_os_error(error: BaseException) -> str:
    """Return the reason of an `OSError` without error number and path, or the message of any other error."""
    return getattr(error, "strerror", None) or str(error)


def join_problems(problems: Sequence[str], where: str) -> str:
    """Return one message for all problems: a single line for one problem, a list for several problems."""
    if len(problems) == 1:
        return f"{where}: {problems[0]}"
    return f"{len(problems)} problems in {where}:\n" + "\n".join(
        "  - " + problem.replace("\n", "\n    ") for problem in problems
    )
