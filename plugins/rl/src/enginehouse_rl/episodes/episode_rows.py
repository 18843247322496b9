"""Episodes of several rows: joined into one for what judges episodes, and what that says given back to their rows.

The rows of an episode are adjacent, the last one its own (`scored_group.batch_of`), so that no value moves:
of a ragged column only the offsets change. An advantage need not know of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from enginehouse.data import Batch, Ragged
from enginehouse.data.columns import COLUMNS

REDUCTIONS = {"sum": np.add, "min": np.minimum, "max": np.maximum}
REDUCED_COLUMNS = {column.name: REDUCTIONS[column.of_episode] for column in COLUMNS if column.of_episode in REDUCTIONS}
"""Columns of one number a row that all rows of an episode have a part in, and how these are put together."""


class EpisodeRows:
    """Which rows are of one episode.

    Args:
        episode: a label a row, int64 `(rows,)`; those with equal ones are adjacent.

    Attributes:
        index: int64 `(rows,)`, the number of each row's episode, from 0.
        last: int64 `(episodes,)`, the last row of each.
        are_single: whether each episode is one row.
    """

    def __init__(self, episode: torch.Tensor):
        _, self.index, counts = episode.unique_consecutive(return_inverse=True, return_counts=True)
        ends = counts.cumsum(0)
        self.last = ends - 1
        self.are_single = len(counts) == len(episode)
        self._bounds = torch.cat([ends.new_zeros(1), ends])

    @property
    def segment(self) -> torch.Tensor:
        """The number of each row within its episode, int64 `(rows,)`."""
        return torch.arange(len(self.index)) - self._bounds[self.index]

    def join(self, samples: Batch) -> Batch:
        """One row an episode. A ragged column has the values of all its rows, `REDUCED` ones are put together, and of
        any other it has that of its last row, which is where what is an episode's stands."""
        if self.are_single:
            return samples
        return Batch({name: self._join(name, samples[name]) for name in samples.columns})

    def _join(self, name: str, column: Any) -> Any:
        if isinstance(column, Ragged):
            return Ragged(column.values, column.offsets[self._bounds])
        if name in REDUCED_COLUMNS:
            return torch.from_numpy(REDUCED_COLUMNS[name].reduceat(column.numpy(), self._bounds[:-1].numpy()))
        return Batch({name: column}).take(self.last)[name]

    def apply(self, make: Callable[[Batch], Batch], samples: Batch, lengths: torch.Tensor) -> dict[str, Any]:
        """The columns that a function of a row an episode adds to samples, or changes, as columns of their rows: what
        it makes by token stays at its token, and each row of an episode has what it makes by episode.

        Args:
            make: returns the samples with more columns.
            samples: what it needs of them.
            lengths: how many tokens each row has.
        """
        given = self.join(samples)
        made = make(given)
        new = {name: made[name] for name in made.columns if name not in given or made[name] is not given[name]}
        if self.are_single:
            return new
        return {name: self._spread(column, lengths) for name, column in new.items()}

    def _spread(self, column: Any, lengths: torch.Tensor) -> Any:
        if isinstance(column, Ragged):
            return Ragged.from_lengths(column.values, lengths)
        return Batch({"column": column}).take(self.index)["column"]
