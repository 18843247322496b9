"""Finds and imports the functions and classes that a config names, `module:function`; `arguments` checks theirs.

A user's own module lies in the current directory or beside the config. These come last on the import path in every
process of a run, so that a file there never replaces a module of the standard library or of an installed package. A
config that names a module which is both is refused, because it is not known which is meant.
"""

from __future__ import annotations

import ast
import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from enginehouse.engines.declared import find_protocol_faults
from enginehouse.engines.environment import Environment
from enginehouse.errors import ConfigError, UserError, nearest
from enginehouse.plugin import ResolveError
from enginehouse.plugin.references import find_definition
from enginehouse_rl.config.migration import answer_value
from enginehouse_rl.plan.arguments import check_values

if TYPE_CHECKING:
    from enginehouse.plugin import PluginManager, Record


@dataclass(frozen=True)
class FunctionCall:
    """A function or a class that a config names, with its arguments.

    Attributes:
        reference: `"module:function"`.
        arguments: the arguments by name; the member of an `Enum`, where the config has its value.
    """

    reference: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


_extended: list[str] = []
"""The entries that `extend_path` put last on `sys.path`."""


def extend_path(directories: Iterable[str]) -> None:
    """Let this process import modules from `directories`, which come after all others but those of earlier calls."""
    earlier = [directory for directory in _extended if directory in sys.path]
    new = [directory for directory in directories if directory in earlier or directory not in sys.path]
    _extended[:] = dict.fromkeys([*new, *earlier])
    sys.path[:] = [path for path in sys.path if path not in _extended] + _extended
    importlib.invalidate_caches()


def find_function(
    plugins: PluginManager,
    kind: type[Record],
    name: str,
    key: str,
    python_path: Sequence[str],
    *,
    always: bool,
    given: Mapping[str, Any] | None = None,
) -> tuple[str, Callable[..., Any] | None]:
    """Find what the config calls `name`: a registered function or class, or the user's own `module:function`.

    The user's own is imported. A registered one may import torch, so it is imported only if `always` is true, or if
    its source does not show that it can be called with only the arguments `given`.

    Returns:
        `"module:function"`, and the function if it was imported.

    Raises:
        UserError: there is no such function, or importing it fails.
    """
    if plugins.is_name(name):
        try:
            record = plugins.get(kind, name)
            reference = getattr(record, record.references[0])
        except UserError as error:
            module, _, attribute = name.rpartition(".")
            hint = answer_value(name) or (f"a function of your own has a colon: {module}:{attribute}" if module else "")
            error.args = (f"{key}: {error}{f'. ({hint})' if hint else ''}", *error.args[1:])
            raise
        try:
            always = always or not _takes(find_definition(reference), given or {})
        except ResolveError as error:
            raise ConfigError(f"{key}: {name!r} is registered, but {error}") from error
        return reference, import_function(reference, key, python_path) if always else None
    _check_unambiguous(name.partition(":")[0], key, python_path)
    return name, import_function(name, key, python_path)


def check_environment(environment: Callable[..., Any], name: str) -> None:
    """Check that `environment`, which the config calls `name`, is a class with the methods of an environment.

    Raises:
        ConfigError: it is no class, or has no `run` that can be called and awaited as an environment's is.
    """
    for fault in find_protocol_faults(environment, [Environment]):
        raise ConfigError(f"environment.name: {name!r} {fault} (docs/plugins/environment.md)")


def _needs_nothing(definition: ast.AST | None) -> bool:
    """True if a function can be called with one positional argument, or a class without any."""
    if isinstance(definition, ast.ClassDef):
        makers = {"__init__", "__new__"}.intersection(getattr(node, "name", "") for node in definition.body)
        return not (makers or definition.bases or definition.keywords or definition.decorator_list)
    if not isinstance(definition, ast.FunctionDef) or not all(map(_adds_defaults_only, definition.decorator_list)):
        return False
    signature = definition.args
    without_default = len(signature.posonlyargs) + len(signature.args) - len(signature.defaults)
    return without_default <= 1 and None not in signature.kw_defaults


def _takes(definition: ast.AST | None, values: Mapping[str, Any]) -> bool:
    """True if the definition shows that a function can be called with `values` after one positional argument.

    Each argument then is keyword-only, and its annotation is of Python's own types and pydantic's `Field`. A class can
    be shown to be called without any.
    """
    if not values or not isinstance(definition, ast.FunctionDef):
        return _needs_nothing(definition) and not values
    arguments = [argument for argument in definition.args.kwonlyargs if argument.arg in values]
    annotations = {argument.arg: argument.annotation for argument in arguments if argument.annotation}
    names = {"Annotated": Annotated, "Field": Field, "Literal": Literal}
    try:
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=eval(ast.unparse(annotation), names))
            for name, annotation in annotations.items()
        ]
    except Exception:  # of its module's own names
        return False

    def stand_in() -> None: ...

    stand_in.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return len(parameters) == len(values) and _needs_nothing(definition) and not check_values(stand_in, "", values)[1]


def _adds_defaults_only(decorator: ast.expr) -> bool:
    """True if a decorator is core's `policy_loss`, which adds only arguments with defaults."""
    called = decorator.func if isinstance(decorator, ast.Call) else None
    return isinstance(called, ast.Name) and called.id == "policy_loss"


def import_function(reference: str, key: str, python_path: Sequence[str] = ()) -> Callable[..., Any]:
    """Import a function or a class.

    Args:
        reference: `"module:function"`, as the config has it.
        key: the config key of the reference, for messages.
        python_path: directories of the user's own modules, for the nearest name.

    Raises:
        ConfigError: the form is wrong, there is no such module or function, or importing the module fails.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{key}: {reference!r} is neither a registered name nor of the form module:function")
    if module_name.endswith(".py") or os.sep in module_name:
        dotted = module_name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise ConfigError(f"{key}: {reference!r} names a file; name the module: {dotted}:{attribute}")
    value = _import(module_name, key, python_path)
    for part in attribute.split("."):
        if not hasattr(value, part):
            file = getattr(value, "__file__", None)
            place = f"module {module_name!r}{f' ({file})' if file else ''}"
            raise ConfigError(f"{key}: {place} has no {part!r}{_suggest_function(value, part)}")
        value = getattr(value, part)
    if not callable(value):
        raise ConfigError(f"{key}: {reference!r} is {type(value).__name__}, not a function")
    return value


def _suggest_function(module: Any, name: str) -> str:
    functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    return f". {nearest(name, functions)}" if functions else ""


def _check_unambiguous(module_name: str, key: str, python_path: Sequence[str]) -> None:
    """Refuse a module of the user's that shares its name with one that is found before it."""
    top = module_name.partition(".")[0]
    spec = PathFinder.find_spec(top, list(python_path))
    if spec is None or spec.origin is None:  # there is none, or a directory without code of its own
        return
    first = next(filter(None, (finder.find_spec(top, None) for finder in sys.meta_path)), None)
    if first is not None and first.origin != spec.origin and not _is_same_file(first.origin, spec.origin):
        standard = top in sys.stdlib_module_names
        owner = "the standard library's" if standard else f"installed ({first.origin})"
        raise ConfigError(
            f"{key}: module {top!r} is {owner}, and {spec.origin} has the same name; give your own file another name"
            + ("" if standard else ", or install it by pip install -e if the two are one package")
        )


def _is_same_file(origin: str | None, file: str) -> bool:
    try:
        return origin is not None and os.path.samefile(origin, file)
    except OSError:  # "built-in"
        return False


def _import(module_name: str, key: str, python_path: Sequence[str]) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ConfigError(
                f"{key}: there is no module {module_name!r}{_suggest_module(module_name, python_path)}"
            ) from error
        raise ConfigError(f"{key}: {_describe_failure(module_name, error)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{key}: {_describe_failure(module_name, error)}") from error


def _describe_failure(module_name: str, error: BaseException) -> str:
    """Return a message that importing raised, with the last lines of the user's own code that led there."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    places = "".join(f"\n    {frame.filename}, line {frame.lineno}: {frame.line}" for frame in user_frames[-3:])
    if isinstance(error, SyntaxError):
        places += f"\n    {error.filename}, line {error.lineno}: {(error.text or '').strip()}"
    return f"importing {module_name!r} raised {type(error).__name__}: {error}{places}"


def _suggest_module(module_name: str, python_path: Sequence[str]) -> str:
    """Name the user's module that is nearest to a missing one, or the places where it was looked for."""
    folder, _, name = module_name.replace(".", os.sep).rpartition(os.sep)
    modules: dict[str, str] = {}
    for directory in python_path:
        for path in sorted(Path(directory, folder).glob("*.py")):
            modules.setdefault(path.stem, str(path))
    close = difflib.get_close_matches(name, modules, n=1)
    if close:
        dotted = ".".join(filter(None, (folder.replace(os.sep, "."), close[0])))
        return f". Did you mean {dotted!r} ({modules[close[0]]})?"
    return f". It was looked for in {', '.join(python_path)} and among the installed packages"
