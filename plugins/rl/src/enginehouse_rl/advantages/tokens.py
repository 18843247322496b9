"""Rewards and credits of single tokens. All values here are float64.

The counted tokens of a row are the states of an episode, in their order. Other tokens between them, such as a tool's
result, are no states: after the last token of a turn, the next state is the first counted token of the next turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from enginehouse.data import Ragged
from enginehouse_rl.advantages.groups import group_statistics

if TYPE_CHECKING:
    from enginehouse.data import Batch

__all__ = ["CountedTokens"]


class CountedTokens:
    """The tokens that a `loss_mask` counts, concatenated over all rows, and sums over these tokens.

    Attributes:
        row: row of each token, int64 `(counted,)`.
        lengths: number of counted tokens of each row, int64 `(rows,)`.
    """

    def __init__(self, mask: Ragged):
        self._mask = mask
        self.row = mask.row[mask.values]
        self.lengths = self.row.bincount(minlength=len(mask))

    @property
    def last(self) -> torch.Tensor:
        """Index of the last counted token of each row that has counted tokens."""
        return self.lengths.cumsum(0)[self.lengths > 0] - 1

    def of(self, column: Ragged) -> torch.Tensor:
        """Return the tokens' values in a column that is aligned with the mask, `(counted,)`."""
        return column.values[self._mask.values].double()

    def rewards(self, batch: Batch) -> torch.Tensor:
        """Return the `token_rewards` of the counted tokens, `(counted,)`. The `reward` of each row is added to the
        value at the row's last counted token."""
        rewards = self.of(batch.ragged("token_rewards"))
        rewards[self.last] += batch["reward"].double()[self.lengths > 0]
        return rewards

    def sums_to_the_end(self, values: torch.Tensor, discount: float) -> torch.Tensor:
        """Return for each of `values` `(counted,)` the sum of `discount^k * values[t + k]`, k >= 0, to the row's
        end."""
        lengths = self.lengths.numpy()
        last = (lengths.cumsum() - 1)[np.argsort(-lengths)]
        longer_than = (len(lengths) - np.bincount(lengths).cumsum()).tolist()
        sums = values.clone().numpy()
        for back, rows in enumerate(longer_than[1:-1], start=1):
            at = last[:rows] - back
            sums[at] += discount * sums[at + 1]
        return torch.from_numpy(sums)

    def next_in_row(self, values: torch.Tensor) -> torch.Tensor:
        """Return for each token the value of the next token in its row, or 0 for the last."""
        following = torch.zeros_like(values)
        following[:-1] = values[1:] * (self.row[1:] == self.row[:-1])
        return following

    def column(self, values: torch.Tensor) -> Ragged:
        """Return a float32 column with `values` `(counted,)` at these tokens and 0 at all others."""
        spread = torch.zeros(self._mask.tokens)
        spread[self._mask.values] = values.float()
        return self._mask.like(spread)


def normalized(values: torch.Tensor, epsilon: float = 1e-8) -> torch.Tensor:
    """Return `(values - mean) / sqrt(variance + epsilon)` of `values` `(counted,)`; equal values give exactly 0."""
    _, distances, deviations = group_statistics(values, torch.zeros(len(values), dtype=torch.int64))
    return distances / (deviations.square() + epsilon).sqrt()
