"""Renames the columns of a data set for rewards and environments (`data.columns`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from enginehouse.errors import DataError, nearest
from enginehouse_rl.data.files import RowProblems, Shape, Table


@dataclass(frozen=True)
class ColumnNames:
    """New names of columns, and names of values inside columns.

    Attributes:
        sources: the source of each new name: a column (`solution`), or a value inside a column
            (`reward_model.ground_truth`). A column that gets a new name loses its old name. A column keeps its name if
            only values inside it get new names.
    """

    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def needed(self) -> list[str]:
        """The columns that every row must have."""
        return list(dict.fromkeys(source.partition(".")[0] for source in self.sources.values()))

    def check(self, table: Table) -> None:
        """Check that every row of a table has these columns and values, and that no new name is the name of another
        column.

        Raises:
            DataError: a row lacks a column or value, or a name is taken.
        """
        problems = RowProblems()
        for shape in table.shapes():
            for name in self._find_clashes(shape.columns):
                problems.add(
                    f"{table.where(shape.first)} has a column {name!r}, but data.columns gives this name to "
                    f"{self.sources[name]!r}: give the column {name!r} another name in data.columns too"
                )
        for name, source in self.sources.items():
            column, _, inner = source.partition(".")
            for row, value in enumerate(table.needed[column] if inner else ()):
                try:
                    _dig(value, inner)
                except LookupError:
                    choices = f". {nearest(inner, value)}" if isinstance(value, Mapping) else ""
                    problems.add(
                        f"{table.where(row)}: column {column!r} has no value {inner!r}, which data.columns calls "
                        f"{name!r}{choices}"
                    )
        problems.raise_any()

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return shapes whose columns have the new names."""
        renamed = self._renamed
        return [
            shape._replace(columns=(*(name for name in shape.columns if name not in renamed), *self.sources))
            for shape in shapes
        ]

    def apply(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row's columns under the new names.

        Raises:
            DataError: a value is missing.
        """
        renamed = self._renamed
        columns = {name: value for name, value in row.items() if name not in renamed}
        for name, source in self.sources.items():
            column, _, inner = source.partition(".")
            try:
                columns[name] = _dig(row[column], inner)
            except LookupError as error:
                raise DataError(f"a row has no {source!r}, which data.columns calls {name!r}") from error
        return columns

    @property
    def _renamed(self) -> set[str]:
        """The columns that get a new name."""
        return {source for source in self.sources.values() if "." not in source}

    def _find_clashes(self, columns: Sequence[str]) -> list[str]:
        return [name for name in self.sources if name in columns and name not in self._renamed]


def _dig(value: Any, path: str) -> Any:
    """Return the value at a dotted path inside another value.

    Raises:
        LookupError: there is no such value.
    """
    for part in path.split(".") if path else ():
        if not isinstance(value, Mapping):
            raise KeyError(part)
        value = value[part]
    return value
