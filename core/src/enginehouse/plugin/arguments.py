"""The arguments of a function that a config names, in words: for `plugins show`, and for messages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}

REQUIRED = "(required)"
"""In place of a default."""

KL_ARGUMENTS = {"kl_coefficient": "algorithm.kl.coefficient", "kl_estimator": "algorithm.kl.estimator"}
"""Arguments that a loss gets from the KL term, and the keys that say their values."""

UNREADABLE = (NameError, AttributeError, TypeError, ValueError, SyntaxError)
"""What evaluating an annotation raises that cannot be evaluated."""


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
        for one in parameters_by_name(list(parameters_of(function).values()), positional)
        if one.kind is not one.POSITIONAL_ONLY
    ]


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
        return "" if parameter.annotation is parameter.empty else type_words(annotation_of(function, parameter))
    except UNREADABLE:
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


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return {}


def parameters_by_name(parameters: Sequence[inspect.Parameter], positional: int) -> list[inspect.Parameter]:
    """The parameters that are left for keyword arguments when `positional` others came first."""
    by_name = [one for one in parameters if one.kind is one.KEYWORD_ONLY]
    if any(one.kind is one.VAR_POSITIONAL for one in parameters):
        return by_name
    ordered = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return ordered[positional:] + by_name


def annotation_of(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if parameter.annotation is parameter.empty:
        return Any
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    made_by: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    return eval(parameter.annotation, getattr(inspect.unwrap(made_by), "__globals__", {}))
