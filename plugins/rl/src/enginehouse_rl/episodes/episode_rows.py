"""Joins the rows of each episode for functions that work on episodes, and distributes the results of these functions to
the rows.

The rows of an episode are adjacent, and its last row holds the values of the episode (`scored_group.build_batch`).
Therefore, joining rows copies no values of a ragged column: only its offsets change. An advantage function gets one row
for each episode, and need not know that the episode had several rows.
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
"""Columns in which all rows of an episode contribute to the number of the episode, and the function that combines the
numbers of the rows."""


class EpisodeRows:
    """Maps rows to their episodes.

    Args:
        episode: Label of each row's episode, int64 `(rows,)`. Rows with equal labels are adjacent.

    Attributes:
        index: Index of each row's episode, int64 `(rows,)`.
        last: Index of the last row of each episode, int64 `(episodes,)`.
        are_single: True if each episode has one row.
    """

    def __init__(self, episode: torch.Tensor):
        _, self.index, counts = episode.unique_consecutive(return_inverse=True, return_counts=True)
        ends = counts.cumsum(0)
        self.last = ends - 1
        self.are_single = len(counts) == len(episode)
        self._bounds = torch.cat([ends.new_zeros(1), ends])

    @property
    def segment(self) -> torch.Tensor:
        """Index of each row within its episode, int64 `(rows,)`."""
        return torch.arange(len(self.index)) - self._bounds[self.index]

    def join(self, samples: Batch) -> Batch:
        """Return the samples with one row for each episode.

        A ragged column gets the values of all rows of the episode. In `REDUCED_COLUMNS`, the numbers of all rows are
        combined into one. Any other column keeps the value of the last row, which holds the values of the episode.
        """
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
        """Call a function that works on episodes, and return the columns that it adds or changes, as columns of
        `samples`.

        The value of a token stays at its token. The value of an episode is repeated for each row of the episode.

        Args:
            make: Takes samples with one row for each episode, and returns them with more columns.
            lengths: Length of each row of `samples` in tokens, int64 `(rows,)`.
        """
        joined = self.join(samples)
        extended = make(joined)
        new_columns = {
            name: extended[name]
            for name in extended.columns
            if name not in joined or extended[name] is not joined[name]
        }
        if self.are_single:
            return new_columns
        return {name: self._spread(column, lengths) for name, column in new_columns.items()}

    def _spread(self, column: Any, lengths: torch.Tensor) -> Any:
        if isinstance(column, Ragged):
            return Ragged.from_lengths(column.values, lengths)
        return Batch({"column": column}).take(self.index)["column"]
