"""The record that a name stands for, of something that a config may also name as `"module:attribute"`."""

from __future__ import annotations

from typing import TypeVar

from enginehouse.plugin import Function, plugins

F = TypeVar("F", bound=Function)


def function_record(kind: type[F], named: str | F) -> F:
    """The record of a function: the registered one, one made of `"module:function"`, or what was given.

    Raises:
        PluginLookupError: there is no such name, or no such function.
    """
    if not isinstance(named, str):
        return named
    there = plugins()
    if there.is_name(named):
        return there.get(kind, named)
    there.function(kind, named)
    return kind(name=named, function=named)
