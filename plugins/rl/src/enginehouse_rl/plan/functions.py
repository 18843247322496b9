"""Finds and imports the functions and classes that a config names as `module:function`.

A user's own module is in the current directory or beside the config. Every process of a run puts these directories
last on the import path, so that a file in them never replaces a module of the standard library or of an installed
package. If a module of the same name is found earlier on the import path, the config is rejected as ambiguous.
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
        arguments: the arguments by name. If the config has the value of a member of an `Enum`, the argument is the
            member.
    """

    reference: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


_extended: list[str] = []
"""The entries that `extend_path` appended to `sys.path`."""


def extend_path(directories: Iterable[str]) -> None:
    """Append `directories` to this process's import path, before the directories of earlier calls."""
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
    """Find the function or class that the config calls `name`: a registered function, or the user's own
    `module:function`.

    The user's own function is imported. A registered function may import torch. It is therefore imported only if
    `always` is true, or if its source does not show that it can be called with just the arguments `given`.

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
            hint = answer_value(name) or (f"name your own function as {module}:{attribute}" if module else "")
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
        ConfigError: it is not a class, or has no `run` with the signature of `Environment.run`.
    """
    for fault in find_protocol_faults(environment, [Environment]):
        raise ConfigError(f"environment.name: {name!r} {fault} (docs/plugins/environment.md)")


def _needs_nothing(definition: ast.AST | None) -> bool:
    """True if a function can be called with only one positional argument, or a class without any argument."""
    if isinstance(definition, ast.ClassDef):
        makers = {"__init__", "__new__"}.intersection(getattr(node, "name", "") for node in definition.body)
        return not (makers or definition.bases or definition.keywords or definition.decorator_list)
    if not isinstance(definition, ast.FunctionDef) or not all(map(_adds_defaults_only, definition.decorator_list)):
        return False
    signature = definition.args
    without_default = len(signature.posonlyargs) + len(signature.args) - len(signature.defaults)
    return without_default <= 1 and None not in signature.kw_defaults


def _takes(definition: ast.AST | None, values: Mapping[str, Any]) -> bool:
    """True if the source shows that a function can be called with `values` after one positional argument.

    The source shows this only if each argument is keyword-only, with an annotation made of Python's own types and
    pydantic's `Field`. For a class, the source can show only that it can be called without arguments.
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
    except Exception:  # an annotation uses names of its module
        return False

    def stand_in() -> None: ...

    stand_in.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return len(parameters) == len(values) and _needs_nothing(definition) and not check_values(stand_in, "", values)[1]


def _adds_defaults_only(decorator: ast.expr) -> bool:
    """True if a decorator is `policy_loss` of this package, which adds only arguments with defaults."""
    called = decorator.func if isinstance(decorator, ast.Call) else None
    return isinstance(called, ast.Name) and called.id == "policy_loss"


def import_function(reference: str, key: str, python_path: Sequence[str] = ()) -> Callable[..., Any]:
    """Import a function or a class.

    Args:
        python_path: directories of the user's own modules, searched for the nearest name.

    Raises:
        ConfigError: the reference has a wrong form, the module or function does not exist, or the import fails.
    """
    module_name, colon, attribute = reference.partition(":")
    if not (module_name and colon and attribute):
        raise ConfigError(f"{key}: {reference!r} is neither a registered name nor of the form module:function")
    if module_name.endswith(".py") or os.sep in module_name:
        dotted = module_name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise ConfigError(f"{key}: {reference!r} must name a module, not a file: {dotted}:{attribute}")
    value = _import(module_name, key, python_path)
    for part in attribute.split("."):
        if not hasattr(value, part):
            file = getattr(value, "__file__", None)
            place = f"module {module_name!r}{f' ({file})' if file else ''}"
            raise ConfigError(f"{key}: {place} has no {part!r}{_suggest_function(value, part)}")
        value = getattr(value, part)
    if not callable(value):
        raise ConfigError(f"{key}: {reference!r} must be a function or a class, not {type(value).__name__}")
    return value


def _suggest_function(module: Any, name: str) -> str:
    functions = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    return f". {nearest(name, functions)}" if functions else ""


def _check_unambiguous(module_name: str, key: str, python_path: Sequence[str]) -> None:
    """Reject a module of the user that has the same name as a module found earlier on the import path."""
    top = module_name.partition(".")[0]
    spec = PathFinder.find_spec(top, list(python_path))
    if spec is None or spec.origin is None:  # no module, or a directory without code
        return
    first = next(filter(None, (finder.find_spec(top, None) for finder in sys.meta_path)), None)
    if first is not None and first.origin != spec.origin and not _is_same_file(first.origin, spec.origin):
        standard = top in sys.stdlib_module_names
        owner = "part of the standard library" if standard else f"installed ({first.origin})"
        raise ConfigError(
            f"{key}: module {top!r} is {owner}, but {spec.origin} has the same name; give your own file another name"
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
    """Describe the exception that an import raised, with the last lines of the user's code that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if "importlib" not in frame.filename and frame.filename != __file__]
    places = "".join(f"\n    {frame.filename}, line {frame.lineno}: {frame.line}" for frame in user_frames[-3:])
    if isinstance(error, SyntaxError):
        places += f"\n    {error.filename}, line {error.lineno}: {(error.text or '').strip()}"
    return f"importing {module_name!r} raised {type(error).__name__}: {error}{places}"


def _suggest_module(module_name: str, python_path: Sequence[str]) -> str:
    """Return a hint for a missing module: the user's module with the nearest name, or the places that were searched."""
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
