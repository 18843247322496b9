"""GDPO compares each of several rewards separately within its group, so that no reward dominates another.

Source: Liu et al. 2026, "GDPO: Group reward-Decoupled Normalization Policy Optimization": the weighted sum over rewards
k of (r_ik - mean(r_k)) / std(r_k), with mean and std over the group. A_i is this sum, normalized over the samples of
the step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from enginehouse.errors import ConfigError
from enginehouse_rl.advantages.groups import group_statistics
from enginehouse_rl.advantages.tokens import normalized

if TYPE_CHECKING:
    from enginehouse.data import Batch


def gdpo(
    batch: Batch, *, weights: tuple[float, ...] | None = None, epsilon: Annotated[float, Field(gt=0)] = 1e-6
) -> Batch:
    """Add `advantages` float32 `(rows,)` to a batch with `rewards` float32 `(rows, k)` and `group` int64 `(rows,)`.

    Args:
        batch: the samples of a step; every group in it must be complete.
        weights: weights of the rewards' advantages, in the order of the rewards; unset: 1 each.
        epsilon: number added to each standard deviation. A reward that is equal for all samples of a group has no
            effect in this group.

    Raises:
        ConfigError: the number of weights is not the number of rewards.
    """
    rewards, group = batch["rewards"], batch["group"]
    if weights is not None and len(weights) != rewards.shape[1]:
        raise ConfigError(
            "algorithm.advantage.arguments.weights must hold one weight for each reward, "
            f"{rewards.shape[1]} in all, not {len(weights)}"
        )
    credits = torch.zeros(len(rewards), dtype=torch.float64)
    for reward, weight in zip(rewards.unbind(1), weights or [1.0] * rewards.shape[1], strict=True):
        _, distances, deviations = group_statistics(reward, group)
        credits += weight * distances / (deviations + epsilon)
    return batch.with_columns(advantages=normalized(credits).float())
