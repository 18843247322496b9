"""Methods that are yet to be written: a skeleton says of each what it has to do, and a suite says so before it runs.

A method is unwritten as long as its body is `raise NotImplementedError("yours to write: ...")`, its docstring apart.
Source is read, nothing is imported.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from enginehouse.plugin import Record, RolloutBackend, TrainBackend

MARK = "yours to write: "
"""What the message of an unwritten method begins with."""


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A method, or function, that is yet to be written.

    Attributes:
        name: its name.
        file: where it is.
        line: of its `def`.
        says: what it has to do.
    """

    name: str
    file: Path
    line: int
    says: str

    def __str__(self) -> str:
        file = self.file.relative_to(Path.cwd()) if self.file.is_relative_to(Path.cwd()) else self.file
        return f"{file}:{self.line}: {self.name} is {MARK}{self.says}"


def unwritten(record: Record) -> list[Unwritten]:
    """What is yet to be written of the modules that a record names, in the order it stands there."""
    fields = ("engine",) if isinstance(record, TrainBackend | RolloutBackend) else record.references
    modules = dict.fromkeys(getattr(record, field).partition(":")[0] for field in fields)
    return [one for module in modules for one in _of_module(module)]


def _of_module(module: str) -> Iterator[Unwritten]:
    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return  # whoever runs the thing says so
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (says := _says(node)) is not None:
            yield Unwritten(node.name, Path(spec.origin), node.lineno, says)


def _says(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """What an unwritten function has to do; None: it is written."""
    *before, last = function.body
    if any(not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant)) for one in before):
        return None
    match last:
        case ast.Raise(exc=ast.Call(func=ast.Name(id="NotImplementedError"), args=[ast.Constant(value=str(text))])) if (
            text.startswith(MARK)
        ):
            return text.removeprefix(MARK)
    return None
