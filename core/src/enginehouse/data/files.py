"""Data files on disk: JSONL and Parquet, read whole, with errors that name file, line and row.

JSONL is parsed line by line, so the reward function gets the very values that stand in the file (a loader that
infers one type a column turns the string "2024-01-01" into a date and 1 into 1.0) and a bad line is named.
Parquet goes through `datasets`, which knows how its richer types are stored. This module imports neither torch
nor `datasets` before it has to: `plan` checks files with it.
"""

from __future__ import annotations

import difflib
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from enginehouse.errors import DataError, nearest

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
SUFFIXES = (*JSON_SUFFIXES, *PARQUET_SUFFIXES)
_SHOWN = 60


class Table(Protocol):
    """The rows of a file. `needed` columns are held ready, the others are fetched by row."""

    path: Path
    needed: dict[str, list[Any]]

    def __len__(self) -> int: ...

    def others(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Of each of these rows, every column but the needed ones."""
        ...

    def where(self, row: int) -> str:
        """Name a row for a message: file, row (from 0) and line."""
        ...


def check_prompt_file(path: str | Path, prompt_column: str) -> tuple[str, ...]:
    """Check that a file of prompts exists, is readable and has the column, looking at its schema or first row only.

    Returns:
        The file's columns.

    Raises:
        DataError: saying what is wrong and what would be right.
    """
    return check_file(Path(path), (prompt_column,))


def check_demonstration_file(path: str | Path, prompt_column: str, response_column: str) -> tuple[str, ...]:
    """As `check_prompt_file`, for a file of demonstrations."""
    return check_file(Path(path), (prompt_column, response_column))


def check_file(path: Path, needed: Sequence[str]) -> tuple[str, ...]:
    """Check suffix, existence, readability and columns without reading all rows; return the columns."""
    _check_path(path)
    if path.suffix.lower() in PARQUET_SUFFIXES:
        columns, rows = _parquet_schema(path)
        if not rows:
            raise DataError(f"{path} has no rows")
    else:
        columns = tuple(_first_json_row(path))
    for name in needed:
        _check_column(path, name, columns)
    return columns


def open_table(path: str | Path, needed: Sequence[str]) -> Table:
    """Read a whole file.

    Raises:
        DataError: if it is missing, empty, unreadable, of an unknown kind, or lacks a needed column in any row.
    """
    path = Path(path)
    check_file(path, needed)
    return ParquetTable(path, needed) if path.suffix.lower() in PARQUET_SUFFIXES else JsonTable(path, needed)


class JsonTable:
    """A JSONL file (one object a line), or a JSON file that is one array of objects."""

    def __init__(self, path: Path, needed: Sequence[str]) -> None:
        self.path = path
        self.needed: dict[str, list[Any]] = {name: [] for name in needed}
        self._rows: list[bytes] = []  # parsed again when asked for: a tenth of the memory of Python objects
        self._lines: list[int] = []
        for number, line in _json_lines(path):
            record = _parse(path, number, line)
            for name, values in self.needed.items():
                if name not in record:
                    raise DataError(
                        f"{_place(path, len(self._rows), number)} has no column {name!r}: {nearest(name, record)}"
                    )
                values.append(record[name])
            self._rows.append(line)
            self._lines.append(number)

    def __len__(self) -> int:
        return len(self._rows)

    def others(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        records = [json.loads(self._rows[row]) for row in rows]
        return [{name: value for name, value in record.items() if name not in self.needed} for record in records]

    def where(self, row: int) -> str:
        return _place(self.path, row, self._lines[row])


class ParquetTable:
    """A Parquet file, held as Arrow in memory."""

    def __init__(self, path: Path, needed: Sequence[str]) -> None:
        import datasets

        self.path = path
        bars = datasets.are_progress_bars_disabled()
        datasets.disable_progress_bars()
        try:
            with tempfile.TemporaryDirectory(prefix="enginehouse-") as cache:
                table: Any = datasets.Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True)
        except Exception as error:  # datasets wraps whatever pyarrow or the disk raises
            raise DataError(f"{path} cannot be read as Parquet: {error.__cause__ or error}") from error
        finally:
            if not bars:
                datasets.enable_progress_bars()
        self.needed = {name: list(table[name]) for name in needed}
        self._others = table.remove_columns(list(needed))
        self._rows = len(table)

    def __len__(self) -> int:
        return self._rows

    def others(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        names = self._others.column_names
        if not names:
            return [{} for _ in rows]
        columns = self._others[list(rows)]
        return [dict(zip(names, values)) for values in zip(*(columns[name] for name in names))]

    def where(self, row: int) -> str:
        return _place(self.path, row, None)


def _place(path: Path, row: int, line: int | None) -> str:
    return f"{path}, row {row}" + (f" (line {line})" if line is not None else "")


def _check_path(path: Path) -> None:
    if path.is_dir():
        inside = sorted(child.name for child in path.iterdir() if child.suffix.lower() in SUFFIXES)
        hint = f"name one of its files: {', '.join(inside[:10])}" if inside else "it holds no data files"
        raise DataError(f"{path} is a directory, not a data file; {hint}")
    if not path.exists():
        raise DataError(f"there is no data file {path}{_neighbour(path)}")
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path} is of no known kind: data files end in {', '.join(SUFFIXES)}")


def _neighbour(path: Path) -> str:
    """What exists near a path that does not."""
    absolute = path.absolute()
    folder = absolute.parent
    if not folder.is_dir():
        while not folder.is_dir():
            folder = folder.parent
        return f": the folder {absolute.parent} does not exist ({folder} does)"
    names = [child.name for child in folder.iterdir() if child.is_file()]
    data = sorted(name for name in names if name.lower().endswith(SUFFIXES))
    close = difflib.get_close_matches(path.name, data or names, n=1, cutoff=0.5)
    if close:
        return f"; the nearest in {folder} is {close[0]!r}"
    return f"; {folder} holds {', '.join(data[:10])}" if data else f"; {folder} holds no data files"


def _check_column(path: Path, name: str, columns: Sequence[str]) -> None:
    if name not in columns:
        raise DataError(f"{path} has no column {name!r}: {nearest(name, columns)}")


def _parquet_schema(path: Path) -> tuple[tuple[str, ...], int]:
    """Column names and number of rows."""
    import pyarrow
    from pyarrow import parquet

    try:
        metadata = parquet.read_metadata(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as Parquet: {error}") from error
    return tuple(metadata.schema.to_arrow_schema().names), metadata.num_rows


def _first_json_row(path: Path) -> dict[str, Any]:
    for number, line in _json_lines(path):
        return _parse(path, number, line)
    raise DataError(f"{path} has no rows")


def _json_lines(path: Path) -> Any:
    """Line number (from 1; None in a JSON array) and bytes of each row; blank lines are none."""
    try:
        with path.open("rb") as file:
            head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
            file.seek(0)
            if path.suffix.lower() == ".json" and head.startswith(b"["):
                yield from ((None, line) for line in _array_rows(path, file.read()))
                return
            for number, line in enumerate(file, 1):
                line = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
                if line:
                    yield number, line
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _array_rows(path: Path, content: bytes) -> list[bytes]:
    try:
        rows = json.loads(content)
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}") from error
    return [json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass") for row in rows]


def _parse(path: Path, number: int | None, line: bytes) -> dict[str, Any]:
    place = f"{path}, line {number}" if number is not None else str(path)
    try:
        record = json.loads(line)
    except ValueError as error:  # also UnicodeDecodeError
        shown = line[:_SHOWN].decode("utf-8", "replace") + ("..." if len(line) > _SHOWN else "")
        raise DataError(f"{place}: not valid JSON: {error}: {shown}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected one JSON object a line, found a {type(record).__name__}")
    return record
