"""Statistics of rewards over each group. The samples of one prompt form a group, and are compared with each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from enginehouse_rl.losses.kl import KL_PENALTY

if TYPE_CHECKING:
    from enginehouse.data import Batch

__all__ = ["group_statistics", "group_sums"]


def group_statistics(rewards: torch.Tensor, group: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return for each row the size of its group, the distance of its reward from the group's mean, and the group's
    standard deviation.

    If all rewards of a group are equal, distance and deviation are exactly 0. With a rounded mean, both would be tiny
    instead of 0, and their quotient would not be tiny.

    Args:
        rewards: float `(rows,)`.
        group: int64 `(rows,)`, any labels; the rows of a group need not be adjacent.

    Returns:
        Three float64 tensors `(rows,)`: sizes, distances and standard deviations (n - 1; 0 for a group of one).
    """
    rewards = rewards.double()
    _, index = group.unique(return_inverse=True)
    groups = int(index.max()) + 1 if len(index) else 0
    zeros = torch.zeros(groups, dtype=rewards.dtype)
    sizes = torch.bincount(index, minlength=groups).to(rewards.dtype)
    means = zeros.index_add(0, index, rewards) / sizes
    lowest = zeros.scatter_reduce(0, index, rewards, "amin", include_self=False)
    highest = zeros.scatter_reduce(0, index, rewards, "amax", include_self=False)
    distances = rewards - torch.where(lowest == highest, lowest, means)[index]
    deviations = (zeros.index_add(0, index, distances.square()) / (sizes - 1).clamp(min=1)).sqrt()
    return sizes[index], distances, deviations[index]


def group_sums(values: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Return for each row the sum of float `values` `(rows,)` over its group."""
    labels, index = group.unique(return_inverse=True)
    return torch.zeros(len(labels), dtype=values.dtype).index_add(0, index, values)[index]


def kl_distances(batch: Batch) -> torch.Tensor:
    """Return for each row the distance of its KL penalty from the mean of its group, float64 `(rows,)`; 0 without a
    penalty.

    The distance is subtracted from the advantage unscaled. If the KL penalty were a part of the rewards, it would be
    divided by the standard deviation of the rewards. It would then have the more weight, the less the rewards differ.
    In a group of equal rewards, it would have full weight, however small its coefficient.

    Args:
        batch: `group` int64 `(rows,)`, and `KL_PENALTY` float32 `(rows,)` if there is a KL term in the reward.
    """
    if KL_PENALTY not in batch:
        return torch.zeros(len(batch), dtype=torch.float64)
    return group_statistics(batch[KL_PENALTY], batch["group"])[1]
