"""Check the part of the project's English that a program can check: beginnings of docstrings, and empty names.

python -m tools.wording        # a line for each finding; fails if there is one
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = ("core/src", "plugins/*/src", "tools")

CLAUSE = re.compile(r"\s*(What|Whether|How|Where|Which|Who|When|Whose)\b")
"""First words of a clause, which states neither an action nor a thing."""
ENTRY = re.compile(r"^ +\*{0,2}(\w+): (of|what|whether|how|where|which|who|when|whose)\b", re.MULTILINE | re.IGNORECASE)
"""An entry of Args or Attributes that begins with a clause, or with words that need a noun before them."""


def check_tree(root: Path = ROOT) -> Iterator[str]:
    """Yield a line for each finding in the checkout, as `path:line: finding`."""
    for pattern in SOURCES:
        for path in sorted(file for folder in root.glob(pattern) for file in folder.rglob("*.py")):
            for line, finding in sorted(check_source(path.read_text(encoding="utf-8"))):
                yield f"{path.relative_to(root).as_posix()}:{line}: {finding}"


def check_source(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the description of each finding in a module's source."""
    for node in ast.walk(ast.parse(text)):
        for line, docstring in _docstrings(node):
            if clause := CLAUSE.match(docstring):
                yield line, f"a docstring begins with {clause[1]!r}: begin it with a verb or a noun"
            for entry in ENTRY.finditer(docstring):
                yield line, f"the entry {entry[1]!r} of a docstring begins with {entry[2]!r}: begin it with a noun"
        if "one" in _names(node):
            yield getattr(node, "lineno", 0), "'one' names nothing: take the noun of what it holds"


def _docstrings(node: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield docstrings: those that Python knows, and strings below an assignment."""
    body = getattr(node, "body", None)
    if isinstance(body, list):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for place, statement in enumerate(body):
            match statement:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    below = place and isinstance(body[place - 1], ast.Assign | ast.AnnAssign)
                    if below or (documented and not place):
                        yield statement.lineno, text


def _names(node: ast.AST) -> Iterator[str | None]:
    """Yield the names that a node assigns."""
    match node:
        case ast.Name(id=name, ctx=ast.Store()) | ast.arg(arg=name) | ast.ExceptHandler(name=name):
            yield name
        case ast.MatchAs(name=name) | ast.MatchStar(name=name) | ast.alias(asname=name):
            yield name


if __name__ == "__main__":
    findings = list(check_tree())
    print(*findings, sep="\n", end="\n" if findings else "")
    sys.exit(bool(findings))
