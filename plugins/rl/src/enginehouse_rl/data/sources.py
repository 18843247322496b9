"""The sources of a run's rows, the share of each file, and the order in which rows come.

It imports neither torch nor numpy: `plan` counts with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from enginehouse.errors import DataError
from enginehouse_rl.data.files import RowProblems


class Source(NamedTuple):
    """Rows that follow each other in a data set and go round in epochs of their own.

    Attributes:
        name: in metrics; "" where there is no other.
        path: its file; "" where it may be several.
        rows: how many.
        weight: its share of what is drawn is this, by the sum of all weights.
    """

    name: str
    path: str
    rows: int
    weight: float


def sources_of(files: str | Path | Sequence[str | Path] | Mapping[str, float], rows: Sequence[int]) -> list[Source]:
    """Return what `data.train` draws from: each file by its weight if there are weights, else all rows alike.

    Args:
        files: a path, several, or weights by path.
        rows: of each file, how many there are to draw from.

    Raises:
        DataError: a file with a weight has none.
    """
    if not isinstance(files, Mapping):
        return [Source("", "", sum(rows), 1.0)]
    sources = [Source(*fields) for fields in zip(_names(list(files)), files, rows, files.values(), strict=True)]
    for source in sources:
        if not source.rows:
            raise DataError(f"{source.path} has a weight in data.train, and no row of it is left to draw")
    return sources


def kept_by_file(kept: Sequence[int], rows: Sequence[int]) -> list[int]:
    """Count in each file, of so many `rows`, the rows `kept`, which are ascending."""
    counts = [0] * len(rows)
    ends = list(itertools.accumulate(rows))
    file = 0
    for row in kept:
        while row >= ends[file]:
            file += 1
        counts[file] += 1
    return counts


def ranks(values: Sequence[Any], column: str, where: Callable[[int], str]) -> list[int]:
    """Return the place of each row's value among the different values of `column`, by which `data.order_by` sorts.

    Raises:
        DataError: naming the rows whose value is no number.
    """
    problems = RowProblems()
    for row, value in enumerate(values):
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
            problems.add(
                f"{where(row)}: {column!r} is {value!r} ({type(value).__name__}), and data.order_by={column} sorts by "
                "numbers"
            )
    problems.raise_any()
    place = {value: rank for rank, value in enumerate(sorted(set(values)))}
    return [place[value] for value in values]


def _names(paths: Sequence[str]) -> list[str]:
    """Return the shortest end of each path that no other ends in, without suffix: `gsm/train` beside `code/train`."""
    parts = [Path(path).with_suffix("").parts for path in paths]
    return [
        next(
            (
                "/".join(end)
                for n in range(1, len(part) + 1)
                if sum(other[-n:] == (end := part[-n:]) for other in parts) == 1
            ),
            path,
        )
        for path, part in zip(paths, parts, strict=True)
    ]
