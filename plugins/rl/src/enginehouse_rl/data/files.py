"""Reads data files, JSONL and Parquet, and checks every row. Errors name file, line and row.

JSONL is parsed line by line, so that the reward function gets exactly the values of the file. A loader that infers one
type for a column would turn the string "2024-01-01" into a date, and 1 into 1.0. The needed columns of Parquet are read
with pyarrow, and the other columns with `datasets`, which can decode richer types, such as images. This module imports
torch and `datasets` only when it needs them, because `plan` uses this module.
"""

from __future__ import annotations

import difflib
import itertools
import json
import re
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from enginehouse.errors import DataError, nearest

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
PARQUET_SUFFIXES = (".parquet",)
SUFFIXES = (*JSON_SUFFIXES, *PARQUET_SUFFIXES)
MOST_NESTED = 64
"""Maximum depth of lists and objects in a row. Deeper values could neither be sent to a process nor written."""
_SHOWN = 60
_LISTED = 5
_ROWS_AT_ONCE = 1024


class Shape(NamedTuple):
    """Rows that have the same columns.

    Attributes:
        first: the index of the first such row.
    """

    columns: tuple[str, ...]
    first: int
    rows: int


class Table(Protocol):
    """Rows of files. The `needed` columns are in memory; other columns are fetched row by row.

    Attributes:
        needed: the values of each needed column, one for each row.
        unread: the number of further rows, which were not read because the time was up.
    """

    needed: dict[str, list[Any]]
    unread: int

    def __len__(self) -> int: ...

    def fetch_others(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """Return all columns of these rows except the needed ones."""
        ...

    def where(self, row: int) -> str:
        """Name a row for a message, by file, row and line."""
        ...

    def shapes(self) -> list[Shape]:
        """Return the shapes of the rows, beginning with the shape of the first row. A Parquet file has one shape."""
        ...

    def list_files(self) -> Sequence[Table]: ...


class RowProblems:
    """Collects and counts the problems of rows. One error then describes the first few."""

    def __init__(self) -> None:
        self._first: list[str] = []
        self._rows = 0
        self._alike: dict[str, tuple[str, int]] = {}  # by problem: the first row, and the number of further ones

    def add(self, problem: str) -> None:
        """Add a problem of one row; its text names the row."""
        self._rows += 1
        if len(self._first) < _LISTED:
            self._first.append(problem)

    def add_alike(self, place: str, problem: str) -> None:
        """Add a problem of the row at `place` that other rows may share. The error then describes the problem once, and
        states the number of rows."""
        first, more = self._alike.get(problem, (place, -1))
        self._alike[problem] = first, more + 1

    def raise_any(self) -> None:
        """If there are problems, raise an error that states the only one or lists several.

        Raises:
            DataError: there is a problem.
        """
        shared = [
            f"{first}{f' and {more:,} more row' + 's' * (more > 1) if more else ''}: {problem}"
            for problem, (first, more) in self._alike.items()
        ]
        listed = [*shared, *self._first]
        if len(listed) == 1:
            raise DataError(listed[0])
        if listed:
            rows = self._rows + sum(more + 1 for _, more in self._alike.values())
            unlisted = self._rows - len(self._first)
            listed += [f"and {unlisted:,} more"] if unlisted else []
            raise DataError("\n  - ".join([f"{rows:,} rows of the data cannot be used:", *listed]))


def check_file(path: Path, needed: Sequence[str]) -> tuple[str, ...]:
    """Check without reading all rows that a file is a data file and has the `needed` columns; return its columns."""
    _check_path(path)
    if path.suffix.lower() in PARQUET_SUFFIXES:
        columns, rows = _read_schema(path)
        if not rows:
            raise DataError(f"{path} has no rows")
    else:
        columns = tuple(_read_first_row(path))
    for name in needed:
        if name not in columns:
            raise DataError(f"{path} has no column {name!r}. {nearest(name, columns)}")
    return columns


def open_table(
    path: str | Path | Iterable[str | Path], needed: Iterable[str | None], seconds: float | None = None
) -> Table:
    """Read one file, or several one after the other.

    Args:
        path: a path, or several.
        needed: the columns that every row must have; None and repetitions are ignored.
        seconds: stop after about this time, and count the remaining rows (`Table.unread`); None: read all rows.

    Raises:
        DataError: a file is missing, empty, unreadable or of an unknown kind, or a row cannot be read or lacks a needed
            column.
    """
    paths = [Path(file) for file in ([path] if isinstance(path, str | Path) else path)]
    if not paths:
        raise DataError("no data file is named: give a path, or a list of paths")
    names = list(dict.fromkeys(name for name in needed if name is not None))
    for file in paths:
        check_file(file, names)
    until = None if seconds is None else time.monotonic() + seconds
    problems = RowProblems()
    tables: list[Table] = [
        (ParquetTable if file.suffix.lower() in PARQUET_SUFFIXES else JsonTable)(file, names, problems, until)
        for file in paths
    ]
    problems.raise_any()
    return tables[0] if len(tables) == 1 else Tables(tables)


class JsonTable:
    """A JSONL file (one object per line), or a JSON file that contains one array of objects.

    Args:
        problems: gets the problems of rows; these rows are left out.
        until: value of `time.monotonic()` at which reading stops. None: all rows are read.
    """

    def __init__(self, path: Path, needed: Sequence[str], problems: RowProblems, until: float | None = None) -> None:
        self._path = path
        self.needed: dict[str, list[Any]] = {name: [] for name in needed}
        self.unread = 0
        self._rows: list[bytes] = []  # parsed again on demand: a tenth of the memory of Python objects
        self._lines: list[int | None] = []
        self._shapes: dict[frozenset[str], Shape] = {}
        for row, (number, line) in enumerate(_read_lines(path)):
            if self.unread or (until is not None and row and row % _ROWS_AT_ONCE == 0 and time.monotonic() > until):
                self.unread += 1
                continue
            place = _name_row(path, row, number)
            try:
                record = _parse(place, line)
                for name in needed:
                    if name not in record:
                        raise DataError(f"{place} has no column {name!r}. {nearest(name, record)}")
            except DataError as error:
                problems.add(str(error))
                continue
            for name, values in self.needed.items():
                values.append(record[name])
            shape = self._shapes.get(names := frozenset(record))
            self._shapes[names] = shape._replace(rows=shape.rows + 1) if shape else Shape(tuple(record), row, 1)
            self._rows.append(line)
            self._lines.append(number)

    def __len__(self) -> int:
        return len(self._rows)

    def fetch_others(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        records = [json.loads(self._rows[row]) for row in rows]
        return [{name: value for name, value in record.items() if name not in self.needed} for record in records]

    def where(self, row: int) -> str:
        return _name_row(self._path, row, self._lines[row])

    def shapes(self) -> list[Shape]:
        return list(self._shapes.values())

    def list_files(self) -> Sequence[Table]:
        return [self]


class ParquetTable:
    """A Parquet file: needed columns as Python objects, the others in Arrow. Takes the arguments of `JsonTable`."""

    def __init__(self, path: Path, needed: Sequence[str], problems: RowProblems, until: float | None = None) -> None:
        from pyarrow import parquet

        self._path = path
        self._columns, rows = _read_schema(path)
        self.needed: dict[str, list[Any]] = {name: [] for name in needed}
        self._decoded: Any = None
        self._stored: Any = None
        self._rows = 0
        with _read_parquet(path), parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(_ROWS_AT_ONCE, columns=list(needed)):
                if self._rows and until is not None and time.monotonic() > until:
                    break
                for name, values in self.needed.items():
                    values.extend(self._read_values(batch, name, problems))
                self._rows += batch.num_rows
        self.unread = rows - self._rows
        if until is None:
            self._decoded = self._read_others()

    def _read_values(self, batch: Any, name: str, problems: RowProblems) -> list[Any]:
        column = batch[batch.schema.get_field_index(name)]
        try:
            return column.to_pylist()
        except UnicodeDecodeError:
            values = []
            for row, value in enumerate(column):
                try:
                    values.append(value.as_py())
                except UnicodeDecodeError as error:
                    place = _name_row(self._path, self._rows + row, None)
                    problems.add(f"{place}: column {name!r} is not valid UTF-8: {error}")
                    values.append(None)
            return values

    def _read_others(self) -> Any:
        """Return the other columns as a `datasets.Dataset`, or None. Columns that `datasets` cannot decode are read by
        `_read_stored`."""
        import datasets
        from pyarrow import parquet

        schema = parquet.read_schema(self._path)
        stored = [name for name in self._other_names if not _has_type(schema.field(name))]
        names = [name for name in self._other_names if name not in stored]
        if not names:
            self._read_stored(stored)
            return None
        with _read_parquet(self._path):
            dataset: Any = datasets.Dataset(parquet.read_table(self._path, columns=names))
            dataset.data.validate(full=True)  # bytes that are no text would end the run when the row is used
        undecoded = [name for name in names if not _decodes(dataset.select_columns([name]))]
        self._read_stored([*stored, *undecoded])
        return dataset.remove_columns(undecoded) if undecoded else dataset

    def _read_stored(self, names: list[str]) -> None:
        """Read columns that are passed on as the file stores them."""
        from pyarrow import parquet

        with _read_parquet(self._path):
            self._stored = parquet.read_table(self._path, columns=names) if names else None

    @property
    def _other_names(self) -> list[str]:
        return [name for name in self._columns if name not in self.needed]

    def __len__(self) -> int:
        return self._rows

    def fetch_others(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        columns: dict[str, Any] = {}
        if self._decoded is not None and self._decoded.column_names:
            columns = self._decoded[list(rows)]
        if self._stored is not None:
            columns |= self._stored.take(list(rows)).to_pydict()
        names = [name for name in self._other_names if name in columns]
        return [{name: columns[name][place] for name in names} for place in range(len(rows))]

    def where(self, row: int) -> str:
        return _name_row(self._path, row, None)

    def shapes(self) -> list[Shape]:
        return [Shape(self._columns, 0, self._rows)]

    def list_files(self) -> Sequence[Table]:
        return [self]


class Tables:
    """Several tables as one; their rows follow each other."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._tables = tables
        self._starts = list(itertools.accumulate((len(table) for table in tables[:-1]), initial=0))
        self.needed = {
            name: list(itertools.chain.from_iterable(table.needed[name] for table in tables))
            for name in tables[0].needed
        }
        self.unread = sum(table.unread for table in tables)

    def __len__(self) -> int:
        return sum(len(table) for table in self._tables)

    def fetch_others(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        records: dict[int, dict[str, Any]] = {}
        for number, (table, start) in enumerate(zip(self._tables, self._starts, strict=True)):
            own_rows = [row for row in dict.fromkeys(rows) if self._find_table(row) == number]
            records.update(zip(own_rows, table.fetch_others([row - start for row in own_rows]), strict=True))
        return [records[row] for row in rows]

    def where(self, row: int) -> str:
        number = self._find_table(row)
        return self._tables[number].where(row - self._starts[number])

    def shapes(self) -> list[Shape]:
        merged: dict[frozenset[str], Shape] = {}
        for table, start in zip(self._tables, self._starts, strict=True):
            for shape in table.shapes():
                names = frozenset(shape.columns)
                if earlier := merged.get(names):
                    merged[names] = earlier._replace(rows=earlier.rows + shape.rows)
                else:
                    merged[names] = shape._replace(first=shape.first + start)
        return list(merged.values())

    def list_files(self) -> Sequence[Table]:
        return self._tables

    def _find_table(self, row: int) -> int:
        return bisect_right(self._starts, row) - 1


def _has_type(field: Any) -> bool:
    """True if `datasets` has a type for a column."""
    import datasets
    import pyarrow

    try:
        datasets.Features.from_arrow_schema(pyarrow.schema([field]))
    except (ValueError, NotImplementedError):
        return False
    return True


def _decodes(column: Any) -> bool:
    """True if the library that decodes a column (of images, for example) is installed."""
    try:
        column[0]
    except ImportError:
        return False
    except Exception:  # reported when the row is used
        return True
    return True


def _name_row(path: Path, row: int, line: int | None) -> str:
    """Name a row for people, counting rows and lines from 1."""
    return f"{path}, row {row + 1}" + (f" (line {line})" if line is not None else "")


def describe_kind(value: Any) -> str:
    """Return the kind of a YAML or JSON value: `"a number"`."""
    kinds = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "a mapping"}
    return "null" if value is None else kinds.get(type(value), type(value).__name__)


def _check_path(path: Path) -> None:
    if path.is_dir():
        inside = sorted(child.name for child in path.iterdir() if child.suffix.lower() in SUFFIXES)
        hint = f"name one of its files: {', '.join(inside[:10])}" if inside else "it holds no data files"
        raise DataError(f"{path} is a directory, not a data file; {hint}")
    if not path.exists():
        raise DataError(f"there is no data file {path}{_suggest_path(path)}")
    if path.suffix.lower() not in SUFFIXES:
        raise DataError(f"{path} must be a data file, with a name that ends in {', '.join(SUFFIXES)}")


def _suggest_path(path: Path) -> str:
    """Describe the path that is nearest to a missing path."""
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


@contextmanager
def _read_parquet(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # datasets wraps whatever pyarrow or the disk raises
        raise DataError(f"{path} cannot be read as Parquet: {error.__cause__ or error}") from error


def _read_schema(path: Path) -> tuple[tuple[str, ...], int]:
    from pyarrow import parquet

    with _read_parquet(path):
        metadata = parquet.read_metadata(path)
    return tuple(metadata.schema.to_arrow_schema().names), metadata.num_rows


def _read_first_row(path: Path) -> dict[str, Any]:
    for number, line in _read_lines(path):
        return _parse(_name_row(path, 0, number), line)
    raise DataError(f"{path} has no rows")


def _read_lines(path: Path) -> Iterator[tuple[int | None, bytes]]:
    """Yield the line number (from 1; None in a JSON array) and the bytes of each row, without blank lines."""
    try:
        with path.open("rb") as file:
            head = file.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()
            file.seek(0)
            if path.suffix.lower() == ".json" and head.startswith(b"["):
                yield from ((None, line) for line in _split_array(path, file.read()))
                return
            for number, line in enumerate(file, 1):
                line = (line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line).strip()
                if line:
                    yield number, line
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def _split_array(path: Path, content: bytes) -> Iterator[bytes]:
    """Yield the text of each value in a JSON array."""
    row = 0
    try:
        text = content.decode("utf-8-sig")
        at = _skip(_OPENING, text, 0)
        while text[at : at + 1] != "]":
            _, end = _scan(text, at)
            yield text[at:end].encode()
            row += 1
            at = _skip(_SPACE, text, end)
            if text[at : at + 1] != "]":
                at = _skip(_COMMA, text, at)
        if (end := _skip(_SPACE, text, at + 1)) < len(text):
            raise json.JSONDecodeError("Extra data", text, end)
    except (ValueError, RecursionError) as error:
        problem = _NESTED if isinstance(error, RecursionError) else f"not valid JSON: {error}"
        raise DataError(f"{path}, in row {row + 1}: {problem}") from error


_OPENING, _COMMA, _SPACE = re.compile(r"\s*\[\s*"), re.compile(r",\s*(?!\])"), re.compile(r"\s*")
_NESTED = f"lists and objects are nested more than {MOST_NESTED} deep: flatten the value, or give it as a string"


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    match = pattern.match(text, at)
    if match is None:
        raise json.JSONDecodeError("Expecting ',' and a value, or the end of the array", text, at)
    return match.end()


class _RepeatedKey(ValueError):
    """A key occurs twice in one object."""


def _make_record(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise _RepeatedKey(next(name for name in names if names.count(name) > 1))
    return record


_decode = json.JSONDecoder(object_pairs_hook=_make_record).decode
_scan = json.JSONDecoder().raw_decode


def _parse(place: str, line: bytes) -> dict[str, Any]:
    """Return the object of a row.

    Raises:
        DataError: the line is no object, or contains a value that could not be used later.
    """
    try:
        record = _decode(line.decode("utf-8"))
    except _RepeatedKey as error:
        raise DataError(f"{place}: the key {str(error)!r} occurs twice in one object: keep one of them") from error
    except ValueError as error:  # also UnicodeDecodeError
        shown = line[:_SHOWN].decode("utf-8", "replace") + ("..." if len(line) > _SHOWN else "")
        raise DataError(f"{place}: not valid JSON: {error}: {shown}") from error
    except RecursionError as error:
        raise DataError(f"{place}: {_NESTED}") from error
    if not isinstance(record, dict):
        raise DataError(f"{place}: expected one JSON object per line, found {describe_kind(record)}")
    if line.count(b"[") + line.count(b"{") > MOST_NESTED and _count_levels(record) > MOST_NESTED:
        raise DataError(f"{place}: {_NESTED}")
    if (b"\\ud" in line or b"\\uD" in line) and (broken := _find_broken_text(record)):
        raise DataError(
            f"{place}: {broken} contains half of a character, a lone surrogate such as \\ud83d: remove it, or write "
            "the whole character"
        )
    return record


def _count_levels(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        depth += 1
        inner: Iterator[Iterable[Any]] = (entry.values() if isinstance(entry, dict) else entry for entry in level)
        level = [entry for values in inner for entry in values if isinstance(entry, dict | list)]
    return depth


def _find_broken_text(record: dict[str, Any]) -> str:
    """Return the name of the first column with a string that cannot be encoded; empty if there is none."""
    for name, value in record.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return f"column {name!a}"
    return ""
