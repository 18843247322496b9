"""The record that a name stands for, of something that a config may also name as `"module:attribute"`."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from enginehouse.config.arguments import check_call, check_values
from enginehouse.config.functions import extend_path, find_function
from enginehouse.errors import UserError
from enginehouse.plugin import Function, Reward, plugins, resolve
from enginehouse_testing.given import Given

F = TypeVar("F", bound=Function)


def function_record(kind: type[F], named: str | F) -> F:
    """The record of a function: the registered one, one made of `"module:function"`, or what was given.

    Raises:
        UserError: there is no such name, or no such function.
    """
    if not isinstance(named, str):
        return named
    there = plugins()
    if there.is_name(named):
        return there.get(kind, named)
    extend_path([os.getcwd()])
    find_function(there, kind, named, kind.kind, [os.getcwd()], always=True)
    return kind(name=named, function=named)


def check_given(record: Any, given: Given) -> None:
    """Check what is given beside a record, as `enginehouse plan` does, before anything is tried.

    Raises:
        UserError: a function does not take the arguments, or needs others.
    """
    if not isinstance(record, Function):
        return
    function = resolve(record.function)
    if isinstance(record, Reward):
        from enginehouse_testing.reward_trial import check_examples

        check_examples(record, given)
    else:
        check_call(function, "arguments", given.arguments, "arguments", positional=1)
    _, problems = check_values(function, "arguments", given.arguments)
    if problems:
        raise UserError(f"{record.kind} {record.name!r}: {'; '.join(problems)}")
