"""Keys and values of verl and TRL, answered with what they are called here.

The tables are in `migration.md` beside this file, and `docs/from-verl.md` shows them as they stand there.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import NamedTuple


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        project: whose names they are: `"verl"`.
        values: whether they are values, and not keys.
        names: theirs.
        theirs: the left-hand cell.
        ours: the right-hand cell.
    """

    project: str
    values: bool
    names: tuple[str, ...]
    theirs: str
    ours: str

    def __str__(self) -> str:
        return f"in {self.project} {self.theirs}; here {self.ours}".replace("`", "")


def answer_key(key: str) -> str:
    """Say what another project's dotted key is here; empty if no project is known to have it.

    Names of either side may be short: `rollout.n` and `n` are `actor_rollout_ref.rollout.n`.
    """
    keys = [row for row in _rows() if not row.values]
    fitting = [row for row in keys if key in row.names] or [
        row for row in keys if any(_same(key, n) for n in row.names)
    ]
    return str(fitting[0]) if fitting else ""


def answer_value(value: object) -> str:
    """Say what another project's value is here; empty if no project is known to have it."""
    return next((str(row) for row in _rows() if row.values and value in row.names), "")


def tables() -> str:
    """The tables, as Markdown."""
    return resources.files(__package__).joinpath("migration.md").read_text(encoding="utf-8")


@cache
def _rows() -> tuple[Row, ...]:
    rows, project, values = [], "", False
    for line in tables().splitlines():
        if not line.startswith("| "):
            continue
        theirs, ours = (cell.strip() for cell in line.strip("|").split(" | "))
        if ours.endswith(" here"):  # the table's head: "verl's key", "key here"
            project, values = theirs.split("'")[0], "value" in theirs
            continue
        rows.append(Row(project, values, tuple(re.findall(r"`([^`]+)`", theirs)), theirs, ours))
    return tuple(rows)


def _same(key: str, name: str) -> bool:
    if name.endswith(".*"):
        return f"{key}.".startswith(name[:-1])
    return key == name or key.endswith(f".{name}") or name.endswith(f".{key}")
