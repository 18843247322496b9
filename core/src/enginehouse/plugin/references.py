"""Checks of a record's references without an import, because an engine may be slow or need another runtime.

The checks read source code and never run it. If the source does not decide whether a name exists, it counts as present.
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
    """Return the syntax tree of Python source, despite a bug of CPython 3.11.

    Python raises `SystemError` if garbage is collected during parsing and a finalizer parses too, because both share a
    depth counter: https://github.com/python/cpython/issues/106905. A second attempt succeeds.

    Raises:
        SyntaxError: if the source is not Python.
    """
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)


def find_definition(reference: str) -> Definition | None:
    """Return the definition that a `"module:attribute"` string names; None if it cannot be found in the source.

    The search imports only the packages above the module.

    Raises:
        ResolveError: if there is no such module, or it has no such attribute.
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
        node = bound[name]
        return node if isinstance(node, Definition) and not inner else None
    if "*" in bound or "__getattr__" in bound:
        return None
    close = nearest(name, [name for name in bound if not name.startswith("_")])
    raise ResolveError(f"module {module_name!r} has no {attribute!r} (asked for by {reference!r}). {close}")


def methods_of(protocol: type) -> list[str]:
    return [name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")]


def find_missing_methods(engine: Any, protocol: type) -> list[str]:
    """Return the methods of a protocol that a class lacks, as far as the source shows.

    Args:
        engine: a class, or the result of `find_definition`.
        protocol: the protocol to implement.
    """
    methods = methods_of(protocol)
    if engine is None or isinstance(engine, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    if isinstance(engine, ast.ClassDef):
        bound = dict(_bound(engine.body))
        inherits = any(not (isinstance(base, ast.Name) and base.id == "object") for base in engine.bases)
        if inherits or engine.keywords or engine.decorator_list or "__getattr__" in bound:
            return []  # another class may have them
        return [name for name in methods if name not in bound]
    return [name for name in methods if not callable(getattr(engine, name, None))]


def find_mismatched_methods(engine: type, protocol: type) -> list[str]:
    """Return the methods of a class that cannot be called as a protocol says, each with the reason. Missing methods are
    not included."""
    mismatches = []
    for name in methods_of(protocol):
        promised, method = getattr(protocol, name), getattr(engine, name, None)
        if not callable(method):
            continue
        if why := _find_mismatch(promised, method, inspect.getattr_static(engine, name)):
            mismatches.append(f"{name}: {why} ({protocol.__name__}.{name}{inspect.signature(promised)})")
    return mismatches


def _find_mismatch(promised: Callable[..., Any], method: Callable[..., Any], static: object) -> str:
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # a function in C may have no signature
        return ""
    arguments = list(inspect.signature(promised).parameters.values())
    if isinstance(static, staticmethod | classmethod):
        arguments = arguments[1:]  # `self`
    required = [None for argument in arguments if argument.default is argument.empty]
    optional = [argument.name for argument in arguments if argument.default is not argument.empty]
    by_position = _accepts(signature, required + [None] * len(optional), {})
    by_name = _accepts(signature, required, dict.fromkeys(optional))
    if not (by_position or by_name) or not _accepts(signature, required, {}):
        return f"it takes {signature}, but must accept the arguments of the protocol"
    is_async = inspect.iscoroutinefunction(inspect.unwrap(method))
    if is_async and not inspect.iscoroutinefunction(promised):
        return "it is async, but must not be: its result is not awaited"
    if inspect.iscoroutinefunction(promised) and not is_async and _returns_no_awaitable(method):
        return "it is not async, but must be: its result is awaited"
    return ""


def _accepts(signature: inspect.Signature, positional: Sequence[None], by_name: Mapping[str, None]) -> bool:
    try:
        signature.bind(*positional, **by_name)
    except TypeError:
        return False
    return True


def _returns_no_awaitable(function: Callable[..., Any]) -> bool:
    """Return True if a synchronous function is annotated to return something that cannot be awaited."""
    annotation = str(getattr(function, "__annotations__", {}).get("return", ""))
    return inspect.isfunction(function) and not any(word in annotation for word in ("Awaitable", "Coroutine", "Future"))


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
    """Yield the names that statements bind, in nested blocks too. `*` stands for the import of all names."""
    for statement in body:
        if isinstance(statement, Definition):
            yield statement.name, statement
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            yield from (((alias.asname or alias.name).partition(".")[0], statement) for alias in statement.names)
        else:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                    yield node.id, statement
                elif isinstance(node, ast.stmt) and node is not statement:
                    yield from _bound([node])
