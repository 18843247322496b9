"""The page of faults, docs/reliability.md: one row for each test marked `fault`; `make reliability` writes it.

Tests are read, not run: a marker holds literal strings only, so that the page is made where no engine is installed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"
HEAD = """\
# What a fault does to a run

`make reliability` wrote this page from the tests that show each row: a marker of the test holds the row's text.
*kept* is what a user finds afterwards, *noticed* how long until the run says or does something about it.
A test that says it for several engines or several faults has one row here.

"""


class Fault(NamedTuple):
    """A row of the page.

    Attributes:
        area: heading the row stands under: `signals`, `processes`, `rewards`, `files`, `data`, `numbers`, `weights`...
        what: the fault.
        happens: what the run does.
        exit_code: of the command: "0" where the run goes on.
        kept: what is there afterwards.
        noticed: how long until it is noticed.
        test: path and name of the test.
    """

    area: str
    what: str
    happens: str
    exit_code: str
    kept: str
    noticed: str
    test: str


def faults() -> list[Fault]:
    """Every row, by area, then by the place of its test."""
    found = [fault for path in sorted((ROOT / "tests").rglob("test_*.py")) for fault in _faults_of(path)]
    return sorted(found, key=lambda fault: fault.area)


def page() -> str:
    """The page's text."""
    lines = [HEAD.rstrip("\n")]
    area = None
    for fault in faults():
        if fault.area != area:
            area = fault.area
            lines += [
                f"\n## {area}\n",
                "| fault | what happens | exit code | kept | noticed | shown by |",
                "|---|---|---|---|---|---|",
            ]
        row = (fault.what, fault.happens, fault.exit_code, fault.kept, fault.noticed, f"`{fault.test}`")
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def _faults_of(path: Path) -> Iterator[Fault]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for decorator in node.decorator_list:
            if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault":
                said = {keyword.arg: ast.literal_eval(keyword.value) for keyword in decorator.keywords}
                yield Fault(**said, test=f"{path.relative_to(ROOT)}::{node.name}")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
