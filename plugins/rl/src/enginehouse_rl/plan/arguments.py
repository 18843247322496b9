"""Checks the arguments that a config gives to a function that it names."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from enginehouse.errors import ConfigError
from enginehouse.plugin.arguments import UNREADABLE, annotation_of, arguments_of, parameters_by_name, parameters_of
from enginehouse_rl.config.load import MISTYPED, answers, in_words

if TYPE_CHECKING:
    from enginehouse.plugin.findings import Findings


def check_values(
    function: Callable[..., Any], key: str, arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Check arguments against the types, ranges and choices that `function` is annotated with.

    Whatever pydantic can check counts, `Literal["a", "b"]` and `Annotated[float, Field(gt=0)]` too. Values are taken as
    JSON would be: a list will do for a tuple, a string of digits for no number. They are not converted, but for the
    value of an `Enum`, which becomes its member.

    Args:
        function: what will be called. A parameter without an annotation, or with one that cannot be evaluated, takes
            anything, as does each its own default.
        key: the config key of the arguments, for messages.
        arguments: by name.

    Returns:
        The arguments to call it with, and a message for each that will not do.
    """
    checked, problems = dict(arguments), []
    for name, value in arguments.items():
        parameter = parameters_of(function).get(name)
        if parameter is None:
            continue
        try:
            if value == parameter.default:
                checked[name] = parameter.default
                continue
            adapter: TypeAdapter[Any] = TypeAdapter(annotation_of(function, parameter))
            taken = adapter.validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            problems.append("; or ".join(in_words(detail, f"{key}.{name}") for detail in error.errors()[:4]))
        except (PydanticUserError, *UNREADABLE):
            continue  # nothing to check it by
        else:
            checked[name] = taken if _holds_member(taken) else value
    return checked, problems


def take_values(
    findings: Findings, function: Callable[..., Any], name: str, key: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Have among the findings what is wrong with the arguments of `function`, which the config calls `name`.

    Returns:
        The arguments to call it with.
    """
    taken, problems = check_values(function, key, arguments)
    for problem in problems:
        findings.refuse(f"{problem} (an argument of {name!r})")
    return taken


def check_call(
    function: Callable[..., Any],
    key: str,
    given: Iterable[str],
    named: str,
    *,
    positional: int = 0,
    cure: str = "",
    values: Mapping[str, Any] | None = None,
) -> None:
    """Check that `function` can be called with the keyword arguments `given`, after `positional` others.

    Args:
        function: what will be called.
        key: the config key that names it, for messages.
        given: names of keyword arguments.
        named: what they are called together, for messages: `"algorithm.loss.arguments"`.
        positional: how many positional arguments come first.
        cure: what to do about arguments the function does not take.
        values: of those that stand in the config, for what another project calls them.

    Raises:
        ConfigError: naming arguments the function does not take, and those it needs and does not get.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return  # written in C: only a call can tell
    given, shown = list(given), getattr(function, "__qualname__", repr(function))
    by_name = parameters_by_name(parameters, positional)
    ordered = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    if len(ordered) < positional and not any(one.kind is one.VAR_POSITIONAL for one in parameters):
        raise ConfigError(
            f"{key}: {shown}{inspect.signature(function)} takes {len(ordered)} positional arguments, it is given "
            f"{positional}"
        )
    known = {one.name for one in by_name if one.kind is not one.POSITIONAL_ONLY}
    unknown = [name for name in given if name not in known]
    if unknown and not any(one.kind is one.VAR_KEYWORD for one in parameters):
        hints = [_hint(name, known - set(given), (values or {}).get(name)) for name in unknown]
        said = "; ".join(filter(None, dict.fromkeys([*hints, cure])))
        raise ConfigError(
            f"{key}: {shown} does not take {_quoted(unknown)} (of {named}){f'; {said}' if said else ''}"
            + _listed(function, positional, end="" if said.endswith("?") else ".")
        )
    needed = [one.name for one in by_name if one.default is one.empty and one.name not in given]
    if needed:
        raise ConfigError(
            f"{key}: {shown} needs {_quoted(needed)}, which is not among {named}" + _listed(function, positional)
        )


def _holds_member(value: Any) -> bool:
    """Return whether a value is, or holds, a member of an `Enum`."""
    if isinstance(value, Mapping):
        return any(map(_holds_member, [*value, *value.values()]))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_holds_member, value))
    return isinstance(value, Enum)


def _hint(name: str, choices: Iterable[str], value: Any) -> str:
    """Return a substitute for an argument that a function lacks: one named alike, another project's, or the nearest."""
    for cutoff in (MISTYPED, 0.6):
        if near := difflib.get_close_matches(name, choices, n=1, cutoff=cutoff):
            return f"did you mean {near[0]!r}?"
        if cutoff == MISTYPED and (said := "; ".join(filter(None, answers((name,), value).values()))):
            return said
    return ""


def _listed(function: Callable[..., Any], positional: int, end: str = ".") -> str:
    """The end of a message: what a function takes; `end` ends the sentence before it."""
    lines = [f"\n  {one}" for one in arguments_of(function, positional)]
    return f"{end} It takes{':' if lines else ' none'}{''.join(lines)}"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
