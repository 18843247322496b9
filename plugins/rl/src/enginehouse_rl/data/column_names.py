"""What columns of a data set are called where rewards and environments look for them: `data.columns`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from enginehouse.errors import DataError, nearest
from enginehouse_rl.data.files import RowProblems, Shape, Table


@dataclass(frozen=True)
class ColumnNames:
    """Other names of columns, and names of values within columns.

    Attributes:
        sources: by each name the column, or the value: `solution`, `reward_model.ground_truth`. A column loses its own
            name, and one with a value in it keeps it.
    """

    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def needed(self) -> list[str]:
        """The columns that every row has to have."""
        return list(dict.fromkeys(source.partition(".")[0] for source in self.sources.values()))

    def check(self, table: Table) -> None:
        """Check that every row of a table has what is named, and that no name is taken.

        Raises:
            DataError: naming the rows.
        """
        problems = RowProblems()
        for shape in table.shapes():
            for name in self._taken(shape.columns):
                problems.add(
                    f"{table.where(shape.first)} has a column {name!r}, and data.columns calls {self.sources[name]!r} "
                    f"so: give {name!r} another name there too"
                )
        for name, source in self.sources.items():
            column, _, inner = source.partition(".")
            for row, value in enumerate(table.needed[column] if inner else ()):
                try:
                    _dig(value, inner)
                except LookupError:
                    choices = f"; {nearest(inner, value)}" if isinstance(value, Mapping) else ""
                    problems.add(
                        f"{table.where(row)}: column {column!r} holds no {inner!r}, which data.columns calls "
                        f"{name!r}{choices}"
                    )
        problems.raise_any()

    def shapes(self, shapes: Sequence[Shape]) -> list[Shape]:
        """Return shapes with these names."""
        gone = self._gone
        return [
            shape._replace(columns=(*(name for name in shape.columns if name not in gone), *self.sources))
            for shape in shapes
        ]

    def apply(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return a row's columns under these names.

        Raises:
            DataError: a value is not there.
        """
        gone = self._gone
        named = {name: value for name, value in row.items() if name not in gone}
        for name, source in self.sources.items():
            column, _, inner = source.partition(".")
            try:
                named[name] = _dig(row[column], inner)
            except LookupError as error:
                raise DataError(f"a row has no {source!r}, which data.columns calls {name!r}") from error
        return named

    @property
    def _gone(self) -> set[str]:
        """The columns that have another name."""
        return {source for source in self.sources.values() if "." not in source}

    def _taken(self, columns: Sequence[str]) -> list[str]:
        return [name for name in self.sources if name in columns and name not in self._gone]


def _dig(value: Any, path: str) -> Any:
    """Return the value at a path within another.

    Raises:
        LookupError: there is none.
    """
    for part in path.split(".") if path else ():
        if not isinstance(value, Mapping):
            raise KeyError(part)
        value = value[part]
    return value
