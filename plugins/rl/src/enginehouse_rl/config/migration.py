"""Translates keys and values of verl and TRL to their names in enginehouse.

The tables are in `migration.md` beside this file; `docs/from-verl.md` and `docs/from-trl.md` show them.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from typing import NamedTuple


class Row(NamedTuple):
    """A row of a table.

    Attributes:
        values: true if the row is about values, and not about keys.
        names: the keys or values of the other project in the left-hand cell.
        theirs: the left-hand cell, about the other project.
        ours: the right-hand cell, about enginehouse.
    """

    project: str
    values: bool
    names: tuple[str, ...]
    theirs: str
    ours: str

    def __str__(self) -> str:
        return f"in {self.project} {self.theirs}; in enginehouse {self.ours}".replace("`", "")


def answer_key(key: str) -> str:
    """Return the enginehouse name of another project's dotted key; empty if no project is known to have the key.

    Both the key and the table may use short names: `rollout.n` and `n` mean `actor_rollout_ref.rollout.n`.
    """
    rows = [row for row in _read_rows() if not row.values]
    exact = (row for row in rows if key in row.names)
    similar = (row for row in rows if any(_is_same(key, name) for name in row.names))
    return str(next(exact, None) or next(similar, ""))


def answer_value(value: object) -> str:
    """Return the enginehouse name of another project's value; empty if no project is known to have the value."""
    return next((str(row) for row in _read_rows() if row.values and value in row.names), "")


def read_tables() -> str:
    return resources.files(__package__).joinpath("migration.md").read_text(encoding="utf-8")


@cache
def _read_rows() -> tuple[Row, ...]:
    rows, project, values = [], "", False
    for line in read_tables().splitlines():
        if not line.startswith("| "):
            continue
        left_cell, right_cell = (cell.strip() for cell in line.strip("|").split(" | "))
        if right_cell.endswith(" here"):  # the table's head: "verl's key", "key here"
            project, values = left_cell.split("'")[0], "value" in left_cell
            continue
        rows.append(Row(project, values, tuple(re.findall(r"`([^`]+)`", left_cell)), left_cell, right_cell))
    return tuple(rows)


def _is_same(key: str, name: str) -> bool:
    if name.endswith(".*"):
        return f"{key}.".startswith(name[:-1])
    return key == name or key.endswith(f".{name}") or name.endswith(f".{key}")
