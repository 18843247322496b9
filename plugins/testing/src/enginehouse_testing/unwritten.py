"""Finds methods of a skeleton that are yet to be written, so that a suite can name them before it runs.

A method is unwritten if its body, apart from the docstring, is `raise NotImplementedError("yours to write: ...")`. This
module reads the source and imports nothing.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from enginehouse.plugin import Record, RolloutBackend, TrainBackend

MARK = "yours to write: "
"""The beginning of an unwritten method's message."""


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A method or function that is yet to be written.

    Attributes:
        line: number of the line of its `def`.
        says: description of what the method has to do.
    """

    name: str
    file: Path
    line: int
    says: str

    def __str__(self) -> str:
        file = self.file.relative_to(Path.cwd()) if self.file.is_relative_to(Path.cwd()) else self.file
        return f"{file}:{self.line}: {self.name} is {MARK}{self.says}"


def unwritten(record: Record) -> list[Unwritten]:
    """Return the parts that are yet to be written in a record's modules, in order."""
    fields = ("engine",) if isinstance(record, TrainBackend | RolloutBackend) else record.references
    modules = dict.fromkeys(getattr(record, field).partition(":")[0] for field in fields)
    return [method for module in modules for method in _find_unwritten(module)]


def _find_unwritten(module: str) -> Iterator[Unwritten]:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return  # the error is raised when the record is used
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (says := _says(node)) is not None:
            yield Unwritten(node.name, Path(spec.origin), node.lineno, says)


def _says(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """Return what an unwritten function has to do, or None if it is written."""
    *before, last = function.body
    if any(not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)) for line in before):
        return None
    match last:
        case ast.Raise(exc=ast.Call(func=ast.Name(id="NotImplementedError"), args=[ast.Constant(value=str(text))])) if (
            text.startswith(MARK)
        ):
            return text.removeprefix(MARK)
    return None
