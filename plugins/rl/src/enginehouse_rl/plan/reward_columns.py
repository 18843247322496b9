"""Checks the data columns that rewards and environments get, also by the functions' own checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import getattr_static
from typing import TYPE_CHECKING, Any

from enginehouse.errors import ConfigError, UserError
from enginehouse.plugin.records import keywords, resolve
from enginehouse_rl.data.files import Shape
from enginehouse_rl.plan.arguments import check_call

if TYPE_CHECKING:
    from enginehouse_rl.plan.rewards import RewardPlan
    from enginehouse_rl.plan.row_lengths import Tokenizer


@dataclass(frozen=True)
class RowColumns:
    """Rows that have the same columns.

    Attributes:
        where: the name of the rows in messages.
        names: the columns, without the prompt.
    """

    where: str
    names: tuple[str, ...]


def list_columns(shapes: Sequence[Shape], name: str, prompt: str, where: Callable[[int], str]) -> list[RowColumns]:
    """Return the columns of a file's rows, without the prompt. In messages, `name` names the rows of the first shape,
    and `where` names other rows."""
    groups = []
    for number, shape in enumerate(shapes):
        more = f" and {shape.rows - 1:,} more rows" if shape.rows > 1 else ""
        rows = f"{where(shape.first)}{more}" if number else name
        groups.append(RowColumns(rows, tuple(column for column in shape.columns if column != prompt)))
    return groups


def check_reward_columns(
    function: Callable[..., Any] | None,
    key: str,
    arguments: Mapping[str, Any],
    columns: Sequence[RowColumns],
    gets: Sequence[str],
) -> None:
    """Check that a reward can be called with the columns of each row.

    Args:
        function: the reward; None: only names are checked.
        key: the key of the reward's section in the config.
        gets: the names of the arguments that the run passes to every reward.

    Raises:
        ConfigError: the reward requires an argument that it does not get, or does not take one of `arguments`; or a
            column has the name of one of its other arguments.
    """
    accepted = None if function is None else keywords(function)
    for rows in columns:
        for name in gets:
            if name in rows.names and (accepted is None or name in accepted):
                raise ConfigError(
                    f"{rows.where}: a reward gets {name!r} from the run, so it would never see the column {name!r}; "
                    "rename the column in the data"
                )
    for rows in columns or [RowColumns("", ())]:
        passable = [*gets, *rows.names]
        if clash := next((name for name in arguments if name in passable), None):
            source = "the run" if clash in gets else f"the column {clash!r} of {rows.where}"
            raise ConfigError(
                f"{key}.arguments.{clash}: the reward already gets an argument {clash!r} from {source}; give this one "
                "another name, here and in the function"
            )
        if function is not None and columns:
            sources = f"{', '.join(gets)}, the columns of {rows.where} and {key}.arguments (docs/rewards.md)"
            passed = [name for name in passable if accepted is None or name in accepted]
            check_call(function, f"{key}.function", [*passed, *arguments], sources, values=arguments)


def check_rewards(rewards: Sequence[RewardPlan], columns: Sequence[RowColumns], gets: Sequence[str]) -> None:
    for reward in rewards:
        check_reward_columns(resolve(reward.function), reward.key, reward.arguments, columns, gets)


def run_own_check(
    function: Callable[..., Any], key: str, arguments: Mapping[str, Any], columns: Sequence[RowColumns] | None
) -> None:
    """Call the `check` of a reward or an environment, if it has one, with its arguments and the columns of each row.

    Raises:
        ConfigError: the error that `check` raised, with `key` before its message.
    """
    if any(isinstance(value, str) and "${" in value for value in arguments.values()):
        return  # the reward's process reads the variable
    if isinstance(function, type) and not isinstance(getattr_static(function, "check", None), staticmethod):
        return  # a method `check` of instances is another check
    check = getattr(function, "check", lambda arguments, columns: None)
    shapes: list[tuple[str, ...] | None] = [rows.names for rows in columns or ()]
    for names in shapes or [None]:
        try:
            check(arguments, names)
        except ConfigError as error:
            error.args = (f"{key}: {error}", *error.args[1:])
            raise


def run_tokenizer_check(
    function: Callable[..., Any], key: str, arguments: Mapping[str, Any], tokenizer: Tokenizer
) -> None:
    """Call the `check_tokenizer` of an environment, if it has one, with the model's tokenizer.

    Raises:
        UserError: the error that `check_tokenizer` raised, with `key` before its message.
    """
    check = getattr_static(function, "check_tokenizer", None)
    if not isinstance(check, staticmethod):
        return
    if (loaded := tokenizer()) is not None:
        try:
            check(arguments, loaded)
        except UserError as error:
            error.args = (f"{key}: {error}", *error.args[1:])
            raise
