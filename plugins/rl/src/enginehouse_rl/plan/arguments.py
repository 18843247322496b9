"""Checks the arguments that a config gives to a function which the config names."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from inspect import Parameter
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from enginehouse.errors import ConfigError, did_you_mean
from enginehouse.plugin.arguments import UNREADABLE, annotation_of, arguments_of, parameters_by_name, parameters_of
from enginehouse_rl.config.load import MISTYPED, answer_keys, describe_error

if TYPE_CHECKING:
    from enginehouse.plugin.findings import Findings


def check_values(
    function: Callable[..., Any], key: str, arguments: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Check arguments against the types, ranges and choices in the annotations of `function`.

    Pydantic does the checking, including `Literal["a", "b"]` and `Annotated[float, Field(gt=0)]`. It follows the rules
    of JSON: a list is accepted for a tuple, but a string of digits is not accepted for a number. Values are returned
    unchanged, except that the value of an `Enum` becomes its member.

    Args:
        function: the function to call. A parameter accepts any value if it has no annotation, or an annotation that
            cannot be evaluated. Every parameter accepts its default.

    Returns:
        The arguments to call the function with, and a message for each wrong argument.
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
            parsed = adapter.validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            problems.append("; or ".join(describe_error(detail, f"{key}.{name}") for detail in error.errors()[:4]))
        except (PydanticUserError, *UNREADABLE):
            continue  # there is no annotation to check it against
        else:
            checked[name] = parsed if _holds_member(parsed) else value
    return checked, problems


def take_values(
    findings: Findings, function: Callable[..., Any], name: str, key: str, arguments: Mapping[str, Any]
) -> dict[str, Any]:
    """Reject wrong arguments of `function`, which the config calls `name`; return the arguments to call it with."""
    checked, problems = check_values(function, key, arguments)
    for problem in problems:
        findings.refuse(f"{problem} (an argument of {name!r})")
    return checked


def check_call(
    function: Callable[..., Any],
    key: str,
    names: Iterable[str],
    source: str,
    *,
    positional: int = 0,
    kind: str = "",
    called: str = "",
    values: Mapping[str, Any] | None = None,
) -> None:
    """Check that `function` can be called with `positional` positional arguments, and with keyword arguments `names`.

    Args:
        source: the origin of the arguments, for messages: `"algorithm.loss.arguments"`.
        positional: the number of positional arguments.
        kind: the kind of function. The message names it when the arguments under `key` may belong to another function
            of this kind.
        called: description of the function for messages; empty: the function's own name.
        values: the arguments as they stand in the config, which may use the names of another project (verl, TRL).

    Raises:
        ConfigError: the function does not take one of the arguments, or requires an argument that is not among them.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return  # written in C: only a call can tell
    names, values = list(names), values or {}
    title = called or getattr(function, "__qualname__", repr(function))
    by_name, kinds = parameters_by_name(parameters, positional), [parameter.kind for parameter in parameters]
    ordered = kinds.count(Parameter.POSITIONAL_ONLY) + kinds.count(Parameter.POSITIONAL_OR_KEYWORD)
    if ordered < positional and Parameter.VAR_POSITIONAL not in kinds:
        raise ConfigError(
            f"{key}: {title}{inspect.signature(function)} must take {positional} positional arguments, not {ordered}"
        )
    known_names = {parameter.name for parameter in by_name if parameter.kind is not Parameter.POSITIONAL_ONLY}
    unknown = [name for name in names if name not in known_names]
    if unknown and Parameter.VAR_KEYWORD not in kinds:
        hints = [_suggest(name, known_names - set(names), values.get(name)) for name in unknown]
        cure = f"To remove arguments of another {kind}, set {key}={{}}." if kind and values else ""
        advice = " ".join(filter(None, dict.fromkeys([*hints, cure])))
        raise ConfigError(
            f"{key}: {title} does not take {_quote(unknown)} (of {source}).{f' {advice}' if advice else ''}"
            + _list_parameters(function, positional)
        )
    required = [parameter.name for parameter in by_name if parameter.default is Parameter.empty]
    if needed := [name for name in required if name not in names]:
        noun = "the argument" if len(needed) == 1 else "the arguments"
        where = "" if source == key else f", not among {source}"
        raise ConfigError(
            f"{key}: {title} requires {noun} {_quote(needed)}{where}.{_list_parameters(function, positional)}"
        )


def _holds_member(value: Any) -> bool:
    """True if a value is a member of an `Enum`, or contains one."""
    if isinstance(value, Mapping):
        return any(map(_holds_member, [*value, *value.values()]))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_holds_member, value))
    return isinstance(value, Enum)


def _suggest(name: str, choices: Iterable[str], value: Any) -> str:
    """Return advice for an unknown argument: a similar name, the substitute of another project's name, or the nearest
    name."""
    for cutoff in (MISTYPED, 0.6):
        if near := did_you_mean(name, choices, cutoff):
            return near
        if cutoff == MISTYPED and (answer := "; ".join(filter(None, answer_keys((name,), value).values()))):
            return f"{answer[0].upper()}{answer[1:]}."
    return ""


def _list_parameters(function: Callable[..., Any], positional: int) -> str:
    """Return the last part of a message: the list of a function's arguments."""
    lines = [f"\n  {argument}" for argument in arguments_of(function, positional)]
    return " Arguments:" + "".join(lines) if lines else " It has no arguments"


def _quote(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)
