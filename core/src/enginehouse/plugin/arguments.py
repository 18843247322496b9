"""Descriptions of a function's arguments, for `plugins show` and for messages."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

TYPES: dict[Any, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    NoneType: "null",
    None: "null",
    dict: "mapping",
    Any: "anything",
}
"""Names of Python types in the terms of YAML."""
BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}

REQUIRED = "(required)"
"""Text in place of a missing default."""

KL_ARGUMENTS = {"kl_coefficient": "algorithm.kl.coefficient", "kl_estimator": "algorithm.kl.estimator"}
"""Loss arguments that the KL term sets, and the config keys of their values."""

UNREADABLE = (NameError, AttributeError, TypeError, ValueError, SyntaxError)
"""Errors that the evaluation of an annotation may raise."""


class Argument(NamedTuple):
    """One argument.

    Attributes:
        type: type with its bounds; empty without an annotation.
        default: default as YAML shows it, or `REQUIRED`.
        description: entry of the argument in the section `Args:` of the function's docstring.
    """

    name: str
    type: str
    default: str
    description: str

    def __str__(self) -> str:
        default = self.default.strip("()") if self.default == REQUIRED else f"default {self.default}"
        return f"{self.name}: {'; '.join(filter(None, (self.type, default)))}"


def arguments_of(function: Callable[..., Any], positional: int = 0) -> list[Argument]:
    """Return the arguments that a config can give by name, without the first `positional` arguments."""
    descriptions = _read_descriptions(function)
    return [
        Argument(
            parameter.name,
            _type_of(function, parameter),
            REQUIRED if parameter.default is parameter.empty else default_words(parameter.default),
            descriptions.get(parameter.name, ""),
        )
        for parameter in parameters_by_name(list(parameters_of(function).values()), positional)
        if parameter.kind is not parameter.POSITIONAL_ONLY
    ]


def type_words(annotation: Any) -> str:
    """Describe a type with its bounds in the words of YAML, such as `"number or null, > 0"`."""
    words, bounds = _type(annotation)
    return ", ".join([words, *bounds])


def bounds_of(metadata: Iterable[Any]) -> list[str]:
    """Describe the bounds in the metadata of an annotation."""
    marks = [mark for item in metadata for mark in getattr(item, "metadata", [item])]
    return [f"{sign} {getattr(mark, name)}" for mark in marks for name, sign in BOUNDS.items() if hasattr(mark, name)]


def default_words(value: Any) -> str:
    """Return a default as YAML shows it; `"unset"` for None."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(default_words, value))}]"
    return "unset" if value is None else str(value.value if isinstance(value, Enum) else value)


def _type(annotation: Any) -> tuple[str, list[str]]:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        words, bounds = _type(inner[0])
        return words, [*bounds, *bounds_of(inner[1:])]
    if origin in (Union, UnionType):
        parts = [_type(part) for part in inner]
        return " or ".join(words for words, _ in parts), [bound for _, bounds in parts for bound in bounds]
    if origin is Literal:
        return " | ".join(map(str, inner)), []
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        return " | ".join(str(member.value) for member in annotation), []
    if isinstance(origin, type) and issubclass(origin, Collection):
        contents = [type_words(part) for part in inner if part is not ...]
        words = (
            f"mapping of {' to '.join(contents)}" if issubclass(origin, Mapping) else f"list of {', '.join(contents)}"
        )
        return words, []
    if annotation in TYPES:
        return TYPES[annotation], []
    if isinstance(annotation, type):
        return annotation.__name__, []
    return str(annotation).replace("typing.", ""), []


def _type_of(function: Callable[..., Any], parameter: inspect.Parameter) -> str:
    try:
        return "" if parameter.annotation is parameter.empty else type_words(annotation_of(function, parameter))
    except UNREADABLE:
        return str(parameter.annotation)


def _read_descriptions(function: Callable[..., Any]) -> dict[str, str]:
    """Return the entries of the section `Args:` of a docstring, by argument."""
    lines = (inspect.getdoc(function) or "").splitlines()
    entries: dict[str, str] = {}
    name = ""
    for line in lines[lines.index("Args:") + 1 :] if "Args:" in lines else ():
        if line and not line.startswith(" "):
            break
        if entry := re.fullmatch(r" {4}(\w+)(?: \(.*?\))?: *(.*)", line):
            name, entries[entry[1]] = entry[1], entry[2]
        elif name and line:
            entries[name] = f"{entries[name]} {line.strip()}"
    return entries


def parameters_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function by name; an empty mapping if they are unknown."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return {}


def parameters_by_name(parameters: Sequence[inspect.Parameter], positional: int) -> list[inspect.Parameter]:
    """Return the parameters that are not yet filled when `positional` arguments are given by position."""
    by_name = [parameter for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return by_name
    ordered_kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    ordered = [parameter for parameter in parameters if parameter.kind in ordered_kinds]
    return ordered[positional:] + by_name


def annotation_of(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the evaluated annotation of a parameter; `Any` if it has no annotation."""
    if parameter.annotation is parameter.empty:
        return Any
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    constructor: Any = function.__init__ if isinstance(function, type) else function  # type: ignore[misc]
    return eval(parameter.annotation, getattr(inspect.unwrap(constructor), "__globals__", {}))
