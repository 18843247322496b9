"""The functions a config names, `module:function`: found, imported and checked against the arguments they will get.

A user's own module lies in the current directory or beside the config. These come last on the import path, in every
process of a run: a file there never stands in for a module of the standard library or of an installed package. A config
that names a module which is both is refused, since which of the two is meant cannot be known.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from enginehouse.config.load import in_words
from enginehouse.config.migration import answer_value
from enginehouse.errors import ConfigError, UserError
from enginehouse.plugin import ResolveError
from enginehouse.plugin.references import find_definition

if TYPE_CHECKING:
    from enginehouse.plugin import Function, PluginManager


_extended: list[str] = []
"""What `extend_path` has put last on `sys.path`."""


def extend_path(directories: Iterable[str]) -> None:
    """Let this process import from `directories` what is found nowhere else but in those of an earlier call."""
    earlier = [directory for directory in _extended if directory in sys.path]
    new = [directory for directory in directories if directory in earlier or directory not in sys.path]
    _extended[:] = dict.fromkeys([*new, *earlier])
    sys.path[:] = [path for path in sys.path if path not in _extended] + _extended
    importlib.invalidate_caches()


def find_function(
    plugins: PluginManager, kind: type[Function], name: str, key: str, python_path: Sequence[str], *, always: bool
) -> tuple[str, Callable[..., Any] | None]:
    """Find what the config calls `name`: a registered function, or the user's own `module:function`.

    The user's own is imported. A registered one is its plugin's business and may import torch: it is imported only if
    `always` says so, or if reading its source does not show that it can be called without arguments of the config.

    Returns:
        `"module:function"`, and the function if it was imported.

    Raises:
        UserError: there is no such function, or importing it fails.
    """
    if plugins.is_name(name):
        try:
            reference = plugins.get(kind, name).function
        except UserError as error:
            module, _, attribute = name.rpartition(".")
            hint = answer_value(name) or (f"a function of your own has a colon: {module}:{attribute}" if module else "")
            error.args = (f"{key}: {error}{f'. ({hint})' if hint else ''}", *error.args[1:])
            raise
        try:
            always = always or not _needs_nothing(find_definition(reference))
        except ResolveError as error:
            raise ConfigError(f"{key}: {name!r} is registered, but {error}") from error
        return reference, import_function(reference, key, python_path) if always else None
    _check_whose(name.partition(":")[0], key, python_path)
    return name, import_function(name, key, python_path)


def _needs_nothing(definition: ast.AST | None) -> bool:
    """Whether a function can be called with one positional argument, by its definition."""
    if not isinstance(definition, ast.FunctionDef) or definition.decorator_list:
        return False
    signature = definition.args
    without_default = len(signature.posonlyargs) + len(signature.args) - len(signature.defaults)
    return without_default <= 1 and None not in signature.kw_defaults


def import_function(reference: str, key: str, python_path: Sequence[str] = ()) -> Callable[..., Any]:
    """Import what `"module:function"` names.

    Args:
        reference: what the config says.
        key: the config key that says it, for messages.
        python_path: directories of the user's own modules, for the nearest name.

    Raises:
        ConfigError: saying which part fails: the form, the module, its own import, the function.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{key}: {reference!r} is neither a registered name nor of the form module:function")
    if module_name.endswith(".py") or os.sep in module_name:
        dotted = module_name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise ConfigError(f"{key}: {reference!r} names a file; name the module: {dotted}:{attribute}")
    found = _import(module_name, key, python_path)
    for part in attribute.split("."):
        if not hasattr(found, part):
            functions = [name for name, value in vars(found).items() if callable(value) and not name.startswith("_")]
            close = difflib.get_close_matches(part, functions, n=1)
            hint = (
                f"; did you mean {close[0]!r}?"
                if close
                else f"; it has {', '.join(functions[:10])}"
                if functions
                else ""
            )
            where = getattr(found, "__file__", None)
            raise ConfigError(f"{key}: module {module_name!r}{f' ({where})' if where else ''} has no {part!r}{hint}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{key}: {reference!r} is {type(found).__name__}, not a function")
    return found


def check_values(function: Callable[..., Any], key: str, arguments: Mapping[str, Any]) -> list[str]:
    """Check arguments against the types, ranges and choices that `function` is annotated with.

    Whatever pydantic can check counts, `Literal["a", "b"]` and `Annotated[float, Field(gt=0)]` too. Values are taken as
    JSON would be: a list will do for a tuple, a string of digits for no number. They are not converted.

    Args:
        function: what will be called. A parameter without an annotation, or with one that cannot be evaluated, takes
            anything, as does each its own default.
        key: the config key of the arguments, for messages.
        arguments: by name.

    Returns:
        A message for each that will not do.
    """
    problems = []
    for name, value in arguments.items():
        parameter = _parameters(function).get(name)
        if parameter is None:
            continue
        try:
            if value == parameter.default:
                continue
            adapter: TypeAdapter[Any] = TypeAdapter(_annotation(function, parameter))
            adapter.validate_json(json.dumps(value), strict=True)
        except ValidationError as error:
            problems.append("; or ".join(in_words(detail, f"{key}.{name}") for detail in error.errors()[:4]))
        except (PydanticUserError, NameError, AttributeError, TypeError, ValueError, SyntaxError):
            continue  # nothing to check it by
    return problems


def _parameters(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return {}


def _annotation(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    if parameter.annotation is parameter.empty:
        return Any
    if not isinstance(parameter.annotation, str):
        return parameter.annotation
    return eval(parameter.annotation, getattr(inspect.unwrap(function), "__globals__", {}))


def check_call(
    function: Callable[..., Any], key: str, given: Iterable[str], named: str, *, positional: int = 0, cure: str = ""
) -> None:
    """Check that `function` can be called with the keyword arguments `given`, after `positional` others.

    Args:
        function: what will be called.
        key: the config key that names it, for messages.
        given: names of keyword arguments.
        named: what they are called together, for messages: `"algorithm.loss.arguments"`.
        positional: how many positional arguments come first.
        cure: what to do about arguments the function does not take.

    Raises:
        ConfigError: naming arguments the function does not take, and those it needs and does not get.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return  # written in C: only a call can tell
    given = list(given)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        by_name = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    else:
        ordered = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        if len(ordered) < positional:
            raise ConfigError(
                f"{key}: {_shown(function)} takes {len(ordered)} positional arguments, it is given {positional}"
            )
        by_name = ordered[positional:] + [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    known = {p.name for p in by_name if p.kind is not p.POSITIONAL_ONLY}
    unknown = [name for name in given if name not in known]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        near = [close for name in unknown for close in difflib.get_close_matches(name, known - set(given), n=1)]
        hint = f"did you mean {near[0]!r}?" if near else f"it takes {_quoted(sorted(known)) or 'none'}"
        hint = f"{hint}; {cure}" if cure else hint
        raise ConfigError(f"{key}: {_shown(function)} does not take {_quoted(unknown)} (of {named}); {hint}")
    needed = [p.name for p in by_name if p.default is p.empty and p.name not in given]
    if needed:
        raise ConfigError(f"{key}: {_shown(function)} needs {_quoted(needed)}, which is not among {named}")


def _shown(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", repr(function))
    return f"{name}{inspect.signature(function)}"


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(repr(name) for name in names)


def _check_whose(module_name: str, key: str, python_path: Sequence[str]) -> None:
    """Refuse a module of the user's that shares its name with one that is found before it."""
    top = module_name.partition(".")[0]
    own = PathFinder.find_spec(top, list(python_path))
    if own is None or own.origin is None:  # there is none, or a directory without code of its own
        return
    found = next(filter(None, (finder.find_spec(top, None) for finder in sys.meta_path)), None)
    if found is not None and found.origin != own.origin and not _same_file(found.origin, own.origin):
        whose = "the standard library's" if top in sys.stdlib_module_names else f"installed ({found.origin})"
        raise ConfigError(
            f"{key}: module {top!r} is {whose}, and {own.origin} has the same name; give your own file another name"
            + ("" if top in sys.stdlib_module_names else ", or install it by pip install -e if the two are one package")
        )


def _same_file(one: str | None, other: str) -> bool:
    try:
        return one is not None and os.path.samefile(one, other)
    except OSError:  # "built-in"
        return False


def _import(module_name: str, key: str, python_path: Sequence[str]) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{key}: there is no module {module_name!r}{_nearest_module(module_name, python_path)}"
            ) from error
        raise ConfigError(f"{key}: {_raised(module_name, error)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: {_raised(module_name, error)}") from error


def _raised(module_name: str, error: BaseException) -> str:
    """That importing raised, with the last lines of the user's own code that led there."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename and f.filename != __file__
    ]
    places = "".join(f"\n    {frame.filename}, line {frame.lineno}: {frame.line}" for frame in frames[-3:])
    if isinstance(error, SyntaxError):
        places += f"\n    {error.filename}, line {error.lineno}: {(error.text or '').strip()}"
    return f"importing {module_name!r} raised {type(error).__name__}: {error}{places}"


def _nearest_module(module_name: str, python_path: Sequence[str]) -> str:
    folder, _, name = module_name.replace(".", os.sep).rpartition(os.sep)
    modules: dict[str, str] = {}
    for directory in python_path:
        for path in sorted(Path(directory, folder).glob("*.py")):
            modules.setdefault(path.stem, str(path))
    close = difflib.get_close_matches(name, modules, n=1)
    if close:
        dotted = ".".join(filter(None, (folder.replace(os.sep, "."), close[0])))
        return f"; did you mean {dotted!r} ({modules[close[0]]})?"
    return f"; it was looked for in {', '.join(python_path)} and among the installed packages"
