"""Rewards by group: the samples of one prompt are judged against each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from enginehouse.data import Batch


def group_statistics(rewards: torch.Tensor, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For each row, the size, mean and standard deviation (n - 1) of its group's rewards.

    Args:
        rewards: float32 `(rows,)`.
        group: int64 `(rows,)`, any labels; the rows of a group need not be adjacent.

    Returns:
        Three float32 tensors `(rows,)`. The standard deviation of a group of one is 0.
    """
    _, index = group.unique(return_inverse=True)
    groups = int(index.max()) + 1 if len(index) else 0
    counts = torch.bincount(index, minlength=groups).to(rewards.dtype)
    means = torch.zeros(groups, dtype=rewards.dtype).index_add_(0, index, rewards) / counts
    squares = torch.zeros(groups, dtype=rewards.dtype).index_add_(0, index, (rewards - means[index]).square())
    deviations = (squares / (counts - 1).clamp(min=1)).sqrt()
    return counts[index], means[index], deviations[index]


def with_token_advantages(batch: Batch, per_row: torch.Tensor) -> Batch:
    """Give every counted token its row's advantage: adds ragged float32 `advantages`, 0 where `loss_mask` is false."""
    mask = batch["loss_mask"]
    values = per_row.repeat_interleave(mask.lengths) * mask.values
    return batch.with_columns(advantages=mask.like(values))
