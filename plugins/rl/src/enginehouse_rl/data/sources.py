"""Finds the sources of a run's rows, with their weights, and ranks rows by a column.

This module imports neither torch nor numpy, because `plan` uses it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from enginehouse.errors import DataError
from enginehouse_rl.data.files import RowProblems, describe_kind


class Source(NamedTuple):
    """A range of adjacent rows of a data set. A sampler counts epochs for each source separately.

    Attributes:
        name: the name of the source in metrics; "" for the only source.
        path: the file of the source; "" if the source may have several files.
        weight: the weight of the source. Divided by the sum of all weights, it is the source's fraction of the sampled
            rows.
    """

    name: str
    path: str
    rows: int
    weight: float


def make_sources(files: str | Path | Sequence[str | Path] | Mapping[str, float], rows: Sequence[int]) -> list[Source]:
    """Return the sources of `data.train`: each file if the files have weights, otherwise one source with all rows.

    Args:
        files: a path, several paths, or weights by path.

    Raises:
        DataError: a file with a weight has no rows.
    """
    if not isinstance(files, Mapping):
        return [Source("", "", sum(rows), 1.0)]
    sources = [Source(*fields) for fields in zip(_shorten_paths(list(files)), files, rows, files.values(), strict=True)]
    for source in sources:
        if not source.rows:
            raise DataError(f"{source.path} has a weight in data.train, but none of its rows is left")
    return sources


def count_by_file(kept: Sequence[int], rows: Sequence[int]) -> list[int]:
    """Count the rows in `kept` (ascending) for each file; `rows` are the files' sizes."""
    counts = [0] * len(rows)
    ends = list(itertools.accumulate(rows))
    file = 0
    for row in kept:
        while row >= ends[file]:
            file += 1
        counts[file] += 1
    return counts


def rank_values(values: Sequence[Any], column: str, where: Callable[[int], str]) -> list[int]:
    """Return the rank of each row's value among the distinct values of `column`, by which `data.order_by` sorts.

    Raises:
        DataError: a value is no number.
    """
    problems = RowProblems()
    for row, value in enumerate(values):
        if not isinstance(value, int | float) or isinstance(value, bool) or value != value:
            problems.add(
                f"{where(row)}: {column!r} is {value!r} ({describe_kind(value)}), but "
                f"data.order_by={column} needs a number other than NaN"
            )
    problems.raise_any()
    ranks = {value: rank for rank, value in enumerate(sorted(set(values)))}
    return [ranks[value] for value in values]


def _shorten_paths(paths: Sequence[str]) -> list[str]:
    """Return the shortest unique last part of each path, without its suffix: `gsm/train` beside `code/train`."""
    all_parts = [Path(path).with_suffix("").parts for path in paths]
    names = []
    for path, parts in zip(paths, all_parts, strict=True):
        ends = (parts[-length:] for length in range(1, len(parts) + 1))
        unique = (end for end in ends if sum(other_parts[-len(end) :] == end for other_parts in all_parts) == 1)
        names.append("/".join(next(unique, (path,))))
    return names
