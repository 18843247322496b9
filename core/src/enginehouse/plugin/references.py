"""Whether what a record names is there, found out without importing it: an engine may take seconds, or be for another
Python environment. Source is read, not run; what reading cannot tell counts as there.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import InspectLoader
from typing import Any

from enginehouse.errors import nearest
from enginehouse.plugin.records import ResolveError, resolve

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def parse(source: str) -> ast.Module:
    """The syntax tree of Python source, also where CPython 3.11 takes a finalizer's own parsing for an error of it.

    All trees share one count of depth there, which a collector that runs meanwhile upsets, where what it drops logs a
    traceback: https://github.com/python/cpython/issues/106905. A second try finds it dropped.

    Raises:
        SyntaxError: the source is not Python.
    """
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)


def find_definition(reference: str) -> Definition | None:
    """Where the module of a `"module:attribute"` string defines it; None where reading cannot tell.

    Only the packages above the module are imported.

    Raises:
        ResolveError: there is no such module, or it has no such attribute.
    """
    module_name, _, attribute = reference.partition(":")
    if module_name in sys.modules:
        resolve(reference)
    tree = _source(module_name, reference)
    if tree is None:
        return None
    bound = dict(_bound(tree.body))
    name, *inner = attribute.split(".")
    if name in bound:
        found = bound[name]
        return found if isinstance(found, Definition) and not inner else None
    if "*" in bound or "__getattr__" in bound:
        return None
    close = nearest(name, [one for one in bound if not one.startswith("_")])
    raise ResolveError(f"module {module_name!r} has no {attribute!r} (asked for by {reference!r}); {close}")


def methods_of(protocol: type) -> list[str]:
    """The names of a protocol's methods."""
    return [name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")]


def find_missing_methods(engine: Any, protocol: type) -> list[str]:
    """The methods of a protocol that a class does not have, as far as can be told.

    Args:
        engine: a class, or what `find_definition` found.
        protocol: what it is to follow.
    """
    wanted = methods_of(protocol)
    if engine is None or isinstance(engine, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    if isinstance(engine, ast.ClassDef):
        bound = dict(_bound(engine.body))
        heir = any(not (isinstance(one, ast.Name) and one.id == "object") for one in engine.bases)
        if heir or engine.keywords or engine.decorator_list or "__getattr__" in bound:
            return []  # another class may have them
        return [name for name in wanted if name not in bound]
    return [name for name in wanted if not callable(getattr(engine, name, None))]


def find_mismatched_methods(engine: type, protocol: type) -> list[str]:
    """The methods of a class that cannot be called as a protocol says, and why; those it lacks are not among them."""
    found = []
    for name in methods_of(protocol):
        wanted, theirs = getattr(protocol, name), getattr(engine, name, None)
        if not callable(theirs):
            continue
        if why := _misfit(wanted, theirs, inspect.getattr_static(engine, name)):
            found.append(f"{name}: {why} ({protocol.__name__}.{name}{inspect.signature(wanted)})")
    return found


def _misfit(wanted: Callable[..., Any], theirs: Callable[..., Any], static: object) -> str:
    try:
        signature = inspect.signature(theirs)
    except (TypeError, ValueError):  # written in C: only a call can tell
        return ""
    arguments = list(inspect.signature(wanted).parameters.values())
    if isinstance(static, staticmethod | classmethod):
        arguments = arguments[1:]  # `self`
    required = [None for one in arguments if one.default is one.empty]
    optional = [one.name for one in arguments if one.default is not one.empty]
    ways: list[tuple[list[None], dict[str, None]]] = [
        (required + [None] * len(optional), {}),
        (required, dict.fromkeys(optional)),
    ]
    if not any(_takes(signature, *way) for way in ways) or not _takes(signature, required, {}):
        return f"it takes {signature}, and cannot be called as the protocol says"
    is_async = inspect.iscoroutinefunction(inspect.unwrap(theirs))
    if is_async and not inspect.iscoroutinefunction(wanted):
        return "it is async, and its result is not awaited"
    if inspect.iscoroutinefunction(wanted) and not is_async and _returns_no_awaitable(theirs):
        return "it is not async, and its result is awaited"
    return ""


def _takes(signature: inspect.Signature, positional: Sequence[None], by_name: Mapping[str, None]) -> bool:
    try:
        signature.bind(*positional, **by_name)
    except TypeError:
        return False
    return True


def _returns_no_awaitable(function: Callable[..., Any]) -> bool:
    """Whether a function that is not async says that it returns something else than what can be awaited."""
    said = str(getattr(function, "__annotations__", {}).get("return", ""))
    return inspect.isfunction(function) and not any(word in said for word in ("Awaitable", "Coroutine", "Future"))


def _source(module_name: str, reference: str) -> ast.Module | None:
    try:
        spec = importlib.util.find_spec(module_name)
        loader = None if spec is None else spec.loader
        source = loader.get_source(module_name) if isinstance(loader, InspectLoader) else None
        tree = None if source is None else parse(source)
    except Exception as error:
        raise ResolveError(f"{reference!r} cannot be found: {type(error).__name__}: {error}") from error
    if spec is None:
        raise ResolveError(f"there is no module {module_name!r} (asked for by {reference!r})")
    return tree


def _bound(body: list[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """The names that statements bind, blocks inside of them included; `*` where a whole module is imported."""
    for statement in body:
        if isinstance(statement, Definition):
            yield statement.name, statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (((one.asname or one.name).partition(".")[0], statement) for one in statement.names)
        else:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id, statement
                elif isinstance(node, ast.stmt) and node is not statement:
                    yield from _bound([node])
