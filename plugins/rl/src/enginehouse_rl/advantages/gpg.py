"""GPG compares a reward with its group's mean. It enlarges all advantages to make up for groups of equal rewards, which
have no gradient.

Source: Chu et al. 2025, "GPG: A Simple and Strong Reinforcement Learning Baseline": A_i = alpha * (r_i - mean(r)),
alpha = B / (B - M). M of the step's B samples belong to groups with equal rewards, whose gradient is 0. GPG is used
with the loss `policy_gradient`. A KL term in the reward is not multiplied by alpha, because groups with equal rewards
have a KL term too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from enginehouse_rl.advantages.groups import group_statistics, kl_distances

if TYPE_CHECKING:
    from enginehouse.data import Batch


def gpg(batch: Batch) -> Batch:
    """Add `advantages` float32 `(rows,)` to a batch with `reward` float32 `(rows,)` and `group` int64 `(rows,)`.

    If the batch has the column `kl_penalty`, the result of `kl_distances` is subtracted from the advantages.
    """
    _, distances, deviations = group_statistics(batch["reward"], batch["group"])
    telling = (deviations > 0).sum().clamp(min=1)
    return batch.with_columns(advantages=(distances * len(distances) / telling - kl_distances(batch)).float())
