"""The functions and classes a config names, `module:function`: found and imported. What they are given: `arguments`.

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
from enginehouse.errors import ConfigError, UserError
from enginehouse.plugin import ResolveError
from enginehouse.plugin.references import find_definition
from enginehouse_rl.config.migration import answer_value
from enginehouse_rl.plan.arguments import check_values

if TYPE_CHECKING:
    from enginehouse.plugin import PluginManager, Record


@dataclass(frozen=True)
class FunctionCall:
    """A function or a class that a config names, and what it is called with.

    Attributes:
        reference: `"module:function"`.
        arguments: by name, as it takes them: the member of an `Enum`, where the config has its value.
    """

    reference: str
    arguments: Mapping[str, Any] = field(default_factory=dict)


_extended: list[str] = []
"""The entries that `extend_path` put last on `sys.path`."""


def extend_path(directories: Iterable[str]) -> None:
    """Let this process import from `directories` what is found nowhere else but in those of an earlier call."""
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

    The user's own is imported. A registered one is its plugin's business and may import torch: it is imported only if
    `always` says so, or if reading its source does not show that it can be called with the arguments `given` alone.

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
    _check_whose(name.partition(":")[0], key, python_path)
    return name, import_function(name, key, python_path)


def check_environment(found: Callable[..., Any], name: str) -> None:
    """Check that what the config calls `name` is an environment, as far as can be told before it is made.

    Raises:
        ConfigError: it is no class, or has no `run` that can be called and awaited as an environment's is.
    """
    for said in find_protocol_faults(found, [Environment]):
        raise ConfigError(f"environment.name: {name!r} {said} (docs/plugins/environment.md)")


def _needs_nothing(definition: ast.AST | None) -> bool:
    """Return whether a function can be called with one positional argument, or a class without any."""
    if isinstance(definition, ast.ClassDef):
        makes = {"__init__", "__new__"}.intersection(getattr(one, "name", "") for one in definition.body)
        return not (makes or definition.bases or definition.keywords or definition.decorator_list)
    if not isinstance(definition, ast.FunctionDef) or not all(map(_adds_defaults_only, definition.decorator_list)):
        return False
    signature = definition.args
    without_default = len(signature.posonlyargs) + len(signature.args) - len(signature.defaults)
    return without_default <= 1 and None not in signature.kw_defaults


def _takes(definition: ast.AST | None, given: Mapping[str, Any]) -> bool:
    """True if a function can be called with `given` after one positional argument, or a class without any, by its
    definition: each argument is keyword-only, and its annotation is of Python's own types and pydantic's `Field`."""
    if not given or not isinstance(definition, ast.FunctionDef):
        return _needs_nothing(definition) and not given
    annotations = {one.arg: one.annotation for one in definition.args.kwonlyargs if one.annotation and one.arg in given}
    names = {"Annotated": Annotated, "Field": Field, "Literal": Literal}
    try:
        parameters = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=eval(ast.unparse(annotation), names))
            for name, annotation in annotations.items()
        ]
    except Exception:  # of its module's own names
        return False

    def as_read() -> None: ...

    as_read.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return len(parameters) == len(given) and _needs_nothing(definition) and not check_values(as_read, "", given)[1]


def _adds_defaults_only(decorator: ast.expr) -> bool:
    """Return whether a decorator is core's `policy_loss`, which adds only arguments with defaults."""
    called = decorator.func if isinstance(decorator, ast.Call) else None
    return isinstance(called, ast.Name) and called.id == "policy_loss"


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
    """Say that importing raised, with the last lines of the user's own code that led there."""
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
