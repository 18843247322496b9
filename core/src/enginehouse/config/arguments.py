"""What a function that a config names takes: its arguments in words, and whether those of a config will do."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from enginehouse.config.load import MISTYPED, answers, in_words
from enginehouse.errors import ConfigError

if TYPE_CHECKING:
    from enginehouse.plugin.findings import Findings

BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}

REQUIRED = "(required)"
"""In place of a default."""

KL_ARGUMENTS = {"kl_coefficient": "algorithm.kl.coefficient", "kl_estimator": "algorithm.kl.estimator"}
"""Arguments that a loss gets from the KL term, and the keys that say their values."""

_NOT_TO_BE_CHECKED = (PydanticUserError, NameError, AttributeError, TypeError, ValueError, SyntaxError)
"""What an annotation raises that nothing can be checked by."""


class Argument(NamedTuple):
    """One argument.

    Attributes:
        name: its name.
        type: its type with its bounds; empty where its author does not say.
        default: as YAML would show it, or `REQUIRED`.
        description: what the docstring of the function says of it, in its section `Args:`.
    """

    name: str
    type: str
    default: str
    description: str

    def __str__(self) -> str:
        default = self.default.strip("()") if self.default == REQUIRED else f"default {self.default}"
        return f"{self.name}: {'; '.join(filter(None, (self.type, default)))}"


def arguments_of(function: Callable[..., Any], positional: int = 0) -> list[Argument]:
    """The arguments that a config can give by name; `positional` others come first."""
    described = _described(function)
    return [
        Argument(
            one.name,
            _type_of(function, one),
            REQUIRED if one.default is one.empty else default_words(one.default),
            described.get(one.name, ""),
        )
        for one in _by_name(list(_parameters(function).values()), positional)
        if one.kind is not one.POSITIONAL_ONLY
    ]


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
        parameter = _parameters(function).get(name)
        if parameter is None:
            continue
        try:
            if value == parameter.default:
                checked[name] = parameter.default
                continue
            adapter: TypeAdapter[Any] = TypeAdapter(_annotation(function, parameter))
            taken = adapter.validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            problems.append("; or ".join(in_words(detail, f"{key}.{name}") for detail in error.errors()[:4]))
        except _NOT_TO_BE_CHECKED:
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
    by_name = _by_name(parameters, positional)
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


def type_words(annotation: Any) -> str:
    """A type with its bounds, as users know it: `"float | None, > 0"`."""
    words, bounds = _type(annotation)
    return ", ".join([words, *bounds])


def bounds_of(metadata: Iterable[Any]) -> list[str]:
    """The bounds among what an annotation says besides the type."""
    told = [inner for one in metadata for inner in getattr(one, "metadata", [one])]
    return [f"{sign} {getattr(one, name)}" for one in told for name, sign in BOUNDS.items() if hasattr(one, name)]


def default_words(value: Any) -> str:
    """A default as YAML would show it."""
    return "unset" if value is None else str(value.value if isinstance(value, Enum) else value)


def _type(annotation: Any) -> tuple[str, list[str]]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        words, bounds = _type(inner[0])
        return words, [*bounds, *bounds_of(inner[1:])]
    if origin in (Union, UnionType):
        parts = [_type(one) for one in inner]
        return " | ".join(words for words, _ in parts), [bound for _, bounds in parts for bound in bounds]
    if origin is Literal:
        return " | ".join(map(str, inner)), []
    if annotation in (None, NoneType):
        return "None", []
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(str(one.value) for one in annotation), []
    if isinstance(origin, type):
        return f"{origin.__name__}[{', '.join('...' if one is ... else type_words(one) for one in inner)}]", []
    if isinstance(annotation, type):
        return annotation.__name__, []
    return str(annotation).replace("typing.", ""), []


def _type_of(function: Callable[..., Any], parameter: inspect.Parameter) -> str:
    try:
        return "" if parameter.annotation is parameter.empty else type_words(_annotation(function, parameter))
    except _NOT_TO_BE_CHECKED:
        return str(parameter.annotation)


def _described(function: Callable[..., Any]) -> dict[str, str]:
    """What the section `Args:` of a docstring says, by argument."""
    lines = (inspect.getdoc(function) or "").splitlines()
    found: dict[str, str] = {}
    name = ""
    for line in lines[lines.index("Args:") + 1 :] if "Args:" in lines else ():
        if line and not line.startswith(" "):
            break
        if begun := re.fullmatch(r" {4}(\w+)(?: \(.*?\))?: *(.*)", line):
            name, found[begun[1]] = begun[1], begun[2]
        elif name and line:
            found[name] = f"{found[name]} {line.strip()}"
    return found


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return {}


def _by_name(parameters: Sequence[inspect.Parameter], positional: int) -> list[inspect.Parameter]:
    """The parameters that are left for keyword arguments when `positional` others came first."""
    by_name = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return by_name
    ordered = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return ordered[positional:] + by_name


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if parameter.annotation is parameter.empty:
        return Any
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    made_by: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    return eval(parameter.annotation, getattr(inspect.unwrap(made_by), "__globals__", {}))


def _holds_member(value: Any) -> bool:
    """Whether a value is, or holds, a member of an `Enum`."""
    if isinstance(value, Mapping):
        return any(map(_holds_member, [*value, *value.values()]))
    if isinstance(value, (list, tuple, set, frozenset)):
        return any(map(_holds_member, value))
    return isinstance(value, Enum)


def _hint(name: str, choices: Iterable[str], value: Any) -> str:
    """What to give for an argument that a function lacks: one nearly called so, another project's row, the nearest."""
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
